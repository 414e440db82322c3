"""The shuffle by blocks against one that is written out: blocks, windows, growth, what is read."""

from __future__ import annotations

import itertools
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import numpy as np
import pytest
from document_source import Documents
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Records, number

import formats.parquet as formats_parquet
from datapipe import Concatenate, Mismatch, NotFound, Pack, Pipeline, Where
from datapipe.order import block_shuffle as blocks_module
from datapipe.order.block_shuffle import VERSION, WINDOW, BlockOrder, Blocks
from datapipe.order.examples import Examples, Segment
from datapipe.order.permute import Permutation, mix
from formats import open_source, write_parquet
from formats.errors import Misuse
from formats.parquet import ParquetSource
from formats.source import BLOCK, blocks_of, sealed


def written_out(sizes, window, seed, epoch, stream):
    """The records of an epoch in a list: whole blocks in turn, each window shuffled."""
    blocks, first = [], 0
    for size in sizes:
        blocks.append(list(range(first, first + size)))
        first += size
    blocks = [block for block in blocks if block]
    outer = Permutation(len(blocks), mix(VERSION, seed, 0), epoch, stream)
    blocks = [blocks[i] for i in outer(np.arange(len(blocks))).tolist()]
    found = []
    for turn, at in enumerate(range(0, len(blocks), window)):
        records = [record for block in blocks[at : at + window] for record in block]
        inner = Permutation(len(records), mix(VERSION, seed, 1 + turn), epoch, stream)
        found += [records[i] for i in inner(np.arange(len(records))).tolist()]
    return found


def bounds(sizes):
    return np.cumsum([0, *sizes])


SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(any)


@given(SIZES, st.integers(1, 25), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2))
def test_an_epoch_is_what_is_written_out(sizes, window, seed, epoch, stream):
    order = BlockOrder(Blocks(bounds(sizes), window), seed, epoch, stream)
    wanted = written_out(sizes, window, seed, epoch, stream)
    assert order.n == len(wanted)
    assert sorted(wanted) == list(range(order.n))
    every = np.arange(order.n)
    assert order(every).tolist() == wanted
    assert order.inverse(wanted).tolist() == every.tolist()


@given(SIZES, st.integers(1, 5), st.data())
def test_any_positions_in_any_shape(sizes, window, data):
    order = Blocks(bounds(sizes), window).order(7, 1, 0)
    wanted = np.array(written_out(sizes, window, 7, 1, 0))
    some = data.draw(st.lists(st.integers(0, order.n - 1), max_size=30))
    assert order(some).tolist() == wanted[some].tolist()
    assert order.inverse(wanted[some]).tolist() == some
    square = np.arange(4, dtype=np.uint8).reshape(2, 2) % order.n
    assert order(square).tolist() == wanted[square].tolist()
    assert order(square).dtype == order.inverse(square).dtype == np.int64


def test_orders_that_may_never_change():
    """States that were saved name them: another order is another version."""
    order = Blocks([0, 3, 5, 9, 10, 16], 2).order(42, 0, 0)
    assert order(np.arange(16)).tolist() == VECTOR
    assert Blocks([0, 3, 5], 2).digest == "ca3ce338f5111180d8ab7eebde2d9008"


VECTOR = [6, 10, 13, 12, 14, 15, 8, 7, 11, 5, 2, 1, 0, 4, 3, 9]


