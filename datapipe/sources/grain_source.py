"""Grain datasets with random access as sources, read through their own transformations."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from datapipe.sources.epoch_sources import EpochSource
from datapipe.sources.tree_digest import coarse, exact
from datapipe.texts import text
from formats.errors import BadRecord, Misuse, is_of_a_record
from formats.source import Spec, as_rows, json_digest, sealed

_SAMPLED: Final = 16  # elements that enter the fingerprint
_STEADY: Final = frozenset(
    {
        "BatchMapDataset",
        "ConcatenateMapDataset",
        "MapMapDataset",
        "RangeMapDataset",
        "SliceMapDataset",
        "SourceMapDataset",
    }
)  # transformations that do the same in every epoch
_ENDLESS: Final = 1 << 40  # more than any dataset has, less than a batched endless one


@final
class GrainSource(EpochSource):
    """A `grain.MapDataset` as a source of examples; a `Pipeline` makes it of one by itself.

    Its elements are trees. Without functions of examples in the pipeline they are stacked as what
    `.map` returns is. Element i of epoch e is `dataset[e * len(dataset) + i]`, which is what
    `dataset.repeat()` has there: a shuffle or a random map in the chain goes on through the epochs.

    What the functions in the chain compute is known by a few elements and by `version` only.
    A pickle of it holds the dataset by cloudpickle, as Grain's own workers get it.

    Args:
      dataset: without `.filter`, and with an end.
      version: a text of at most 64 characters; change it whenever a function in the chain changes
        what it returns.

    Raises:
      Misuse: it is no MapDataset, filters, or repeats without end.
    """

    def __init__(self, dataset: Any, *, version: str = "") -> None:
        if not _is_a(dataset, "MapDataset"):
            raise Misuse(f"wanted a grain.MapDataset, found {type(dataset).__name__}")
        version = text("version", version, 0, 64)
        _refuse_what_is_no_source(dataset)
        self.dataset = dataset
        self._batched = _with_batched_sources(dataset)
        self.version = version
        self._length = len(dataset)
        self._fingerprint: dict[str, Any] | None = None
        self._has_batches: bool | None = None  # None: nothing was read yet
        self._closed = False

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"GrainSource({_chain(self.dataset)})"

    @property
    def varies(self) -> bool:
        """False if all transformations of the chain do the same in every epoch."""
        return any(
            type(node).__name__ not in _STEADY or not type(node).__module__.startswith("grain.")
            for node in _nodes(self.dataset)
        )

    def read_epochs(self, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> list[Any]:
        """See `EpochSource.read_epochs`. A list of elements, read through the chain in one go."""
        if self._closed:
            raise Misuse("this source is closed; make it again to read from it")
        rows = as_rows(items, self._length)
        found = self._elements((rows + epochs * self._length).tolist())
        for row, element in zip(rows.tolist(), found, strict=True):
            if element is None:
                raise BadRecord(
                    f"{self.where(row)} is None, with which Grain marks what was left out: give "
                    "the pipeline filter= instead, and take from the chain what leaves out",
                    index=row,
                )
        return found

    def _elements(self, indices: list[int]) -> list[Any]:
        """Elements by one call, or one by one if the chain has no batches or they differ."""
        several = len(indices) > 1
        if self._has_batches is None and several:
            few = [indices[0], indices[len(indices) // 2], indices[-1]]
            one_by_one = [self.dataset[index] for index in few]
            self._has_batches = self._batch_is(few, one_by_one)
        if self._has_batches and several:
            try:
                found = list(self._batched._getitems(indices))
            except Exception:
                pass  # one by one they are read, or say which of them cannot be
            else:
                if len(found) == len(indices):
                    return found
        return [self.dataset[index] for index in indices]

    def _batch_is(self, indices: list[int], elements: list[Any]) -> bool:
        try:
            return exact(list(self._batched._getitems(indices))) == exact(elements)
        except Exception:
            return False

    @property
    def spec(self) -> Spec:
        """Trees."""
        return Spec(trees=True)

    def fingerprint(self) -> dict[str, Any]:
        """Names and lengths of the chain, fingerprints of its sources, and a few elements.

        Only the first digits of floating-point numbers count: see `tree_digest.coarse`. The first
        call reads up to 16 elements twice.

        Raises:
          Misuse: an element is another one when it is read again.
        """
        if self._fingerprint is None:
            items = np.unique(np.linspace(0, self._length - 1, _SAMPLED).astype(np.int64)).tolist()
            sample = self._sampled(items)
            again = self._sampled(items)
            changed = [
                item
                for item, one, other in zip(items, sample, again, strict=True)
                if exact(one) != exact(other)
            ]
            if changed:
                raise Misuse(
                    f"{self.where(changed[0])} is another one when it is read again: a batch would "
                    "not be the same after a restore; take random numbers from .random_map with a "
                    "seed, and leave what is outside of the chain alone"
                )
            self._fingerprint = sealed(
                {
                    "format": "grain",
                    "records": self._length,
                    "chain": _chain(self.dataset),
                    "reads": [
                        json_digest(source.fingerprint())
                        for source in _sources(self.dataset)
                        if hasattr(source, "fingerprint")
                    ],
                    "sample": coarse(sample),
                    "version": self.version,
                }
            )
        return self._fingerprint

    def _sampled(self, items: list[int]) -> list[Any]:
        found = []
        for item in items:
            try:
                found += self.read_epochs(np.array([item]), np.zeros(1, np.int64))
            except Exception as error:
                if not is_of_a_record(error):
                    raise
                found.append("bad")  # whoever comes to it decides what to do about it
        return found

    def where(self, index: int) -> str:
        """See `Source.where`."""
        return f"element {index} of {_chain(self.dataset)}"

    def close(self) -> None:
        """See `Source.close`."""
        self._closed = True

    def __getstate__(self) -> dict[str, Any]:
        import cloudpickle  # comes with Grain

        return {**self.__dict__, "dataset": cloudpickle.dumps(self.dataset), "_batched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dataset = pickle.loads(state["dataset"])
        batched = _with_batched_sources(dataset)
        self.__dict__.update(state | {"dataset": dataset, "_batched": batched})


def adapted(source: Any) -> Any:
    """A source for what Grain calls one; anything else as it is. Does not import Grain.

    Raises:
      Misuse: it is a pipeline of Grain without random access; what `GrainSource` raises.
    """
    if _is_a(source, "MapDataset"):
        return GrainSource(source)
    if any(_is_a(source, name) for name in ("IterDataset", "DatasetIterator", "DataLoader")):
        raise Misuse(
            f"a {type(source).__name__} of Grain has no random access and can be no source: give "
            "the MapDataset that it begins with, or leave it to Grain, and give its iterator as "
            "`data` to the checkpoint manager"
        )
    return source


def _is_a(value: object, name: str) -> bool:
    kind = getattr(sys.modules.get("grain"), name, None)  # not imported: nothing can be one
    return isinstance(kind, type) and isinstance(value, kind)


def _nodes(dataset: Any) -> Iterator[Any]:
    """A dataset and all that it is made of, from the last transformation to the sources."""
    yield dataset
    for parent in getattr(dataset, "parents", ()):
        yield from _nodes(parent)


def _sources(dataset: Any) -> list[Any]:
    """The sources that it reads from."""
    return [node._source for node in _nodes(dataset) if hasattr(node, "_source")]


def _chain(dataset: Any) -> str:
    """The chain of a dataset: names and lengths, which are the same in every process."""
    name, parents = type(dataset).__name__, getattr(dataset, "parents", ())
    if not parents:
        beneath = getattr(dataset, "_source", None)
        name += "" if beneath is None else f"({type(beneath).__name__})"
    behind = ", ".join(map(_chain, parents))
    behind = f"({behind})" if len(parents) > 1 else behind
    return f"{name} {len(dataset)}" + (f" < {behind}" if behind else "")


def _refuse_what_is_no_source(dataset: Any) -> None:
    nodes = list(_nodes(dataset))
    if any(kind.__name__ == "FilterMapDataset" for node in nodes for kind in type(node).__mro__):
        raise Misuse(
            "a MapDataset with .filter has elements that are none, so that nobody knows how many "
            "there are: take .filter out of it, and give the pipeline filter=, such as "
            "datapipe.Kept.of_mask(...) with one boolean for each element"
        )
    if len(dataset) >= _ENDLESS and any(len(node) >= sys.maxsize for node in nodes):
        raise Misuse(
            f"a MapDataset of {len(dataset)} elements: take .repeat() out of it, the pipeline has "
            "epochs= for that, without end by default"
        )


# -- reading batches -------------------------------------------------------------------------------


class _Batches:
    """A source with PyTorch's `__getitems__`, which gives it to Grain as `_getitems`."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index]

    def _getitems(self, indices: Sequence[int]) -> Any:
        return self._source.__getitems__(indices)


def _with_batched_sources(dataset: Any) -> Any:
    """A copy of the dataset that reads batches where Grain would read single elements.

    `_batch_is` compares the two before the copy is used.
    """
    source, parents = getattr(dataset, "_source", None), getattr(dataset, "_parents", ())
    if hasattr(source, "__getitems__") and not hasattr(source, "_getitems"):
        changed: dict[str, Any] = {"_source": _Batches(source)}
    else:
        twins = tuple(map(_with_batched_sources, parents))
        if all(twin is parent for twin, parent in zip(twins, parents, strict=True)):
            return dataset
        changed = {"_parents": twins}
    twin = copy.copy(dataset)
    twin.__dict__.pop("_stats", None)  # made when first used, from those of its parents
    twin.__dict__.update(changed)
    return twin
