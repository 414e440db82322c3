"""Which examples a range of batches held: counted along the committed steps of a lineage. No I/O.

The batches between two commits were served with the batch size that the second one tells. A
position does not depend on a batch size, so from where one attempt stopped the next is counted
with its own, and with what was left out at that time. Where records do not tell the sizes, a range
is given that holds all that may have been served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ckpt.errors import Misuse
from ckpt.lineage import Lineage, served

Json = Any
Ranges = list[tuple[int, int]]


class Examples(Protocol):
    """What is known of the order of the examples, whatever iterator serves them."""

    def span(
        self, state: Json, first: int, stop: int, skips: Sequence[tuple[int, int]], size: int
    ) -> Iterable[tuple[int, int]]:
        """What batches `first` to `stop - 1` of that size hold, counted from a state.

        `skips` are left out beside those of the state.
        """

    def after(
        self, state: Json, batches: int, skips: Sequence[tuple[int, int]], size: int
    ) -> int | None:
        """The `next_example` of the state so many batches later, at least one."""

    def toward(self, state: Json, later: Json) -> Json:
        """The state with the order that was in force until a later one.

        As it is where nothing has changed in between, or `later` does not lie ahead of it. None: as
        the iterator of today would go on from it.
        """


@dataclass(frozen=True)
class Commit:
    """What a committed step tells of one iterator."""

    step: int
    attempt: int
    state: Json
    batch_size: int


@dataclass(frozen=True)
class Now:
    """The iterator of today."""

    batch_size: int
    state: Json = None
    attempt: int | None = None
    """Which has served with it so far; None: none has."""


@dataclass(frozen=True)
class Counted:
    """The examples of a range of batches."""

    ranges: Ranges
    covering: tuple[range, ...] = ()
    """Batches of which it is not known what they held: the ranges have all that they may have."""


@dataclass(frozen=True)
class _Piece:
    """Batches of one chain member, in examples each: at least and at most so many."""

    batches: range
    least: int
    most: int
    skips: Sequence[tuple[int, int]]
    until: int | None = None
    """The position behind the last one, where nothing is known of each."""
    certain: bool = True
    """Else they may have been served in another order."""


@dataclass(frozen=True)
class Course:
    """The commits of a lineage, as far as one iterator is concerned.

    Args:
        read: what the commit of a step number tells; None where it cannot be read or knows nothing
            of the iterator.
        in_force: what each attempt left out beside what states know of.
        now: None where there is none, as on the command line.
    """

    line: Lineage
    steps: Sequence[int]
    read: Callable[[int], Commit | None]
    in_force: Mapping[int, Sequence[tuple[int, int]]]
    examples: Examples
    now: Now | None = None
    _seen: dict[int, Commit | None] = field(default_factory=dict)

    def held(self, batches: range, base: Commit) -> Counted:
        """The examples of batches, counted from 0; `base` is a commit at or before them."""
        found: Ranges = []
        covering: list[range] = []
        for start, pieces in self._pieces(batches, base):
            self._count(start, pieces, batches, found, covering)
        return Counted(found, tuple(dict.fromkeys(covering)))

    def _pieces(self, wanted: range, base: Commit) -> list[tuple[Commit, list[_Piece]]]:
        steps = [step for step in sorted(self.steps) if step > base.step]
        inner = [step for step in steps if step < wanted.stop]
        last = next(filter(None, (self._at(s) for s in steps if s >= wanted.stop)), None)
        while last is None and inner and wanted.start < wanted.stop:
            last = self._at(inner.pop())
        found = [] if last is None else self._between(base, last, inner)
        newest = base if last is None else last
        if newest.step < wanted.stop:
            found += self._since(newest, wanted)
        return found

    def _at(self, step: int) -> Commit | None:
        if step not in self._seen:
            self._seen[step] = self.read(step)
        return self._seen[step]

    # -- between two commits -----------------------------------------------------------------------

    def _between(
        self, one: Commit, two: Commit, inner: list[int]
    ) -> list[tuple[Commit, list[_Piece]]]:
        """Looks at as few commits between them as will do."""
        one = self._toward(one, two.state)
        pieces = self._known(one, two)
        if all(piece.least for piece in pieces) and self._agree(
            one, two, pieces, has_inner=bool(inner)
        ):
            return [(one, pieces)]
        while inner:
            index = len(inner) // 2
            middle = self._at(inner[index])
            if middle is not None:
                before = self._between(one, middle, inner[:index])
                return [*before, *self._between(middle, two, inner[index + 1 :])]
            inner = [*inner[:index], *inner[index + 1 :]]
        return [(one, self._derived(one, two, pieces))]

    def _known(self, one: Commit, two: Commit) -> list[_Piece]:
        """The sizes that the two tell: that of an attempt is what its next commit says."""
        sizes = {one.attempt: one.batch_size, two.attempt: two.batch_size}
        return [
            self._piece(attempt, share, sizes.get(attempt, 0), sizes.get(attempt, 0))
            for attempt, share in self._shares(one.step, two.step)
        ]

    def _agree(
        self, one: Commit, two: Commit, pieces: Sequence[_Piece], *, has_inner: bool
    ) -> bool:
        """Does counting from one lead to the other? States that do not tell: if none is between."""
        there = _position(two.state)
        if there is None or _position(one.state) is None:
            return not has_inner
        return self._end(one, pieces) == there

    def _derived(self, one: Commit, two: Commit, pieces: list[_Piece]) -> list[_Piece]:
        """The share of attempts of which no commit is left, by what the others served."""
        there = _position(two.state)
        if there is None or _position(one.state) is None:
            raise Misuse(
                f"no step between {one.step} and {two.step} is left that tells the batch size of "
                "each, and the states do not tell how many examples were served: rewind without "
                "skipping"
            )
        unknown = [index for index, piece in enumerate(pieces) if not piece.least]
        last = pieces[-1]
        if not unknown:
            return [_Piece(range(one.step, two.step), 0, 0, last.skips, there)]
        first, stop = unknown[0], unknown[-1] + 1
        before = self._end(one, pieces[:first])
        # Where the attempt of the second commit began: so far back as it can have served since.
        behind = before + _most(
            there - before,
            there,
            lambda ahead: self._end(_moved(one, before + ahead), pieces[stop:]),
        )
        if self._end(_moved(one, behind), pieces[stop:]) != there:
            return [_Piece(range(one.step, two.step), 0, 0, last.skips, there)]
        middle = range(pieces[first].batches.start, pieces[stop - 1].batches.stop)
        size, odd = divmod(self._count_of(one, before, behind, pieces[first].skips), len(middle))
        if len(unknown) == 1 and not odd and size:
            exact = [*pieces]
            exact[first] = _Piece(middle, size, size, pieces[first].skips)
            if self._agree(one, two, exact, has_inner=False):
                return exact
        return [*pieces[:first], _Piece(middle, 0, 0, last.skips, behind), *pieces[stop:]]

    # -- after the last commit ---------------------------------------------------------------------

    def _since(self, last: Commit, wanted: range) -> list[tuple[Commit, list[_Piece]]]:
        """Twice, where the order has changed and it is not known which one was in force."""
        if self.now is None:
            return [(last, self._sized(last, wanted)[0])]
        ahead = self._toward(last, None if self.now.attempt is None else self.now.state)
        pieces, served = self._sized(ahead, wanted)
        if served or ahead == last or self._same(last, ahead, pieces, wanted):
            return [(ahead, pieces)]
        either = [replace(piece, certain=False) for piece in pieces]
        return [(last, either), (ahead, either)]

    def _same(self, one: Commit, two: Commit, pieces: Sequence[_Piece], wanted: range) -> bool:
        """Whichever order it was: were it the same examples?"""
        found: list[Ranges] = []
        for base in (one, two):
            found.append([])
            self._count(base, pieces, wanted, found[-1], [])
        return found[0] == found[1]

    def _sized(self, last: Commit, wanted: range) -> tuple[list[_Piece], bool]:
        """And whether the iterator of today has served them."""
        pieces: list[_Piece] = []
        served = self.now is not None and self.now.attempt == last.attempt
        for attempt, share in self._shares(last.step, wanted.stop):
            left = attempt != self.line[0].attempt
            sizes = {last.batch_size, *([] if self.now is None else [self.now.batch_size])}
            if left and attempt == last.attempt:
                sizes = {last.batch_size}
            elif self._serves(attempt, last, pieces, share.start, wanted.start):
                assert self.now is not None
                sizes = {self.now.batch_size}
                served = True
            pieces.append(self._piece(attempt, share, min(sizes), max(sizes)))
        return pieces, served

    def _serves(
        self, attempt: int, last: Commit, before: Sequence[_Piece], start: int, wanted: int
    ) -> bool:
        """Are the wanted batches, from `start` on, those of the attempt that is running?

        One that has served none of them since may be meant, or one that ended before it without a
        commit: whoever skips after a restart speaks of what the trainer before it has told.
        """
        if self.now is None or attempt != self.now.attempt or attempt == last.attempt:
            return False
        here = _position(self.now.state)
        if here is None or _position(last.state) is None:
            return False
        if any(piece.least != piece.most for piece in before):
            return False
        began = _moved(last, self._end(last, before))
        skips, size = self.in_force.get(attempt, ()), self.now.batch_size

        def served_to(count: int) -> int:
            return self._end(began, [_Piece(range(count), size, size, skips)])

        done = _most(here - _known_position(began), here, served_to)
        return done > 0 and served_to(done) == here and wanted < start + done

    def _toward(self, commit: Commit, later: Json) -> Commit:
        return replace(commit, state=self.examples.toward(commit.state, later))

    # -- arithmetic --------------------------------------------------------------------------------

    def _shares(self, start: int, stop: int) -> list[tuple[int, range]]:
        return [(reach.attempt, share) for reach, share in served(self.line, range(start, stop))]

    def _piece(self, attempt: int, share: range, least: int, most: int) -> _Piece:
        return _Piece(share, least, most, self.in_force.get(attempt, ()))

    def _count(
        self,
        base: Commit,
        pieces: Sequence[_Piece],
        wanted: range,
        found: Ranges,
        covering: list[range],
    ) -> None:
        """Adds what the wanted ones of the pieces after a commit held."""
        if _position(base.state) is None:
            self._count_blindly(base, pieces, wanted, found)
            return
        low = high = base
        for piece in pieces:
            part = range(
                max(piece.batches.start, wanted.start), min(piece.batches.stop, wanted.stop)
            )
            first, stop = (each - piece.batches.start for each in (part.start, part.stop))
            exact = piece.until is None and low == high and piece.least == piece.most
            if part and exact:
                found += self._span(low.state, first, stop, piece.skips, piece.least)
                covering += [] if piece.certain else [part]
            elif part:
                start, end = _known_position(low), piece.until
                if end is None:
                    start = self._end(low, [_first(piece, first, piece.least)])
                    end = self._end(high, [_first(piece, stop, piece.most)])
                count = self._count_of(base, start, end, piece.skips)
                found += self._span(_moved(base, start).state, 0, count, piece.skips, 1)
                covering.append(part)
            if piece.until is not None:
                low = high = _moved(base, piece.until)
            else:
                whole = len(piece.batches)
                low = _moved(base, self._end(low, [_first(piece, whole, piece.least)]))
                high = _moved(base, self._end(high, [_first(piece, whole, piece.most)]))

    def _count_blindly(
        self, base: Commit, pieces: Sequence[_Piece], wanted: range, found: Ranges
    ) -> None:
        """States that tell no position: all batches since the commit were of one size."""
        sizes = {size for piece in pieces for size in (piece.least, piece.most)}
        if len(sizes) > 1:
            raise Misuse(
                f"the batch size was {', '.join(map(str, sorted(sizes)))} since step {base.step}, "
                "and the states do not tell a position (`next_example`) to count on from: rewind "
                "without skipping"
            )
        for piece in pieces:
            first = max(piece.batches.start, wanted.start) - base.step
            stop = min(piece.batches.stop, wanted.stop) - base.step
            if first < stop:
                found += self._span(base.state, first, stop, piece.skips, piece.least)

    def _span(
        self, state: Json, first: int, stop: int, skips: Sequence[tuple[int, int]], size: int
    ) -> Ranges:
        spans = self.examples.span(state, first, stop, skips, size)
        return [(int(start), int(end)) for start, end in spans]

    def _end(self, base: Commit, pieces: Sequence[_Piece]) -> int:
        """The position after pieces of which the sizes are known."""
        at = base
        for piece in pieces:
            count = len(piece.batches)
            if count:
                position = self.examples.after(at.state, count, piece.skips, piece.least)
                at = at if position is None else _moved(at, position)
        return _known_position(at)

    def _count_of(
        self, base: Commit, start: int, stop: int, skips: Sequence[tuple[int, int]]
    ) -> int:
        """How many examples lie between two positions."""
        at = _moved(base, start)
        return _most(
            stop - start, stop, lambda count: self._end(at, [_Piece(range(count), 1, 1, skips)])
        )


def _first(piece: _Piece, count: int, size: int) -> _Piece:
    """The first batches of a piece, if they were of that size."""
    return _Piece(range(count), size, size, piece.skips)


def _most(upper: int, there: int, reached: Callable[[int], int]) -> int:
    """The greatest number up to `upper` that does not reach beyond a position; 0 if all do."""
    low, high = 0, max(0, upper)
    while low < high:
        middle = (low + high + 1) // 2
        if reached(middle) <= there:
            low = middle
        else:
            high = middle - 1
    return low


def _moved(commit: Commit, position: int) -> Commit:
    return replace(commit, state={**commit.state, "next_example": position})


def _known_position(commit: Commit) -> int:
    found = _position(commit.state)
    assert found is not None
    return found


def _position(state: Json) -> int | None:
    found = state.get("next_example") if isinstance(state, dict) else None
    return found if type(found) is int else None
