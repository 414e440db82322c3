"""The iterator: exact positions, working ahead, skips, devices, several processes."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from memory_source import Columns, Gate, Records, number

import formats
from datapipe import Mismatch, Misuse, Pipeline
from datapipe.prefetch.device_feed import needed
from datapipe.prefetch.prefetcher import Prefetcher

HERE = Path(__file__).parent


def numbers(count=23, *, batch_size=4, seed=7, epochs=3, remainder="carry", shuffle=True):
    """Batches of record ids, and of random numbers that go with them."""
    pipe = Pipeline(
        Records(count),
        batch_size=batch_size,
        seed=seed,
        epochs=epochs,
        remainder=remainder,
        shuffle=shuffle,
    )
    pipe = pipe.map(number, version="1")
    return pipe.random_map(lambda n, rng: {"n": n, "r": rng.random()}, version="1")


def taken(iterator, count):
    return [next(iterator) for _ in range(count)]


# -- Grain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["carry", "drop", "keep"])
@pytest.mark.parametrize(("count", "batch_size"), [(12, 4), (13, 4), (3, 3), (1, 1)])
def test_grain_restores_it_at_every_state(count, batch_size, remainder):
    pipe = numbers(count, batch_size=batch_size, remainder=remainder, epochs=2)
    grain.experimental.assert_equal_output_after_checkpoint(pipe)
    grain.experimental.assert_equal_output_after_checkpoint(pipe.dataset(prefetch=0))


def test_grain_transformations_go_behind_it():
    wanted = list(numbers())
    assert isinstance(numbers().iterator(), grain.DatasetIterator)
    mapped = numbers().dataset().map(lambda batch: batch["n"] * 2)
    grain.experimental.assert_equal_output_after_checkpoint(mapped)
    np.testing.assert_equal(list(mapped), [batch["n"] * 2 for batch in wanted])
    device = jax.devices()[1]
    placed = grain.experimental.device_put(
        numbers().dataset(prefetch=1).map(lambda batch: {"n": batch["n"].astype(np.int32)}), device
    )
    first = next(iter(placed))["n"]
    assert first.devices() == {device}
    grain.experimental.assert_equal_output_after_checkpoint(placed.map(jax.device_get))
    limited = grain.experimental.LimitIterDataset(numbers(epochs=None).dataset(), 5)
    np.testing.assert_equal(list(limited), wanted[:5])


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["carry", "drop", "keep"])
@pytest.mark.parametrize(("count", "batch_size"), [(12, 4), (13, 4), (7, 5)])
def test_state_at_every_batch_of_three_epochs(count, batch_size, remainder):
    pipe = numbers(count, batch_size=batch_size, remainder=remainder)
    wanted = list(pipe)
    straight = pipe.iterator()
    for at in range(len(wanted) + 1):
        state = json.loads(json.dumps(straight.get_state()))
        restored = pipe.iterator()
        restored.set_state(state)
        assert restored.get_state() == state
        np.testing.assert_equal(list(restored), wanted[at:], f"state {state}")
        assert restored.next_example == straight.plan.advance(0, len(wanted))
        if at < len(wanted):
            next(straight)


def test_the_end_is_the_end_and_can_be_restored():
    pipe = numbers()
    iterator = pipe.iterator()
    list(iterator)
    state = iterator.get_state()
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    assert iterator.get_state() == state
    again = pipe.iterator()
    again.set_state(state)
    assert list(again) == []
    again.seek(0)  # and back
    np.testing.assert_equal(list(again), list(pipe))
    longer = numbers(epochs=4).iterator()  # more epochs go on where the shorter run ended
    longer.set_state(state)
    np.testing.assert_equal(list(longer), list(numbers(epochs=4))[len(list(pipe)) :])


CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_iterator import numbers
for line in sys.stdin:
    arguments, state = json.loads(line)
    iterator = numbers(**arguments).iterator()
    iterator.set_state(state)
    rest = [[batch["n"].tolist(), batch["r"].tolist()] for batch in iterator]
    print(json.dumps([rest, iterator.get_state()]))
"""


