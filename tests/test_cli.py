"""`ckpt ls`, `log`, `inspect` and `verify` on real runs, intact and damaged."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_runs import answer, ckpt_command, iterator, refusal, state, training

import ckpt
from ckpt import layout
from ckpt.errors import Unsupported
from ckpt.spike import GuardState, Spike
from tools import commands, views

ROOT = Path(__file__).parent.parent
VIEWS = ("ls", "log", "inspect", "verify")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Attempt 1: steps 5 to 30. Attempt 2: back to 15, steps 20, 25. Attempt 3: step 30.

    Step 10 is pinned, step 35 was left unfinished.
    """
    root = tmp_path_factory.mktemp("cli") / "run"
    with training(root) as trainer:
        trainer.resume()
        trainer.train(30)
        trainer.rewind(15, skip_steps=range(17, 19), reason="loss spike at 18")
        trainer.train(25)
    with training(root) as trainer:
        trainer.resume()
        trainer.train(30, metrics={"loss": float("nan"), "accuracy": 0.5})
    ckpt.pin(root, 10)
    shutil.copytree(root / "branch-2" / "30", root / layout.making_name(2, 35, 3))
    return root


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def rows(run, *options, code=0):
    found = answer("ls", run, *options, code=code)["steps"]
    return [(row["step"], row["branch"], row["attempt"], row["state"]) for row in found]


LINEAGE = [
    *((step, 1, 1, "committed") for step in (5, 10, 15)),
    *((step, 2, 2, "committed") for step in (20, 25)),
    (30, 2, 3, "committed"),
    (35, 2, 3, "unfinished"),
]


# --- ls ------------------------------------------------------------------------------------------


def test_ls_shows_the_lineage(original):
    assert rows(original) == LINEAGE
    found = answer("ls", original)
    assert (found["location"], found["attempt"], found["branch"]) == (str(original), 3, 2)
    by_step = {row["step"]: row for row in found["steps"]}
    assert [step for step, row in by_step.items() if row["pinned"]] == [10]
    assert by_step[20]["metrics"] == {"loss": 0.05}
    assert by_step[30]["metrics"] == {"loss": "nan", "accuracy": 0.5}  # JSON knows no NaN
    assert "being written" in by_step[35]["note"]
    for step in (5, 30):
        row = by_step[step]
        files = (original / f"branch-{row['branch']}" / str(step)).rglob("*")
        sizes = {path.name: path.stat().st_size for path in files if path.is_file()}
        listed = sum(sizes.values()) - sizes[layout.MARKER] - sizes[layout.MANIFEST]
        assert row["size_bytes"] == listed


def test_ls_all_shows_abandoned_branches(original):
    abandoned = [(step, 1, 1, "abandoned") for step in (20, 25, 30)]
    assert rows(original, "--all") == sorted([*LINEAGE, *abandoned])


def test_steps_that_a_spike_had_begun_before_are_suspect(run):
    spike = Spike(33, 34, 9.0, 3.0)
    guard = GuardState(history=(spike,)).to_json()
    with training(run) as trainer:
        last = trainer.resume()
        assert last < 33
        trainer.train(40)
        trainer.rewind(25, skip_steps=range(32, 36), reason=str(spike), guard=guard)
        (branch,) = {row["branch"] for row in rows_of(run, "--all") if row["step"] == 40}
        trainer.train(35)
    found = {(row["step"], row["branch"]): row for row in rows_of(run, "--all")}
    told = {key: row["note"] for key, row in found.items() if row["state"] == "suspect"}
    assert told == {(35, branch): str(spike), (40, branch): str(spike)}
    assert found[30, branch]["state"] == "abandoned", "saved before the onset"
    assert not [row for row in rows_of(run) if row["state"] == "suspect"], "they were left"
    text = ckpt_command("ls", run, "--all").stdout
    assert "suspect" in text
    log = ckpt_command("log", run).stdout
    assert f"reason: {spike}" in log
    assert "leaves out examples data 1" in log


def rows_of(run, *options):
    return answer("ls", run, *options)["steps"]


def test_ls_as_text_is_plain_when_piped(original):
    text = ckpt_command("ls", original).stdout
    assert "\x1b" not in text
    lines = text.splitlines()
    assert len(lines) == 2 + len(LINEAGE)
    assert re.search(r"^ *10 +1 +1 +[-\d]+ [:\d]+ +\S+ KiB +loss=0.1 +committed, pinned$", lines[3])
    assert all(line == line.rstrip() for line in lines)


