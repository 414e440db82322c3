"""The command on what is no run, its errors, its exit codes, and how it behaves among others."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runs import answer, ckpt_command, refusal, training
from rich.console import Console

import ckpt
from ckpt import layout
from ckpt.errors import CheckpointError, Damaged, InUse, StoreFailed
from tools import cli, commands, failures
from tools.demo import play
from tools.demo.trainer import TrainerFailed

ROOT = Path(__file__).parent.parent
VIEWS = ("ls", "log", "inspect", "verify")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Steps 5, 10, 15 of attempt 1."""
    root = tmp_path_factory.mktemp("command") / "run"
    with training(root) as trainer:
        trainer.resume()
        trainer.train(15)
    return root


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


# --- what is no run ------------------------------------------------------------------------------


@pytest.fixture
def odd(tmp_path, original):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign" / "src").mkdir(parents=True)
    (tmp_path / "foreign" / "branch-1").write_text("a file of that name")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(original)
    (tmp_path / "steplike" / "7").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("command", VIEWS)
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("file", "a file; wanted the directory"),
        ("empty", "an empty directory"),
        ("foreign", "found branch-1, src"),
        ("steplike/7", "no checkpoint here"),
        ("missing/deep", "no such directory"),
        ("file/below", "no such directory"),
        ("dangling", "no such directory"),
    ],
)
def test_what_is_no_run_is_not_found(odd, command, name, told):
    message = refusal(command, odd / name, code=3)
    assert told in message
    assert str(odd / name) in message


@pytest.mark.parametrize("command", VIEWS)
def test_a_link_to_a_run_is_the_run(odd, command):
    assert answer(command, odd / "link") is not None


def test_names_that_were_probably_meant(run):
    assert f"did you mean {run}?" in refusal("ls", run.parent / "rnu", code=3)
    assert f"did you mean {run}?" in refusal("ls", run.parent, code=3)
    assert f"did you mean {run}?" in refusal("ls", run / "log", code=3)
    step = run / "branch-1" / "16"
    assert f"did you mean {step.with_name('15')}" in refusal("inspect", step, code=3)
    mistyped = run.parent / "runn" / "branch-1" / "15"
    assert f"did you mean {run}/branch-1/15?" in refusal("verify", mistyped, code=3)
    assert f"wanted its run, {run}" in refusal("ls", run / "branch-1" / "15", code=2)
    result = ckpt_command("verfiy", run)
    assert result.exit_code == 2
    assert "Did you mean 'verify'?" in result.stderr