def test_a_new_process_goes_on_exactly():
    cases = []
    for remainder in ("carry", "drop", "keep"):
        for shuffle in (True, False):
            arguments = {"remainder": remainder, "shuffle": shuffle, "count": 10, "epochs": 2}
            iterator = numbers(**arguments).iterator()
            iterator.skip([(5, 7)])
            whole = numbers(**arguments).iterator()
            whole.skip([(5, 7)])
            wanted = [[batch["n"].tolist(), batch["r"].tolist()] for batch in whole]
            for at in range(len(wanted) + 1):
                cases.append((arguments, iterator.get_state(), wanted[at:], whole.get_state()))
                if at < len(wanted):
                    next(iterator)
    asked = "".join(json.dumps([arguments, state]) + "\n" for arguments, state, _, _ in cases)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(HERE)],
        input=asked,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    answers = [json.loads(line) for line in child.stdout.splitlines()]
    for answer, (arguments, state, rest, end) in zip(answers, cases, strict=True):
        assert answer == [rest, end], f"{arguments} from {state}"


@pytest.mark.parametrize("seed", range(6))
def test_three_crashes_equal_one_straight_run(seed):
    rng = random.Random(seed)
    pipe = numbers(rng.randrange(5, 40), batch_size=rng.randrange(1, 6), remainder="keep")
    wanted = list(pipe)
    state, served = None, []
    for _ in range(3):
        iterator = pipe.iterator(prefetch=rng.randrange(4), window=rng.randrange(1, 5))
        if state is not None:
            iterator.set_state(state)
        saved_at = len(served)
        for _ in range(rng.randrange(1, 9)):
            batch = next(iterator, None)
            if batch is None:
                break
            served.append(batch)
            if rng.random() < 0.5:
                state, saved_at = iterator.get_state(), len(served)
        if state is None:
            state = pipe.iterator().get_state()
        del served[saved_at:]  # a crash: what came after the last save is done again
        del iterator
    iterator = pipe.iterator()
    iterator.set_state(state)
    np.testing.assert_equal(served + list(iterator), wanted, f"seed {seed}")


# -- working ahead ---------------------------------------------------------------------------------


def test_the_state_is_that_of_what_was_delivered():
    iterator = numbers().iterator(prefetch=5, window=4, threads=2)
    iterator.start_prefetch()
    iterator.start_prefetch()
    for delivered in range(10):
        assert iterator.next_example == 4 * delivered
        assert iterator.get_state()["next_example"] == 4 * delivered
        next(iterator)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_set_state_before_during_and_after(prefetch):
    pipe = numbers()
    wanted = list(pipe)
    iterator = pipe.iterator(prefetch=prefetch)
    states = []
    for batch in wanted:
        states.append(iterator.get_state())
        np.testing.assert_equal(next(iterator), batch)
    for at in (0, 7, len(wanted) - 1, 3, 3):  # after the end, then in the midst of it
        iterator.set_state(states[at])
        assert iterator.get_state() == states[at]
        np.testing.assert_equal(taken(iterator, 1), wanted[at : at + 1])
    iterator.set_state(states[5])
    np.testing.assert_equal(list(iterator), wanted[5:])


def test_set_state_while_a_read_hangs_drops_what_it_brings():
    source = Gate(40)
    pipe = Pipeline(source, batch_size=4, seed=1, epochs=1).map(number, version="1")
    iterator = pipe.iterator(prefetch=2)
    state = pipe.iterator().get_state() | {"next_example": 20}
    iterator.start_prefetch()
    assert source.entered.wait(60)
    iterator.set_state(state)
    source.opened.set()
    plan = pipe.plan
    assert [batch.tolist() for batch in iterator] == [
        plan.records(b).tolist() for b in range(5, 10)
    ]
    iterator.close()


def test_prefetch_really_works_ahead_and_no_further():
    source = Records(400)
    pipe = Pipeline(source, batch_size=4, seed=1, epochs=1)
    with pipe.iterator(prefetch=3, window=1) as iterator:
        next(iterator)
        until(lambda: len(source.calls) == 4)  # one delivered, three ahead
        time.sleep(0.05)
        assert len(source.calls) == 4
    lazy = Records(400)
    iterator = Pipeline(lazy, batch_size=4, seed=1, epochs=1).iterator(prefetch=0, window=1)
    taken(iterator, 2)
    assert len(lazy.calls) == 2


