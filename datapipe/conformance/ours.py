"""The adapter of this project: `Pipeline` as a loader under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datapipe.conformance.loader import FEATURES, Loader, Records, Setting
from datapipe.pipeline import Pipeline
from datapipe.sources.stages import Pack

if TYPE_CHECKING:
    import jax

    from datapipe.iterator import Iterator


def _open(setting: Setting) -> Iterator:
    sources = {f"source{number}": each for number, each in enumerate(setting.sources)}
    pipe = Pipeline(
        sources,  # type: ignore[arg-type]
        batch_size=setting.batch_size,
        seed=setting.seed,
        shuffle=setting.shuffle,
        epochs=setting.epochs,
        remainder=setting.remainder,
        weights=dict(zip(sources, setting.weights, strict=True)) if setting.weights else None,
        on_bad_record=setting.on_bad_record,
        pack={name: _pack(setting, each) for name, each in sources.items()}
        if setting.row_tokens
        else None,
    )
    if not setting.raw and not setting.row_tokens:
        pipe = pipe.map(Records.number, version="1")
    pipe = pipe.map_batch(_as_it_is, version=setting.version)
    options: dict[str, Any] = {"workers": setting.workers}
    if setting.may_change:
        options["on_change"] = "segment"
    if setting.hosts > 1:
        options["sharding"] = _rows_of(setting)
    return pipe.iterator(**options)


def _pack(setting: Setting, source: Records) -> Pack:
    lengths = [len(Records.record(each)) for each in source.ids]
    return Pack(setting.row_tokens, lengths=lengths, dtype="uint8")


def _as_it_is(batch: Any) -> Any:
    return batch


def _rows_of(setting: Setting) -> jax.sharding.Sharding:
    """A sharding of which this process holds what one host of several would hold.

    JAX has no such thing without the other processes: it asks the sharding, which says so.
    """
    import jax

    share = setting.batch_size // setting.hosts
    rows = slice(setting.host * share, (setting.host + 1) * share)
    device = jax.devices("cpu")[0]
    alone = jax.sharding.SingleDeviceSharding(device)

    class HostRows(jax.sharding.Sharding):
        is_fully_replicated = False
        is_fully_addressable = False
        memory_kind = None
        device_set = {device}  # noqa: RUF012
        num_devices = setting.hosts
        _internal_device_list = alone._internal_device_list  # type: ignore[attr-defined]

        def devices_indices_map(self, shape: Any) -> Any:
            return {device: (rows, *[slice(None)] * (len(shape) - 1))}

        def addressable_devices_indices_map(self, shape: Any) -> Any:
            return self.devices_indices_map(shape)

        def shard_shape(self, shape: Any) -> Any:
            return (share, *shape[1:])

        def _to_xla_hlo_sharding(self, axes: int) -> Any:
            return alone._to_xla_hlo_sharding(axes)

    return HostRows()


def _ids(batch: Any) -> list[int]:
    if isinstance(batch, dict):  # packed
        batch = batch["tokens"]
    if isinstance(batch, np.ndarray):
        return [int(each) for each in batch.ravel()]
    shards = [np.asarray(shard.data) for shard in batch.addressable_shards]
    return [int(each) for shard in shards for each in shard.ravel()]


LOADER: Final = Loader(
    name="lastgood",
    open=_open,
    ids=_ids,
    offers=frozenset(FEATURES),
    packages=("lastgood", "jax"),
)
"""A `datapipe.Pipeline`."""
