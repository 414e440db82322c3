"""Iterators of Grain as `data` of a manager: saved as they are, restored exactly, or refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from grain import experimental
from grain_kinds import KINDS, OTHERS, digest, elastic, interleaved, loader, manager, mixed

import ckpt
from datapipe.conformance.children import end_group

STEPS, KILLED_AT = 13, 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def take(iterator: Any, count: int) -> list[str]:
    return [digest(next(iterator)) for _ in range(count)]


# -- every kind ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("before", [0, 7])
def test_a_state_restores_into_a_new_iterator(root: Path, name: str, before: int) -> None:
    saved, fresh = iter(KINDS[name]()), iter(KINDS[name]())
    take(saved, before)
    ckpt.save(root, {"w": np.zeros(2)}, step=1, data=saved)
    rest = take(saved, 9)
    take(fresh, 2)
    ckpt.restore(root, data=fresh)
    assert take(fresh, 9) == rest
    # And back, after it was drawn from.
    ckpt.restore(root, data=fresh)
    assert take(fresh, 9) == rest


def test_killed_and_started_again_all_of_them_serve_what_an_undisturbed_run_has(
    root: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    script = Path(__file__).with_name("grain_kinds.py")
    for killed_at, status in ((KILLED_AT, -signal.SIGKILL), (0, 0)):
        words = [str(word) for word in (script, root, log, STEPS, killed_at)]
        told = tmp_path / "told"
        with (
            told.open("w") as out,
            subprocess.Popen(
                [sys.executable, *words], stdout=out, stderr=out, start_new_session=True
            ) as process,
        ):
            try:
                process.wait(timeout=120)
            finally:
                end_group(process)  # workers of Grain outlive it
        assert process.returncode == status, told.read_text()[-3000:]
    lines = [line.split() for line in log.read_text().splitlines()]
    served = {(int(step), name): found for step, name, found in lines}
    again = [int(step) for step, name, _ in lines if name == "prefetch"]
    assert again == [*range(1, KILLED_AT + 1), *range(7, STEPS + 1)]
    same_as = {"processes": "prefetch", "loader_processes": "loader"}
    for name in {**KINDS, **OTHERS}:
        wanted = take(iter(KINDS[same_as.get(name, name)]()), STEPS)
        assert [served[step, name] for step in range(1, STEPS + 1)] == wanted, name


# -- what a state is -------------------------------------------------------------------------------


class Odd:
    """An iterator with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        {"at": np.int64(5), "epoch": np.uint32(2), "scale": np.float32(0.1)},
        {"done": [False, True], "parents": ({"at": 1}, {"at": 2})},
        {"future": {3: {"next_index": 0}, 4: {"next_index": 1}}},
        b"\0\xff\x80",
        b'{"json": [1,\n 2]}',
        {"json": 1},
        {"$": ["tuple", [1]]},
        np.arange(6).reshape(2, 3),
        2**200,
        None,
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_state_comes_back_as_it_was_with_its_types(root: Path, state: Any) -> None:
    ckpt.save(root, {"w": np.zeros(2)}, step=1, data=Odd(state))
    fresh = Odd()
    ckpt.restore(root, data=fresh)
    assert repr(fresh.state) == repr(state)
    assert type(fresh.state) is type(state)


def test_nothing_of_a_state_is_pickled(root: Path) -> None:
    with pytest.raises(ckpt.Misuse, match=r"get_state\(\)\['rng'\].*found .*Generator"):
        ckpt.save(root, {"w": np.zeros(2)}, data=Odd({"rng": np.random.default_rng(0)}))
    with pytest.raises(ckpt.Misuse, match=r"at most 16777216 bytes.*what an iterator has buffered"):
        ckpt.save(root, {"w": np.zeros(2)}, data=Odd(b"x" * (17 << 20)))
    assert not list(root.glob("branch-*/*"))


def test_a_state_that_was_tampered_with_is_damage(root: Path) -> None:
    from ckpt import states

    saved = {"data": {"state": {"$": ["pickle", "gASV"]}, "batch_size": None}}
    odd = Odd(1)
    with pytest.raises(ckpt.Damaged, match="here: iterator 'data': no state of an iterator"):
        states.put(odd, saved, {}, process=0, processes=1, where="here")
    assert odd.state == 1


def test_what_an_iterator_goes_on_to_change_is_put_back_after_an_error(root: Path) -> None:
    class Live(Odd):
        def set_state(self, state: Any) -> None:
            self.state["at"] += 100  # of the very object that it handed out
            if state["at"] == 1:
                raise KeyError("parents")
            self.state = state

    ckpt.save(root, {"w": np.zeros(2)}, step=1, data=Odd({"at": 1}))
    live = Live({"at": 7})
    with pytest.raises(ckpt.Mismatch, match=r"Live does not take the state .*KeyError: 'parents'"):
        ckpt.restore(root, data=live)
    assert live.state == {"at": 7}