def test_stores_that_fail_are_never_empty(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    for command in VIEWS:
        refusal(command, tmp_path / "loop", code=4)

    assert "ftp" in refusal("ls", "ftp://bucket/run", code=2)

    def fails(store):
        raise StoreFailed("disk on fire")

    monkeypatch.setattr(commands, "run_at", fails)
    assert "disk on fire" in refusal("ls", tmp_path, code=4)


def test_newer_formats_are_refused_with_both_versions(run):
    decision = json.loads((run / "attempts" / "1.from.json").read_bytes())
    del decision["seal"]
    record = run / "attempts" / "1.from.json"
    record.write_bytes(layout.seal({**decision, "format": 9}))
    for command in ("ls", "log", "inspect"):
        message = refusal(command, run, code=2)
        assert "format 9" in message
        assert "up to 1" in message


def test_text_from_files_is_never_obeyed(run):
    """Neither as escapes of the terminal nor as markup."""
    ckpt.rewind(run, 15, reason="\x1b[31mred\x07 [bold]x[/bold] :smile:")
    text = ckpt_command("log", run).stdout
    assert r"reason: \x1b[31mred\x07 [bold]x[/bold] :smile:" in text
    message = refusal("ls", run.parent / "\x1b]0;title\x07", code=3)
    assert r"\x1b]0;title\x07: no such directory" in message
    # A file name that is no text in any encoding; the shell hands it on like this.
    assert r"\udcff" in refusal("ls", run.parent / "\udcff", code=3)
    assert "UTF-8" in refusal("rewind", run, "--to", 5, "--reason", "\udcff", "--yes", code=2)


# --- the command itself --------------------------------------------------------------------------


def test_every_exit_code_is_in_the_help():
    pages = {name: ckpt_command(name, "--help").stdout for name in (*VIEWS, "rewind", "demo")}
    whole = ckpt_command("--help").stdout
    for code, meaning in failures.EXIT_CODES.items():
        assert re.search(rf"^ +{code}  {re.escape(meaning)}", whole, re.M), code
    for name, page in pages.items():
        assert "Exit codes:" in page, name
        assert f"Example: ckpt {name} " in page, name
        told = {
            int(code)
            for code in re.findall(r"^ +(\d+)  \w", page.partition("Exit codes:")[2], re.M)
        }
        assert {0, 2} < told <= failures.EXIT_CODES.keys(), name


def test_versions():
    found = commands.versions()
    assert list(found) == ["lastgood", *commands.ENGINES]
    assert found["jax"]
    assert ckpt_command("--version").stdout.splitlines()[0] == f"lastgood {found['lastgood']}"
    assert answer("--version") == found


def test_faults_have_one_message_and_a_traceback_only_when_asked_for(original, monkeypatch):
    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of mine")

    monkeypatch.setattr(commands, "ls", breaks)
    assert "unexpected ZeroDivisionError: of mine" in refusal("ls", original, code=70)
    result = ckpt_command("ls", original, "--debug")
    assert isinstance(result.exception, ZeroDivisionError)


def told_as_json(*arguments, code):
    """The error that a command with `--json` prints, and nothing else on stdout."""
    result = ckpt_command(*arguments, "--json")
    assert result.exit_code == code, (result.stdout, result.stderr)
    found = json.loads(result.stdout)
    assert set(found) == {"error"}
    assert set(found["error"]) == {"kind", "message", "exit_code"}
    assert found["error"]["exit_code"] == code
    told = re.sub(r"[^\x21-\x7e]", "", result.stderr)  # without frames and line breaks
    assert re.sub(r"[^\x21-\x7e]", "", found["error"]["message"]) in told
    return found["error"]


@pytest.mark.parametrize("command", VIEWS)
def test_errors_are_json_where_json_was_wanted(command, odd, run):
    error = told_as_json(command, odd / "missing", code=3)
    assert error["kind"] == "NotFound"
    assert str(odd / "missing") in error["message"]
    assert told_as_json(command, "ftp://bucket/run", code=2)["kind"] == "Misuse"
    (odd / "loop").symlink_to("loop")
    assert told_as_json(command, odd / "loop", code=4)["kind"] in ("StoreFailed", "OSError")
    assert told_as_json(command, code=2)["kind"] == "Misuse"
    assert "--nonsense" in told_as_json(command, run, "--nonsense", code=2)["message"]


def test_errors_of_all_kinds_are_json(run, monkeypatch):
    assert "No such command" in told_as_json("nonsense", code=2)["message"]
    assert told_as_json(code=2)["message"] == "Missing command."
    rewind = ("rewind", run, "--to", 5, "--reason", "x")
    assert "--yes" in told_as_json(*rewind, code=2)["message"]
    assert "A < B" in told_as_json(*rewind, "--skip-steps", "7:3", code=2)["message"]
    assert told_as_json("demo", "--steps", 5, code=2)["kind"] == "Misuse"
    for error, kind, code in (
        (Damaged("x"), "Damaged", 1),
        (StoreFailed("x"), "StoreFailed", 4),
        (PermissionError("x"), "OSError", 4),
        (InUse("x"), "InUse", 5),
        (ZeroDivisionError("x"), "Fault", 70),
    ):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(commands, "ls", fails)
        assert told_as_json("ls", run, code=code)["kind"] == kind

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "ls", stopped)
    result = ckpt_command("ls", run, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["error"]["kind"] == "Stopped"


def test_one_of_a_kind_is_no_plural(tmp_path):
    run = tmp_path / "run"
    one = re.compile(r"(?<![\w.,:-])1 (steps|leaves|attempts|saves|records|images|chunks|slots)\b")
    ckpt.CheckpointManager(run).close()
    with pytest.raises(ckpt.NotFound) as caught:
        ckpt.restore(run)
    assert not one.search(str(caught.value))
    for step in (3, 4):
        ckpt.save(run, {"w": 1.5}, step=step)
        rewind = ckpt_command("rewind", run, "--to", 3, "--reason", "x", "--dry-run").stdout
        shown = [ckpt_command(command, run).stdout for command in VIEWS]
        assert not one.search("\n".join([rewind, *shown]))
    assert "1 leaf;" in shown[2]
    assert "leave behind   1 step: 4 (it stays on disk)" in rewind
    for image in run.glob("branch-*/*/*/d/*.image"):
        image.write_bytes(b"")
    with pytest.raises(Damaged) as caught:
        ckpt.restore(run)
    assert not one.search(str(caught.value))
    assert "2 steps damaged" in ckpt_command("verify", run).stdout


def test_the_kinds_of_errors_are_in_the_help():
    page = " ".join(ckpt_command("--help").stdout.split())
    for kind in failures.CODE_OF:
        assert re.search(rf"\b{kind}\b", page), kind
    assert '{"error": {"kind": ..., "message": ..., "exit_code": ...}}' in page
    kinds = CheckpointError.__subclasses__()
    names = {kind.__name__ for kind in kinds if kind.__module__ == "ckpt.errors"}
    assert {"NotFound", "Damaged"} < names <= failures.CODE_OF.keys()


def test_ctrl_c_is_quiet(original):
    code = (
        "import signal, tools.cli, tools.commands, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a job of `&`
        "def ls(*_, **__):\n    print('here', flush=True)\n    time.sleep(60)\n"
        "tools.commands.ls = ls\n"
        "tools.cli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "ls", original],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_reader_that_has_seen_enough(original):
    with subprocess.Popen(
        [sys.executable, "-m", "tools.cli", "ls", original],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def test_ls_loads_nothing_that_opens_steps(run):
    code = f"""
import sys
from tools import cli
try:
    cli.app(["ls", {str(run)!r}])
except SystemExit as end:
    assert not end.code
needless = {{"ckpt.steps", "ckpt.commit", "ckpt.ocdbt", "ckpt.verification", "ckpt.reading"}}
assert not needless & sys.modules.keys(), needless & sys.modules.keys()
"""
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path = {[str(ROOT), *sys.path]!r}\n{code}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_neither_jax_nor_tensorstore_is_loaded(run):
    code = f"""
import sys
from typer.testing import CliRunner
from tools import cli
heavy = {{"jax", "jaxlib", "tensorstore", "orbax", "grain", "pyarrow", "array_record", "optax"}}
rewind = ["rewind", {str(run)!r}, "--to", "10", "--skip-steps", "12:14", "--reason", "x"]
for arguments in (
    ["--version"],
    ["ls", {str(run)!r}, "--all"],
    ["log", {str(run)!r}],
    ["inspect", {str(run)!r}],
    ["verify", {str(run)!r}],
    [*rewind, "--dry-run"],
    [*rewind, "--yes"],
    ["ls", "nowhere"],
):
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == (3 if "nowhere" in arguments else 0), (arguments, result.stderr)
    assert not heavy & sys.modules.keys(), (arguments, heavy & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- demo ----------------------------------------------------------------------------------------


def test_demo_passes_its_options_on(monkeypatch, tmp_path):
    calls = []

    def fake(**options):
        calls.append(options)
        return SimpleNamespace(
            equal=len(calls) < 3,
            to_json=lambda: {"equal": len(calls) < 3},
            picture_problem="",
        )

    monkeypatch.setattr(play, "demo", fake)
    assert answer("demo") == {"equal": True}
    options = ("--steps", 90, "--seed", 4, "--dir", tmp_path, "--keep", "--format", "parquet")
    assert ckpt_command("demo", *options, "--break").exit_code == 0
    assert answer("demo", code=1) == {"equal": False}
    first, second, *_ = calls
    assert first.pop("console") is None
    assert first == {
        "steps": 300,
        "seed": None,
        "format": "array_record",
        "directory": None,
        "keep": False,
        "break_restored": False,
    }
    assert isinstance(second.pop("console"), Console)
    assert second == {
        "steps": 90,
        "seed": 4,
        "format": "parquet",
        "directory": tmp_path,
        "keep": True,
        "break_restored": True,
    }


def test_demo_without_its_picture_fails_after_its_answer(monkeypatch):
    found = SimpleNamespace(equal=True, to_json=lambda: {"equal": True}, picture_problem="no room")
    monkeypatch.setattr(play, "demo", lambda **_: found)
    result = ckpt_command("demo", "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout) == {"equal": True}
    assert result.stderr == "ckpt: no room\n"


def test_demo_that_cannot_be_played(monkeypatch):
    assert "at least 60" in refusal("demo", "--steps", 5, code=2)

    def fails(**_: object) -> None:
        raise TrainerFailed("the trainer would not start")

    monkeypatch.setattr(play, "demo", fails)
    assert "would not start" in refusal("demo", code=4)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'lastgood[demo]'" in refusal("demo", code=2)
