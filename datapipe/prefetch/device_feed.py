"""Rows to devices: which rows of a batch this process reads, and where they go."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from formats.errors import Misuse


class Feed:
    """Turns this process's rows of a batch into global `jax.Array`s.

    Args:
      sharding: of every array of a batch; its first axis is the batch.
      batch_size: rows of the global batch.

    Raises:
      Misuse: the batch cannot be cut that way, or no device of it belongs to this process.
    """

    def __init__(self, sharding: jax.sharding.Sharding, batch_size: int) -> None:
        if not isinstance(sharding, jax.sharding.Sharding):
            raise Misuse(f"sharding must be a jax.sharding.Sharding, found {sharding!r}")
        self._sharding = sharding
        self._batch_size = batch_size
        self._least_axes = 1
        along = sharding
        if isinstance(sharding, NamedSharding):  # other axes do not matter for the rows
            along = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
            self._least_axes = max(1, len(sharding.spec))
        try:
            parts = along.addressable_devices_indices_map((batch_size,))
        except ValueError as error:
            raise Misuse(f"a batch of {batch_size} cannot be sharded: {error}") from error
        slices = [index[0] for index in parts.values() if index is not None]
        self.rows = needed(slices, batch_size)
        if not self.rows.size:
            raise Misuse(f"no device of {sharding} belongs to this process")

    def place(self, batch: Any) -> Any:
        """The same tree, whose leaves have this process's rows, with a global array for each leaf.

        64-bit leaves become 32-bit ones where JAX runs without x64.

        Raises:
          Misuse: a leaf is no array of numbers, cannot be sharded like that, or holds an integer
            that does not fit in 32 bits.
        """
        return jax.tree_util.tree_map_with_path(self._place, batch)

    def _place(self, path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path) or "the batch"
        local = np.asarray(leaf)
        if local.dtype.kind in "OSUMm":
            raise Misuse(
                f"{name} has dtype {local.dtype}, which no device holds: turn it into numbers "
                "in .map, or iterate without sharding"
            )
        if local.ndim < self._least_axes:
            raise Misuse(
                f"{name} of shape {list(local.shape)} cannot be sharded by {self._sharding}: "
                f"it has fewer than {self._least_axes} axes; shard the batch axis only"
            )
        local = _narrow(name, local)
        shape = (self._batch_size, *local.shape[1:])

        def held(index: tuple[slice, ...] | None) -> NDArray[Any]:
            return local[self._local(index or (slice(None),))]

        try:
            return jax.make_array_from_callback(shape, self._sharding, held)
        except ValueError as error:
            raise Misuse(f"{name} of shape {list(shape)} cannot be sharded: {error}") from error

    def _local(self, index: tuple[slice, ...]) -> Any:
        """A range of global rows as a range of the rows that were read; other axes as they are."""
        start, stop, _ = index[0].indices(self._batch_size)
        first, last = np.searchsorted(self.rows, [start, stop])
        return (slice(int(first), int(last)), *index[1:])


def needed(slices: list[slice], batch_size: int) -> NDArray[np.int64]:
    """The rows that any of the slices holds, ascending, each once."""
    wanted = np.zeros(batch_size, dtype=bool)
    for part in slices:
        wanted[part] = True
    return np.flatnonzero(wanted)


def _narrow(name: str, local: NDArray[Any]) -> NDArray[Any]:
    wanted = jax.dtypes.canonicalize_dtype(local.dtype)
    if wanted == local.dtype:
        return local
    if local.dtype.kind in "iu" and local.size:
        limits = np.iinfo(wanted)
        if int(local.min()) < limits.min or int(local.max()) > limits.max:
            raise Misuse(
                f"{name} holds an integer that does not fit in {wanted}: "
                "set jax_enable_x64, or make it smaller in .map"
            )
    return local.astype(wanted)
