"""Token files: windows of memory-mapped arrays of integers, by one gather."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike

from formats.arguments import whole
from formats.contents import Contents
from formats.errors import Damaged, Mismatch, Misuse, Unsupported
from formats.files import File, as_found, naming, open_binary
from formats.mapped import Joined, Mapped, only_local
from formats.source import Column, Handles, Source, Spec, as_rows, grouped, open_files

_DTYPES = ("uint16", "uint32", "int16", "int32", "int64", "uint64", "uint8", "int8")
_LOOKED_AT_BYTES = 64 * 1024
_HEADER_MAGICS = (20240520, 20240801)
"""First int32 of token files that carry a header of 256 int32 values before their tokens."""


@dataclass(frozen=True)
class _Tokens:
    """Where the tokens of one file lie."""

    start_bytes: int
    count: int
    dtype: str


@final
class TokenSource(Source):
    """Windows of tokens from `.bin` and `.npy` files, numbered through the files in their order.

    A `.bin` file is an array of little-endian integers and nothing else; a `.npy` file holds one
    dimension of them. Record i of a file is its tokens `[i * stride, i * stride + window)`. A
    window never crosses from one file into the next, and the tokens behind the last whole window
    of a file are left out: up to stride - 1 of them, or the whole file where it is shorter than a
    window.

    window: tokens in a record. For targets shifted by one take `window=n + 1, stride=n`.
    stride: tokens from one record to the next; `window` unless given.
    dtype: of a `.bin` file. Unless given, what the name says before `.bin` (`train.uint32.bin`,
        `train_uint32.bin`), else uint16; a file that plainly is not that is refused. For `.npy` it
        is only checked.
    header_bytes: to leave out at the start of each `.bin` file.

    `read` returns `{"tokens": [n, window]}` of the dtype of the files, which all have the same.

    Raises: Misuse for a window, stride or dtype that cannot be; Mismatch when dtypes differ;
    Damaged for a file that holds no whole number of tokens, or no array; Unsupported for URLs and
    for arrays that are no tokens; NotFound, StoreFailed.
    """

    def __init__(
        self,
        files: Sequence[File],
        *,
        window: int,
        stride: int | None = None,
        dtype: DTypeLike | None = None,
        header_bytes: int = 0,
    ) -> None:
        self._files = as_found(files)
        only_local(self._files, "token files")
        self._window = whole("window", window, 1, "tokens")
        self._stride = self._window if stride is None else whole("stride", stride, 1, "tokens")
        self._header_bytes = whole("header_bytes", header_bytes, 0, "bytes")
        wanted = None if dtype is None else _token_dtype(dtype)
        self._tokens = tuple(self._look(file, wanted) for file in self._files)
        self._dtype = np.dtype(self._tokens[0].dtype)
        differences = [
            f"{file.name}: wanted {self._dtype}, found {tokens.dtype}"
            for file, tokens in zip(self._files, self._tokens, strict=True)
            if tokens.dtype != self._dtype.name
        ]
        if differences:
            raise Mismatch(
                f"token files of one source differ from the first, {self._files[0].path};"
                " narrow the pattern, or say dtype=",
                differences,
            )
        counts = [self._windows(tokens.count) for tokens in self._tokens]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._contents = Contents(self._files)
        self._start()

    def _start(self) -> None:
        """Begin with no open file. All of them are opened together, or each when it is needed."""
        limit = open_files()
        self._together = len(self._files) if len(self._files) <= limit else 1
        self._handles: Handles[_OpenFiles] = Handles(limit // self._together)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return (
            f"TokenSource({len(self._files)} files, {len(self)} windows"
            f" of {self._window} {self._dtype} tokens)"
        )

    @property
    def spec(self) -> Spec:
        """One column, `tokens`."""
        return Spec((Column("tokens", "array", self._dtype.name, (self._window,)),))

    def read(self, indices: np.ndarray | Sequence[int]) -> dict[str, np.ndarray | list[Any]]:
        """See `Source.read`: `{"tokens": [n, window]}`."""
        rows = as_rows(indices, len(self))
        if self._together == len(self._files):
            found = self._open_files(0).take(rows)
        else:
            found = np.empty(len(rows), _block(self._window * self._dtype.itemsize))
            for number, positions, slots in grouped(rows, self._starts):
                found[slots] = self._open_files(number).take(positions)
        return {"tokens": found.view(self._dtype).reshape(len(rows), self._window)}

    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        about = {
            "columns": self.spec.to_json()["columns"],
            "stride": self._stride,
            "header_bytes": self._header_bytes,
        }
        return self._contents.fingerprint("tokens", np.diff(self._starts).tolist(), about)

    def where(self, index: int) -> str:
        """See `Source.where`."""
        rows = as_rows([index], len(self))
        ((number, positions, _),) = grouped(rows, self._starts)
        first = int(positions[0]) * self._stride
        return f"{self._files[number].path}, tokens {first} to {first + self._window - 1}"

    def close(self) -> None:
        """See `Source.close`."""
        self._handles.close()

    def _windows(self, tokens: int) -> int:
        return 0 if tokens < self._window else (tokens - self._window) // self._stride + 1

    def _look(self, file: File, wanted: np.dtype | None) -> _Tokens:
        if re.search(r"\.npy(-\d+-of-\d+)?$", file.path, re.IGNORECASE):
            return _npy(file, wanted)
        return _raw(file, wanted, self._header_bytes)

    def _open_files(self, first: int) -> _OpenFiles:
        return self._handles.get(first, self._open)

    def _open(self, first: int) -> _OpenFiles:
        numbers = range(first, first + self._together)
        size_bytes = self._dtype.itemsize
        return _OpenFiles(
            Joined([Mapped(self._files[number]) for number in numbers]),
            np.array([self._tokens[number].start_bytes for number in numbers], np.int64),
            self._starts[first : first + self._together] - self._starts[first],
            self._window * size_bytes,
            self._stride * size_bytes,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_handles"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


@final
class _OpenFiles:
    """Files mapped by this process.

    files: which ones; start_bytes: int64[files], where in each its tokens begin; starts:
    int64[files], the number of its first record.
    """

    def __init__(
        self,
        files: Joined,
        start_bytes: np.ndarray,
        starts: np.ndarray,
        window_bytes: int,
        stride_bytes: int,
    ) -> None:
        self._files = files
        self._starts = starts
        self._stride_bytes = stride_bytes
        self._zeros = files.at + start_bytes - starts * stride_bytes  # where record 0 would be
        # One item a window, from any byte on: NumPy then copies it as a block.
        count = max(0, files.bytes.size - window_bytes + 1)
        self._windows = np.ndarray((count,), _block(window_bytes), files.bytes, 0, (1,))

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The bytes of records, int64[n], each of which there is; a void[n]."""
        # The last of several equal starts is the file that is not empty.
        parts = self._starts.searchsorted(rows, side="right") - 1
        self._files.check(parts)
        found: np.ndarray = self._windows[self._zeros[parts] + rows * self._stride_bytes]
        return found


