"""A template that makes room: when its arrays are let go, and what a restore makes of them then."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged_steps import DAMAGES
from jax.sharding import NamedSharding
from loading_states import (
    SPREAD,
    copied,
    devices_of,
    full,
    is_gone,
    live_bytes,
    manager_of,
    save_three,
    state_of,
    traits,
    watched,
)
from rows import Rows

import ckpt
from ckpt import Fit, Loading
from ckpt.manifest import Manifest
from ckpt.reader import Reader, Restored
from tools.bench.bits import bits

DONATE = Loading(donate=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_three(tmp_path_factory.mktemp("donate") / "run")


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def by_resume(root: Path, like: Any, loading: Loading) -> Restored:
    with manager_of(root) as manager:
        return manager.resume(like, Rows(), loading=loading)


def by_restore(root: Path, like: Any, loading: Loading) -> Restored:
    with manager_of(root) as manager:
        return manager.restore(3, like=like, data=Rows(), loading=loading)


def by_rewind(root: Path, like: Any, loading: Loading) -> Restored:
    with manager_of(root) as manager:
        return manager.rewind(3, like=like, data=Rows(), loading=loading)


def by_one_call(root: Path, like: Any, loading: Loading) -> Restored:
    return ckpt.restore(root, like, loading=loading)


def by_step_path(root: Path, like: Any, loading: Loading) -> Restored:
    return ckpt.restore(root / "branch-1/3", like, loading=loading)


def by_reader(root: Path, like: Any, loading: Loading) -> Restored:
    return Reader(root).restore(3, like=like, loading=loading)


def by_reader_of_a_step(root: Path, like: Any, loading: Loading) -> Restored:
    reader = Reader(root)
    return reader.restore_step(reader.find(3), like=like, loading=loading)


CALLS = [
    by_resume,
    by_restore,
    by_rewind,
    by_one_call,
    by_step_path,
    by_reader,
    by_reader_of_a_step,
]


@pytest.mark.parametrize("call", CALLS)
def test_when_reading_begins_the_arrays_of_the_template_are_gone(
    run: Path, call: Callable[[Path, Any, Loading], Restored]
) -> None:
    wanted = full(3)
    for loading in (Loading(), DONATE):
        like = copied(full(7))
        mine = devices_of(like)
        expected = traits(like)
        seen: list[tuple[int, bool]] = []

        def look(_: int, mine: list[jax.Array] = mine, seen: list[Any] = seen) -> None:
            seen.append((live_bytes(), all(each.is_deleted() for each in mine)))

        host = like["host"]
        template_bytes = sum(each.nbytes for each in mine)
        gc.collect()  # arrays of tests before this one may hang in a cycle
        before = live_bytes()
        with watched(look):
            restored = call(run, like, loading)
        at_first, gone = seen[0]
        assert gone == loading.donate
        assert at_first == (before - template_bytes if loading.donate else before)
        assert restored.step == 3
        assert bits(restored.state) == bits(wanted)
        assert traits(restored.state) == expected
        np.testing.assert_array_equal(host, np.arange(50) + 7)
        assert not any(each.is_deleted() for each in devices_of(restored.state))


def test_deleted_arrays_are_as_good_a_template_as_before(saved: Path) -> None:
    like = copied(full(7))
    expected = traits(like)
    for _ in range(2):
        restored = ckpt.restore(saved, like, loading=DONATE)
        assert bits(restored.state) == bits(full(3))
        assert traits(restored.state) == expected


def differing(state: dict[str, Any], kind: str) -> dict[str, Any]:
    """A template that the step does not match, in one leaf that is no array of its own."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    along = NamedSharding(jax.make_mesh((3,), ("y",), devices=jax.devices()[:3]), jax.P("y"))
    other = {
        "missing": {"more": jax.ShapeDtypeStruct((2,), jnp.float32)},
        "spread": {"spread": jax.ShapeDtypeStruct((64, 17), jnp.float32, sharding=SPREAD)},
        "uneven": {"spread": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=along)},
        "cast": {"spread": jax.ShapeDtypeStruct((64, 16), jnp.bfloat16, sharding=along)},
        "wide": {"host": jax.ShapeDtypeStruct((50,), np.int64)},
        "wide, placed": {"host": jax.ShapeDtypeStruct((50,), np.int64, sharding=one)},
        "keys": {"keys": jax.ShapeDtypeStruct((8,), state["keys"].dtype, sharding=along)},
    }
    return {**state, **other[kind]}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", ckpt.Mismatch, "more: wanted float32"),
        ("spread", ckpt.Mismatch, r"spread: wanted float32\[64,17\], found float32\[64,16\]"),
        ("uneven", ckpt.Mismatch, r"\n  spread: wanted NamedSharding.*found shape \[64, 16\]"),
        ("cast", ckpt.Mismatch, r"\n  spread: wanted NamedSharding.*found shape \[64, 16\]"),
        ("wide", ckpt.Unsupported, r"host: wanted int64\[50\], but JAX would make it int32"),
        ("wide, placed", ckpt.Unsupported, "host: .*int64, but JAX would make it int32"),
        ("keys", ckpt.Mismatch, r"\n  keys: wanted NamedSharding.*found shape \[8, 2\]"),
    ],
)
def test_nothing_is_let_go_for_a_step_that_does_not_match(
    saved: Path, kind: str, error: type[Exception], message: str
) -> None:
    like = differing(copied(full(7)), kind)
    fit = Fit(cast=kind == "cast")
    reads: list[int] = []
    with watched(reads.append):
        for loading in (Loading(), DONATE):
            with pytest.raises(error, match=message):
                ckpt.restore(saved, like, fit=fit, loading=loading)
    assert reads == []
    mine = devices_of(like)
    assert len(mine) >= 9
    assert not any(each.is_deleted() for each in mine)
    assert bits({"free": like["free"]}) == bits({"free": state_of(7)["free"]})


