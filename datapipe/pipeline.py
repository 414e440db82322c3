"""The pipeline: what is served, in which order, through which functions. A value, no machinery."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Iterator as _Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datapipe.batches.batch import Recipe
from datapipe.batches.faults import OnBadRecord, Tolerance
from datapipe.batches.transforms import Transform, extended
from datapipe.identity import identity_of
from datapipe.integers import integer
from datapipe.order.block_shuffle import WINDOW, Blocks
from datapipe.order.examples import Examples, Segment
from datapipe.order.mixture import BLOCK, Mixture
from datapipe.order.plan import Plan, Remainder
from datapipe.order.streams import SHUFFLES, Shuffle
from datapipe.prefetch.pace import Pace
from datapipe.prefetch.prefetcher import Prefetcher
from datapipe.provenance import Held, held, holding
from datapipe.segments import ON_CHANGE, OnChange, Positions
from datapipe.sources.epoch_sources import OrderedSource, varies
from datapipe.sources.grain_source import adapted
from datapipe.sources.stages import Filter, Packing, staged
from datapipe.state import JSON
from datapipe.texts import one_of, text
from formats.arguments import mapping, truth
from formats.errors import Misuse, NotFound
from formats.source import blocks_of

if TYPE_CHECKING:
    import jax

    from datapipe.iterator import Dataset, Iterator
    from formats.source import Source

_log = logging.getLogger("datapipe")

_SINGLE: Final = "source"  # the name of a source that is given without one
_SOURCE_METHODS: Final = ("__len__", "read", "fingerprint", "where")
_NAMED: Final = 4  # sources that the log names


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Batches of a source, in an order that depends on nothing but these arguments.

    ::

        pipe = Pipeline(source, batch_size=256, seed=17).map(decode, version="1")
        for batch in pipe.iterator(): ...

    Immutable: `.map`, `.random_map` and `.map_batch` return a new pipeline. Without functions of
    examples a batch is a dict of the columns of the source, or a one-dimensional array of bytes
    objects.

    Args:
      source: what `formats.open_source` returns, or anything with its methods; a
        `grain.MapDataset` (see `GrainSource`); or several of these by name.
      batch_size: examples per batch, over all processes.
      seed: of the shuffle and of `.random_map`; 0 to 2^64 - 1.
      shuffle: True or "global": every epoch in another order of all records; "grain": in the order
        that Grain's shuffle has; "blocks": blocks of records that lie together, such as the row
        groups of Parquet files, are shuffled, and then the records of a few of them; False or
        "none": as stored.
      shuffle_window: blocks whose records are shuffled together; for shuffle="blocks", which has 16
        by default. The batches of a window are read from that many blocks again and again.
      epochs: how often each record is served; None: without end. Of several sources, the first one
        that has been served so often ends the run.
      remainder: what becomes of the end of an epoch: "carry": batches run on into the next epoch,
        and a short one at the very end is left out; "keep": an epoch may end with a short batch;
        "drop": what is left over of an epoch is not served.
      filter: which records are left, as a `Where` or several that must all hold, a `Kept`, or the
        path of a sidecar that `ckpt data index` has written; by name for some of several sources.
      pack: how documents become rows of tokens, as a `Pack` or a `Concatenate`; by name for some
        of several sources. Examples are rows then, of `tokens`, `segment_ids` and `positions`.
      weights: of several sources, by name, of any scale; by default their numbers of records. All
        blocks of at most 4,096 examples have the same number of examples of a source, at least one
        if its weight is not 0: the log warns if that is far more than its share.
      skip_records: whether the record of a skipped example is left out of all later epochs, too;
        by default it comes back in the next one.
      on_bad_record: what becomes of a record that cannot be read, or for which a `.map` before any
        `.random_map` raises. "raise": an error that names it. "replace": another record of its
        source takes its place in all epochs; the log says so once, and the state has it, so that a
        resume does the same (see `datapipe.batches.substitutes`).
      bad_record_limit: with "replace", how many records may be bad, over all epochs and sources:
        those that a process finds and those in the state it went on from.

    `filter` and `pack` are applied once: the attribute `source` is the result.

    Raises:
      NotFound: a source is empty, or a filter keeps nothing of it; there is no such sidecar.
      Mismatch, Damaged: a sidecar is of other data, or not as it was written.
      Misuse: the batch is larger than the sources, or an argument is out of range.
    """

    source: Source | Mapping[str, Source]
    _: KW_ONLY
    batch_size: int
    seed: int
    shuffle: bool | Shuffle = True
    shuffle_window: int | None = None
    epochs: int | None = None
    remainder: Remainder = "carry"
    filter: InitVar[Filter | Mapping[str, Filter] | None] = None
    pack: InitVar[Packing | Mapping[str, Packing] | None] = None
    weights: Mapping[str, float] | None = None
    skip_records: bool = False
    on_bad_record: OnBadRecord = "raise"
    bad_record_limit: int = Tolerance.limit
    transforms: tuple[Transform, ...] = ()

    def __post_init__(
        self,
        filter: Filter | Mapping[str, Filter] | None,
        pack: Packing | Mapping[str, Packing] | None,
    ) -> None:
        given = {name: adapted(each) for name, each in _by_name(self.source).items()}
        if not given:
            raise NotFound("no source is given; check where their names come from")
        for name, source in given.items():
            _must_be_a_source(name, source)
        object.__setattr__(self, "shuffle", _as_shuffle(self.shuffle))
        object.__setattr__(self, "skip_records", truth("skip_records", self.skip_records))
        if self.shuffle_window is not None and self.shuffle != "blocks":
            raise Misuse(f"shuffle_window is for shuffle='blocks', here it is {self.shuffle!r}")
        views = staged(given, filter, pack)
        for number, (name, view) in enumerate(views.items()):
            _must_be_a_source(name, view)
            if isinstance(view, OrderedSource):
                seed = integer("seed", self.seed, 0, (1 << 64) - 1)
                views[name] = view.shuffled(self._order, seed, number, self._window)
        ordered = {isinstance(view, OrderedSource) for view in views.values()}
        if self._order != "none" and len(ordered) > 1:
            raise Misuse(
                "pack: Concatenate is for all sources or none, since it follows the shuffle: give "
                f"it for each of {', '.join(views)}"
            )
        if self.skip_records and (other := [name for name in views if varies(views[name])]):
            raise Misuse(
                f"skip_records: an item of {other[0]} may be another one in another epoch, as with "
                "Concatenate, or a shuffle in a chain of Grain: take Pack, or do without"
            )
        several = isinstance(self.source, Mapping)
        object.__setattr__(self, "source", views if several else views[_SINGLE])
        if self.weights is not None:
            weights = mapping("weights", self.weights)
            if {*weights} != {*self.sources}:
                raise Misuse(
                    f"weights: wanted one for each of {sorted(self.sources)}, "
                    f"found {sorted(weights)}"
                )
        if not isinstance(self.transforms, tuple) or not all(
            isinstance(each, Transform) for each in self.transforms
        ):
            raise Misuse(
                f"transforms: wanted what .map and the like make, found {self.transforms!r:.80}"
            )
        self._tolerance  # noqa: B018  (refuses what is out of range)
        records = sum(map(len, self.sources.values()))
        if self.plan.batch_size > records:
            raise Misuse(
                f"a batch of {self.batch_size} is larger than the source, which holds {records} "
                "records; make the batch smaller"
            )
        if not self.transforms:  # each function makes another pipeline, which has the same weights
            self._tell_of_raised_shares()

    # -- functions -----------------------------------------------------------------------------

    def map(self, fn: Callable[[Any], Any], *, version: str) -> Pipeline:
        """`fn(example)` for each example: a record as bytes, a dict of its columns, or a tree.

        It returns an example: not None, nor what can be iterated over only once, such as a
        generator. Change `version` whenever `fn` changes what it returns: it is a text of 1 to 64
        characters.

        Raises:
          Misuse: see `Transform`; or a function of batches comes before it.
        """
        return self._with(Transform("map", fn, version))

    def random_map(self, fn: Callable[[Any, Any], Any], *, version: str) -> Pipeline:
        """`fn(example, rng)` for each example, with a fresh `numpy.random.Generator`.

        Its random numbers depend only on seed, epoch, record, and the place of `fn` among the
        functions of the pipeline.

        Raises:
          Misuse: as for `map`.
        """
        return self._with(Transform("random_map", fn, version))

    def map_batch(self, fn: Callable[[Any], Any], *, version: str) -> Pipeline:
        """`fn(batch)` for each batch: a tree of arrays with a leading axis of rows.

        It must treat each row on its own: with a sharding it gets the rows of one process. It
        returns a tree of one array or more with as many rows; None may stand for a part that is not
        there. Anything else, such as scalars, lists of numbers or arrays of fewer rows, is a
        `Mismatch` when the batch is made. Functions of examples come before it.

        Raises:
          Misuse: see `Transform`.
        """
        return self._with(Transform("map_batch", fn, version))

    def _with(self, added: Transform) -> Pipeline:
        return replace(self, transforms=extended(self.transforms, added))

    # -- order and identity --------------------------------------------------------------------

    @cached_property
    def sources(self) -> dict[str, Source]:
        """All sources by name, in the order of their numbers; a single one is called "source"."""
        return _by_name(self.source)

    @cached_property
    def plan(self) -> Plan:
        """The order of the records. Reads no data."""
        counts = tuple(len(source) for source in self.sources.values())
        segment = Segment(0, counts, Mixture.of(self._weights).counts)
        ordered = any(isinstance(source, OrderedSource) for source in self.sources.values())
        shuffle = "none" if ordered else self._order
        blocks: tuple[Blocks, ...] = ()
        if shuffle == "blocks":
            cuts = map(blocks_of, self.sources.values())
            blocks = tuple(Blocks(bounds, self._window) for bounds in cuts)
        order = Examples((segment,), self.seed, shuffle, self.epochs, blocks)
        return Plan(order, self.batch_size, self.remainder, skip_records=self.skip_records)

    @property
    def _weights(self) -> list[float]:
        """By the number of the source."""
        given = self.weights or {}
        return [given.get(name, len(source)) for name, source in self.sources.items()]

    def _tell_of_raised_shares(self) -> None:
        """Warns of sources that get far more than their weight: one example of each block."""
        names = list(self.sources)
        raised = self.plan.order.segments[-1].mixture.raised(self._weights)
        if not raised:
            return
        told = [
            f"{names[number]} gets {100 * got:.3g}% and wants {100 * wanted:.3g}%"
            for number, wanted, got in raised
        ]
        more = f", and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
        _log.warning(
            "weights: a source gets one of %d examples at least, however little it wants: %s%s. "
            "Leave it out, give it more weight, or make one source of several",
            BLOCK,
            ", ".join(told[:_NAMED]),
            more,
        )

    @property
    def _order(self) -> Shuffle:
        if isinstance(self.shuffle, bool):
            return "global" if self.shuffle else "none"
        return self.shuffle

    @property
    def _window(self) -> int:
        return WINDOW if self.shuffle_window is None else self.shuffle_window

    @cached_property
    def identity(self) -> JSON:
        """What saved positions belong to. The first call asks the sources for fingerprints."""
        labels = [transform.label for transform in self.transforms]
        return identity_of(self.plan, self._fingerprints, labels)

    @cached_property
    def _fingerprints(self) -> dict[str, dict[str, Any]]:
        return {name: source.fingerprint() for name, source in self.sources.items()}

    @property
    def _tolerance(self) -> Tolerance:
        return Tolerance(self.on_bad_record, self.bad_record_limit)

    # -- provenance ----------------------------------------------------------------------------

    def pieces(self, batches: int | range, *, plan: Plan | None = None) -> Held:
        """Which records, and which of their tokens, batches are made of, without reading data.

        Args:
          batches: counted from example 0, as by `plan.records`.
          plan: that of an iterator, if examples are skipped there.

        Raises:
          Misuse: no such batches; or `plan` belongs to another pipeline.
        """
        return held(tuple(self.sources.values()), self._or_own(plan).rows(batches))

    def batches(
        self,
        record: int,
        *,
        token: int | None = None,
        source: str | None = None,
        epochs: range | None = None,
        plan: Plan | None = None,
    ) -> tuple[int, ...]:
        """The batches that hold a record, or one token of it, without reading data; ascending.

        Args:
          record: its number in the source as it was given, before filter and packing.
          token: of a packed source: its number in the document.
          source: the name of the source; needed if there are several.
          epochs: the epochs of the source to look at; by default all of them.
          plan: that of an iterator, if examples are skipped there.

        Raises:
          Misuse: no such record, token or source; the plan has no end and `epochs` is missing; or
            `plan` belongs to another pipeline.
        """
        names = list(self.sources)
        if source is None and len(names) == 1:
            source = names[0]
        source = one_of("source", source, names)
        plan, number = self._or_own(plan), names.index(source)
        asked = plan.epochs_within(number, epochs)
        return holding(self.sources[source], number, record, token, asked, plan)

    def _or_own(self, plan: Plan | None) -> Plan:
        if plan is None:
            return self.plan
        if not isinstance(plan, Plan):
            raise Misuse(f"plan: wanted that of an iterator, found {plan!r:.80}")
        wanted, found = (each.order.segments[-1].items for each in (self.plan, plan))
        if found != wanted:
            raise Misuse(
                f"plan: wanted one of this pipeline, whose sources have {wanted} items, found one "
                f"of {found} items"
            )
        return plan

    # -- iterating -----------------------------------------------------------------------------

    def iterator(
        self,
        *,
        on_change: OnChange = "raise",
        sharding: jax.sharding.Sharding | None = None,
        prefetch: int = 2,
        window: int = 16,
        threads: int = 1,
        workers: int = 0,
    ) -> Iterator:
        """An iterator at example 0.

        Args:
          on_change: what `set_state` does with a position of a run that had other weights, shorter
            sources or fewer of them: "raise", or "segment": the run goes on from there with those
            of today, and the state has both (see `datapipe.segments`). A source may have grown by
            files behind those it had; new sources come last. New records are served from the next
            epoch of their source on.
          sharding: batches become global `jax.Array`s with this sharding, whose first axis is the
            batch. Each process reads only the rows that its devices hold, each of them once.
          prefetch: batches made ahead in threads; 0: each is made when it is asked for, as are
            those of a window that is read in less time than a thread is worth. With a sharding, at
            most two beyond the one delivered are on devices, or on the way there.
          window: batches whose records are read by one call; fewer if they would take more than 64
            MiB; and after the start and every change of position the windows grow from one batch
            on. The records of a window are held in memory, and those of two while one follows the
            other. Batches without functions are slices of it: keeping one keeps the window.
          threads: batches made at a time; more than one needs functions that are thread-safe.
          workers: processes that make batches, for functions in Python that take long; 0: they are
            made in this process. Each worker has up to two windows of batches in memory that it
            shares with this process, `2 * workers * window` batches in all, and the records of one
            window. Batches may be kept: from the fifth one on they are copied out of that memory.

        The other arguments do not change what comes out. What goes to workers must be picklable by
        cloudpickle, as functions and classes of the program itself, lambdas and closures are.
        Functions that use JAX find only the CPU there. A worker that dies is replaced, and its
        batches are made again.

        Raises:
          Misuse: an argument is out of range, the batch cannot be sharded like that, or something
            cannot be sent to workers.
        """
        from datapipe.iterator import Iterator  # Grain takes a second to import

        on_change = one_of("on_change", on_change, ON_CHANGE)
        pace = Pace(prefetch, window, threads, workers)
        feed = None
        if sharding is not None:
            from datapipe.prefetch.device_feed import Feed

            if self.remainder == "keep":
                raise Misuse("a short batch cannot be sharded: take remainder='carry' or 'drop'")
            feed = Feed(sharding, self.plan.batch_size)
        sources = tuple(self.sources.values())
        recipe = Recipe(sources, self.transforms, self.plan.order.seed, self._tolerance)
        positions = Positions(self.plan, self.identity, self._fingerprints, on_change)
        return Iterator(positions, Prefetcher(recipe, feed, pace))

    def dataset(self, **options: Any) -> Dataset:
        """The pipeline as a `grain.IterDataset`, so that Grain's own transformations can follow.

        `options` are those of `iterator`, whose iterator it gives.
        """
        from datapipe.iterator import Dataset

        return Dataset(partial(self.iterator, **options))

    def __iter__(self) -> _Iterator[Any]:
        return self.iterator()


def _as_shuffle(given: object) -> bool | Shuffle:
    if isinstance(given, bool | np.bool_):
        return bool(given)
    for each in SHUFFLES:
        if isinstance(given, str) and given == each:
            return each
    raise Misuse(
        f"shuffle must be True, False, or one of {', '.join(SHUFFLES)}, found {given!r:.80}"
    )


def _by_name(source: Source | Mapping[str, Source]) -> dict[str, Source]:
    return dict(source) if isinstance(source, Mapping) else {_SINGLE: source}


def _must_be_a_source(name: str, source: object) -> None:
    text("the name of a source", name, 1, 64)
    missing = [method for method in _SOURCE_METHODS if not hasattr(source, method)]
    if missing:
        raise Misuse(
            f"{type(source).__name__} is no source: it has no {', '.join(missing)}; "
            "open files with formats.open_source(...)"
        )
    if len(source) == 0:  # type: ignore[arg-type]
        raise NotFound(f"{name} holds no records; check its pattern and its filters")
