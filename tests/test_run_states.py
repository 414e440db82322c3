"""States that JAX cannot flatten, since their keys have no order, through a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import Rows

import ckpt
from ckpt import Loading

GUARD = ckpt.SpikeGuard(
    window=8, warm_up=4, cool_down=2, consecutive=1, margin=2, skip_before=1, skip_after=2
)


def state_of(count: int) -> dict[Any, Any]:
    """Weak type and sharding are to survive, and whole numbers beside texts as keys."""
    one = jax.device_put(jnp.full(3, float(count)), jax.devices()[3])
    return {1: one, "a": {"n": count, 2: jnp.full((2, 2), count)}, "host": np.full(2, count)}


def plain(state: dict[Any, Any]) -> list[Any]:
    inner = state["a"]
    return [state[1].tolist(), inner["n"], inner[2].tolist(), state["host"].tolist()]


@pytest.mark.parametrize("donate", [False, True])
def test_keys_of_several_types_in_a_run_that_rewinds_and_resumes(
    tmp_path: Path, donate: bool
) -> None:
    with pytest.raises(ValueError, match="Comparator"):
        jax.tree.leaves(state_of(0))
    place = ckpt.Shared(tmp_path / "run", every=2, keep=ckpt.Keep())
    for steps, spikes in ((10, {8}), (12, set())):
        with (
            ckpt.CheckpointManager(place, arena=tmp_path / "arena") as manager,
            ckpt.Run(
                manager,
                state_of(0),
                Rows(),
                steps=steps,
                guard=GUARD,
                loading=Loading(donate=donate),
            ) as run,
        ):
            assert run.step == (0 if steps == 10 else 10)
            for step, _ in run:
                assert plain(run.state) == plain(state_of(step - 1))
                assert run.state[1].sharding == state_of(0)[1].sharding
                spike = step in spikes
                spikes -= {step}
                run.update(state_of(step), loss=100.0 if spike else 1.0 + step / 1000)
            assert [rewound.onset for rewound in run.rewinds] == ([8] if steps == 10 else [])
            assert plain(run.state) == plain(state_of(steps))


def test_such_a_state_that_could_not_be_restored_is_refused_at_once(tmp_path: Path) -> None:
    within = state_of(1)
    within["a"]["itself"] = within
    other: list[tuple[dict[Any, Any], type[Exception], str]] = [
        ({**state_of(1), 1: jnp.zeros(4)}, ckpt.Misuse, r"~int:1: wanted float32\[3\], found "),
        ({**state_of(1), 2: jnp.zeros(4)}, ckpt.Misuse, "~int:2: wanted nothing, found float32"),
        ({"a": state_of(1)["a"]}, ckpt.Misuse, r"~int:1: wanted float32\[3\], found nothing"),
        (within, ckpt.Unsupported, "contains itself"),
    ]
    with (
        ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena") as manager,
        ckpt.Run(manager, state_of(0), Rows(), steps=3) as run,
    ):
        for step, _ in run:
            for state, error, message in other:
                with pytest.raises(error, match=message):
                    run.update(state)
            run.update(state_of(step))
    assert plain(ckpt.restore(tmp_path / "run", state_of(0)).state) == plain(state_of(3))
