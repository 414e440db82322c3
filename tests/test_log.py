"""The log of an attempt: lines and values, and metrics that came late."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cli_runs import answer, ckpt_command, training
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt import attempts, log
from ckpt.lineage import StepId
from ckpt.log import Event
from ckpt.store import FileStore

STEP = StepId(20, 1, 1)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.builds(
    Event,
    st.text(),
    st.dictionaries(st.text().filter(lambda name: name not in ("event", "time_ns")), JSON),
    st.integers(1, 2**63),
)


@given(st.lists(EVENTS, max_size=5))
def test_lines_come_back_as_they_were(events: list[Event]) -> None:
    text = b"".join(log.emit(event.to_json()) for event in events)
    assert text.count(b"\n") == len(events)
    assert log.parse(text) == log.Log(tuple(events), 0)


@given(st.lists(EVENTS, min_size=1, max_size=4), st.data())
def test_a_torn_last_line_is_counted_and_nothing_else(
    events: list[Event], data: st.DataObject
) -> None:
    lines = [log.emit(event.to_json()) for event in events]
    left = data.draw(st.integers(0, len(lines[-1]) - 2))
    found = log.parse(b"".join(lines[:-1]) + lines[-1][:left])
    assert found == log.Log(tuple(events[:-1]), min(left, 1))


GARBAGE = st.binary(max_size=30) | st.sampled_from(
    [b"[1]", b"{}", b"\xff\xfe", b'{"event":1}', b'{"event":"sa', b"null", b"[" * 5000, b"NaN"]
)


@given(st.lists(GARBAGE | EVENTS, max_size=8))
def test_garbage_is_passed_over(mixed: list[bytes | Event]) -> None:
    told = [each for each in mixed if isinstance(each, Event)]
    text = b"".join(
        log.emit(each.to_json()) if isinstance(each, Event) else each.replace(b"\n", b"") + b"\n"
        for each in mixed
    )
    found = log.parse(text)
    assert list(found.events) == told
    garbage = [each for each in mixed if isinstance(each, bytes) and each.strip()]
    assert found.unreadable == len(garbage)


def test_events_say_what_they_are_about() -> None:
    saved = log.saved(STEP, "local", {"blocking_s": 0.02, "bytes": 10})
    assert (saved.step, saved.tier, saved.members["bytes"]) == (STEP, "local", 10)
    assert log.deleted(STEP, "shared").step == STEP
    assert log.inflated(20, {"inflation_s": 0.5}).to_json() == {
        "event": "inflation",
        "inflation_s": 0.5,
        "step": 20,
    }
    assert log.skipped(20).to_json() == {"event": "skipped", "step": 20}
    spiked = log.spiked({"onset": 20, "seen": 21}, 15, (n for n in (20,)))
    assert spiked.members == {"onset": 20, "seen": 21, "to": 15, "suspect": [20]}
    trouble = log.trouble("shared", "no space")
    assert (trouble.step, trouble.tier) == (None, "shared")
    assert log.recovered("shared", 31.25).members["seconds"] == 31.25
    assert log.retention_failed("", ckpt.StoreFailed("x")).members["error"] == "x"
    assert log.restarted("killed").kind == "writer restarted"
    assert log.rewound(STEP, "spike").members["parent"]["step"] == 20
    for members in ({"step": 1}, {"step": 1, "branch": True, "attempt": 1}, {"step": "1"}):
        assert Event("save", members).step is None
    assert Event("x", {"tier": 5}).tier == ""


def test_an_event_without_a_time_happened_now() -> None:
    (found,) = log.parse(log.emit({"event": "new"})).events
    assert found.time_ns > 1_700_000_000_000_000_000
    assert log.parse(log.emit({"event": "new", "time_ns": 5})).events[0].time_ns == 5


def test_numbers_of_all_kinds_are_metrics() -> None:
    given = {"a": 1, "b": np.float32(0.5), "c": jnp.float32(2), "d": float("nan")}
    told = log.measured(STEP, given).members["metrics"]
    assert {name: type(value) for name, value in told.items()} == dict.fromkeys(given, float)
    assert (told["a"], told["b"], told["c"]) == (1.0, 0.5, 2.0)
    (found,) = log.parse(log.emit(log.measured(STEP, given).to_json())).events
    assert math.isnan(found.members["metrics"]["d"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (5, "metrics: wanted numbers by name, found 5"),
        ({3: 1.0}, "a name: wanted text"),
        ({"loss": "low"}, "metrics: loss: wanted a number"),
        ({"loss": [1.0, 2.0]}, "metrics: loss: wanted a number"),
        ({"loss": None}, "metrics: loss: wanted a number"),
    ],
)
def test_what_is_no_metric(given: Any, told: str) -> None:
    with pytest.raises(ckpt.Misuse, match=told):
        log.measured(STEP, given)


# --- late metrics --------------------------------------------------------------------------------


def add(root: Path, attempt: int, *events: Event) -> None:
    for event in events:
        FileStore(root).append(f"log/a{attempt}.jsonl", log.emit(event.to_json()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Branch 1: 5, 10, 15, left at 10; branch 2: 15, 20. The loss falls."""
    with training(tmp_path / "run") as trainer:
        trainer.resume()
        trainer.train(15)
        trainer.rewind(10)
        trainer.train(20)
    return tmp_path / "run"


def late(root: Path) -> dict[StepId, dict[str, float]]:
    store = FileStore(root)
    return log.late_metrics(store, attempts.list_run(store))