def until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


def workers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("datapipe")}


def test_two_hundred_lives():
    """Close, drop, restore and iterate again: no deadlock, no thread left behind."""
    pipe = numbers(40, epochs=None)
    wanted = taken(pipe.iterator(prefetch=0), 6)
    before = workers()
    for life in range(200):
        iterator = pipe.iterator(prefetch=1 + life % 4, window=1 + life % 3, threads=1 + life % 2)
        state = iterator.get_state()
        np.testing.assert_equal(taken(iterator, life % 5), wanted[: life % 5])
        if life % 3 == 0:
            iterator.set_state(state)
            np.testing.assert_equal(taken(iterator, 2), wanted[:2])
        if life % 4 == 0:
            del iterator  # collected with work in flight
        else:
            iterator.close()
    gc.collect()
    until(lambda: workers() <= before)


def test_close_waits_and_is_final():
    source = Gate(40)
    before = workers()
    iterator = Pipeline(source, batch_size=4, seed=1).iterator(prefetch=2)
    iterator.start_prefetch()
    assert source.entered.wait(60)
    threading.Timer(0.1, source.opened.set).start()
    iterator.close()
    assert source.opened.is_set()
    assert workers() <= before
    iterator.close()
    assert iterator.get_state()["next_example"] == 0
    for call in (
        lambda: next(iterator),
        lambda: iterator.seek(0),
        lambda: iterator.skip([(0, 1)]),
        lambda: iterator.set_state(iterator.get_state()),
        iterator.start_prefetch,
    ):
        with pytest.raises(Misuse, match="this iterator is closed; take a new one"):
            call()


def test_the_context_closes():
    with numbers(epochs=None).iterator() as iterator:
        next(iterator)
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


def test_an_interrupt_while_waiting_loses_nothing():
    pipe = numbers()
    for prefetch in (0, 2):
        interrupts = iter([True])

        def once(batch, interrupts=interrupts):
            if next(interrupts, False):
                raise KeyboardInterrupt
            return batch

        iterator = pipe.map_batch(once, version="1").iterator(prefetch=prefetch)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert iterator.next_example == 0
        iterator.seek(0)  # the interrupt hit the work itself
        np.testing.assert_equal(list(iterator), list(pipe))


@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"prefetch": 3}, {"prefetch": 3, "threads": 2}]
)
@pytest.mark.parametrize("at", [1, 6, 17])
def test_an_interrupt_within_functions_that_change_arrays_in_place(options, at):
    calls = 0

    def tenfold(example):
        nonlocal calls
        calls += 1
        example["row"] *= 10
        if calls == at:
            raise KeyboardInterrupt
        return example

    pipe = Pipeline(Columns(23), batch_size=4, seed=7, epochs=2)
    plain = list(pipe.map(lambda e: e | {"row": e["row"] * 10}, version="1"))
    with pipe.map(tenfold, version="1").iterator(**options) as iterator:
        found = []
        interrupts = 0
        while len(found) < len(plain):
            try:
                found.append(next(iterator))
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1
    np.testing.assert_equal(found, plain)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", ["start", "replace", "restart", "_fill", "_coming"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_batch_counts_as_delivered_when_it_is(monkeypatch, name, error, is_before):
    """Whatever fails on the way, before or after its work, and at every call of it."""
    pipe = Pipeline(Records(23, bad=[3, 9, 20]), batch_size=4, seed=7, epochs=1)
    pipe = replace(pipe, on_bad_record="replace").map(number, version="1")
    plain = pipe.iterator(prefetch=0)
    wanted = [(plain.get_state(), next(plain).tolist()) for _ in range(pipe.plan.batch_count)]
    whole = getattr(Prefetcher, name)
    for at in range(12):
        calls = 0
        iterator = pipe.iterator(prefetch=2, window=2)

        def failing(ahead, *args, at=at):
            nonlocal calls
            calls += 1
            if is_before and calls - 1 == at:
                raise error("on the way")
            result = whole(ahead, *args)
            if not is_before and calls - 1 == at:
                raise error("on the way")
            return result

        found = []
        with monkeypatch.context() as patched, iterator:
            patched.setattr(Prefetcher, name, failing)
            while len(found) < len(wanted):
                with contextlib.suppress(error):
                    state = iterator.get_state()
                    found.append((state, next(iterator).tolist()))
        assert found == wanted, f"at {at}"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_move_that_is_interrupted_is_done_all_the_same(monkeypatch, prefetch):
    def interrupted(*args):
        raise KeyboardInterrupt

    pipe = numbers()
    for move in (
        lambda iterator: iterator.seek(20),
        lambda iterator: iterator.skip([(12, 20)]),
        lambda iterator: iterator.set_state({**iterator.get_state(), "next_example": 20}),
    ):
        with pipe.iterator(prefetch=prefetch) as iterator:
            taken(iterator, 3)
            with monkeypatch.context() as patched:
                patched.setattr(iterator._prefetcher, "restart", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    move(iterator)
            np.testing.assert_equal(next(iterator), list(pipe)[5])


# -- skips and seeks -------------------------------------------------------------------------------


def flat(batches):
    return [n for batch in batches for n in batch["n"].tolist()]


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(0, 60), st.integers(1, 30), st.integers(0, 4))
def test_skip_discards_what_was_made_ahead(delivered, start, length, prefetch):
    pipe = numbers(remainder="keep")
    every = flat(pipe)
    with pipe.iterator(prefetch=prefetch, window=3) as iterator:
        served = flat(taken(iterator, delivered))
        iterator.skip([(start, start + length)])
        rest = flat(iterator)
    at = len(served)
    kept = [e for e in range(at, len(every)) if not start <= e < start + length]
    assert served == every[:at]
    assert rest == [every[e] for e in kept]


