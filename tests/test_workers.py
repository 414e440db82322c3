"""Worker processes: the same batches, errors that stay what they are, deaths, and no traces."""

from __future__ import annotations

import gc
import importlib
import os
import random
import threading
import time

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memory_source import Columns, Gate, Records, number
from number_batches import columns, numbers
from waiting import eventually
from worker_traces import no_traces  # noqa: F401 - a fixture

from datapipe import BadRecord, Misuse, Pipeline
from datapipe.prefetch.worker_pool import KEPT

pytestmark = pytest.mark.usefixtures("no_traces")


# -- the same batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["carry", "drop", "keep"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_changes_nothing(workers, remainder):
    pipe = numbers(remainder=remainder)
    wanted = pipe.iterator(prefetch=0)
    with pipe.iterator(workers=workers, window=3) as iterator:
        for batch in wanted:
            np.testing.assert_equal(next(iterator), batch)
            assert iterator.get_state() == wanted.get_state()
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)


def test_all_kinds_of_leaves_come_through():
    def varied(example):
        n = int(example["id"])
        return {
            "text": example["text"],
            "none": None,
            "pair": (np.float32(n), np.full((n % 2 and 0, 3), n, np.int16)),
            "bytes": b"x" * n,
            "order": np.asfortranarray(np.arange(6).reshape(2, 3)) + n,
            "big": np.datetime64("2020-01-01") + n,
        }

    pipe = Pipeline(Columns(20), batch_size=4, seed=3, epochs=1)
    pipe = pipe.map(lambda e: varied(e) | {"pair": (np.float32(1), np.zeros((0, 3)))}, version="1")
    plain = list(pipe)
    for batch, wanted in zip(pipe.iterator(workers=1), plain, strict=True):
        np.testing.assert_equal(batch, wanted)
        for (path, leaf), (_, other) in zip(
            jax.tree_util.tree_leaves_with_path(batch),
            jax.tree_util.tree_leaves_with_path(wanted),
            strict=True,
        ):
            assert leaf.dtype == other.dtype, path
            assert leaf.flags.writeable, path


