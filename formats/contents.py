"""What the files of a source hold, as fingerprints tell it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, final

import xxhash

from formats.errors import Mismatch
from formats.files import THREADS, File, naming, open_binary
from formats.source import sealed

_TAIL_BYTES: Final = 128 * 1024
_SAMPLE_BYTES: Final = 4096
_SAMPLES: Final = 16


@final
class Contents:
    """The files of a source. Their bytes are looked at when a fingerprint is asked for, once."""

    def __init__(self, files: Sequence[File]) -> None:
        self._files = tuple(files)
        self._digests: list[tuple[str, str]] | None = None

    def fingerprint(
        self, format: str, records: Sequence[int], about: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See `Source.fingerprint`; `records` of each file, `about` what else tells it apart.

        Raises: Mismatch when the size of a file is not what was listed; NotFound, StoreFailed.
        """
        if self._digests is None:
            with ThreadPoolExecutor(THREADS) as pool:
                self._digests = list(pool.map(_digests, self._files))
        files = [
            {
                "name": file.name,
                "bytes": file.size_bytes,
                "records": count,
                "tail": tail,
                "sample": sample,
            }
            for file, count, (tail, sample) in zip(self._files, records, self._digests, strict=True)
        ]
        return sealed({"format": format, "records": sum(records), **about, "files": files})


def _digests(file: File) -> tuple[str, str]:
    """Digests (hex xxh3-64) of the last 128 KiB and of 16 pages of 4 KiB spread over the file."""
    with open_binary(file) as stream, naming(file.path):
        size_bytes = stream.seek(0, os.SEEK_END)
        if size_bytes != file.size_bytes:
            raise Mismatch(
                f"{file.path} changed since the source was opened; open it again",
                [f"{file.name}: wanted {file.size_bytes} bytes, found {size_bytes}"],
            )
        stream.seek(max(0, size_bytes - _TAIL_BYTES))
        tail = xxhash.xxh3_64_hexdigest(stream.read(_TAIL_BYTES))
        sample = xxhash.xxh3_64()
        room = max(0, size_bytes - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            stream.seek(room * number // (_SAMPLES - 1))
            sample.update(stream.read(_SAMPLE_BYTES))
    return tail, sample.hexdigest()
