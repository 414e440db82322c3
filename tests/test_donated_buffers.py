"""Arrays of a template that share memory: with one that stays all stay, else all are let go."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from loading_states import SPREAD, copied, devices_of, full, is_gone, save_three, state_of

import ckpt
from ckpt import Fit, Loading
from tools.bench.bits import bits

DONATE = Loading(donate=True)
KEEP = Fit(missing="keep")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_three(tmp_path_factory.mktemp("buffers") / "run")


def joined(parts: list[jax.Array], like: jax.Array) -> jax.Array:
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)


def sharers(state: dict[str, Any]) -> dict[str, jax.Array]:
    """Other arrays over the buffers of leaves, by the leaf."""
    return {
        "free": jax.device_put(state["free"], state["free"].sharding),
        "spread": jax.device_put(state["spread"], SPREAD),
        "columns": state["columns"].addressable_shards[3].data,
        "copies": joined([s.data for s in state["copies"].addressable_shards], state["copies"]),
        "half": joined([state["half"]], state["half"]),
        "key": jax.device_put(state["key"], state["key"].sharding),
        "keys": jax.random.key_data(state["keys"]),
    }


def gone_of(like: dict[str, Any]) -> set[str]:
    return {n for n, leaf in like.items() if isinstance(leaf, jax.Array) and is_gone(leaf)}


@pytest.mark.parametrize("name", sharers(state_of(0)))
def test_what_shares_a_buffer_with_a_leaf_that_stays_is_kept(saved: Path, name: str) -> None:
    like: dict[str, Any] = copied(state_of(7))
    arrays = {each for each, leaf in like.items() if isinstance(leaf, jax.Array)}
    like["ema"] = sharers(like)[name]
    value = bits(like["ema"])
    restored = ckpt.restore(saved, like, step=2, fit=KEEP, loading=DONATE).state
    assert not any(map(is_gone, devices_of(restored)))
    assert restored["ema"] is like["ema"]
    assert bits(restored.pop("ema")) == value
    assert bits(restored) == bits(state_of(2))
    assert gone_of(like) == arrays - {name}


@pytest.mark.parametrize("told", [0, 1])
def test_where_a_backend_tells_no_addresses_all_that_may_share_memory_stays(
    saved: Path, told: int
) -> None:
    """After so many addresses it tells no more."""
    calls = itertools.count()

    def address(_: jax.Array) -> int:
        if next(calls) < told:
            return 4096
        raise NotImplementedError("no addresses here")

    like: dict[str, Any] = copied(state_of(7))
    like["ema"] = jax.device_put(like["free"], like["free"].sharding)
    arrays = {each for each, leaf in like.items() if isinstance(leaf, jax.Array)}
    with mock.patch.object(type(like["free"]), "unsafe_buffer_pointer", address):
        restored = ckpt.restore(saved, like, step=2, fit=KEEP, loading=DONATE).state
    assert next(calls) > told
    assert bits(restored) == bits({**state_of(2), "ema": state_of(7)["free"]})
    # Those that stay hold blocks of one shape and dtype on their devices.
    assert gone_of(like) == arrays - {"ema", "free", "one", "copies"}


def test_arrays_that_share_buffers_among_themselves_are_let_go(saved: Path) -> None:
    like: dict[str, Any] = copied(full(7))
    others = sharers(like)
    like["one"] = like["free"]
    like["copies"] = jax.device_put(like["free"], like["free"].sharding)
    restored = ckpt.restore(saved, like, loading=DONATE).state
    assert bits(restored) == bits(full(3))
    assert not any(map(is_gone, devices_of(restored)))
    assert all(map(is_gone, devices_of(like)))
    assert gone_of(others) == others.keys() - {"copies"}  # the leaf was left out of `like`
