"""Iterators of Grain of every kind, and a trainer that draws from all of them at once.

Run as `grain_kinds.py <run> <log> <steps> <killed at, or 0>`: resumes, and writes down each batch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import xxhash
from absl import flags
from grain import experimental
from memory_source import Records

import ckpt
from datapipe import Pipeline


def _range(count: int = 60) -> grain.MapDataset:
    return grain.MapDataset.range(count)


def _iter(dataset: grain.MapDataset, buffered: int = 0) -> grain.IterDataset:
    return dataset.to_iter_dataset(grain.ReadOptions(prefetch_buffer_size=buffered))


def document(number: int) -> dict[str, np.ndarray]:
    return {"tokens": np.full(number % 5 + 1, number)}


def jittered(number: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"number": number, "noise": rng.random()}


class Thrice(experimental.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, number: int) -> list[int]:
        return [number, -number, number + 100]


def loader(workers: int = 0, count: int = 60, **options: Any) -> Any:
    return grain.DataLoader(
        data_source=range(count),
        sampler=grain.samplers.IndexSampler(count, num_epochs=3, shuffle=True, seed=4),
        worker_count=workers,
        **options,
    )


def elastic(batch_size: int = 4, index: int = 0, count: int = 1) -> Any:
    shard = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    return experimental.ElasticIterator(_range().shuffle(seed=3).repeat(), batch_size, shard)


def sliced(index: int = 0, count: int = 1) -> Any:
    """The share of one of several processes, in batches."""
    return _iter(_range().shuffle(seed=6).repeat()[index::count].batch(3))


def mixed(*names: str) -> Any:
    parents = {name: _iter(_range(9 + len(name)).shuffle(seed=2).repeat()) for name in names}
    return grain.IterDataset.mix(list(parents.values()), [1 + len(n) for n in names])


def interleaved(cycle: int = 2) -> Any:
    parts = [_iter(_range(count)) for count in (9, 5, 12, 7)]
    return experimental.InterleaveIterDataset(parts, cycle_length=cycle)


def _packed(kind: Any, **options: Any) -> Any:
    documents = _iter(_range().repeat().map(document))
    return kind(documents, length_struct={"tokens": 8}, **options)


KINDS: dict[str, Callable[[], Any]] = {
    "prefetch": lambda: _range().shuffle(seed=1).repeat().to_iter_dataset(),
    "no_prefetch": lambda: _iter(_range().shuffle(seed=1).repeat()),
    "filter_batch": lambda: _iter(_range().repeat(), 4).filter(lambda n: n % 3 > 0).batch(2),
    "random_map": lambda: _iter(_range().repeat()).seed(3).random_map(jittered),
    "mix": lambda: mixed("a", "bcd"),
    "interleave": interleaved,
    "zip": lambda: experimental.ZipIterDataset([_iter(_range()), _iter(_range().shuffle(seed=5))]),
    "limit": lambda: experimental.LimitIterDataset(_iter(_range()), 40),
    "repeat": lambda: experimental.RepeatIterDataset(_iter(_range(5)), None),
    "window_shuffle": lambda: experimental.WindowShuffleIterDataset(
        _iter(_range()), window_size=5, seed=1
    ),
    "first_fit": lambda: _packed(experimental.FirstFitPackIterDataset, num_packing_bins=3),
    "concat_then_split": lambda: _packed(experimental.ConcatThenSplitIterDataset),
    "thread_prefetch": lambda: experimental.ThreadPrefetchIterDataset(
        _iter(_range().repeat()), prefetch_buffer_size=3
    ),
    "flat_map": lambda: experimental.FlatMapIterDataset(_iter(_range()), Thrice()),
    "rebatch": lambda: experimental.RebatchIterDataset(_iter(_range().repeat()).batch(4), 3),
    "device_put": lambda: experimental.device_put(
        _iter(_range().map(np.float32).repeat()),
        jax.devices()[0],
        cpu_buffer_size=2,
        device_buffer_size=2,
    ),
    "elastic": elastic,
    "loader": loader,
    "behind_ours": lambda: Pipeline(Records(50), batch_size=3, seed=1).dataset().map(len),
}

OTHERS: dict[str, Callable[[], Any]] = {
    "processes": lambda: _iter(_range().shuffle(seed=1).repeat()).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)
    ),
    "loader_processes": lambda: loader(workers=1),
}
"""With worker processes of Grain's; they serve what `prefetch` and `loader` do."""


def digest(batch: Any) -> str:
    """Of a tree of arrays and numbers."""
    hasher = xxhash.xxh3_64(str(jax.tree.structure(batch)).encode())
    for leaf in jax.tree.leaves(batch):
        array = np.asarray(leaf)
        hasher.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return hasher.hexdigest()


def manager(root: Path) -> ckpt.CheckpointManager:
    arena = root.with_name(f"{root.name}.arena")
    return ckpt.CheckpointManager(ckpt.Shared(root), arena=arena, writer="thread")


def main() -> None:
    flags.FLAGS.mark_as_parsed()  # as a program of absl's does; Grain's workers ask for flags
    root, log = Path(sys.argv[1]), Path(sys.argv[2])
    steps, killed_at = int(sys.argv[3]), int(sys.argv[4])
    data = {name: iter(make()) for name, make in {**KINDS, **OTHERS}.items()}
    with manager(root) as m, log.open("a") as out:
        restored = m.resume(data=data)
        for step in range(restored.step + 1, steps + 1):
            for name, each in data.items():
                out.write(f"{step} {name} {digest(next(each))}\n")
            out.flush()
            if step % 3 == 0:
                m.save(step, {"step": step}, data=data).wait()
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
    for each in data.values():
        if hasattr(each, "close"):
            each.close()


if __name__ == "__main__":
    main()