def test_ls_names_damaged_steps(run):
    (run / "branch-1" / "10" / layout.MARKER).unlink()
    manifest = run / "branch-2" / "20" / layout.MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":20', b'"step":21'))
    found = answer("ls", run, code=1)["steps"]
    damaged = {row["step"]: row for row in found if row["state"] == "damaged"}
    assert damaged.keys() == {10, 20}
    assert (damaged[10]["attempt"], damaged[10]["pinned"]) == (None, True)
    assert layout.MARKER in damaged[10]["note"]
    assert str(manifest) in damaged[20]["note"]
    text = ckpt_command("ls", run).stdout
    assert len(text.splitlines()) == 2 + len(LINEAGE)
    assert re.search(rf"^ *20 .* damaged +{re.escape(str(manifest))}", text, re.M)


def test_links_inside_a_run(run):
    (run / "loop").symlink_to(run)
    (run / "self").symlink_to("self")
    assert rows(run) == LINEAGE
    # A link is followed, and what it leads to belongs elsewhere.
    (run / "branch-9").symlink_to(run / "branch-1")
    (run / "branch-2" / "40").symlink_to(run / "branch-2" / "30")
    damaged = [row for row in rows(run, code=1) if row not in LINEAGE]
    assert {(row[0], row[3]) for row in damaged if row[1] == 2} == {(40, "damaged")}
    assert all(row[3] == "damaged" for row in damaged)


# --- log -----------------------------------------------------------------------------------------


def test_log_tells_the_history(original):
    found = answer("log", original)["attempts"]
    assert [(row["attempt"], row["kind"], row["branch"]) for row in found] == [
        (3, "resume", 2),
        (2, "rewind", 2),
        (1, "start", 1),
    ]
    resumed, rewound, started = found
    assert started["parent"] is None
    assert rewound["parent"] == {"step": 15, "branch": 1, "attempt": 1}
    assert resumed["parent"] == {"step": 25, "branch": 2, "attempt": 2}
    assert rewound["reason"] == "loss spike at 18"
    assert rewound["new_skips"] == rewound["skips"] == {"data": [[64, 72]]}
    assert (resumed["new_skips"], resumed["skips"]) == ({}, {"data": [[64, 72]]})
    assert all(row["pid"] == os.getpid() and row["in_lineage"] for row in found)
    saves = [event for event in started["events"] if event["event"] == "save"]
    assert [save["step"] for save in saves] == [5, 10, 15, 20, 25, 30] == started["steps"]
    assert all(save["bytes"] > 0 and save["durable_s"] > 0 for save in saves)


def test_log_draws_a_graph(run):
    """A rewind to an attempt before another one leaves that one beside the line."""
    ckpt.rewind(run, 10, reason="further back")
    with training(run) as trainer:
        trainer.resume()
        trainer.train(15)
    attempts = run / "attempts"
    claim = {"attempt": 6, "format": 1, "host": "h", "kind": "resume", "pid": 1, "time_ns": 0}
    (attempts / "6.json").write_bytes(layout.seal(claim))
    lines = ckpt_command("log", run).stdout.splitlines()
    heads = [line for line in lines if re.match(r"[|*ox/ ]*[*ox]", line)]
    assert [re.match(r"([|*ox/ ]+?) +(\d)  (\w+)", line).groups() for line in heads] == [
        ("x", "6", "resume"),
        ("*", "5", "resume"),
        ("|o", "4", "rewind"),
        ("||o", "3", "resume"),
        ("||o", "2", "rewind"),
        ("*//", "1", "start"),
    ]
    text = "\n".join(lines)
    assert "reason: further back" in text
    assert "leaves out examples data 64:72 (8 in all)" in text
    assert "6 saves: steps 5, 10, 15, 20, 25, 30\n" in text


