"""Running the conformance suite: limits, processes that die, reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import plain_loader
import pytest

from datapipe import conformance
from datapipe.conformance.children import Child, NoAnswerError, ask

HERE = Path(__file__).parent
BY_NAME = {check.name: check for check in conformance.checks}


def test_a_loader_without_end_fails():
    result = BY_NAME["state is json"].run(plain_loader.loader(plain_loader.ENDLESS))
    assert result.status == "failed"
    assert "does not end: more than 5000 batches" in result.detail


def test_a_check_that_hangs_fails_and_says_where():
    hanging = plain_loader.loader(plain_loader.HANGING)
    result = BY_NAME["state is json"].run(hanging, limit_s=0.3)
    assert result.status == "failed"
    assert result.is_stuck
    assert "no end after 0.3 s: it stands in wait" in result.detail


@pytest.mark.parametrize(
    ("fault", "said"),
    [(plain_loader.HANGING, "no end after 0.5 s"), (plain_loader.DYING, "the process ended: exit")],
)
def test_the_next_check_runs_in_a_new_process(fault, said):
    names = ["state is json", "state is small"]
    told = []
    report = conformance.run(
        plain_loader.loader(fault),
        checks=[BY_NAME[name] for name in names],
        limit_s=0.5,
        tell=told.append,
    )
    assert [result.check for result in report.results] == names
    assert report.results == tuple(told)
    assert not report.is_conformant
    for result in report.results:
        assert result.status == "failed"
        assert said in result.detail


def test_a_loader_may_write_as_much_as_it_likes():
    report = conformance.run(
        plain_loader.loader(plain_loader.LOUD), checks=[BY_NAME["state is json"]], limit_s=20
    )
    assert report.is_conformant, report


def test_a_failing_child_says_why():
    with pytest.raises(NoAnswerError, match="the process ended: ZeroDivisionError"):
        ask(divmod, 1, 0)


def _leave_a_block(tell):
    """Shared memory that no process maps, and a process that does not end when it is asked to."""
    block = SharedMemory(create=True, size=32)
    block.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(block.name)
    signal.pause()


def test_blocks_that_no_process_maps_go_with_the_child():
    with Child(_leave_a_block) as child:
        block = Path("/dev/shm", child.answer(20.0))
        assert block.exists()
    assert not block.exists()


def test_a_check_of_ones_own_is_refused_by_run():
    own = conformance.Check("own", "Nothing.", lambda trial: None)
    with pytest.raises(ValueError, match=r"own is none of conformance\.checks; run it by itself"):
        conformance.run(plain_loader.loader(), checks=[own])
    assert own.run(plain_loader.loader()).status == "passed"


def test_a_loader_of_a_script_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from datapipe import conformance\n"
        "def opened(setting): ...\n"
        "loader = conformance.Loader('mine', opened, frozenset({'drop'}))\n"
        "conformance.run(loader)\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    assert ran.returncode == 1
    assert "opened must stand in a module, not in a script" in ran.stderr


def test_a_loader_must_say_what_it_offers_in_known_words():
    with pytest.raises(ValueError, match=r"\['flying'\] are no features: carry, "):
        conformance.Loader("mine", plain_loader.open_plain, frozenset({"carry", "flying"}))
    with pytest.raises(ValueError, match="mine must offer one of carry, keep, drop"):
        conformance.Loader("mine", plain_loader.open_plain, frozenset({"seek"}))


# -- reports ---------------------------------------------------------------------------------------


def test_a_report_is_a_table_and_a_json_value():
    few = [BY_NAME[name] for name in ("state is json", "seek counts all examples")]
    broken = plain_loader.loader("state is json")
    modest = conformance.Loader("modest", plain_loader.open_plain, frozenset({"drop"}))
    reports = [conformance.run(loader, checks=few, seed=5) for loader in (broken, modest)]
    assert [report.count("passed") for report in reports] == [1, 1]
    assert [result.check for result in reports[0].failed] == ["state is json"]
    assert reports[1].is_conformant
    lines = conformance.table(reports).splitlines()
    assert lines[0].split() == ["state", "is", "json", "modest"]
    assert lines[1].split() == ["state", "is", "json", "FAILED", "passed"]
    assert lines[2].split() == ["seek", "counts", "all", "examples", "passed", "-"]
    assert "1 passed, 1 failed, 0 not offered" in str(reports[0])
    assert "state is json: TypeError: at must be a tuple (seed 5)" in str(reports[0])
    assert f"pytest {pytest.__version__}; seed 5" in str(reports[0])
    found = json.loads(json.dumps(reports[1].to_json()))
    assert found["loader"] == "modest"
    assert found["results"][1] == {
        "check": "seek counts all examples",
        "status": "not offered",
        "detail": "seek",
        "is_stuck": False,
    }