def test_skips_are_in_the_state_and_unite():
    pipe = numbers()
    iterator = pipe.iterator()
    iterator.skip([(20, 24), (8, 10)])
    iterator.skip([(10, 12)])
    assert iterator.get_state()["skips"] == [8, 4, 8, 4]
    next(iterator)
    restored = pipe.iterator()
    restored.skip([(0, 4)])  # a state says all: its skips replace those here
    restored.set_state(iterator.get_state())
    assert restored.get_state()["skips"] == [8, 4, 8, 4]
    np.testing.assert_equal(list(restored), list(iterator))
    # An older state and a newer ledger: the manager adds what it knows.
    restored.set_state(pipe.iterator().get_state())
    restored.skip([(8, 12)])
    assert not set(range(8, 12)) & set(np.concatenate(restored.plan.examples(0, 3)).tolist())


@pytest.mark.parametrize("other", [1, 3, 5, 8])
def test_skip_then_change_the_batch_size(other):
    """After a spike people lower the batch size: the same examples stay skipped."""
    iterator = numbers(40, batch_size=4, epochs=2).iterator()
    taken(iterator, 3)
    state = iterator.get_state()
    ranges = iterator.span(state, 2, 5)
    assert ranges == [(20, 32)]
    iterator.skip(ranges)
    changed = numbers(40, batch_size=other, epochs=2, remainder="keep").iterator()
    changed.set_state(iterator.get_state())
    every = flat(numbers(40, batch_size=4, epochs=2))
    assert flat(changed) == every[12:20] + every[32:]


def test_a_rewind_serves_what_the_run_without_the_bad_batches_serves():
    """Save at 3, see a spike in batches 6 and 7, go back, skip them: nothing else is different."""
    pipe = numbers(40, epochs=2)
    wanted = list(pipe)
    iterator = pipe.iterator(prefetch=4)
    taken(iterator, 3)
    state = iterator.get_state()
    taken(iterator, 9)
    iterator.set_state(state)
    iterator.skip(iterator.span(state, 3, 5))
    np.testing.assert_equal(list(iterator), wanted[3:6] + wanted[8:])


def test_span_counts_under_the_skips_of_the_state():
    iterator = numbers(40).iterator()
    iterator.skip([(6, 10)])
    state = iterator.get_state()
    iterator.skip([(0, 100)])
    assert iterator.span(state, 0, 1) == [(0, 4)]
    assert iterator.span(state, 1, 3) == [(4, 6), (10, 16)]
    with pytest.raises(Mismatch):
        numbers(seed=8).iterator().span(state, 0, 1)