def test_epochs_seeds_and_streams_are_unrelated():
    blocks = Blocks(np.arange(0, 4001, 100), 4)
    every = np.arange(4000)
    orders = [
        blocks.order(s, e, n)(every) for s, e, n in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.01
            assert (one // 100 == other // 100).mean() < 0.2


def test_a_window_is_as_good_as_shuffled():
    """Within a window neighbours are as far apart as in a shuffle of NumPy's, and across blocks."""
    order = Blocks(np.arange(0, 160_001, 1000), 16).order(3, 2, 0)
    found = order(np.arange(16_000))
    held = np.unique(found // 1000)
    assert held.size == 16
    places = np.searchsorted(held, found // 1000) * 1000 + found % 1000
    distance = np.abs(np.diff(places)).mean()
    assert abs(distance - 16_000 / 3) < 200, distance
    assert abs(np.corrcoef(places, np.arange(16_000))[0, 1]) < 0.03


def test_a_block_is_needed_in_one_window_only():
    blocks = Blocks(np.arange(0, 5001, 50), 8)
    found = blocks.order(5, 0, 0)(np.arange(5000)) // 50
    windows = [set(found[at : at + 400].tolist()) for at in range(0, 5000, 400)]
    assert sum(map(len, windows)) == 100
    assert max(map(len, windows)) == 8


@pytest.mark.parametrize(
    "given",
    [[0], [], [1, 2], [0, 0], [0, 5, 3], [0.0, 1.0], [[0, 1]], [-1, 4]],
)
def test_refuses_bounds_that_are_none(given):
    with pytest.raises(Misuse, match="rise from 0 to the number of records"):
        Blocks(given)


def test_refuses_what_is_out_of_range(monkeypatch):
    with pytest.raises(Misuse, match="shuffle_window must be"):
        Blocks([0, 1], 0)
    with pytest.raises(Misuse, match=r"index 5 is outside \[0, 5\)"):
        Blocks([0, 5]).order(0, 0, 0)([5])
    with pytest.raises(Misuse, match="items must be"):
        Blocks([0, 5]).leading(6)
    monkeypatch.setattr(blocks_module, "BLOCKS_LIMIT", 20)
    assert Blocks(np.arange(21)).count == 20
    with pytest.raises(Misuse, match="blocks: wanted at most 20, found 21"):
        Blocks(np.arange(22))


def test_many_threads_and_another_process():
    blocks = Blocks(np.arange(0, 3001, 30), 7)
    wanted = [blocks.order(1, epoch, 0)(np.arange(3000)).tolist() for epoch in range(6)]
    again = pickle.loads(pickle.dumps(blocks))
    assert again == blocks
    assert hash(again) == hash(blocks)
    assert again != Blocks(blocks.bounds, 8)
    with ThreadPoolExecutor(4) as pool:
        calls = [(epoch % 6, pool.submit(again.order, 1, epoch % 6, 0)) for epoch in range(60)]
        for epoch, call in calls:
            assert call.result()(np.arange(3000)).tolist() == wanted[epoch]


# -- growth ----------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=25)
@given(SIZES, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_a_source_that_grew_has_the_epochs_it_had(sizes, more, data):
    """The epoch under way ends as it began; the next one is that of all blocks."""
    window, seed = data.draw(st.integers(1, 6)), 3
    old, new = sum(sizes), sum(sizes) + sum(more)
    at = data.draw(st.integers(1, 3 * old))
    order = Examples(
        (Segment(0, (old,), (1,)), Segment(at, (new,), (1,))),
        seed,
        "blocks",
        None,
        (Blocks(bounds([*sizes, *more]), window),),
    )
    wanted, epoch = [], 0
    while len(wanted) < at:
        wanted += written_out(sizes, window, seed, epoch, 0)
        epoch += 1
    for later in (epoch, epoch + 1):
        wanted += written_out([*sizes, *more], window, seed, later, 0)
    assert order.locate(np.arange(len(wanted))).items.tolist() == wanted
    for example in (0, at, len(wanted) - 1):
        stream = order.streams[0]
        assert example in list(stream.ordinals(wanted[example], range(epoch + 2)))


def test_fixed_blocks_stay_where_they_are_when_records_are_added():
    short, long = blocks_of(Records(2 * BLOCK + 7)), blocks_of(Records(3 * BLOCK + 1))
    assert short.tolist() == [0, BLOCK, 2 * BLOCK, 2 * BLOCK + 7]
    assert Blocks(long).leading(2 * BLOCK + 7) == Blocks(short)


# -- pipelines -------------------------------------------------------------------------------------


class Cut(Records):
    """Records in blocks of ten."""

    @property
    def blocks(self):
        return np.append(np.arange(0, self.count, 10), self.count)


def made(count=57, **options):
    arguments = {"batch_size": 4, "seed": 11, "shuffle": "blocks", "shuffle_window": 2, "epochs": 3}
    return Pipeline(Cut(count), **{**arguments, **options})


def test_serves_what_is_written_out_and_resumes_anywhere():
    wanted = [r for e in range(3) for r in written_out([10] * 5 + [7], 2, 11, e, 0)]
    batches = made().iterator()
    states, served = [batches.get_state()], []
    for batch in batches:
        served += [number(record) for record in batch]
        states.append(batches.get_state())
    assert served == wanted[: len(served)]
    assert len(served) == 57 * 3 // 4 * 4
    for k in range(0, len(states), 7):
        again = made().iterator(window=1 + k % 3, prefetch=k % 2)
        again.set_state(json.loads(json.dumps(states[k])))
        assert [number(r) for batch in again for r in batch] == served[4 * k :]
    plan = made().plan
    for record in (0, 31, 56):
        held = [b for b in range(plan.batches_left(0)) if record in plan.records(b)]
        assert list(plan.batches(record)) == held


def test_what_decides_the_order_is_part_of_the_state():
    state = made().iterator().get_state()
    assert state["plan"]["shuffle"] == "blocks"
    assert state["plan"]["shuffle_window"] == 2
    assert state["plan"]["blocks"] == VERSION
    assert state["sources"][0][1]["blocks"] == Blocks(Cut(57).blocks).digest
    for other, text in [
        (made(shuffle_window=3), "plan.shuffle_window: saved 2, here 3"),
        (
            made(shuffle="global", shuffle_window=None),
            "plan.shuffle: saved 'blocks', here 'global'",
        ),
        (Pipeline(Records(57), **OPTIONS), "sources.source.blocks: saved '[0-9a-f]{32}', here '"),
    ]:
        with pytest.raises(Mismatch, match=text):
            other.iterator().set_state(state)
    assert made(shuffle_window=None).identity["plan"]["shuffle_window"] == WINDOW


OPTIONS = {"batch_size": 4, "seed": 11, "shuffle": "blocks", "shuffle_window": 2, "epochs": 3}


def test_a_mixture_shuffles_each_source_by_its_own_blocks():
    pipe = Pipeline({"cut": Cut(40), "plain": Records(20)}, **{**OPTIONS, "epochs": 1})
    rows = pipe.plan.rows(range(pipe.plan.batches_left(0)))
    cut = written_out([10] * 4, 2, 11, 0, 0)
    plain = written_out([20], 2, 11, 0, 1)
    assert rows.items[rows.sources == 0].tolist() == cut
    assert rows.items[rows.sources == 1].tolist() == plain


class CutDocuments(Documents):
    """In blocks that a test gives."""

    blocks = None


def test_a_filter_leaves_of_each_block_what_it_keeps():
    source = CutDocuments([3] * 50)
    source.blocks = np.arange(0, 51, 10)
    pipe = Pipeline(source, **{**OPTIONS, "epochs": 1}, filter=Where("score", "<", 4))
    assert blocks_of(pipe.sources["source"]).tolist() == [0, 4, 8, 12, 16, 20]
    found = pipe.plan.records(range(pipe.plan.batches_left(0))).tolist()
    assert found == written_out([4] * 5, 2, 11, 0, 0)
    packed = Pipeline(source, **OPTIONS, pack=Pack(6, lengths="length"))
    assert blocks_of(packed.sources["source"]).tolist() == [0, 5, 10, 15, 20, 25]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any),
    st.sampled_from(["first-fit", "best-fit"]),
    st.integers(1, 12),
)
def test_bins_lie_in_the_blocks_of_their_first_documents(lengths, strategy, window):
    source = CutDocuments(lengths)
    source.blocks = np.append(np.arange(0, len(lengths), 7), len(lengths))
    pack = Pack(6, lengths="length", strategy=strategy, window=window)
    bins = Pipeline(source, batch_size=1, seed=0, pack=pack).source
    found = bins.blocks
    for block, (start, stop) in enumerate(itertools.pairwise(found.tolist())):
        pieces = bins.pieces(np.arange(start, stop), np.zeros(stop - start, np.int64))
        firsts = pieces.records[pieces.offsets == 0]
        assert all(7 * block <= first < 7 * block + 7 for first in firsts.tolist())
    assert found[-1] == len(bins)


def test_documents_laid_end_to_end_in_the_order_of_blocks():
    source = Documents([5] * 40)
    options = {**OPTIONS, "shuffle_window": 1}

    def tokens(pipe):
        return np.concatenate([batch["tokens"].ravel() for batch in pipe.iterator()])

    pipe = Pipeline(source, **options, pack=Concatenate(10, lengths="length"))
    wanted = written_out([40], 1, 11, 0, 0)
    assert (tokens(pipe)[:200:5] // 1000).tolist() == wanted
    label = pipe.identity["sources"][0][1]["fingerprint"]
    other = Pipeline(source, **OPTIONS, pack=Concatenate(10, lengths="length"))
    assert other.identity["sources"][0][1]["fingerprint"] != label


def test_a_filter_that_leaves_nothing_is_told():
    for pack in (None, Pack(6, lengths="length"), Concatenate(6, lengths="length")):
        with pytest.raises(NotFound, match="check its pattern and its filters"):
            Pipeline(Documents([3] * 50), **OPTIONS, filter=Where("score", ">", 9), pack=pack)


# -- Parquet ---------------------------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path):
    for shard in range(3):
        values = np.arange(640) + 640 * shard
        write_parquet(tmp_path / f"{shard}.parquet", {"value": values}, row_group_size=64)
    return tmp_path / "*.parquet"


@pytest.mark.parametrize(("batch_size", "window"), [(16, 1), (16, 8), (60, 2)])
def test_each_row_group_is_decoded_once_an_epoch(parquet, monkeypatch, window, batch_size):
    """With room for the windows that a read may touch, be it at the end of an epoch."""
    decoded = []
    decode = formats_parquet._OpenFile.decode

    def counted(opened, group, columns):
        decoded.append(group)
        return decode(opened, group, columns)

    monkeypatch.setattr(formats_parquet._OpenFile, "decode", counted)
    group_bytes = 64 * 8 + 64
    source = open_source(parquet, cache_bytes=3 * 4 * group_bytes)
    assert isinstance(source, ParquetSource)
    assert source.blocks.tolist() == list(range(0, 1921, 64))
    pipe = Pipeline(
        source, batch_size=batch_size, seed=5, shuffle="blocks", shuffle_window=4, epochs=2
    )
    served = np.concatenate([batch["value"] for batch in pipe.iterator(window=window)])
    assert np.array_equal(served, pipe.plan.records(range(pipe.plan.batches_left(0))))
    blocks = len(decoded)
    assert blocks <= 2 * 30
    decoded.clear()
    everywhere = Pipeline(source, batch_size=batch_size, seed=5, epochs=2)
    for _ in everywhere.iterator(window=window):
        pass
    assert len(decoded) > 5 * blocks


def test_with_the_cache_the_order_is_the_same(parquet, tmp_path):
    source = open_source(parquet)
    cached = source.cached(tmp_path / "cache")
    assert cached.blocks.tolist() == source.blocks.tolist()
    options = {**OPTIONS, "batch_size": 64}
    first = Pipeline(source, **options).iterator()
    next(first)
    second = Pipeline(cached, **options).iterator()
    second.set_state(first.get_state())
    assert next(second)["value"].tolist() == next(first)["value"].tolist()


# -- growth of a pipeline -------------------------------------------------------------------------


class Grown(Records):
    """Files of the given numbers of records, each of them a block."""

    def __init__(self, *files, name="memory", cut=None):
        super().__init__(sum(files), name=name)
        self.files = files
        self.blocks = bounds(files if cut is None else cut)

    def fingerprint(self):
        files = [{"name": f"{i}", "records": count} for i, count in enumerate(self.files)]
        return sealed({"format": "memory", "records": self.count, "files": files})


def grown(*files, **options):
    source = Grown(*files, **options)
    pipe = Pipeline(source, **{**OPTIONS, "epochs": 4})
    return pipe.iterator(prefetch=0, on_change="segment")


def test_a_run_goes_on_with_more_blocks():
    sizes, more = [9, 4, 11, 6], [9, 4, 11, 6, 8, 5]
    short = grown(*sizes)
    served = [number(record) for _ in range(10) for record in next(short)]
    long = grown(*more)
    long.set_state(json.loads(json.dumps(short.get_state())))
    middle = long.get_state()
    for _ in range(5):
        served += [number(record) for record in next(long)]
    again = grown(*more)  # and once more, from a state that tells of both
    again.set_state(json.loads(json.dumps(long.get_state())))
    served += [number(record) for batch in again for record in batch]
    wanted = [r for epoch in (0, 1) for r in written_out(sizes, 2, 11, epoch, 0)]
    wanted += [r for epoch in (2, 3) for r in written_out(more, 2, 11, epoch, 0)]
    assert served == wanted[: len(served)]
    assert len(wanted) - len(served) < 4
    assert long.span(middle, 0, 5) == [(40, 60)]
    assert long.span(short.toward(short.get_state(), middle), 0, 5) == [(40, 60)]


def test_records_that_are_cut_otherwise_are_no_growth():
    state = grown(9, 4, 11, 6).get_state()
    for other in (grown(9, 4, 11, 6, 8, cut=[9, 15, 6, 8]), grown(9, 4, 11, 6, cut=[15, 15])):
        with pytest.raises(Mismatch, match="the first 30 records were cut into other blocks"):
            other.set_state(state)