def given(call: str, root: Path, like: Any, data: Any) -> Restored:
    if call == "reader":
        return ckpt.restore(root, like, data=data, loading=DONATE)
    if call == "path":
        return ckpt.restore(root / "branch-1/3", like, data=data, loading=DONATE)
    with manager_of(root) as manager:
        if call == "rewind":
            return manager.rewind(3, like=like, data=data, loading=DONATE)
        return getattr(manager, call)(like=like, data=data, loading=DONATE)


@pytest.mark.parametrize("call", ["resume", "restore", "rewind", "reader", "path"])
def test_nothing_is_let_go_for_a_step_without_the_state_of_an_iterator(
    run: Path, call: str
) -> None:
    like = copied(full(7))
    data = {"data": Rows(), "more": Rows()}
    reads: list[int] = []
    with watched(reads.append), pytest.raises(ckpt.Mismatch, match=r"of iterators more was saved"):
        given(call, run, like, data)
    with (
        watched(reads.append),
        mock.patch.object(Manifest, "parse", saved_by_two),
        pytest.raises(ckpt.Mismatch, match="each of 2 processes, here are 1"),
    ):
        given(call, run, like, data["data"])
    assert reads == []
    assert not any(map(is_gone, devices_of(like)))
    assert bits(like) == bits(full(7))
    assert [each.next_example for each in data.values()] == [0, 0]


def saved_by_two(data: bytes, where: str) -> Manifest:
    """A manifest as two processes write it whose iterators are not at the same place."""
    states = {"data": {"states": [{"at": 1}, {"at": 2}], "batch_size": 2}}
    return dataclasses.replace(PARSE(data, where), data=states)


PARSE = Manifest.parse


