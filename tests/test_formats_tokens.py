"""Token sources against slices of plain arrays: windows, strides, dtypes, odd files."""

from __future__ import annotations

import os
import pickle
import re
import struct
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import formats

SEED = 5


def put(path: Path, tokens: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    return path


def some_tokens(count: int, dtype: str = "uint16", seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 120, count).astype(dtype)


def windows(files: list[np.ndarray], window: int, stride: int) -> list[list[int]]:
    return [
        tokens[start : start + window].tolist()
        for tokens in files
        for start in range(0, len(tokens) - window + 1, stride)
    ]


@hypothesis.given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    window=st.integers(1, 12),
    stride=st.none() | st.integers(1, 15),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "uint32", "int64"]),
    suffix=st.sampled_from(["bin", "npy"]),
    data=st.data(),
)
def test_reads_what_slices_would_give(
    tmp_path_factory, lengths, window, stride, dtype, suffix, data
):
    directory = tmp_path_factory.mktemp("tokens")
    arrays = [some_tokens(length, dtype, seed) for seed, length in enumerate(lengths)]
    for number, tokens in enumerate(arrays):
        put(directory / f"{number}.{suffix}", tokens)
    oracle = windows(arrays, window, stride or window)
    with formats.open_source(
        directory / f"*.{suffix}", window=window, stride=stride, dtype=dtype
    ) as source:
        assert len(source) == len(oracle)
        for _ in range(3):
            rows = data.draw(
                st.lists(st.integers(0, len(oracle) - 1), max_size=20) if oracle else st.just([])
            )
            batch = source.read(rows)["tokens"]
            assert (batch.dtype, batch.shape) == (np.dtype(dtype), (len(rows), window))
            assert batch.flags.writeable
            assert batch.tolist() == [oracle[row] for row in rows]
        if oracle:
            assert source[len(oracle) - 1]["tokens"].tolist() == oracle[-1]
        (column,) = source.spec.columns
        assert (column.dtype, column.shape) == (dtype, (window,))


def test_where_and_the_short_tail(tmp_path):
    put(tmp_path / "a.bin", some_tokens(10))
    put(tmp_path / "b.bin", some_tokens(3))
    put(tmp_path / "c.bin", some_tokens(11))
    source = formats.open_source(tmp_path / "*.bin", window=4)
    assert len(source) == 4
    assert source.where(3) == f"{tmp_path}/c.bin, tokens 4 to 7"
    assert repr(source) == "TokenSource(3 files, 4 windows of 4 uint16 tokens)"
    with pytest.raises(formats.OutOfRange, match="record 4 asked for"):
        source.read([4])
    source.close()
    with pytest.raises(formats.Misuse, match="closed"):
        source.read([0])


def test_the_dtype_of_raw_files(tmp_path):
    wide = some_tokens(100, "uint32")
    for name in ["a.uint32.bin", "a_uint32.bin"]:
        source = formats.open_source(put(tmp_path / name, wide), window=100)
        assert source.read([0])["tokens"].tolist() == [wide.tolist()]
    plain = put(tmp_path / "a.bin", wide)
    with pytest.raises(formats.Misuse, match=r'a\.bin: every second uint16 is 0.*dtype="uint32"'):
        formats.open_source(plain, window=4)
    assert len(formats.open_source(plain, window=4, dtype="uint16")) == 50
    assert len(formats.open_source(plain, window=4, dtype=np.uint32)) == 25
    put(tmp_path / "b.int32.bin", wide)
    with pytest.raises(formats.Mismatch, match=r"b\.int32\.bin: wanted uint32, found int32"):
        formats.open_source([tmp_path / "a.uint32.bin", tmp_path / "b.int32.bin"], window=4)


def test_headers_of_raw_files(tmp_path):
    header = np.zeros(256, np.int32)
    header[:3] = [20240520, 1, 64]
    tokens = some_tokens(64)
    path = tmp_path / "a.bin"
    path.write_bytes(header.tobytes() + tokens.tobytes())
    with pytest.raises(formats.Unsupported, match=r"header of 1024 bytes.*say header_bytes=1024"):
        formats.open_source(path, window=8)
    source = formats.open_source(path, window=8, header_bytes=1024)
    assert source.read(range(8))["tokens"].reshape(-1).tolist() == tokens.tolist()
    with pytest.raises(formats.Damaged, match=r"holds 1152 bytes, fewer than its header of 2000"):
        formats.open_source(path, window=8, header_bytes=2000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "token files need window="),
        ({"window": 0}, "window=0: wanted a number of tokens"),
        ({"window": True}, "window=True: wanted"),
        ({"window": 4, "stride": -1}, "stride=-1: wanted"),
        ({"window": 4, "dtype": "float32"}, "dtype='float32': wanted one of uint16"),
        ({"window": 4, "dtype": ">u2"}, "little-endian"),
        ({"window": 4, "dtype": "uint17"}, "dtype='uint17' is no NumPy dtype"),
        (
            {"window": 4, "header_bytes": -1},
            "header_bytes=-1: wanted a number of bytes",
        ),
        ({"window": 4, "columns": ["x"]}, "leave out columns="),
    ],
)
def test_arguments_that_cannot_be(tmp_path, options, message):
    path = put(tmp_path / "a.bin", some_tokens(8))
    with pytest.raises(formats.Misuse, match=message):
        formats.open_source(path, **options)


