"""Other loaders as loaders under test, each used as its documentation says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grain
import numpy as np
from absl import flags

from datapipe.conformance import Loader, Records, Setting


def _dataset(setting: Setting) -> Any:
    """Records in the order of the whole run, not yet cut into batches."""
    parts = []
    for source in setting.sources:
        part = grain.MapDataset.source(source).seed(setting.seed)
        if setting.shuffle:
            part = part.shuffle()
        if not setting.raw and not setting.row_tokens:
            part = part.map(Records.number)
        parts.append(part)
    if len(parts) > 1:
        return grain.MapDataset.mix(parts, weights=setting.weights).repeat(setting.epochs)
    return parts[0]


def _open_grain(setting: Setting) -> Any:
    """Shuffle, slice for the host, batch, repeat, and processes behind all that."""
    share = setting.batch_size // setting.hosts
    if setting.row_tokens:
        return _Grain(_packed(setting, share), setting)
    records = _dataset(setting)
    if setting.remainder == "carry":
        records = records.repeat(setting.epochs)[setting.host :: setting.hosts]
        batches = records.batch(share, drop_remainder=True)
    else:
        records = records[setting.host :: setting.hosts]
        batches = records.batch(share, drop_remainder=setting.remainder == "drop")
        batches = batches.repeat(setting.epochs)
    return _Grain(batches.to_iter_dataset(), setting)


def _packed(setting: Setting, share: int) -> Any:
    """First-fit packing of this host's documents, batches of rows behind it."""
    documents = _dataset(setting).repeat(setting.epochs)[setting.host :: setting.hosts]
    rows = grain.experimental.FirstFitPackIterDataset(
        documents.map(_tokens).to_iter_dataset(),
        length_struct={"tokens": setting.row_tokens},
        num_packing_bins=share,
        shuffle_bins=False,
    )
    return rows.batch(share, drop_remainder=setting.remainder != "keep")


def _tokens(record: bytes) -> dict[str, Any]:
    return {"tokens": np.frombuffer(record, np.uint8)}


def _open_elastic(setting: Setting) -> Any:
    """`ElasticIterator`, which batches and slices by itself."""
    workers = _workers(setting)
    shard = grain.sharding.ShardOptions(setting.host, setting.hosts)
    records = _dataset(setting).repeat(setting.epochs)
    return iter(
        grain.experimental.ElasticIterator(
            records, setting.batch_size, shard, multiprocessing_options=workers
        )
    )


def _workers(setting: Setting) -> grain.MultiprocessingOptions | None:
    if not setting.workers:
        return None
    flags.FLAGS.mark_as_parsed()  # a program without absl.app has to
    return grain.MultiprocessingOptions(num_workers=setting.workers)


class _Grain:
    """An iterator of Grain with `seek`, which Grain has as a function."""

    def __init__(self, dataset: Any, setting: Setting) -> None:
        workers = _workers(setting)
        if workers is not None:
            dataset = dataset.mp_prefetch(workers)
        self._iterator = iter(dataset)
        self._batch_size = setting.batch_size
        self.get_state = self._iterator.get_state
        self.set_state = self._iterator.set_state
        self.close = self._iterator.close

    def __next__(self) -> Any:
        return next(self._iterator)

    def __iter__(self) -> _Grain:
        return self

    def seek(self, example: int) -> None:
        """Goes to the batch that begins there."""
        grain.experimental.set_next_index(self._iterator, example // self._batch_size)


def _ids(batch: Any) -> Sequence[int]:
    if isinstance(batch, dict):  # packed
        batch = batch["tokens"]
    return [int(each) for each in np.asarray(batch).ravel()]


GRAIN: Final = Loader(
    name="Grain",
    open=_open_grain,
    ids=_ids,
    offers=frozenset({"carry", "keep", "drop", "workers", "hosts", "rehost", "seek", "pack"}),
    packages=("grain",),
)
"""`MapDataset` to `IterDataset`, with `mp_prefetch` for workers and slices for hosts."""

ELASTIC: Final = Loader(
    name="Grain elastic",
    open=_open_elastic,
    ids=_ids,
    offers=frozenset({"carry", "workers", "reworker", "hosts", "rehost", "rebatch"}),
    packages=("grain",),
)
"""`grain.experimental.ElasticIterator`."""