def test_seek():
    pipe = numbers(remainder="keep")
    every = flat(pipe)
    iterator = pipe.iterator()
    for example in (50, 0, 3, len(every) - 1, len(every)):
        iterator.seek(example)
        assert iterator.next_example == example
        assert flat(iterator) == every[example:]
    with pytest.raises(Misuse, match=r"an example must be an integer in \[0, 69\], found 70"):
        iterator.seek(70)
    assert iterator.batch_size == 4


# -- devices ---------------------------------------------------------------------------------------


def mesh(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "model")[: len(shape)])


def columns(batch_size=16, epochs=2):
    pipe = Pipeline(Columns(40), batch_size=batch_size, seed=3, epochs=epochs)
    return pipe.map_batch(lambda b: {"id": b["id"].astype(np.int32), "row": b["row"]}, version="1")


@pytest.mark.parametrize(
    "sharding",
    [
        NamedSharding(mesh(8), PartitionSpec("data")),
        NamedSharding(mesh(4, 2), PartitionSpec("data")),
        NamedSharding(mesh(2, 4), PartitionSpec("model")),
        NamedSharding(mesh(4, 2), PartitionSpec(("data", "model"))),
        NamedSharding(mesh(8), PartitionSpec()),
        SingleDeviceSharding(jax.devices()[3]),
    ],
    ids=str,
)
def test_global_arrays_hold_the_same_batch(sharding):
    wanted = list(columns())
    with columns().iterator(sharding=sharding) as iterator:
        batches = list(iterator)
    for batch, plain in zip(batches, wanted, strict=True):
        for name, leaf in batch.items():
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            assert leaf.dtype == plain[name].dtype
            np.testing.assert_array_equal(leaf, plain[name])


def test_axes_behind_the_batch_may_be_sharded_too():
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("data", "model"))
    pipe = columns().map_batch(lambda b: b["row"], version="1")
    first = next(pipe.iterator(sharding=sharding))
    np.testing.assert_array_equal(first, next(pipe.iterator()))
    with pytest.raises(Misuse, match=r"\['id'\] of shape \[16\] cannot be sharded"):
        next(columns().iterator(sharding=sharding))


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_hosts_together_read_each_row_once(hosts):
    """What each of several hosts would read, without the hosts."""
    sharding = NamedSharding(mesh(8), PartitionSpec("data"))
    parts = sharding.devices_indices_map((16,))
    per_host = 8 // hosts
    rows = [
        needed([parts[d][0] for d in jax.devices()[h * per_host : (h + 1) * per_host]], 16)
        for h in range(hosts)
    ]
    assert np.concatenate(rows).tolist() == list(range(16))
    replicated = NamedSharding(mesh(4, 2), PartitionSpec("model")).devices_indices_map((16,))
    assert needed([part[0] for part in replicated.values()], 16).tolist() == list(range(16))


def test_integers_are_narrowed_only_where_they_fit():
    sharding = NamedSharding(mesh(8), PartitionSpec("data"))
    pipe = Pipeline(Records(16), batch_size=8, seed=1).map(number, version="1")
    first = next(pipe.iterator(sharding=sharding))
    assert first.dtype == np.int32
    assert first.tolist() == next(pipe.iterator()).tolist()
    big = pipe.map(lambda n: {"big": n + 2**31}, version="1").iterator(sharding=sharding)
    with pytest.raises(Misuse, match=r"\['big'\] holds an integer that does not fit in int32"):
        next(big)


def test_what_no_device_can_hold():
    sharding = NamedSharding(mesh(8), PartitionSpec("data"))
    with pytest.raises(Misuse, match="dtype object, which no device holds: turn it into numbers"):
        next(Pipeline(Records(16), batch_size=8, seed=1).iterator(sharding=sharding))
    with pytest.raises(Misuse, match="a batch of 9 cannot be sharded"):
        Pipeline(Records(16), batch_size=9, seed=1).iterator(sharding=sharding)
    with pytest.raises(Misuse, match="'carry' or 'drop'"):
        numbers(16, batch_size=8, remainder="keep").iterator(sharding=sharding)
    with pytest.raises(Misuse, match="must return the rows it is given"):
        next(columns().map_batch(lambda b: b["id"][:3], version="1").iterator(sharding=sharding))
    with pytest.raises(Misuse, match=r"must be a jax\.sharding\.Sharding"):
        columns().iterator(sharding=PartitionSpec("data"))