def npy(header: bytes, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


ODD_ARRAYS = {
    "empty": b"",
    "garbage": b"hello " * 50,
    "header cut": npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (4,)}\n")[:30],
    "body cut": npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (40,)}\n", bytes(78)),
    "huge": npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (1152921504606846976,)}\n"),
    "beyond 64 bits": npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,)}\n" % 2**70),
    "negative": npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (-4,)}\n", bytes(8)),
    "no dict": npy(b"[1, 2]\n"),
    "deep": npy(b"(" * 5000 + b")" * 5000),
    "a call": npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (open('x'),)}\n"),
    "huge header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{",
    "long header": npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (4,)}" + b" " * 20000),
    "no version": b"\x93NUMPY\x63\x00" + bytes(100),
    "pickle": pickle.dumps([1, 2]),
}


@pytest.mark.parametrize("name", sorted(ODD_ARRAYS))
def test_what_is_no_array_is_damaged(tmp_path, name):
    path = tmp_path / "a.npy"
    path.write_bytes(ODD_ARRAYS[name])
    with pytest.raises(formats.Damaged, match=re.escape(str(path))):
        formats.open_source(path, window=2)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_no_pickle_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.array([Trap()], object), allow_pickle=True)
    with pytest.raises(formats.Damaged, match=r"a\.npy is cut short or no \.npy file of numbers"):
        formats.open_source("a.npy", window=1)
    assert os.listdir() == ["a.npy"]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4), np.uint16), r"shape \[4, 4\], wanted one dimension"),
        (np.uint16(4), r"shape \[\], wanted one dimension"),
        (np.zeros(4, np.float32), r"holds <f4, wanted one of uint16"),
        (np.zeros(4, ">u2"), r"holds >u2, wanted"),
        (np.zeros(4, [("x", "u2")]), "wanted one of uint16"),
    ],
)
def test_arrays_that_are_no_tokens(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(formats.Unsupported, match=message):
        formats.open_source(tmp_path / "a.npy", window=1)


def test_files_cut_or_of_another_dtype(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(1, 8)))
    with pytest.raises(formats.Damaged, match=r"7 bytes of tokens, no multiple of 2 \(uint16\)"):
        formats.open_source(path, window=1)
    array = put(tmp_path / "a.npy", some_tokens(9))
    with pytest.raises(formats.Mismatch, match=r"a\.npy: wanted uint32, found uint16"):
        formats.open_source(array, window=1, dtype="uint32")


@pytest.mark.parametrize("suffix", ["bin", "npy"])
def test_no_tokens_at_all(tmp_path, suffix):
    source = formats.open_source(put(tmp_path / f"a.{suffix}", some_tokens(0)), window=3)
    assert len(source) == 0
    assert source.read([])["tokens"].shape == (0, 3)
    assert len(source.fingerprint()["digest"]) == 32
    with pytest.raises(IndexError, match="no records"):
        source[0]


def test_a_file_that_changes_underneath_is_noticed(tmp_path):
    path = put(tmp_path / "a.bin", some_tokens(4096 * 4))
    source = formats.open_source(path, window=4)
    source.read([0])
    os.truncate(path, 100)
    with pytest.raises(formats.Mismatch, match=r"a\.bin: wanted 32768 bytes, found 100"):
        source.read([4000])


def test_fingerprint_sees_content_window_and_stride(tmp_path):
    path = put(tmp_path / "a.bin", some_tokens(64))
    other = put(tmp_path / "b.bin", some_tokens(64, seed=SEED + 1))
    alike = put(tmp_path / "c.npy", some_tokens(64))

    def digest(path: Path, **options: int) -> str:
        return formats.open_source(path, **options).fingerprint()["digest"]

    first = digest(path, window=8)
    assert digest(path, window=8, stride=8) == first
    digests = {
        digest(path, window=4),
        digest(path, window=8, stride=4),
        digest(other, window=8),
        digest(alike, window=8),
    }
    assert len(digests | {first}) == 5


def test_more_files_than_may_be_open_are_read_file_by_file(tmp_path, monkeypatch):
    arrays = [some_tokens(length, seed=length) for length in (40, 3, 0, 25, 31)]
    for number, tokens in enumerate(arrays):
        put(tmp_path / f"{number}.bin", tokens)
    rows = np.random.default_rng(SEED).integers(0, len(windows(arrays, 4, 3)), 200)
    with formats.open_source(tmp_path / "*.bin", window=4, stride=3) as together:
        wanted = together.read(rows)["tokens"]
    monkeypatch.setattr("formats.tokens.open_files", lambda: 2)
    with formats.open_source(tmp_path / "*.bin", window=4, stride=3) as apart:
        found = apart.read(rows)["tokens"]
        assert len(apart._handles._open) == 2
    assert np.array_equal(found, wanted), f"seed {SEED}"
