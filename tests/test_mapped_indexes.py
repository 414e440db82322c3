"""Indexes in the processes that read through them: mapped, not copied."""

from __future__ import annotations

import copy
import os
import pickle
import shutil

import numpy as np
import pytest
from document_source import Documents

from datapipe import Kept, Mismatch, NotFound, Pack, Pipeline
from datapipe.batches.batch import Recipe
from datapipe.batches.faults import Tolerance
from datapipe.prefetch import worker
from datapipe.prefetch.ring import mapped, opened
from datapipe.prefetch.worker_process import pickled_work
from datapipe.sources.indexes import Lengths
from datapipe.sources.origin import Origin
from datapipe.sources.packing import Bins, Packed, pack

SEED = 17
FEW, MANY = 1_000, 60_000


class Plain(Documents):
    """Documents whose lengths are no list that is pickled with them: document d has d % 7 + 1."""

    def __init__(self, documents):
        super().__init__([])
        self.documents = documents

    def __len__(self):
        return self.documents

    def read(self, indices):
        ids = np.asarray(indices)
        lengths = ids % 7 + 1
        tokens = [np.full(each, d, np.int32) for d, each in zip(ids, lengths, strict=True)]
        return {"tokens": tokens, "length": lengths, "score": ids % 10}


def lengths_of(documents):
    return np.arange(documents) % 7 + 1


def pipeline(documents, directory, **stages):
    """A pipeline whose indexes are in files."""
    source = Plain(documents)
    path = directory / f"lengths-{documents}"
    Lengths.of(lengths_of(documents)).save(path, Origin.of(source))
    kept = directory / f"kept-{documents}"
    Kept.of_mask(np.arange(documents) % 3 > 0).save(kept, Origin.of(source))
    chosen = {
        "pack": Pack(64, lengths=path, window=100, index=directory / f"bins-{documents}"),
        "filter": kept,
    }
    return Pipeline(
        source, batch_size=4, seed=SEED, **{name: chosen[name] for name in stages["only"]}
    )


def work_bytes(pipe):
    recipe = Recipe(tuple(pipe.sources.values()), (), SEED, Tolerance("raise", 0))
    work = pickled_work(recipe, None)
    os.close(work.fd)
    return work.size_bytes


@pytest.mark.parametrize("only", [["pack"], ["filter"]])
def test_what_workers_get_does_not_grow_with_the_documents(tmp_path, only):
    sizes = [work_bytes(pipeline(each, tmp_path, only=only)) for each in (FEW, MANY, MANY)]
    assert sizes[1] == sizes[2], "written by the first, loaded by the second"
    assert abs(sizes[1] - sizes[0]) < 64, sizes
    assert sizes[0] < 8192


def test_what_is_sent_to_a_worker_does_not_grow_with_the_documents(tmp_path, monkeypatch):
    sent = []
    real = worker.send

    def send(link, message, fds=()):
        sent.append(len(pickle.dumps(message)))
        real(link, message, fds)

    monkeypatch.setattr(worker, "send", send)
    totals = []
    for documents in (FEW, MANY):
        sent.clear()
        source = Plain(documents)
        pipe = Pipeline(
            source, batch_size=4, seed=SEED, pack=Pack(64, lengths=lengths_of(documents))
        )
        with pipe.iterator(workers=1, window=1, prefetch=1) as batches:
            found = next(batches)
        np.testing.assert_equal(found, next(iter(pipe)))
        totals.append(max(sent))
    assert max(totals) < 1024
    assert abs(totals[1] - totals[0]) < 64, totals


def test_workers_share_what_has_no_file():
    pipe = Pipeline(
        Plain(MANY), batch_size=4, seed=SEED, pack=Pack(64, lengths=lengths_of(MANY), window=100)
    )
    recipe = Recipe(tuple(pipe.sources.values()), (), SEED, Tolerance("raise", 0))
    work = pickled_work(recipe, None)
    memory = mapped(work.fd, work.size_bytes)
    os.close(work.fd)
    (view,) = opened(memory)[0].sources
    bins = view.bins
    for array in (bins.bounds, bins.records, bins.starts, bins.lengths):
        assert np.shares_memory(array, memory)
    assert np.shares_memory(view.documents.lengths.tokens, memory)


