"""Iterators of other libraries, Grain's first of all: what is known of their states.

Such an iterator says nothing of what its state means. Two things can be told from the state alone:
whether it is a position in the data of the whole run, and whether it has as many parts as the
iterator that is to take it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ckpt.errors import CheckpointError, Mismatch

CURE: Final = (
    "use datapipe (it takes a grain.MapDataset as its source, too: datapipe.Pipeline(dataset, ...))"
)
"""For what only an iterator can do that knows which examples it serves."""

_ELASTIC: Final = frozenset({"global_next_index"})  # Grain's ElasticIterator
_OURS: Final = frozenset(  # datapipe's, beneath Grain's own transformations
    {"format", "next_example", "segments", "sources"}
)
_PARTS: Final = ("iterators_in_use_states", "parents")
"""Members of Grain's states with one state for each worker, or for each dataset of several."""


def is_position(state: Any) -> bool:
    """Whether a state counts examples of the whole run, and nothing of one process.

    Where the states of all processes are equal then, any number of processes can go on from it.
    """
    if not isinstance(state, Mapping):
        return False
    return state.keys() == _ELASTIC or state.keys() >= _OURS


def set_state(iterator: Any, state: Any, where: str) -> None:
    """Position an iterator.

    Raises:
        Mismatch: the state has more or fewer parts, or the iterator refuses it, however it does so.
    """
    differences = list(_differences(state, iterator.get_state(), ""))
    if differences:
        raise Mismatch(
            f"{where}: the state is of another pipeline; build it with as many workers and "
            "datasets as there were, or restore without `data`",
            differences,
        )
    try:
        iterator.set_state(state)
    except CheckpointError:
        raise
    except Exception as error:
        raise Mismatch(
            f"{where}: {type(iterator).__name__} does not take the state that was saved "
            f"({type(error).__name__}: {error}); build the pipeline as it was, or restore without "
            "`data`"
        ) from error


def _differences(saved: Any, here: Any, path: str) -> Iterator[str]:
    """Grain goes through both together and drops the rest without a word."""
    if not isinstance(saved, Mapping) or not isinstance(here, Mapping):
        return
    for name in saved.keys() & here.keys():
        place = f"{path}[{name!r}]"
        theirs, ours = saved[name], here[name]
        if isinstance(theirs, list | tuple) and isinstance(ours, list | tuple):
            if name in _PARTS and len(theirs) != len(ours):
                yield f"{place}: saved {len(theirs)} states, here are {len(ours)}"
            for number, pair in enumerate(zip(theirs, ours, strict=False)):
                yield from _differences(*pair, f"{place}[{number}]")
        else:
            yield from _differences(theirs, ours, place)