# -- other pipelines -------------------------------------------------------------------------------


def test_a_state_of_another_pipeline_is_refused_and_the_iterator_stays(root: Path) -> None:
    cases = [
        (mixed("a", "bc", "def"), mixed("a", "bc"), r"\['parents'\]: saved 3 states, here are 2"),
        (mixed("a", "bc"), mixed("a", "bc", "def"), r"saved 2 states, here are 3"),
        (
            interleaved(3),
            interleaved(2),
            r"\['iterators_in_use_states'\]: saved 3 states, here are 2",
        ),
        (KINDS["prefetch"](), mixed("a", "b"), "does not take the state.*KeyError: 'parents'"),
        (KINDS["mix"](), KINDS["prefetch"](), "does not take the state.*KeyError: 'next_index'"),
        (loader(count=60), loader(count=50), "does not take the state"),
        (loader(), KINDS["prefetch"](), "does not take the state"),
    ]
    for step, (theirs, ours, told) in enumerate(cases, start=1):
        one, other = iter(theirs), iter(ours)
        take(one, 3), take(other, 2)
        wanted = take(iter(ours), 4)[2:]
        ckpt.save(root, {"w": np.zeros(2)}, step=step, data={"data": one})
        with pytest.raises(ckpt.Mismatch, match=told):
            ckpt.restore(root, data=other)
        assert take(other, 2) == wanted


def test_a_dataset_is_no_iterator(root: Path) -> None:
    for dataset in (grain.MapDataset.range(3), KINDS["prefetch"](), loader()):
        with pytest.raises(ckpt.Misuse, match=r"of a dataset or DataLoader of Grain `iter\(...\)`"):
            ckpt.save(root, {"w": np.zeros(2)}, data=dataset)


def test_data_that_is_forgotten_is_an_error(root: Path) -> None:
    data = iter(KINDS["prefetch"]())
    with manager(root) as m:
        m.save(1, {"w": np.zeros(2)}, data=data).wait()
        with pytest.raises(ckpt.Misuse, match="save\\(\\) got no `data`"):
            m.save(2, {"w": np.zeros(2)})


# -- rewinding -------------------------------------------------------------------------------------


def test_a_rewind_without_skips_puts_it_back_and_one_with_skips_is_refused(root: Path) -> None:
    data = iter(KINDS["filter_batch"]())
    with manager(root) as m:
        m.resume(data=data)
        for step in range(1, 5):
            next(data)
            m.save(step, {"step": step}, data=data)
        m.wait_until_finished()
        with pytest.raises(ckpt.Misuse, match=r"cannot skip batches.*datapipe.Pipeline\(dataset"):
            m.rewind(1, skip_steps=range(3, 4), data=data)
        m.rewind(2, data=data)
        assert take(data, 2) == take(iter(KINDS["filter_batch"]()), 4)[2:]
    with (
        manager(root) as m,
        pytest.raises(ckpt.Misuse, match=r"cannot skip.*datapipe.Pipeline\(dataset"),
        ckpt.Run(m, {"step": 0}, data, guard=ckpt.SpikeGuard(), steps=5) as run,
    ):
        next(iter(run))


def test_a_run_goes_on_with_it(root: Path) -> None:
    wanted = take(iter(KINDS["random_map"]()), 8)
    found = []
    for steps in (3, 8):
        data = iter(KINDS["random_map"]())
        with manager(root) as m, ckpt.Run(m, {"w": np.zeros(2)}, data, steps=steps) as run:
            for _, batch in run:
                found.append(digest(batch))
                run.update(run.state)
    assert found == wanted


# -- positions of the whole run --------------------------------------------------------------------


def test_a_state_of_an_elastic_iterator_is_one_for_all_processes(root: Path) -> None:
    data = iter(elastic())
    take(data, 5)
    ckpt.save(root, {"w": np.zeros(2)}, step=1, data={"elastic": data, "mix": iter(KINDS["mix"]())})
    saved = ckpt.metadata(root).data
    assert saved["elastic"]["state"] == {"global_next_index": 20}
    assert "states" in saved["mix"]
    halves = [iter(elastic(index=index, count=2)) for index in range(2)]
    for half in halves:
        ckpt.restore(root, data={"elastic": half})
    whole = np.stack([np.asarray(next(half)) for half in halves], axis=1).reshape(-1)
    np.testing.assert_array_equal(whole, next(data))


def test_datapipe_beneath_transformations_of_grain_is_elastic_too(root: Path) -> None:
    data = iter(KINDS["behind_ours"]())
    take(data, 2)
    ckpt.save(root, {"w": np.zeros(2)}, step=1, data=data)
    assert ckpt.metadata(root).data["data"]["state"]["next_example"] == 6
    json.dumps(ckpt.metadata(root).data)


def test_assertions_of_grain_hold_for_what_is_saved() -> None:
    experimental.assert_equal_output_after_checkpoint(
        experimental.LimitIterDataset(KINDS["random_map"](), 4)
    )