def test_records_of_bytes_and_batches_that_grow():
    """A batch that is larger than a slot makes larger slots."""
    sizes = [10, 100_000, 10, 3_000_000, 20, 6_000_000, 30]
    pipe = Pipeline(Records(len(sizes) * 2), batch_size=2, seed=0, shuffle=False, epochs=2)
    assert [b.tolist() for b in pipe.iterator(workers=2)] == [b.tolist() for b in pipe]
    grown = pipe.map(lambda r: number(r), version="1").map_batch(
        lambda b: np.full((2, sizes[int(b[0]) // 2] // 2), b[0]), version="1"
    )
    for batch, wanted in zip(grown.iterator(workers=2, window=2), grown, strict=True):
        np.testing.assert_array_equal(batch, wanted)


def test_positions_move_while_workers_are_busy():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    pipe = numbers(40, epochs=None)
    plain = pipe.iterator(prefetch=0)
    with pipe.iterator(workers=2, window=4) as iterator:
        states = [iterator.get_state()]
        for _ in range(60):
            act = rng.randrange(4)
            if act == 0:
                at = rng.randrange(200)
                iterator.seek(at)
                plain.seek(at)
            elif act == 1:
                start = rng.randrange(300)
                iterator.skip([(start, start + 3)])
                plain.skip([(start, start + 3)])
            elif act == 2:
                state = rng.choice(states)
                iterator.set_state(state)
                plain.set_state(state)
            for _ in range(rng.randrange(6)):
                np.testing.assert_equal(next(iterator), next(plain))
            states.append(iterator.get_state())
            assert states[-1] == plain.get_state()


def stalled(record):
    """Records that somebody skipped while they were made take long."""
    if number(record) % 8 == 0:
        time.sleep(0.2)
    return np.full(1000, number(record))


def test_slots_run_out_while_a_worker_is_at_what_nobody_wants():
    pipe = Pipeline(Records(400), batch_size=1, seed=1, shuffle=False).map(stalled, version="1")
    with pipe.iterator(workers=2, window=2) as iterator:
        for start in (0, 8, 16, 24, 32):  # the first of the window sleeps: the others run ahead
            iterator.seek(start)
            for n in range(start, start + 3):
                assert next(iterator)[0, 0] == n
            time.sleep(0.05)


@pytest.mark.parametrize("move", ["seek", "set_state"])
def test_a_worker_that_is_stuck_keeps_its_slots(tmp_path, move):
    """The other one goes on alone: nothing that is wanted waits behind the window that is not."""
    stuck, opened = tmp_path / "stuck", tmp_path / "opened"

    def gated(record):
        if number(record) == 40:
            stuck.touch()
            while not opened.exists():
                time.sleep(0.01)
        return np.full(1000, number(record))

    pipe = Pipeline(Records(400), batch_size=1, seed=1, shuffle=False).map(gated, version="1")
    state = {**pipe.iterator().get_state(), "next_example": 200}
    with pipe.iterator(workers=2, window=4) as iterator:
        pool = iterator._prefetcher._pool
        lent = [next(iterator) for _ in range(36)]
        eventually(stuck.exists)
        iterator.seek(200) if move == "seek" else iterator.set_state(state)
        found = [next(iterator)[0, 0] for _ in range(11)]
        eventually(lambda: pool._is_short or pool._failure)
        found += [next(iterator)[0, 0] for _ in range(10)]
        opened.touch()
        found += [next(iterator)[0, 0] for _ in range(20)]
    assert found == [*range(200, 241)]
    assert [batch[0, 0] for batch in lent] == [*range(36)]


# -- shared memory ---------------------------------------------------------------------------------


def test_batches_are_the_users_own():
    """Written to, kept for ever, and never overwritten by those that follow."""
    pipe = columns(epochs=6)
    wanted = list(pipe)
    kept = []
    with pipe.iterator(workers=2, window=2) as iterator:
        for batch in iterator:
            batch["row"] += 1
            kept.append(batch)
    del iterator
    gc.collect()
    assert len(kept) > 2 * (2 * 2 * 2 + KEPT)
    for batch, plain in zip(kept, wanted, strict=True):
        np.testing.assert_array_equal(batch["id"], plain["id"])
        np.testing.assert_array_equal(batch["row"], plain["row"] + 1)


def test_slots_come_back_and_are_aligned():
    places = set()
    pipe = columns(epochs=20)
    with pipe.iterator(workers=2, window=2) as iterator:
        for index, batch in enumerate(iterator):
            for leaf in batch.values():
                assert leaf.flags.writeable
                assert leaf.ctypes.data % 64 == 0
            if index >= 20:  # all slots are there
                places.add(batch["row"].ctypes.data)
            del batch, leaf
    assert len(places) <= 2 * 2 * 2 + KEPT


def test_a_view_of_a_view_holds_the_slot():
    pipe = columns(epochs=20)
    with pipe.iterator(workers=1, window=1) as iterator:
        for _ in range(5):
            next(iterator)
        view = next(iterator)["row"][1:][1:, :1]
        wanted = view.copy()
        for _ in range(30):
            next(iterator)
        np.testing.assert_array_equal(view, wanted)


def test_jax_may_take_an_array_as_it_lies():
    pipe = columns(batch_size=8, epochs=20)
    wanted = list(pipe)
    with pipe.iterator(workers=2, window=2) as iterator:
        held = [jax.device_put(next(iterator)) for _ in wanted]
    del iterator
    for batch, plain in zip(held, wanted, strict=True):
        for name, leaf in batch.items():
            np.testing.assert_array_equal(leaf, plain[name])


# -- devices and Grain -----------------------------------------------------------------------------


def test_workers_feed_devices():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    pipe = columns(batch_size=16, epochs=4)
    wanted = list(pipe)
    with pipe.iterator(sharding=sharding, workers=2, window=2) as iterator:
        batches = list(iterator)
    for batch, plain in zip(batches, wanted, strict=True):
        for name, leaf in batch.items():
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            np.testing.assert_array_equal(leaf, plain[name])


def test_grain_goes_behind_workers():
    pipe = columns(epochs=1)
    wanted = list(pipe)
    dataset = pipe.dataset(workers=1)
    mapped = dataset.map(lambda batch: batch["id"] * 2)
    grain.experimental.assert_equal_output_after_checkpoint(mapped)
    device = jax.devices()[1]
    placed = list(grain.experimental.device_put(dataset, device))
    for batch, plain in zip(placed, wanted, strict=True):
        assert batch["id"].devices() == {device}
        np.testing.assert_array_equal(batch["row"], plain["row"])
    limited = grain.experimental.LimitIterDataset(pipe.dataset(workers=2), 3)
    assert [b["id"].tolist() for b in limited] == [b["id"].tolist() for b in wanted[:3]]


# -- errors ----------------------------------------------------------------------------------------


class Choked(Exception):
    def __init__(self, wanted, found):
        super().__init__(f"wanted {wanted}, found {found}")
        self.wanted = wanted


def same_error(found, wanted):
    assert type(found) is type(wanted)
    assert str(found) == str(wanted)
    assert {k: v for k, v in vars(found).items() if k != "__notes__"} == {
        k: v for k, v in vars(wanted).items() if k != "__notes__"
    }
    if wanted.__cause__ is not None:
        same_error(found.__cause__, wanted.__cause__)


def test_a_bad_record_is_the_same_error_and_the_position_stays():
    pipe = Pipeline(Records(40, bad=[17]), batch_size=4, seed=1, epochs=1).map(number, version="1")
    here, there = pipe.iterator(prefetch=0), pipe.iterator(workers=2)
    with there:
        good = pipe.plan.batches(17)[0]
        for _ in range(good):
            assert next(here).tolist() == next(there).tolist()
        with pytest.raises(BadRecord) as wanted:
            next(here)
        for _ in range(2):
            with pytest.raises(BadRecord) as found:
                next(there)
            same_error(found.value, wanted.value)
            assert found.value.file == "shard-3"
            assert "worker process" in "\n".join(found.value.__notes__)  # Grain adds some, too
            assert "memory_source.py" in "\n".join(found.value.__notes__)
            assert there.get_state() == here.get_state()
        example = 4 * good
        for iterator in (here, there):
            iterator.skip([(example, example + 4)])
        assert [b.tolist() for b in there] == [b.tolist() for b in here]


def test_errors_of_functions():
    def choke(batch):
        try:
            raise Choked(1, 2)
        except Choked as error:
            error.add_note("a note")
            raise KeyError("outer") from error

    pipe = Pipeline(Records(8), batch_size=4, seed=1)
    with pipe.map_batch(choke, version="1").iterator(workers=1) as iterator:
        with pytest.raises(KeyError, match="outer") as found:
            next(iterator)
        assert "in .map_batch 1 of the batch of examples 0 to 3" in found.value.__notes__
        cause = found.value.__cause__
        # Its __init__ wants two arguments and it has one: it cannot be made again.
        assert isinstance(cause, RuntimeError)
        assert "Choked: wanted 1, found 2" in str(cause)
        assert "a note" in cause.__notes__

    def stop(batch):
        raise StopIteration

    with (
        pipe.map_batch(stop, version="1").iterator(workers=1) as iterator,
        pytest.raises(RuntimeError, match="raised StopIteration"),
    ):
        next(iterator)


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    pipe = Pipeline(Records(8), batch_size=4, seed=1)
    with pytest.raises(Misuse, match=r"the function of \.map 3 cannot be sent .* pickle .*lock"):
        pipe.map(lambda r: (lock, r)[1], version="3").iterator(workers=1)
    gate = Pipeline(Gate(8), batch_size=4, seed=1)
    with pytest.raises(Misuse, match=r"source 0 \(Gate\) cannot be sent to worker processes"):
        gate.iterator(workers=1)
    with pytest.raises(Misuse, match="take more workers instead of threads"):
        pipe.iterator(workers=1, threads=2)
    with pytest.raises(Misuse, match=r"workers must be an integer in \[0, 1024\], found -1"):
        pipe.iterator(workers=-1)


def test_bad_records_are_replaced_by_workers_too(caplog):
    source = Records(40, bad=[3, 17, 18, 30])
    pipe = Pipeline(source, batch_size=4, seed=1, epochs=3, on_bad_record="replace")
    pipe = pipe.map(number, version="1")
    plain = pipe.iterator(prefetch=0)
    with pipe.iterator(workers=2, window=2) as iterator:
        for batch in plain:
            assert next(iterator).tolist() == batch.tolist()
            assert iterator.get_state() == plain.get_state()
    limited = Pipeline(source, batch_size=4, seed=1, on_bad_record="replace", bad_record_limit=2)
    with limited.map(number, version="1").iterator(workers=1) as iterator:
        with pytest.raises(BadRecord, match="bad_record_limit=2 may be replaced"):
            list(iterator)
        assert len(iterator.get_state()["replaced"]) >= 1


def test_large_arrays_of_functions_are_shared_until_written_to():
    table = np.arange(1 << 20)

    def look_up(record):
        table[0] += 1  # a copy of one page: no other process sees it
        return {"value": table[number(record) + 1] - 1, "count": table[0], "pid": os.getpid()}

    pipe = Pipeline(Records(400), batch_size=4, seed=1, epochs=1).map(look_up, version="1")
    counts = {}
    with pipe.iterator(workers=2, window=1) as iterator:
        for index, batch in enumerate(iterator):
            np.testing.assert_array_equal(batch["value"], pipe.plan.records(index))
            for pid, count in zip(batch["pid"].tolist(), batch["count"].tolist(), strict=True):
                counts.setdefault(pid, []).append(count)
    assert len(counts) == 2
    for found in counts.values():
        assert found == list(range(1, len(found) + 1))
    assert table[0] == 0


def test_a_module_that_workers_cannot_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def work(record):\n    return len(record)\n")
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module("only_here").work
    monkeypatch.undo()
    pipe = Pipeline(Records(8), batch_size=4, seed=1).map(work, version="1")
    with pipe.iterator(workers=1) as iterator:
        with pytest.raises(ModuleNotFoundError, match="only_here") as found:
            next(iterator)
        assert any("must be in modules that can be imported" in n for n in found.value.__notes__)
