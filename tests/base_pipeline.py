"""A pipeline of twenty records, of which a test changes an argument."""

from __future__ import annotations

from memory_source import Records, number

from datapipe import Pipeline


def base(**changes):
    arguments = {"batch_size": 4, "seed": 1, "epochs": 2, **changes}
    source = arguments.pop("source", None) or Records(20)
    return Pipeline(source, **arguments).map(number, version="1")
