"""Links, pipes and large files in a directory of a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from no_files import KINDS, put_in_the_way
from store_contract import aligned, some_bytes
from store_troubles import raw_files

from ckpt.errors import Damaged, StoreFailed
from ckpt.store import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "run")


def test_links_lead_to_what_was_moved_elsewhere(store: FileStore, tmp_path: Path) -> None:
    root = Path(store.location)
    store.put("branch-1/5/x", b"1")
    elsewhere = tmp_path / "other disk"
    os.rename(root / "branch-1", elsewhere)
    os.symlink(elsewhere, root / "branch-1")
    os.symlink(root / "nowhere", root / "dangling")
    os.symlink("loop", root / "loop")
    assert [(e.name, e.is_dir) for e in store.list("")] == [("branch-1", True)]
    assert store.read("branch-1/5/x") == b"1"
    store.move("branch-1/5", "branch-1/6")
    store.put("branch-1/6/y", b"2")
    store.delete_tree("dangling")
    store.delete_tree("branch-1")
    assert not os.path.lexists(root / "branch-1")
    assert raw_files(elsewhere) == {"6/x": b"1", "6/y": b"2"}, "deleted through a link"


@pytest.fixture
def linked(store: FileStore) -> Path:
    """The root, with a link of each kind beside a directory `d`; and one in a list of its own."""
    root = Path(store.location)
    store.put("d/x", b"1")
    links = {"dir": "d", "file": "d/x", "none": "nowhere", "loop": "loop", "past": "d/x/y"}
    for name, target in links.items():
        os.symlink(target, root / name)
    return root


@pytest.mark.parametrize("name", ["dir", "none", "loop", "past"])
def test_a_tree_that_is_a_link_is_removed_itself(store: FileStore, linked: Path, name: str) -> None:
    store.delete_tree(name)
    assert not os.path.lexists(linked / name)
    assert (linked / "d/x").read_bytes() == b"1"
    store.delete_tree(name)


def test_nothing_is_below_a_link_to_a_file(store: FileStore, linked: Path) -> None:
    store.delete_tree("file")
    assert store.read("file") == b"1"


def test_links_that_lead_nowhere_hide_nothing_else(store: FileStore, linked: Path) -> None:
    assert [e.name for e in store.list("")] == ["d", "dir", "file"]
    store.delete("loop")
    store.delete("none")
    assert not {"loop", "none"} & set(os.listdir(linked))


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.delete_tree("loop/x"),
        lambda store: store.delete("loop/x"),
        lambda store: store.clear_temporaries("loop/x"),
        lambda store: store.clear_temporaries("loop"),
        lambda store: store.exists("loop/x"),
        lambda store: store.list("loop"),
        lambda store: store.list("loop/x"),
        lambda store: store.read("loop/x"),
        lambda store: store.read_log("loop/x"),
        lambda store: store.open_image("loop/x"),
        lambda store: store.move("loop/x", "e"),
        lambda store: store.move("loop", "e"),
        lambda store: store.move("d", "loop/x"),
        lambda store: store.put("loop/x", b""),
        lambda store: store.put_if_absent("loop/x", b""),
        lambda store: store.append("loop/x", b""),
        lambda store: store.write_image("loop/x/y", aligned(b"1")),
    ],
)
def test_a_loop_of_links_is_no_absence(
    store: FileStore, linked: Path, act: Callable[[FileStore], None]
) -> None:
    with pytest.raises(StoreFailed, match="symbolic links"):
        act(store)
    assert raw_files(linked / "d") == {"x": b"1"}


@pytest.mark.parametrize("name", ["none", "loop", "past"])
def test_a_link_in_place_of_a_file_is_damage_of_that_file(
    store: FileStore, linked: Path, name: str
) -> None:
    """The store has answered: what it says of other files is to be believed."""
    for read in (store.read, store.read_log, store.open_image):
        with pytest.raises(Damaged, match=rf"/{name}: wanted a file, found a link to .*nowhere; "):
            read(name)
    assert store.exists(name)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_a_file_is_written_into(store: FileStore, kind: str) -> None:
    store.put("x", b"1")
    place = Path(store.location, "y")
    put_in_the_way(place, kind, Path(store.location, "x"))
    wanted = rf"/y: wanted a file, found a {kind} \(.*remove it"
    for write in (store.append, lambda key, data: store.write_image(key, aligned(data))):
        with pytest.raises(StoreFailed, match=wanted):
            write("y", b"2")
    assert store.read("x") == b"1"


def test_nothing_is_written_into_a_pipe_that_somebody_reads(store: FileStore) -> None:
    store.put("x", b"1")
    os.mkfifo(Path(store.location, "y"))
    reader = os.open(Path(store.location, "y"), os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(StoreFailed, match=r"/y: wanted a file, found a pipe"):
        store.append("y", b"2")
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize("key", ["none/x", "none/x/y"])
def test_writing_below_a_link_to_nothing_names_it(store: FileStore, linked: Path, key: str) -> None:
    for act in (store.put, store.put_if_absent):
        with pytest.raises(StoreFailed, match="none: wanted a directory, found a link to nowhere"):
            act(key, b"")
    assert not store.exists(key)
    store.delete_tree(key)


def test_a_pipe_holds_nobody_up(store: FileStore) -> None:
    store.put("a/x", b"")
    os.mkfifo(Path(store.location, "a/pipe"))
    for act in (store.read, store.open_image):
        with pytest.raises(Damaged, match="pipe: wanted a file, found a pipe"):
            act("a/pipe")
    assert [e.name for e in store.list("a")] == ["pipe", "x"]


def test_an_enormous_file_is_not_read_into_memory(store: FileStore) -> None:
    store.put("a", b"")
    os.truncate(Path(store.location, "a"), 1 << 40)
    with pytest.raises(Damaged, match="wanted a small file, found 1099511627776 bytes"):
        store.read("a")


def test_a_file_that_is_cut_while_it_is_read(store: FileStore) -> None:
    store.write_image("image", aligned(some_bytes(10_000)))
    with store.open_image("image") as reader:
        os.truncate(Path(store.location, "image"), 6000)
        with pytest.raises(Damaged, match="ends at byte 6000, wanted bytes up to 9000"):
            reader.read(1000, 8000)
