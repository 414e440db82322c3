"""What a save costs a loop, restarts after a kill, and an outage: at a tiny scale, every figure."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import ckpt
from tools.bench import asking, interference, limits, outage, restart
from tools.bench.cases import Case
from tools.bench.interference_worker import Save
from tools.bench.loops import Loop, digest_of
from tools.bench.outage_worker import Store
from tools.bench.sides import ORBAX, PROCESS, THREAD, Lastgood, side_of
from tools.bench.spreads import Spread
from tools.bench.table import WIDTH
from tools.bench.worlds import Jax

_SAVE = Save(
    blocking_s=0.05,
    durable_s=0.4,
    steps=20,
    longest_s=0.03,
    whole_s=0.7,
    disturbed=50,
    step_s=0.01,
)
_CASE = Case("loop", "three leaves", {"a/w": (4, 8), "b/w": (4, 8), "c/w": (2, 8)})


def _bench(*arguments: str, directory: Path) -> Any:
    command = [sys.executable, "-m", "tools.bench", *arguments, "--json", "--dir", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(directory.iterdir())
    return json.loads(done.stdout)


def test_every_figure_of_every_save_is_reported(tmp_path: Path) -> None:
    found = _bench(
        *("interference", "--pairs", "1", "--saves", "2", "--scale", "0.001", "--step-ms", "2"),
        *("--side", ORBAX, "--side", PROCESS),
        directory=tmp_path,
    )
    assert {"jax", "orbax-checkpoint", "lastgood"} <= found["versions"].keys()
    assert (found["leaves"], found["bytes"]) == (102, 102 * 2 * 4096)
    assert list(found["sides"]) == [ORBAX, PROCESS]
    for side in found["sides"].values():
        (run,) = side["runs"]
        assert len(run["saves"]) == 2
        counted = run["saves"][1]
        assert side["lost_s"]["median"] == counted["lost_s"]
        assert counted["lost_s"] == pytest.approx(counted["blocking_s"] + counted["inflation_s"])
        assert 0 < counted["blocking_s"] < counted["durable_s"] < counted["whole_s"]
        assert 0 < counted["steps"] < counted["disturbed"]
        assert run["step_s"] > 0
    ratio = found["ratios"][PROCESS]["blocking_s"]["median"]
    ours, theirs = (found["sides"][each]["blocking_s"]["median"] for each in (PROCESS, ORBAX))
    assert ratio == pytest.approx(ours / theirs)


@pytest.mark.parametrize(("name", "writer"), [(THREAD, "thread"), (PROCESS, "process")])
def test_a_side_has_the_writer_of_its_name(tmp_path: Path, name: str, writer: str) -> None:
    side = side_of(name, tmp_path / "run", 1, None)
    assert isinstance(side, Lastgood)
    manager = side._manager()
    assert manager.status().writer == writer
    manager.close()


def test_restarts_come_from_the_tier_that_is_meant(tmp_path: Path) -> None:
    result = restart.Plan(tmp_path, 0.002, 1).measure()
    assert not list(tmp_path.iterdir())
    assert {tier: [run.tier for run in runs] for tier, runs in result.runs.items()} == {
        "memory": ["memory"],
        "local": ["local"],
        "shared": ["shared"],
    }
    for tier in restart.TIERS:
        assert result.spread(tier).least > 0
    found = restart.to_json([result])
    faster = found["cases"][0]["times faster"]
    assert faster.keys() == {"memory than local", "memory than shared"}
    assert found["cases"][0]["limits"][0].keys() >= {"memory_s", "read_s"}


def test_a_run_outlives_its_store(tmp_path: Path) -> None:
    found = _bench(
        *("outage", "--away-s", "1", "--before-s", "0.3", "--save-s", "0.1"),
        *("--scale", "0.01"),
        directory=tmp_path,
    )
    assert found["is_in_place"]
    assert list(found["phases"]) == ["before", "away", "catching up", "after"]
    away = found["phases"]["away"]
    assert away["steps"] > 0
    assert away["saves"] > 0
    assert found["backlog"] > 0
    assert 0 <= found["noticed_s"] < 1
    assert found["caught_up_s"] > 0
    assert found["missing"] == found["damaged"] == []
    assert len(found["due"]) > sum(phase["saves"] for phase in found["phases"].values()) - 1


def test_what_is_lost_is_what_the_loop_is_late_by() -> None:
    assert _SAVE.lost_s == pytest.approx(0.7 - 50 * 0.01)
    assert _SAVE.inflation_s == pytest.approx(0.2 - 0.05)


def test_ratios_are_those_of_one_pair() -> None:
    fast, slow = (interference.Run(_SAVE, (save,), 0.01) for save in (_SAVE, _slower(4)))
    runs = {ORBAX: (slow, fast), THREAD: (fast, fast)}
    result = interference.Result(100, 2, runs)
    found = result.ratio(THREAD, "blocking_s")
    assert found == Spread(0.625, 0.25, 1.0)
    assert interference.Result(100, 2, {THREAD: (fast,)}).ratio(THREAD, "lost_s") is None
    told = io.StringIO()
    interference.show(result, Console(width=WIDTH, file=told))
    text = told.getvalue()
    assert f"{THREAD} / {ORBAX}" in text
    assert "0.625 (0.25..1)" in text
    assert "125 (50..200)" in text, "blocking of Orbax"


def _slower(times: float) -> Save:
    return Save(
        blocking_s=_SAVE.blocking_s * times,
        durable_s=_SAVE.durable_s * times,
        steps=20,
        longest_s=0.03,
        whole_s=_SAVE.whole_s * times,
        disturbed=50,
        step_s=0.01,
    )


def test_wrong_values_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        {"rounds": 1, "step_s": 0.01},
        {"saves": [], "step_s": 0.01, "wanted": "a" * 32, "restored": "b" * 32},
    ]
    monkeypatch.setattr(interference, "ask", lambda *_: (answers.pop(0), 0))
    with pytest.raises(asking.WrongValuesError, match="orbax: wanted values of digest aaa"):
        interference.Plan(tmp_path, 0.001, 1).measure()
    assert not list(tmp_path.iterdir())


def _pointers(loop: Loop) -> dict[str, int]:
    return {name: node["w"].unsafe_buffer_pointer() for name, node in loop.state.items()}


def _values(loop: Loop) -> dict[str, np.ndarray]:
    """Copies: a view would keep an array from being donated."""
    return {name: np.asarray(jnp.copy(node["w"])) for name, node in loop.state.items()}


def test_a_step_donates_and_changes_every_leaf_where_it_lies() -> None:
    loop = Loop(Jax(1), _CASE, 5, 2)
    assert len(loop.train(4)) == loop.steps == 4  # what came from NumPy may move in the first
    before, pointers, start = loop.state, _pointers(loop), _values(loop)
    loop.train(3)
    after = _values(loop)
    assert _pointers(loop) == pointers
    assert all(node["w"].is_deleted() for node in before.values())
    changed = {name: (after[name] != start[name]).all(axis=1).tolist() for name in after}
    assert changed == {"a": [True] * 4, "b": [True, True, True, False], "c": [True, True]}


def test_looking_at_the_digest_leaves_the_state_free_to_be_donated() -> None:
    loop = Loop(Jax(1), _CASE, 5, 0)
    loop.train(2)
    pointers, digest = _pointers(loop), loop.digest()
    loop.train()
    assert _pointers(loop) == pointers
    assert loop.digest() != digest
    assert loop.digest() == digest_of(loop.state)


def test_a_store_that_is_away_is_an_error_and_not_empty(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.make()
    ckpt.save(store.run / "one", {"w": np.ones(3)})
    store.go_away()
    with pytest.raises(ckpt.StoreFailed):
        ckpt.restore(store.run / "one")
    with pytest.raises(ckpt.StoreFailed):
        ckpt.save(store.run / "two", {"w": np.ones(3)})
    store.come_back()
    assert ckpt.restore(store.run / "one").state["w"].tolist() == [1, 1, 1]
    assert sorted(os.listdir(tmp_path)) == ["disk", "store"]


def test_what_is_not_in_place_is_told() -> None:
    phase = {
        "lasted_s": 1.0,
        "steps": 10,
        "step_s": 0.0075,
        "saves": 1,
        "blocking_s": 0.01,
        "longest_blocking_s": 0.01,
        "blocked_s": 0.01,
        "local_s": 0.0,
    }
    found = {
        "phases": {"away": phase},
        "every": 10,
        "backlog": 3,
        "noticed_s": None,
        "caught_up_s": 0.5,
        "due": [10, 20, 30],
        "missing": [20],
        "damaged": ["a file"],
        "is_newest_right": False,
    }
    result = outage.Result(2**20, 30.0, found)
    assert not result.is_in_place
    told = io.StringIO()
    outage.show(result, Console(width=WIDTH, file=told))
    text = told.getvalue()
    assert "of 3 steps due, 2 are in the store; missing: 20; damaged: a file; WRONG VALUES" in text
    assert "status() said so never; 3 saves were behind" in text
    for change in ({"missing": []}, {"damaged": []}, {"is_newest_right": True}):
        assert not outage.Result(1, 1.0, {**found, **change}).is_in_place
    right = {**found, "missing": [], "damaged": [], "is_newest_right": True}
    assert outage.Result(1, 1.0, right).is_in_place


def test_a_bare_read_leaves_nothing_behind(tmp_path: Path) -> None:
    assert limits.read_written(tmp_path / "limit", 3 * 2**20 + 17) > 0
    assert not list(tmp_path.iterdir())