def test_log_survives_what_nothing_depends_on(run):
    (run / "log" / "a2.jsonl").write_bytes(b'{"event":"save","step":20}\n[1]\n\xff\n{"event":"sa')
    (run / "log" / "a3.jsonl").unlink()
    (run / "attempts" / "1.json").write_bytes(b"{}")
    found = answer("log", run, code=1)["attempts"]
    assert [event["step"] for event in found[1]["events"]] == [20]
    assert (found[0]["events"], found[0]["steps"]) == ([], [30])
    assert (found[2]["host"], found[2]["kind"]) == (None, "start")
    assert "1.json" in found[2]["damage"]


# --- inspect -------------------------------------------------------------------------------------


def test_inspect_describes_the_newest_step(original):
    found = answer("inspect", original)
    assert found["id"] == {"step": 30, "branch": 2, "attempt": 3}
    assert found["parent"]["step"] == 25
    leaves = {leaf["name"]: leaf for leaf in found["leaves"]}
    kernel = leaves["params/dense/kernel"]
    assert (kernel["kind"], kernel["dtype"], kernel["shape"]) == ("jax", "float32", [4, 4])
    assert leaves["opt/0"]["size_bytes"] == 24
    assert [name for name, leaf in leaves.items() if leaf["hidden_from_orbax"]] == ["note"]
    totals = {total["dtype"]: total for total in found["totals"]}
    assert (totals["float32"]["elements"], totals["float32"]["size_bytes"]) == (16, 64)
    assert sum(total["leaves"] for total in totals.values()) == found["leaf_count"] == 6
    (data,) = found["data"]
    assert (data["batch_size"], data["next_example"], data["records"]) == (4, 128, 1000)
    assert data["skipped"] == [[64, 72]]
    assert found["environment"]["jax"]
    text = ckpt_command("inspect", original).stdout
    assert re.search(
        r"^params\n  dense\n    bias +bfloat16\[4\] +8 B\n    kernel +float32", text, re.M
    )
    assert "hidden from Orbax: note" in text
    assert "next example 128, in epoch 0 of 1,000 records, batches of 4; left out: 64:72" in text


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("params/*", ["params/dense/bias", "params/dense/kernel"]),
        ("params", ["params/dense/bias", "params/dense/kernel"]),
        ("*kernel", ["params/dense/kernel"]),
        ("opt/[0-9]", ["opt/0"]),
    ],
)
def test_inspect_shows_the_leaves_of_a_glob(original, glob, names):
    found = answer("inspect", original, glob, "--step", 10)
    assert [leaf["name"] for leaf in found["leaves"]] == names
    assert found["leaf_count"] == 6
    assert sum(total["leaves"] for total in found["totals"]) == len(names)


def test_inspect_of_what_is_not_there(original):
    message = refusal("inspect", original, "params/dense/kernal", code=3)
    assert "did you mean params/dense/kernel" in message
    assert "newest steps there" in refusal("inspect", original, "--step", 11, code=3)
    step = original / "branch-1" / "20"  # not in the lineage, but one can look at it
    assert answer("inspect", step)["id"]["branch"] == 1
    assert "--step 25" in refusal("inspect", step, "--step", 25, code=2)


def test_inspect_tells_what_can_be_told_of_a_damaged_step(run):
    image = next((run / "branch-2" / "30" / "state" / "d").glob("*.image"))
    image.unlink()
    found = answer("inspect", run, code=1)
    assert len(found["leaves"]) == found["leaf_count"] == 6
    assert str(image.relative_to(run)) in found["damage"][0]
    (run / "branch-2" / "30" / layout.TREE).unlink()
    assert "0 leaves" in ckpt_command("inspect", run).stdout
    found = answer("inspect", run, code=1)
    assert (found["leaves"], found["metrics"]["accuracy"]) == ([], 0.5)


# --- verify --------------------------------------------------------------------------------------


def flip(run: Path) -> Path:
    """One bit of the kernel of step 20."""
    image = run / "branch-2" / "20" / "state" / "d" / "a2-p0.image"
    data = bytearray(image.read_bytes())
    at = data.find(np.ones(16, np.float32).tobytes())
    assert at > 0
    data[at + 5] ^= 4
    image.write_bytes(data)
    return image


def test_verify_of_an_intact_run(original):
    found = answer("verify", original)
    assert found["intact"]
    assert len(found["steps"]) == 9
    assert found["bytes_read"] == 9 * 64 + 9 * (8 + 24 + 8 + 8)
    assert found["unfinished"] == [layout.making_name(2, 35, 3)]
    assert "intact (9 steps" in ckpt_command("verify", original).stdout


