"""What callers give is kept as it is, or refused at once with its name; nothing fails inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from streams import Stream

import ckpt
from ckpt.states import as_json

LIKE = {"w": np.arange(4.0)}
Manager = ckpt.CheckpointManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena") as manager:
        manager.save(0, LIKE).wait()
        yield manager


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [1, 1.5, True, None])
@pytest.mark.parametrize(
    ("place", "value_of"),
    [
        ("", lambda inner: inner),
        (r"\['a'\]\[1\]", lambda inner: {"a": [0, inner]}),
        (r"\[0\]", lambda inner: (inner,)),
    ],
)
def test_keys_that_json_would_make_text_of_are_refused(
    manager: Manager, key: Any, place: str, value_of: Callable[[Any], Any]
) -> None:
    value = value_of({"1": 2, key: 3})
    for options, name in (
        ({"extra": value}, "extra"),
        ({"guard": value}, "guard"),
    ):
        with pytest.raises(ckpt.Misuse, match=rf"^{name}{place}: wanted text as keys, found "):
            manager.save(1, LIKE, **options)
    with pytest.raises(ckpt.Misuse, match=r"^guard"):
        manager.rewind(0, like=LIKE, guard=value)
    assert manager.all_steps() == [0]


@pytest.mark.parametrize("key", [1, 1.5, True, None])
def test_states_of_data_keep_such_keys(manager: Manager, key: Any) -> None:
    value = {"a": [0, {"1": 2, key: 3}]}
    manager.save(1, LIKE, data=Stream(value)).wait()
    found = Stream({})
    manager.restore(1, like=LIKE, data=found)
    assert found.get_state() == value
    assert [type(each) for each in found.get_state()["a"][1]] == [str, type(key)]


def test_names_and_values_of_metrics_are_not_made_up(manager: Manager) -> None:
    with pytest.raises(ckpt.Misuse, match="metrics: a name: wanted text, found 1"):
        manager.save(1, LIKE, metrics={1: 2.0, "1": 3.0})
    for value in ("0.5", None, [1, 2]):
        with pytest.raises(ckpt.Misuse, match="metrics: loss: wanted a number, found"):
            manager.save(1, LIKE, metrics={"loss": value})
    with pytest.raises(ckpt.Misuse, match="metrics: wanted numbers by name, found list"):
        manager.save(1, LIKE, metrics=[1.0])


def test_other_values_come_back(manager: Manager) -> None:
    value = {"": [math.inf, -math.inf, (1, (2,))], "1": {"ß": None}}
    manager.save(1, LIKE, extra=value, metrics={"loss": jnp.float32(0.5)}, guard=value).wait()
    restored = manager.resume(like=LIKE)
    wanted = {"": [math.inf, -math.inf, [1, [2]]], "1": {"ß": None}}
    assert (restored.extra, restored.guard) == (wanted, wanted)
    assert restored.metrics == {"loss": 0.5}
    assert math.isnan(as_json(math.nan, "extra"))


def test_the_saved_position_is_not_the_live_one(manager: Manager) -> None:
    data = Stream({"at": [1]})
    pending = manager.save(1, LIKE, data=data)
    data.state["at"].append(2)
    pending.wait()
    manager.restore(1, like=LIKE, data=data)
    assert data.state == {"at": [1]}


# --- types -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": {"partial": ["w"]}}, r"fit: wanted ckpt\.Fit\(\.\.\.\), found dict \{"),
        ({"fit": None}, "fit: wanted .*, found NoneType None"),
        ({"loading": {"donate": True}}, r"loading: wanted ckpt\.Loading\(\.\.\.\), found dict"),
        ({"loading": None}, "loading: wanted .*, found NoneType None"),
    ],
)
def test_how_to_restore(manager: Manager, options: dict[str, Any], message: str) -> None:
    reader = ckpt.open(manager.location)
    step = f"{manager.location}/branch-1/0"
    calls: list[Callable[..., Any]] = [
        manager.resume,
        manager.restore,
        lambda **given: ckpt.restore(manager.location, **given),
        lambda **given: ckpt.restore(step, **given),
        reader.restore,
        lambda **given: reader.restore_step(reader.find(), **given),
    ]
    if "loading" in options:
        calls.append(lambda **given: manager.rewind(0, **given))
        calls.append(lambda like, **given: ckpt.Run(manager, like, iter([]), steps=1, **given))
    before = reader.listing()
    for call in calls:
        with pytest.raises(ckpt.Misuse, match=message):
            call(like=LIKE, **options)
    assert reader.listing() == before, "an attempt was begun for a call without meaning"


@pytest.mark.parametrize(
    "step", ["0", 1.5, 1.0, True, np.True_, jnp.array(True), -1, b"0", np.arange(2), None, 10**18]
)
def test_steps(manager: Manager, step: Any) -> None:
    reader = ckpt.open(manager.location)
    root = manager.location
    calls = [
        manager.delete,
        manager.should_save,
        manager.rewind,
        lambda step: manager.save(step, LIKE),
        lambda step: ckpt.pin(root, step),
        lambda step: ckpt.unpin(root, step),
        lambda step: ckpt.rewind(root, step),
    ]
    if step is not None:
        calls += [
            manager.restore,
            reader.restore,
            reader.metadata,
            reader.find,
            lambda step: ckpt.restore(root, step=step),
            lambda step: ckpt.restore(f"{root}/branch-1/0", step=step),
            lambda step: ckpt.metadata(root, step=step),
            lambda step: ckpt.save(root, LIKE, step=step),
        ]
    for call in calls:
        with pytest.raises(ckpt.Misuse, match="step: wanted "):
            call(step)


@pytest.mark.parametrize("step", [0, np.int64(0), np.array(0), jnp.array(0)])
def test_steps_of_numpy_and_jax_are_steps(manager: Manager, step: Any) -> None:
    assert manager.should_save(step)
    assert ckpt.restore(manager.location, step=step).step == 0
    assert manager.restore(step, like=LIKE).step == 0
    with pytest.raises(ckpt.Misuse, match="is step 0; step=1 was asked for"):
        ckpt.metadata(f"{manager.location}/branch-1/0", step=1)


@pytest.mark.parametrize("location", [5, None, b"runs", "", "file://", "a\0b", "a\ud800", ["a"]])
def test_locations(location: Any) -> None:
    for call in (Manager, ckpt.Shared, ckpt.open, ckpt.restore, ckpt.metadata, ckpt.verify):
        with pytest.raises(ckpt.Misuse, match=r"^location"):
            call(location)
    with pytest.raises(ckpt.Misuse, match=r"^location"):
        ckpt.save(location, LIKE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ckpt.Shared("k", keep=3), r"Shared: keep: wanted ckpt\.Keep.*, found 3"),
        (lambda: ckpt.Shared("k", keep=None), "Shared: keep: wanted .*, found NoneType None"),
        (lambda: ckpt.Shared("k", every=1.5), "Shared: every: wanted a whole .* float 1.5"),
        (lambda: ckpt.Shared("k", every="2"), "Shared: every: .* from 1 on, found str '2'"),
        (lambda: ckpt.Shared("k", every=0), "Shared: every: .* from 1 on, found 0"),
        (lambda: ckpt.Shared("k", every=True), "Shared: every: .*, found True"),
        (lambda: ckpt.Keep(last=2.0), "Keep: last .*, found float 2.0"),
        (lambda: ckpt.Keep(every="2"), "Keep: every .*, found str '2'"),
        (lambda: ckpt.Keep(best="loss"), r"Keep: best: wanted ckpt\.Best.*, found str 'loss'"),
        (lambda: ckpt.Best("loss", count=0), "Best: count: .*, found 0"),
        (lambda: ckpt.Best(None), "Best: metric: wanted .*, found NoneType"),
        (lambda: ckpt.Fit(partial=5), "partial: wanted a collection .* found 5"),
        (lambda: ckpt.Fit(partial=[1]), "partial: .* found 1"),
        (lambda: ckpt.Fit(partial=iter(["a"])), "partial: wanted a collection"),
        (lambda: ckpt.Fit(rename=["a"]), "rename: wanted a mapping .* found list"),
        (lambda: ckpt.Fit(rename={"a": 1}), "rename: .* found 1"),
        (lambda: ckpt.Fit(cast="yes"), "cast: wanted True, False or a function.* 'yes'"),
    ],
)
def test_options(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ckpt.Misuse, match=message):
        make()
    assert ckpt.Shared("k", every=np.int64(2), keep=ckpt.Keep(last=1)).every == 2


@pytest.mark.parametrize("given", ["5", None, -1, 0, math.nan, math.inf, True, 10**400, [1]])
def test_how_long_to_wait_for_others(tmp_path: Path, given: Any) -> None:
    wanted = (
        r"CheckpointManager: timeout_s: wanted seconds, above 0 and at most 100,000,000, found "
    )
    with pytest.raises(ckpt.Misuse, match=wanted):
        ckpt.CheckpointManager(tmp_path / "run", timeout_s=given)
    assert not (tmp_path / "run").exists()


def test_time_limits(manager: Manager) -> None:
    pending = manager.save(1, LIKE)
    assert pending is not None
    reader = ckpt.open(manager.location)
    calls: list[Callable[[Any], Any]] = [
        manager.wait_until_finished,
        lambda limit: pending.wait(timeout=limit),
        lambda limit: reader.wait_for_new_step(0, timeout=limit),
    ]
    for call in calls:
        for limit in ("x", True, math.nan, [1], 1j):
            with pytest.raises(ckpt.Misuse, match="timeout: wanted seconds, or None to wait for"):
                call(limit)
        for limit in (None, math.inf, 1e300, 10**400, np.float32(60), np.int64(60)):
            call(limit)
    for limit in (0, -1, -math.inf, -(10**400)):  # what is left of a limit may be below 0
        pending.wait(timeout=limit)
        with pytest.raises(TimeoutError):
            reader.wait_for_new_step(9, timeout=limit)


@pytest.mark.parametrize("arena", [5, b"a", "", "a\0b", "s3://bucket/arena", "file://", ["a"]])
def test_the_place_of_the_arena(tmp_path: Path, arena: Any) -> None:
    with pytest.raises(ckpt.Misuse, match=r"^CheckpointManager: arena"):
        ckpt.CheckpointManager(tmp_path / "run", arena=arena)


def test_a_place_may_be_a_url_or_below_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for arena in (f"file://{tmp_path}/arena", "~/arena"):
        with ckpt.CheckpointManager(tmp_path / "run", arena=arena) as manager:
            manager.resume(like=LIKE)
            assert (tmp_path / "arena/lock").exists()


def test_slots() -> None:
    for slots in (0, "2", True, 1.5):
        with pytest.raises(ckpt.Misuse, match="CheckpointManager: slots: wanted a whole number"):
            ckpt.CheckpointManager("k", slots=slots)
    with pytest.raises(ckpt.Misuse, match="slots: wanted at most 1000, found 1001"):
        ckpt.CheckpointManager("k", slots=1001)


@pytest.mark.parametrize("event", ["x", 5, None, [("event", "x")]])
def test_events(manager: Manager, event: Any) -> None:
    with pytest.raises(ckpt.Misuse, match=r"event: wanted a JSON object such as .*, found "):
        manager.note(event)


# --- trees without an end ------------------------------------------------------------------------


def _list_in_itself() -> Any:
    tree: list[Any] = [1.0]
    tree.append(tree)
    return {"a": tree}


def _dict_in_itself() -> Any:
    tree: dict[str, Any] = {}
    tree["a"] = tree
    return tree


def _very_deep() -> Any:
    tree: Any = 1.0
    for _ in range(50_000):
        tree = {"a": tree}
    return tree


@pytest.mark.parametrize("make", [_list_in_itself, _dict_in_itself, _very_deep])
def test_trees_without_an_end(tmp_path: Path, manager: Manager, make: Callable[[], Any]) -> None:
    tree = make()
    fresh, arena = tmp_path / "fresh", tmp_path / "arena-2"
    with ckpt.CheckpointManager(fresh, arena=arena) as other:
        calls: list[Callable[[], Any]] = [
            lambda: other.resume(like=tree),
            lambda: manager.resume(like=tree),
            lambda: manager.restore(0, like=tree),
            lambda: manager.rewind(0, like=tree),
            lambda: manager.save(1, tree),
            lambda: ckpt.restore(manager.location, tree),
            lambda: ckpt.save(tmp_path / "other", tree),
        ]
        for call in calls:
            with pytest.raises(ckpt.Unsupported, match=r"node a/.*a deeper one, or .* itself") as e:
                call()
            assert len(str(e.value)) < 400
        assert not fresh.exists(), "an attempt was begun for it"


def test_others(manager: Manager) -> None:
    with pytest.raises(ckpt.Misuse, match=r"skips: wanted half-open .* found str 'x'"):
        ckpt.rewind(manager.location, 0, skips="x")
    with pytest.raises(ckpt.Misuse, match=r"progress: wanted a function of .*, found 5"):
        ckpt.verify(manager.location, progress=5)
    for call in (ckpt.open(manager.location).restore_step, ckpt.open(manager.location).manifest):
        with pytest.raises(ckpt.Misuse, match=r"step: wanted a StepId, .* found 0"):
            call(0)
    with pytest.raises(ckpt.Misuse, match=r"best_step: policy: wanted .*, found str 'loss'"):
        manager.best_step("loss")
    with pytest.raises(ckpt.Misuse, match="after: wanted a whole number"):
        ckpt.open(manager.location).wait_for_new_step("0", timeout=0)
    with pytest.raises(ckpt.Misuse, match="reason: wanted text, found 5"):
        manager.rewind(0, like=LIKE, reason=5)
    with pytest.raises(ckpt.Misuse, match=r"Run.guard: wanted .*, found True"):
        ckpt.Run(manager, LIKE, iter([]), steps=1, guard=True)