def test_batches_of_workers_that_map_an_index(tmp_path):
    pipe = pipeline(FEW, tmp_path, only=["pack", "filter"])
    wanted = [batch for batch, _ in zip(pipe, range(6), strict=False)]
    with pipe.iterator(workers=2, window=2) as batches:
        np.testing.assert_equal([next(batches) for _ in wanted], wanted)


@pytest.fixture
def stored(tmp_path):
    """Of each kind, one from a file and the same from memory."""
    source = Plain(FEW)
    lengths = Lengths.of(lengths_of(FEW))
    kept = Kept.of_mask(np.arange(FEW) % 3 > 0)
    bins = pack(lengths, 64, window=100)
    kept.save(tmp_path / "kept", Origin.of(source))
    lengths.save(tmp_path / "lengths", Origin.of(source))
    bins.save(tmp_path / "bins")
    made = Packed.of(lengths, 64, 100, "first-fit", "split")
    return {
        "kept": (Kept.load(tmp_path / "kept", source), kept),
        "lengths": (Lengths.load(tmp_path / "lengths", source), lengths),
        "bins": (Bins.load(tmp_path / "bins", made, lengths), bins),
    }


def values(index):
    names = {Kept: ["ids"], Lengths: ["tokens"]}.get(
        type(index), ["bounds", "records", "starts", "lengths"]
    )
    return {name: getattr(index, name) for name in names}


@pytest.mark.parametrize("kind", ["kept", "lengths", "bins"])
@pytest.mark.parametrize("again", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy])
def test_an_index_of_a_file_is_the_one_that_was_saved(stored, kind, again):
    for index in stored[kind]:
        for one in (index, again(index)):
            np.testing.assert_equal(values(one), values(stored[kind][1]))
            assert not any(a.flags.writeable for a in values(one).values()) or one.stored is None
            if kind != "bins":
                assert one.digest == stored[kind][1].digest
            else:
                assert one.made == stored[kind][1].made


@pytest.mark.parametrize("kind", ["kept", "lengths", "bins"])
def test_a_file_that_is_gone_or_another_is_told(stored, tmp_path, monkeypatch, kind):
    monkeypatch.chdir("/")
    index, _ = stored[kind]
    pickled = pickle.dumps(index)
    copied = tmp_path / "copied"
    shutil.copy(tmp_path / kind, copied)
    os.replace(copied, tmp_path / kind)
    assert len(pickle.loads(pickled)) == len(index), "the same bytes are the same index"
    (tmp_path / kind).unlink()
    with pytest.raises(NotFound, match=r"the index is gone, .*put it back"):
        pickle.loads(pickled)
    source = Plain(FEW + 1)
    if kind == "kept":
        Kept.of_mask(np.arange(FEW + 1) % 3 > 1).save(tmp_path / kind, Origin.of(source))
    elif kind == "lengths":
        Lengths.of(lengths_of(FEW + 1)).save(tmp_path / kind, Origin.of(source))
    else:
        pack(Lengths.of(lengths_of(FEW + 1)), 64, window=100).save(tmp_path / kind)
    with pytest.raises(Mismatch, match="another index than when the pipeline was made"):
        pickle.loads(pickled)
    assert values(index)[next(iter(values(index)))].size, "what is mapped stays"


def test_an_index_that_is_missing_in_workers_is_told_by_the_pipeline(tmp_path):
    pipe = pipeline(FEW, tmp_path, only=["pack"])
    (tmp_path / f"bins-{FEW}").unlink()
    with (
        pipe.iterator(workers=1, window=1) as batches,
        pytest.raises(NotFound, match=r"bins-1000: the index is gone"),
    ):
        next(batches)