def test_late_metrics_of_all_attempts_are_joined(run: Path) -> None:
    five, ten = StepId(5, 1, 1), StepId(10, 1, 1)
    assert late(run) == {}
    add(run, 1, log.measured(five, {"eval": 1.0, "other": 3}), log.measured(ten, {"eval": 2}))
    add(run, 2, log.measured(five, {"eval": 4}), Event("metrics", {"step": 5, "metrics": {"x": 1}}))
    wrong = {"a": True, "b": "1", "c": None, "d": 10**400, "e": 2}
    add(run, 2, Event("metrics", {"step": 10, "branch": 1, "attempt": 1, "metrics": wrong}))
    add(run, 7, log.measured(five, {"eval": 9}))  # of no attempt of this run
    assert late(run) == {five: {"eval": 4.0, "other": 3.0}, ten: {"eval": 2.0, "e": 2}}


def test_a_log_that_is_none_adds_nothing(run: Path) -> None:
    add(run, 2, log.measured(StepId(5, 1, 1), {"eval": 1.0}))
    (run / "log" / "a1.jsonl").unlink()
    (run / "log" / "a1.jsonl").mkdir()
    assert late(run) == {StepId(5, 1, 1): {"eval": 1.0}}


def test_best_step_knows_late_metrics(run: Path) -> None:
    reader = ckpt.open(run)
    best_loss, best_eval = ckpt.Best("loss"), ckpt.Best("eval", mode="max")
    assert (reader.best_step(best_loss), reader.best_step(best_eval)) == (20, None)
    add(run, 2, log.measured(StepId(5, 1, 1), {"eval": 0.5}))
    # The same number, on the branch that was left: it says nothing of step 15 of now.
    add(run, 1, log.measured(StepId(15, 1, 1), {"eval": 0.9}))
    assert reader.best_step(best_eval) == 5
    add(run, 2, log.measured(StepId(10, 1, 1), {"eval": 0.6, "loss": 0.001}))
    assert (reader.best_step(best_loss), reader.best_step(best_eval)) == (10, 10)
    ckpt.rewind(run, 15, branch=1)
    assert reader.best_step(best_eval) == 15


def test_the_command_shows_them_with_the_others(run: Path) -> None:
    add(run, 2, log.measured(StepId(15, 2, 2), {"eval": 0.5, "loss": 7}))
    rows = {(row["step"], row["branch"]): row for row in answer("ls", run, "--all")["steps"]}
    assert rows[15, 2]["metrics"] == {"eval": 0.5, "loss": 7.0}
    assert rows[15, 1]["metrics"] == {"loss": pytest.approx(1 / 15)}
    assert "eval=0.5 loss=7" in ckpt_command("ls", run).stdout
    assert answer("inspect", run, "--step", 15)["metrics"] == {"eval": 0.5, "loss": 7.0}
    assert "metrics: eval=0.5 loss=7" in ckpt_command("inspect", run, "--step", 15).stdout
    assert "late metrics of step 15: eval=0.5 loss=7" in ckpt_command("log", run).stdout


def test_log_shows_each_save_and_what_went_wrong(run: Path) -> None:
    (run / "log" / "a1.jsonl").unlink()
    begun_ns = 1_790_000_000_000_000_000
    for number in range(1, 11):
        step = StepId(number, 1, 1)
        figures = {"blocking_s": 0.001 * number, "bytes": 2048, "durable_s": 0.02}
        add(run, 1, log.saved(step, "local", figures))
        add(
            run,
            1,
            log.saved(step, "shared", {"durable_s": 1.5}),
            log.inflated(number, {"inflation_s": 0.25}),
        )
    add(
        run,
        1,
        Event(log.TROUBLE, {"tier": "shared", "error": "no space left"}, begun_ns),
        log.recovered("shared", 31.0),
        log.trouble("local", "disk gone"),
        log.retention_failed("shared", ckpt.StoreFailed("not now")),
        log.retention_failed("shared", ckpt.StoreFailed("nor now")),
        *(log.deleted(StepId(number, 1, 1), "local") for number in (1, 2)),
        log.deleted(StepId(1, 1, 1), "shared"),
        log.restarted("killed by signal 9"),
        Event("of a later release", {"a": 1}),
    )
    FileStore(run).append("log/a1.jsonl", b'{"torn')
    text = ckpt_command("log", run).stdout
    for told in (
        "10 saves: steps 1, 2, ..., 8, 9, 10\n",
        "step 10  blocking 10 ms  2 KiB  local 20 ms, shared 1.5 s  inflation 0.25 s\n",
        "step 5   blocking 5 ms   2 KiB",
        "shared failed for 31 s: no space left\n",
        "local failed, and has not recovered: disk gone\n",
        "retention of shared failed 2 times, last: nor now\n",
        "deleted 2 steps of local: 1, 2\n",
        "deleted 1 step of shared: 1\n",
        "the writer was restarted: killed by signal 9\n",
        '"event": "of a later release"',
        "1 line of its log cannot be read\n",
    ):
        assert told in text, told
    assert "step 4 " not in text
    row = answer("log", run)["attempts"][1]
    assert (len(row["events"]), row["unreadable_lines"]) == (30 + 10, 1)
    assert row["events"][0] == {
        "attempt": 1,
        "blocking_s": 0.001,
        "branch": 1,
        "bytes": 2048,
        "durable_s": 0.02,
        "event": "save",
        "step": 1,
        "tier": "local",
        "time_ns": row["events"][0]["time_ns"],
    }


def test_all_lines_are_made_in_one_module() -> None:
    package = Path(log.__file__).parent
    made = [path.name for path in package.glob("*.py") if '{"event":' in path.read_text()]
    made += [path.name for path in package.glob("*.py") if '"event": "' in path.read_text()]
    assert set(made) <= {"log.py"}
