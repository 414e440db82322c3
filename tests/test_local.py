"""Images in a Local tier: durable under their names, private, and nothing in them is trusted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_contract import aligned, some_bytes

from ckpt import disk, image, promotion
from ckpt.errors import Damaged, NotFound, StoreFailed, Unsupported
from ckpt.image import Header
from ckpt.lineage import StepId
from ckpt.local import LocalImages
from ckpt.open_images import FileImage
from ckpt.promotion import ImageWindows
from ckpt.specs import ArraySpec, ShardSpec
from ckpt.store import FileStore
from ckpt.windows import Told

ONE = StepId(1, 1, 1)


def image_of(step: StepId = ONE, n: int = 100_000, process: int = 0) -> tuple[Header, memoryview]:
    meta = {"step": step.step, "branch": step.branch, "attempt": step.attempt, "process": process}
    specs = [ArraySpec("a", "int64", (n,), (n // 10,)), ArraySpec("b", "int64", (3,), (3,))]
    plan = image.plan(specs, [ShardSpec(0, (0,), (n,)), ShardSpec(1, (0,), (3,))], meta)
    data = aligned(bytes(plan.size_bytes))
    header = image.fill(plan, data, [np.arange(n), np.arange(3) + step.step])
    return header, data


@pytest.fixture
def images(tmp_path: Path) -> LocalImages:
    return LocalImages(tmp_path / "ssd", "/runs/a", 0)


def test_what_was_written_is_there(images: LocalImages) -> None:
    assert images.list() == []
    ids = [StepId(s, b, a) for s, b, a in [(2, 1, 1), (10, 1, 1), (10, 3, 3), (0, 1, 1)]]
    for step in ids:
        images.write(*image_of(step))
    assert [each.id for each in images.list()] == sorted(ids)
    for step in ids:
        header, data = image_of(step)
        assert images.header(step).digest == header.digest
        with images.open(step) as reader:
            assert reader.read(0, reader.size_bytes) == bytes(data)
    images.delete(ids[0])
    images.delete(ids[0])
    assert [each.id for each in images.list()] == sorted(ids[1:])
    with pytest.raises(NotFound):
        images.open(ids[0])
    with pytest.raises(NotFound):
        images.header(ids[0])


def test_runs_and_processes_have_directories_of_their_own(tmp_path: Path) -> None:
    places = {
        LocalImages(tmp_path, run, index).directory for run in ("/a", "/b") for index in (0, 1)
    }
    assert len(places) == 4
    assert {place.parent for place in places} == {tmp_path}
    url = LocalImages(f"file://{tmp_path}", "/a", 0)
    assert url.directory == LocalImages(tmp_path, "/a", 0).directory


def test_the_directory_is_private_or_refused(images: LocalImages) -> None:
    images.write(*image_of())
    assert images.directory.stat().st_mode & 0o777 == 0o700
    images.directory.chmod(0o770)
    for act in (
        lambda: images.write(*image_of()),
        images.list,
        images.clear,
        lambda: images.open(ONE),
        lambda: images.header(ONE),
        lambda: images.delete(ONE),
    ):
        with pytest.raises(StoreFailed, match="mode 0700"):
            act()


def test_foreign_names_are_left_alone(images: LocalImages) -> None:
    images.write(*image_of())
    foreign = [
        *("notes.txt", "01-b1-a1.image", "1-b0-a1.image", "1-b1-a1.image.bak", "-1-b1-a1.image"),
        *("٣-b1-a1.image", "1-b1-a1.image\n", "1-b1-a1.image.tmp-xyz", f"1{'0' * 18}-b1-a1.image"),
    ]
    for name in foreign:
        (images.directory / name).write_bytes(b"x")
    (images.directory / "5-b1-a1.image").mkdir()
    (images.directory / "6-b1-a1.image").symlink_to(images.path(ONE))
    torn = images.directory / f"7-b1-a1.image.tmp-{'0' * 32}"
    torn.write_bytes(b"x")
    assert [each.id for each in images.list()] == [ONE]
    images.clear()
    assert not torn.exists()
    assert {each.name for each in images.directory.iterdir()} == {
        *foreign, "1-b1-a1.image", "5-b1-a1.image", "6-b1-a1.image",
    }  # fmt: skip
    with pytest.raises(Damaged, match="symbolic link"):
        images.open(StepId(6, 1, 1))
    with pytest.raises(Damaged, match="wanted a file"):
        images.open(StepId(5, 1, 1))


def test_a_header_that_is_not_that_of_its_name(images: LocalImages) -> None:
    images.write(*image_of())
    os.rename(images.path(ONE), images.path(StepId(2, 1, 1)))
    with pytest.raises(Damaged, match=r"wanted step 2 .* found step 1 "):
        images.header(StepId(2, 1, 1))
    header, data = image_of(process=1)
    images.write(header, data)
    with pytest.raises(Damaged, match=r"of process 0, found .* of process 1"):
        images.header(ONE)


@given(st.data())
def test_nothing_in_a_file_is_trusted(data: st.DataObject) -> None:
    """Whatever is changed or cut: the very header, or Damaged, at the latest when verified."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        images = LocalImages(place, "/runs/a", 0)
        header, whole = image_of(n=1000)
        images.write(header, whole)
        raw = bytearray(whole)
        if data.draw(st.booleans(), "cut"):
            raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        else:
            at = data.draw(st.one_of(st.integers(0, 4095), st.integers(0, len(raw) - 1)), "at")
            raw[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
        images.path(ONE).write_bytes(raw)
        try:
            found = images.header(ONE)
        except (Damaged, Unsupported):
            return
        assert found.digest == header.digest
        with images.open(ONE) as reader:
            try:
                promotion.verify(found, ImageWindows(reader), lambda: None)
            except Damaged:
                return
        # What no digest covers is not read either: the gaps between chunks.
        ranges = image.payload_ranges(header)
        assert not any(start <= at < start + length for start, length in ranges)


def test_a_full_disk_leaves_nothing_behind(
    images: LocalImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.write(*image_of(StepId(0, 1, 1)))

    def full(path: Path, data: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_bulk", full)
    with pytest.raises(StoreFailed, match="bytes are free"):
        images.write(*image_of())
    assert [each.name for each in images.directory.iterdir()] == ["0-b1-a1.image"]


def test_an_image_is_replaced_at_once(images: LocalImages) -> None:
    images.write(*image_of(n=1000))
    with images.open(ONE) as reader:
        header, data = image_of()
        images.write(header, data)
        assert images.header(ONE).digest == header.digest
        assert reader.size_bytes < header.size_bytes, "who reads goes on with what was there"


def test_a_location_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "ssd").write_bytes(b"")
    images = LocalImages(tmp_path / "ssd", "/runs/a", 0)
    images.clear()
    with pytest.raises(StoreFailed):
        images.write(*image_of())


# --- windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000, 1 << 20, (1 << 20) + 5])
@pytest.mark.parametrize("kind", ["file", "bucket"])
def test_windows_write_what_the_buffer_would(
    size: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memory_bucket import memory_store

    from ckpt import store_kv

    monkeypatch.setattr(disk, "WINDOW_BYTES", 1 << 16)
    monkeypatch.setattr(store_kv, "READ_BYTES", 1 << 16)
    data = some_bytes(size, seed=size)
    (tmp_path / "source").write_bytes(data)
    store = FileStore(tmp_path / "store") if kind == "file" else memory_store()
    cuts = [1000, 65_536] if kind == "bucket" and size > 65_536 else []
    asked: list[None] = []
    with FileImage(tmp_path / "source") as reader:
        source = Told(ImageWindows(reader), lambda: asked.append(None))
        store.write_image("a/image", source, cuts)
    with store.open_image("a/image") as written:
        assert written.size_bytes == size
        assert written.read(0, size) == data
    assert bool(asked) == (size > 0)


def test_windows_are_aligned_memory_of_their_own(tmp_path: Path) -> None:
    data = some_bytes(100_000)
    (tmp_path / "source").write_bytes(data)
    with FileImage(tmp_path / "source") as reader:
        windows = ImageWindows(reader)
        first, second = windows.window(4096, 9000), windows.window(5000, 100_000)
        assert bytes(first) == data[4096:9000]
        assert bytes(second) == data[5000:]
        assert disk.is_page_aligned(first)
        first[:] = bytes(len(first))
        assert bytes(windows.whole()) == data
        with pytest.raises(Damaged):
            windows.window(99_000, 100_001)


def test_a_damaged_chunk_is_named(images: LocalImages) -> None:
    header, data = image_of()
    images.write(header, data)
    raw = bytearray(data)
    row = 4
    raw[int(header.columns.offset[row]) + 11] ^= 4
    images.path(ONE).write_bytes(raw)
    beats: list[None] = []
    with images.open(ONE) as reader:
        found = images.header_of(ONE, reader)
        with pytest.raises(Damaged, match=r"1-b1-a1\.image: a, chunk \(4,\)"):
            promotion.verify(found, ImageWindows(reader), lambda: beats.append(None))
    assert beats