def test_verify_names_file_and_leaf(run):
    image = flip(run)
    found = answer("verify", run, code=1)
    (step,) = [step for step in found["steps"] if not step["intact"]]
    (damage,) = step["damage"]
    assert (step["id"]["step"], damage["leaf"]) == (20, "params/dense/kernel")
    assert run / damage["file"] == image
    text = ckpt_command("verify", run).stdout
    assert "leaf params/dense/kernel" in text
    assert "1 step damaged" in text
    assert answer("verify", run / "branch-2" / "20", code=1)["steps"] == [step]
    assert answer("verify", run / "branch-2" / "25")["intact"]
    assert answer("verify", run, "--shallow")["bytes_read"] == 0


def test_verify_of_damaged_records(run):
    record = run / "attempts" / "2.from.json"
    record.write_bytes(record.read_bytes().replace(b'"branch":2', b'"branch":3'))
    assert rows(run) == LINEAGE  # what it said is known from the steps of that attempt
    found = answer("verify", run, code=1)
    assert [damage["file"] for damage in found["records"]] == ["attempts/2.from.json"]
    assert "damaged" in ckpt_command("verify", run).stdout
    for manifest in (run / "branch-2").glob("*/manifest.json"):
        manifest.write_bytes(b"")
    for command in ("ls", "log"):
        assert "attempts/2.from.json" in refusal(command, run, code=1)


# --- steps of Orbax ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orbax(tmp_path_factory):
    import orbax.checkpoint as ocp

    root = tmp_path_factory.mktemp("orbax")
    tree = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": np.int64(3)}}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(root / "run", options=options) as manager:
        for step in (3, 4):
            manager.save(step, args=ocp.args.StandardSave(tree), metrics={"loss": 0.5})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "final", tree)
    return root


def test_runs_of_orbax_are_listed(orbax):
    found = answer("ls", orbax / "run")
    assert found["attempt"] is None
    assert [(row["step"], row["branch"], row["state"]) for row in found["steps"]] == [
        (3, 0, "committed"),
        (4, 0, "committed"),
    ]
    assert all(row["metrics"] == {"loss": 0.5} for row in found["steps"])
    assert all(row["size_bytes"] > 24 and row["time_ns"] for row in found["steps"])
    assert answer("log", orbax / "run")["attempts"] == []


@pytest.mark.parametrize("name", ["run", "run/3", "final"])
def test_steps_of_orbax_are_inspected(orbax, name):
    found = answer("inspect", orbax / name)
    assert found["format"] == "orbax"
    leaves = {leaf["name"]: (leaf["dtype"], leaf["shape"]) for leaf in found["leaves"]}
    assert leaves == {"w": ("float32", [2, 3]), "b.c": ("int64", [])}
    assert found["metrics"] == (None if name == "final" else {"loss": 0.5})
    assert [leaf["name"] for leaf in answer("inspect", orbax / name, "b")["leaves"]] == ["b.c"]


def test_steps_of_orbax_have_nothing_to_verify(orbax):
    assert "neither digests nor" in refusal("verify", orbax / "run", code=2)
    assert "neither digests nor" in refusal("verify", orbax / "run" / "3", code=2)
    with pytest.raises(Unsupported, match="written by Orbax"):
        ckpt.metadata(orbax / "run")


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1_288_490_189, "1.2 GiB"),
        (2**60, "1.049e+06 TiB"),
    ],
)
def test_sizes_read_well(count, text):
    assert views.size(count) == text


def test_added_skips():
    assert commands.added({"a": [(0, 10), (20, 30)]}, {}) == {"a": [(0, 10), (20, 30)]}
    assert commands.added({"a": [(0, 10)]}, {"a": [(0, 10)]}) == {}
    assert commands.added({"a": [(0, 30)]}, {"a": [(5, 10), (20, 25)]}) == {
        "a": [(0, 5), (10, 20), (25, 30)]
    }


def test_iterators_of_the_tests_agree_with_the_plan():
    """The fixtures rest on it: step s uses batch s - 1."""
    batches = iterator()
    served = [int(record) for record in next(batches)]
    assert served == iterator().plan.records(0).tolist()
    assert state().keys() == {"params", "opt", "key", "note", "step"}
