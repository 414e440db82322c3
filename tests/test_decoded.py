"""Decoded parts of files, kept within a budget."""

from __future__ import annotations

import numpy as np

from formats.decoded import Decoded


def test_a_part_that_is_put_twice_counts_once() -> None:
    kept = Decoded(100)
    table = np.zeros(40, np.uint8)
    for _ in range(5):
        kept.put(1, table)
    kept.put(2, table)
    assert kept.get(1) is table
    assert kept.get(2) is table
    kept.put(1, np.zeros(100, np.uint8))
    assert kept.get(2) is None
    assert kept.get(1).nbytes == 100