def test_leaves_that_keep_their_value_stay(saved: Path) -> None:
    like = copied(state_of(7))
    like["more"] = jnp.full(3, 9.0)
    like["twice"] = like["free"]  # restored there, kept here
    like["bits"] = jax.random.key_data(like["key"])  # may share the memory of the key
    fit = Fit(missing="keep", extra="ignore")
    found = ckpt.restore(saved, like, fit=fit, loading=DONATE).state
    wanted = {**state_of(3), "more": jnp.full(3, 9.0), "twice": state_of(7)["free"]}
    wanted["bits"] = jax.random.key_data(jax.random.key(7))
    assert bits(found) == bits(wanted)
    assert found["more"] is like["more"]
    assert found["twice"] is like["twice"]
    gone = {name for name, leaf in like.items() if isinstance(leaf, jax.Array) and is_gone(leaf)}
    arrays_of_its_own = {name for name, leaf in like.items() if isinstance(leaf, jax.Array)}
    assert gone == arrays_of_its_own - {"more", "twice", "free", "bits", "key"}


def test_an_older_step_is_restored_into_what_was_let_go_for_a_damaged_one(run: Path) -> None:
    for number in (3, 2):
        DAMAGES["image"](run / f"branch-1/{number}")
    fit = Fit(extra="ignore")
    for restore in (
        lambda like: ckpt.restore(run, like, fit=fit, loading=DONATE),
        lambda like: resumed(run, like, fit),
    ):
        like = copied(state_of(7))
        expected = traits(like)
        told: list[bool] = []
        with watched(lambda _, like=like, told=told: told.append(is_gone(like["key"]))):
            restored = restore(like)
        assert (restored.step, [lost.step for lost in restored.report.lost]) == (1, [3, 2])
        assert all(told)
        assert bits(restored.state) == bits(state_of(1))
        assert traits(restored.state) == expected


def resumed(root: Path, like: Any, fit: Fit = Fit(), loading: Loading = DONATE) -> Restored:  # noqa: B008
    with manager_of(root) as manager:
        return manager.resume(like, Rows(), fit=fit, loading=loading)


def test_a_leaf_let_go_for_a_damaged_step_is_not_kept_for_an_older_one(run: Path) -> None:
    DAMAGES["image"](run / "branch-1/3")
    like = copied(full(7))
    wanted = r"branch-1/2: .*\n  ema: wanted an array, found float32\[4\] without values"
    with pytest.raises(ckpt.Mismatch, match=wanted):
        ckpt.restore(run, like, fit=Fit(missing="keep"), loading=DONATE)
    like["ema"] = jnp.zeros(4)
    fit = Fit(partial=lambda name: name != "ema", missing="keep")
    restored = ckpt.restore(run, like, fit=fit, loading=DONATE)
    assert bits(restored.state) == bits({**state_of(2), "ema": jnp.zeros(4)})


def test_a_damaged_header_lets_nothing_go(run: Path) -> None:
    for number in (1, 2, 3):
        DAMAGES["manifest"](run / f"branch-1/{number}")
    like = copied(state_of(7))
    with pytest.raises(ckpt.Damaged):
        ckpt.restore(run, like, loading=DONATE)
    assert not any(map(is_gone, devices_of(like)))


def test_a_fresh_run_returns_the_template_untouched(tmp_path: Path) -> None:
    like = copied(state_of(7))
    with manager_of(tmp_path / "new") as manager:
        restored = manager.resume(like, loading=DONATE)
    assert restored.report.fresh
    assert restored.state is like
    assert bits(like) == bits(state_of(7))
    for error, call in ((ckpt.NotFound, by_one_call), (ckpt.NotFound, by_restore)):
        with pytest.raises(error):
            call(tmp_path / "none", like, DONATE)
    assert bits(like) == bits(state_of(7))


def test_after_an_error_in_reading_the_template_is_gone_and_still_serves(saved: Path) -> None:
    like = copied(full(7))

    def fail(_: int) -> None:
        raise ckpt.StoreFailed("no answer")

    with watched(fail), pytest.raises(ckpt.StoreFailed, match="no answer"):
        ckpt.restore(saved, like, loading=DONATE)
    assert all(map(is_gone, devices_of(like)))
    assert bits(ckpt.restore(saved, like, loading=DONATE).state) == bits(full(3))


