"""An image on this host, read as a step: every digest is verified, nothing can be written."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts import Host, bits, flip, state_of

import ckpt
from ckpt import attempts, commit, layout, tree
from ckpt.errors import Damaged, Misuse, NotFound
from ckpt.image import Header
from ckpt.imaged import HostImage, Imaged, SlotImage, host_images
from ckpt.lineage import StepId
from ckpt.reader import Template, load
from ckpt.slot_files import StoredImage
from ckpt.steps import open_step
from ckpt.verification import check_step, verify_step

STEP = StepId(1, 1, 1)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Step 1 is in the arena, on the disk, and at home."""
    host = Host(tmp_path / "run", tmp_path / "host")
    host.start()
    snap = host.copy(1)
    host.to_local(snap)
    host.to_shared(snap)
    snap.slot.release()
    yield host
    host.close()


def images_of(host: Host) -> dict[str, HostImage]:
    return {image.tier: image for image in host.hosted().images}


def files_below(store: Any, prefix: str) -> dict[str, int | None]:
    return dict(store.walk(prefix))


def test_it_is_the_step_that_home_has(host: Host) -> None:
    """Of all files the same bytes: whoever looks cannot tell it from the published step."""
    for tier, image in images_of(host).items():
        store = Imaged(host.home, image)
        name = layout.step_name(1, 1)
        assert files_below(store, name) == files_below(host.home, name), tier
        for key, size in files_below(store, name).items():
            if key.endswith(".image"):
                with store.open_image(key) as reader:
                    data = reader.read(0, reader.size_bytes)
                assert data == (host.root / key).read_bytes(), tier
            else:
                assert store.read(key) == host.home.read(key), f"{tier}: {key}"
                assert size == len(store.read(key))
            assert store.exists(key)
        assert store.exists(name)
        assert [entry.name for entry in store.list("")] == ["branch-1"]
        found = load(store, STEP, Template(state_of(0)))
        assert bits(found.state) == bits(state_of(1))
        assert check_step(store, STEP) == ()
        assert verify_step(store, STEP).intact
        opened = open_step(store, STEP)
        assert opened.structure == open_step(host.home, STEP).structure


def test_what_it_has_not(host: Host) -> None:
    store = Imaged(host.home, images_of(host)["memory"])
    for key in ("branch-1/2/manifest.json", "branch-1/1/none", "log/a1.jsonl"):
        with pytest.raises(NotFound):
            store.read(key)
        assert not store.exists(key)
    with pytest.raises(NotFound):
        store.open_image("branch-1/1/state/d/a1-p1.image")
    with pytest.raises(NotFound):
        open_step(store, StepId(2, 1, 1))
    # The records are those of home.
    key = layout.decision_name(1)
    assert store.read(key) == host.home.read(key)
    assert store.exists(key)
    assert [e.name for e in store.list("attempts")] == [e.name for e in host.home.list("attempts")]
    assert attempts.list_run(store).counting == [STEP]


def test_nothing_can_be_written(host: Host) -> None:
    store = Imaged(host.home, images_of(host)["local"])
    for act in (
        lambda: store.put("x", b""),
        lambda: store.put_if_absent("x", b""),
        lambda: store.delete("x"),
        lambda: store.delete_tree("branch-1/1"),
        lambda: store.move("branch-1/1", "branch-1/2"),
        lambda: store.write_image("x", memoryview(b"")),
    ):
        with pytest.raises(Misuse, match="only to be read"):
            act()


@pytest.mark.parametrize("tier", ["memory", "local"])
def test_a_flipped_byte_anywhere_is_found(host: Host, tier: str) -> None:
    image = images_of(host)[tier]
    path = Path(image.header.where)
    columns = image.header.columns
    # Every chunk and its CRC, the header page, the table.
    spots = [0, 100, *(columns.offset + columns.stored // 2), *(columns.offset + columns.stored)]
    table = int((columns.offset + columns.stored)[-1]) + 4096 & ~4095
    for spot in map(int, [*spots, table]):
        flip(path, spot)
        with pytest.raises(Damaged):
            load(Imaged(host.home, image), STEP, Template(state_of(0)))
        flip(path, spot)
    found = load(Imaged(host.home, image), STEP, Template(state_of(0)))
    assert bits(found.state) == bits(state_of(1))


def test_a_slot_that_was_filled_anew_is_damaged_not_wrong(host: Host) -> None:
    image = images_of(host)["memory"]
    assert host.arena is not None
    while True:
        snap = host.copy(2)
        snap.slot.release()
        if snap.slot.number == image.slot:
            break
    with pytest.raises(Damaged, match="belongs to another step"):
        load(Imaged(host.home, image), STEP, Template(state_of(0)))


def test_a_slot_is_not_filled_while_it_is_read(host: Host) -> None:
    image = images_of(host)["memory"]
    path = Path(image.header.where)
    with image.open(), open(path) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(Damaged, match="a newer snapshot is being copied"):
            image.open()
    with pytest.raises(NotFound):
        SlotImage(StoredImage(999, path.with_name("slot-999"), image.header))


def test_images_that_make_no_step_are_damaged(host: Host) -> None:
    """Whatever their meta says: it comes from a file."""
    image = images_of(host)["memory"]
    good = image.header.meta
    for change in (
        {"processes": 2},
        {"record": None},
        {"record": {**good["record"], "device": None}, "time_ns": "soon"},
        {"process": 1},
        {"step": "1"},
    ):
        header = Header(
            {**good, **change},
            image.header.arrays,
            image.header.columns,
            image.header.size_bytes,
            image.header.digest,
            image.header.where,
            image.header.tree,
        )
        odd = HostImage(STEP, "memory", header, image.slot, image.open)
        with pytest.raises(Damaged):
            open_step(Imaged(host.home, odd), STEP)


def test_an_image_of_no_step_is_passed_over(host: Host) -> None:
    """The arena of `ckpt.save`, or of whoever else uses one."""
    assert host.arena is not None
    flat = tree.flatten({"w": np.zeros(3)})
    snapshot = ckpt.snapshot.take(flat, host.arena, {"step": 1})
    assert snapshot.slot.number not in {image.slot for image in host.hosted().images}
    snapshot.slot.release()


def test_nothing_is_there() -> None:
    found = host_images(None, {})
    assert (found.images, found.damaged, dict(found.silent)) == ((), (), {})


def test_the_digests_of_leaves_are_those_at_home(host: Host) -> None:
    digests = [commit.leaf_digests([image.header]) for image in images_of(host).values()]
    assert digests[0] == digests[1] == commit.leaf_digests(open_step(host.home, STEP).headers)