def _block(size_bytes: int) -> np.dtype:
    return np.dtype((np.void, size_bytes))


def _token_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise Misuse(f"dtype={dtype!r:.80} is no NumPy dtype ({error})") from error
    if found.name not in _DTYPES or not found.isnative:
        raise Misuse(f"dtype={dtype!r}: wanted one of {', '.join(_DTYPES)}, little-endian")
    return found


def _raw(file: File, wanted: np.dtype | None, header_bytes: int) -> _Tokens:
    """Tokens from `header_bytes` to the end of the file."""
    dtype = wanted or _named(file)
    size_bytes = file.size_bytes - header_bytes
    if size_bytes < 0:
        raise Damaged(
            f"{file.path} holds {file.size_bytes} bytes, fewer than its header of"
            f" {header_bytes}: it is cut short, or header_bytes= is wrong"
        )
    if size_bytes % dtype.itemsize:
        raise Damaged(
            f"{file.path} holds {size_bytes} bytes of tokens, no multiple of {dtype.itemsize}"
            f" ({dtype}): it is cut short, or of another dtype (say dtype=)"
        )
    with open_binary(file) as stream, naming(file.path):
        head = stream.read(_LOOKED_AT_BYTES)
    if header_bytes == 0 and len(head) >= 1024:
        (magic,) = np.frombuffer(head[:4], "<i4")
        if magic in _HEADER_MAGICS:
            raise Unsupported(
                f"{file.path} starts with a header of 1024 bytes (its first number is {magic})"
                " and tokens were wanted; say header_bytes=1024"
            )
    if wanted is None and dtype == np.uint16 and _looks_wider(head[header_bytes:]):
        raise Misuse(
            f"{file.path}: every second uint16 is 0, so its tokens seem to have 32 bits;"
            ' say dtype="uint32", or dtype="uint16" if it is right'
        )
    return _Tokens(header_bytes, size_bytes // dtype.itemsize, dtype.name)


def _named(file: File) -> np.dtype:
    """The dtype in the name of a `.bin` file, or uint16."""
    found = re.search(r"[._-](u?int(?:8|16|32|64))\.[^./]*$", file.path)
    return np.dtype(found[1] if found else "uint16")


def _looks_wider(head: bytes) -> bool:
    pairs = np.frombuffer(head[: len(head) // 4 * 4], "<u2").reshape(-1, 2)
    return len(pairs) >= 32 and not pairs[:, 1].any() and bool(pairs[:, 0].any())


def _npy(file: File, wanted: np.dtype | None) -> _Tokens:
    """Where NumPy's own header says the tokens are, checked against the size of the file."""
    with open_binary(file) as stream, naming(file.path):
        stream.read(1)  # so that a file that cannot be read is not taken for a damaged one
    try:
        array = np.lib.format.open_memmap(file.path, mode="r")
    except (ValueError, TypeError, SyntaxError, ArithmeticError, OSError, MemoryError) as error:
        raise Damaged(
            f"{file.path} is cut short or no .npy file of numbers: {error}; write it with"
            " numpy.save(path, tokens)"
        ) from error
    except RecursionError as error:
        raise Damaged(f"{file.path} is no .npy file: its header is nested too deeply") from error
    if array.ndim != 1:
        raise Unsupported(
            f"{file.path} has the shape {list(array.shape)}, wanted one dimension of tokens;"
            " save tokens.reshape(-1), and windows of it are the records"
        )
    if array.dtype.name not in _DTYPES or not array.dtype.isnative:
        raise Unsupported(
            f"{file.path} holds {array.dtype.str}, wanted one of {', '.join(_DTYPES)},"
            " little-endian; convert it with .astype"
        )
    if wanted is not None and wanted != array.dtype:
        raise Mismatch(
            f"dtype={wanted.name!r} is not what the file says; leave dtype= out",
            [f"{file.name}: wanted {wanted}, found {array.dtype}"],
        )
    count = int(math.prod(array.shape))
    start_bytes = int(getattr(array, "offset", 0))
    if start_bytes + count * array.dtype.itemsize > file.size_bytes:
        raise Damaged(
            f"{file.path} holds {file.size_bytes} bytes, and its header says {count} tokens of"
            f" {array.dtype}: it is cut short"
        )
    return _Tokens(start_bytes, count, array.dtype.name)