def test_a_run_lets_go_of_the_state_before(tmp_path: Path) -> None:
    guard = ckpt.SpikeGuard(
        window=8, warm_up=4, cool_down=2, consecutive=1, margin=2, skip_before=1, skip_after=2
    )
    states: list[jax.Array] = []
    place = ckpt.Shared(tmp_path / "run", every=2, keep=ckpt.Keep())
    for steps, spikes in ((10, {8}), (12, set())):
        start = {"w": jnp.zeros(3)}
        with (
            ckpt.CheckpointManager(place, arena=tmp_path / "arena") as manager,
            ckpt.Run(manager, start, Rows(), steps=steps, guard=guard, loading=DONATE) as run,
        ):
            assert is_gone(start["w"]) == (steps == 12)
            for step, _ in run:
                states.append(run.state["w"] + 1)
                loss = 100.0 if step in spikes else 1.0 + step / 1000
                spikes -= {step}
                run.update({"w": states[-1]}, loss=loss)
            assert run.state["w"].tolist() == [float(steps)] * 3
            if steps == 10:
                (rewound,) = run.rewinds
                assert rewound.onset == 8
                # Some updates pass before the guard has read the loss of one.
                assert [is_gone(w) for w in states].count(True) == 1
                assert [is_gone(w) for w in states].index(True) >= 7


# --- steps of Orbax ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orbax_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import orbax.checkpoint as ocp

    path = tmp_path_factory.mktemp("orbax") / "5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, orbax_state(3))
    return path


def orbax_state(tag: int) -> dict[str, Any]:
    rows = jnp.arange(64.0 * 16).reshape(64, 16) + tag
    return {"w": jax.device_put(rows, SPREAD), "b": rows[0], "n": np.arange(6) + tag}


def test_a_step_of_orbax_lets_the_template_go_too(orbax_step: Path) -> None:
    from ckpt import orbax

    like = copied(orbax_state(7))
    mine = devices_of(like)
    told: list[bool] = []
    sizes: list[tuple[int, int]] = []
    budgets: list[int] = []
    original = orbax._groups

    def groups(reads: Any, budget_bytes: int) -> Any:
        told.append(all(map(is_gone, mine)))
        budgets.append(budget_bytes)
        return original(reads, budget_bytes)

    loading = Loading(
        budget_bytes=100, donate=True, progress=lambda done, total: sizes.append((done, total))
    )
    with mock.patch.object(orbax, "_groups", groups), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = ckpt.restore(orbax_step, like, loading=loading)
        assert bits(restored.state) == bits(orbax_state(3))
        host = ckpt.restore(orbax_step, loading=loading)
    assert told == [True, True]
    assert budgets == [100, 100]
    nbytes = 64 * 16 * 4 + 16 * 4 + 6 * 8
    assert sizes == [(nbytes, nbytes)] * 2
    np.testing.assert_array_equal(host.state["n"], np.arange(6) + 3)


@pytest.mark.parametrize("kind", ["shape", "uneven", "wide"])
def test_a_step_of_orbax_that_does_not_match_lets_nothing_go(orbax_step: Path, kind: str) -> None:
    three = NamedSharding(jax.make_mesh((3,), ("y",), devices=jax.devices()[:3]), jax.P("y"))
    other = {
        "shape": {"w": jax.ShapeDtypeStruct((64, 17), jnp.float32)},
        "uneven": {"w": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=three)},
        "wide": {"n": jax.ShapeDtypeStruct((6,), np.int64)},
    }
    like = {**copied(orbax_state(7)), **other[kind]}
    error = ckpt.Unsupported if kind == "wide" else ckpt.Mismatch
    with pytest.raises(error, match=r"n: wanted int64\[6\]" if kind == "wide" else "w: wanted"):
        ckpt.restore(orbax_step, like, loading=DONATE)
    assert not any(map(is_gone, devices_of(like)))