PROCESS = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec
sys.path.insert(0, sys.argv[1])
from memory_source import Records, number
from datapipe import Pipeline
source = Records(40)
pipe = Pipeline(source, batch_size=8, seed=3, epochs=2).map(number, version="1")
mesh = Mesh(np.array(jax.devices()), ("data",))
found = []
with pipe.iterator(sharding=NamedSharding(mesh, PartitionSpec("data")), window=2) as iterator:
    for batch in iterator:
        shards = {s.index[0].indices(8)[0]: s.data.tolist() for s in batch.addressable_shards}
        total = int(jax.jit(lambda x: x.sum())(batch))
        found.append([shards, total])
    state = iterator.get_state()
read = sorted({int(i) for call in source.calls[:1] for i in call})
print(json.dumps([found, state, read]))
jax.distributed.shutdown()
"""


def test_two_processes_each_read_their_rows(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    logs = [tmp_path / f"{index}.err" for index in range(2)]
    with contextlib.ExitStack() as stack:
        children = []
        for index, log in enumerate(logs):
            child = subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(HERE), address, str(index)],
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w")),
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        answers = []
        for child, log in zip(children, logs, strict=True):
            out, _ = child.communicate(timeout=120)
            assert child.returncode == 0, log.read_text()
            answers.append(json.loads(out.splitlines()[-1]))
    pipe = Pipeline(Records(40), batch_size=8, seed=3, epochs=2).map(number, version="1")
    alone = pipe.iterator()
    wanted = [batch.tolist() for batch in alone]
    (one, state, read), (other, other_state, other_read) = answers
    for batch, (mine, total), (theirs, other_total) in zip(wanted, one, other, strict=True):
        shards = {int(start): rows for start, rows in {**mine, **theirs}.items()}
        assert [n for start in sorted(shards) for n in shards[start]] == batch
        assert len(mine) == len(theirs) == 2
        assert total == other_total == sum(batch)
    assert json.dumps(state) == json.dumps(other_state) == json.dumps(alone.get_state())
    assert sorted(read + other_read) == sorted(wanted[0])  # nobody reads the rows of another


# -- files -----------------------------------------------------------------------------------------


def test_array_record_files(tmp_path):
    for shard in range(3):
        formats.write_array_record(
            tmp_path / f"part-{shard}.array_record",
            [b"%d" % (shard * 10 + i) + b"." * i for i in range(10)],
        )
    with formats.open_source(str(tmp_path / "*.array_record")) as source:
        pipe = Pipeline(source, batch_size=7, seed=2, epochs=2).map(number, version="1")
        grain.experimental.assert_equal_output_after_checkpoint(pipe)
        served = [n for batch in pipe for n in batch.tolist()]
        assert served == pipe.plan.records(range(pipe.plan.batch_count)).tolist()
        state = pipe.iterator().get_state()
    formats.write_array_record(tmp_path / "part-3.array_record", [b"30"])
    with formats.open_source(str(tmp_path / "*.array_record")) as source:
        grown = Pipeline(source, batch_size=7, seed=2, epochs=2).map(number, version="1")
        with pytest.raises(Mismatch, match=r"source\.records: saved 30, here 31"):
            grown.iterator().set_state(state)


def test_parquet_files(tmp_path):
    rows = {"id": np.arange(30), "text": ["x" * i for i in range(30)]}
    formats.write_parquet(tmp_path / "a.parquet", rows)
    with formats.open_source(str(tmp_path / "*.parquet")) as source:
        pipe = Pipeline(source, batch_size=8, seed=2, epochs=1, remainder="keep")
        grain.experimental.assert_equal_output_after_checkpoint(pipe)
        for batch in pipe:
            assert batch["text"].tolist() == ["x" * i for i in batch["id"].tolist()]
        served = [n for batch in pipe for n in batch["id"].tolist()]
        assert sorted(served) == list(range(30))
