"""Sources whose items the epoch decides: read together over a border, blamed one by one."""

from __future__ import annotations

import numpy as np
import pytest
from memory_source import Records
from turning_source import Turning

from datapipe import BadRecord, Kept, Misuse, Pipeline
from datapipe.sources.index_building import kept_by
from datapipe.sources.views import Filtered


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_window_holds_the_items_of_several_epochs(window, prefetch):
    source = Turning(5)
    pipe = Pipeline(source, batch_size=4, seed=0, shuffle=False, epochs=4)
    served = [row for batch in pipe.iterator(window=window, prefetch=prefetch) for row in batch]
    assert served == [b"%d:%d" % divmod(example, 5) for example in range(20)]
    assert all(call == sorted(set(call)) for call in source.calls)
    assert sum(map(len, source.calls)) == 20


def test_several_sources_in_one_batch():
    pipe = Pipeline(
        {"turning": Turning(3), "still": Records(6)},
        batch_size=6,
        seed=0,
        shuffle=False,
        epochs=2,
        weights={"turning": 1, "still": 1},
    )
    served = [
        row for batch in pipe.map(lambda record: {"r": record}, version="1") for row in batch["r"]
    ]
    there = [row for row in served if b":" in row]
    assert there == [b"%d:%d" % divmod(example, 3) for example in range(6)]
    plain = [row for batch in pipe for row in batch]
    assert plain == served


def test_a_read_that_names_no_epoch_is_refused():
    source = Turning(4)
    kept = Filtered(source, Kept.of_ids([1, 3], 4))
    for wrong in (lambda: source.read([2, 0]), lambda: source[3], lambda: kept.read([0])):
        with pytest.raises(Misuse, match=r"other items in every epoch: .*read_epochs\("):
            wrong()
    with pytest.raises(Misuse, match="no index can be made"):
        kept_by(source, lambda record: True)
    assert source.calls == []
    assert kept.read_epochs(np.array([1, 0]), np.array([0, 2])) == [b"0:3", b"2:1"]
    still = Filtered(Records(4), Kept.of_ids([1, 3], 4))
    assert still.read([1]) == Records(4).read([3])


def test_the_item_at_fault_is_that_of_its_epoch():
    source = Turning(4, bad=[(1, 2)])
    pipe = Pipeline(source, batch_size=4, seed=0, shuffle=False, epochs=3)
    batches = pipe.iterator(prefetch=0, window=2)
    assert next(batches).tolist() == [b"0:0", b"0:1", b"0:2", b"0:3"]
    with pytest.raises(BadRecord, match=r"item 2.*choked.*example 6, in epoch 1") as caught:
        next(batches)
    assert caught.value.index == 2
    batches.seek(8)
    np.testing.assert_array_equal(next(batches), [b"2:%d" % item for item in range(4)])
