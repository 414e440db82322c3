"""The corpus: the source text of the running Python's standard library, cut into records."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

import datapipe
import formats

Format = Literal["array_record", "parquet"]
BATCH_ROWS = 16
RECORD_BYTES = 65  # what the model reads and, one byte on, predicts
SHARDS = 4
_ELSEWHERE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def pieces(limit: int) -> list[bytes]:
    """The first `limit` records: consecutive pieces of all modules, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        p for p in root.rglob("*.py") if not _ELSEWHERE & set(p.parts[len(root.parts) :])
    )
    text = bytearray()
    for path in paths:
        text += path.read_bytes()
        if len(text) >= limit * RECORD_BYTES:
            break
    stop = min(len(text) // RECORD_BYTES, limit) * RECORD_BYTES
    return [bytes(text[at : at + RECORD_BYTES]) for at in range(0, stop, RECORD_BYTES)]


def poisoned(records: Sequence[bytes], bad: Iterable[int], seed: int) -> list[bytes]:
    """The same records with those named in `bad` replaced by noise of the same length."""
    noise = random.Random(seed)
    changed = list(records)
    for record in sorted(bad):
        changed[record] = noise.randbytes(len(changed[record]))
    return changed


def write(directory: Path, records: Sequence[bytes], format: Format) -> str:
    """Write `records` into shards under `directory`; returns the pattern that opens them.

    Record i of the source is `records[i]`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    per_shard = -(-len(records) // SHARDS)
    for number in range(SHARDS):
        part = records[number * per_shard : (number + 1) * per_shard]
        path = directory / f"stdlib-{number:05d}-of-{SHARDS:05d}.{format}"
        if format == "array_record":
            formats.write_array_record(path, part)
        else:
            formats.write_parquet(path, {"text": part}, row_group_size=1024)
    return str(directory / f"*.{format}")


def pipeline(pattern: str, seed: int) -> datapipe.Pipeline:
    """Batches of uint8[BATCH_ROWS, RECORD_BYTES] in a global shuffle."""
    source = formats.open_source(pattern)
    return datapipe.Pipeline(source, batch_size=BATCH_ROWS, seed=seed).map(decode, version="1")


def decode(record: bytes | dict[str, Any]) -> np.ndarray:
    """One record as uint8[RECORD_BYTES]."""
    text = record["text"] if isinstance(record, dict) else record
    return np.frombuffer(text, np.uint8)
