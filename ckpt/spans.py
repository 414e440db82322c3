"""Which examples a range of batches held: counted along the committed steps of a lineage. No I/O.

The batches between two commits were served with the batch size that the second one tells. All is
counted in examples from the state of a commit, leaving out what was skipped at that time, so that
a change of the batch size is no more than another factor. Where records do not tell the sizes, a
range is given that holds all that may have been served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt.lineage import Lineage, served

Json = Any
Ranges = list[tuple[int, int]]


class Examples(Protocol):
    """What is known of the order of the examples, whatever iterator serves them."""

    @property
    def unit(self) -> int:
        """Only multiples of it can be asked for."""

    def after(
        self, state: Json, first: int, stop: int, skips: Sequence[tuple[int, int]]
    ) -> Iterable[tuple[int, int]]:
        """Of the examples that follow a state numbers `first` to `stop - 1`, from 0.

        Neither those that the state skips nor `skips` are counted.
        """

    def reached(self, state: Json, count: int, skips: Sequence[tuple[int, int]]) -> int | None:
        """The position that so many examples later was saved; None: such states do not tell."""


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
    total: int | None = None
    """Of all of them together, where nothing is known of the single one."""


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
        return Counted(found, tuple(covering))

    def _pieces(self, wanted: range, base: Commit) -> list[tuple[Commit, list[_Piece]]]:
        steps = [step for step in sorted(self.steps) if step > base.step]
        inner = [step for step in steps if step < wanted.stop]
        last = next(filter(None, (self._at(s) for s in steps if s >= wanted.stop)), None)
        while last is None and inner and wanted.start < wanted.stop:
            last = self._at(inner.pop())
        found = [] if last is None else self._between(base, last, inner)
        newest = base if last is None else last
        if newest.step < wanted.stop:
            found.append((newest, self._since(newest, wanted)))
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
        count, skips = self._end(one, pieces)
        there = _position(two.state)
        if there is None:
            return not has_inner
        if count % self.examples.unit:
            return False
        return self.examples.reached(one.state, count, skips) == there

    def _derived(self, one: Commit, two: Commit, pieces: list[_Piece]) -> list[_Piece]:
        """The share of attempts of which no commit is left, by what the others served."""
        unknown = [index for index, piece in enumerate(pieces) if not piece.least]
        batches = range(one.step, two.step)
        first, stop = (unknown[0], unknown[-1] + 1) if unknown else (0, len(pieces))
        total = self._distance(one, two, pieces[-1].skips)
        if total is None:
            total = len(batches) * max(piece.most for piece in pieces)
        before, _ = self._end(one, pieces[:first], pieces[-1].skips)
        behind = sum(len(piece.batches) * piece.least for piece in pieces[stop:])
        rest = total - before - behind
        middle = range(pieces[first].batches.start, pieces[stop - 1].batches.stop)
        if rest < 0 or not unknown:
            return [_Piece(batches, 0, 0, pieces[-1].skips, total)]
        size, odd = divmod(rest, len(middle))
        if len(unknown) == 1 and not odd and size:
            even = _Piece(middle, size, size, pieces[first].skips)
            exact = [*pieces[:first], even, *pieces[stop:]]
            if self._agree(one, two, exact, has_inner=False):
                return exact
        return [*pieces[:first], _Piece(middle, 0, 0, pieces[-1].skips, rest), *pieces[stop:]]

    # -- after the last commit ---------------------------------------------------------------------

    def _since(self, last: Commit, wanted: range) -> list[_Piece]:
        pieces: list[_Piece] = []
        for attempt, share in self._shares(last.step, wanted.stop):
            left = attempt != self.line[0].attempt
            sizes = {last.batch_size, *([] if self.now is None else [self.now.batch_size])}
            if left and attempt == last.attempt:
                sizes = {last.batch_size}
            elif self._serves(attempt, last, pieces, share.start, wanted.start):
                assert self.now is not None
                sizes = {self.now.batch_size}
            pieces.append(self._piece(attempt, share, min(sizes), max(sizes)))
        return pieces

    def _serves(
        self, attempt: int, last: Commit, before: Sequence[_Piece], start: int, wanted: int
    ) -> bool:
        """Are the wanted batches, from `start` on, those of the attempt that is running?

        One that has served none of them since may be meant, or one that ended before it without a
        commit: whoever skips after a restart speaks of what the trainer before it has told.
        """
        if self.now is None or attempt != self.now.attempt or attempt == last.attempt:
            return False
        if any(piece.least != piece.most for piece in before):
            return False
        skips = self.in_force.get(attempt, ())
        position = Commit(start, attempt, self.now.state, self.now.batch_size)
        moved = self._distance(last, position, skips)
        if moved is None:
            return False
        done, odd = divmod(moved - self._end(last, before, skips)[0], self.now.batch_size)
        return not odd and done > 0 and wanted < start + done

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
        least = most = 0
        skips: Sequence[tuple[int, int]] = ()
        for piece in pieces:
            least = self._under(base.state, least, skips, piece.skips)
            most = self._under(base.state, most, skips, piece.skips)
            skips = piece.skips
            part = range(
                max(piece.batches.start, wanted.start), min(piece.batches.stop, wanted.stop)
            )
            first = least + (part.start - piece.batches.start) * piece.least
            stop = most + (part.stop - piece.batches.start) * piece.most
            if piece.total is not None:
                first, stop = least, most + piece.total
            if part:
                found += [(int(a), int(b)) for a, b in self._after(base.state, first, stop, skips)]
                if piece.total is not None or least != most or piece.least != piece.most:
                    covering.append(part)
            least += len(piece.batches) * piece.least + (piece.total or 0)
            most += len(piece.batches) * piece.most + (piece.total or 0)

    def _end(
        self,
        base: Commit,
        pieces: Sequence[_Piece],
        under: Sequence[tuple[int, int]] | None = None,
    ) -> tuple[int, Sequence[tuple[int, int]]]:
        """How many examples pieces held, and the skips under which that is counted."""
        count = 0
        skips: Sequence[tuple[int, int]] = ()
        for piece in pieces:
            count = self._under(base.state, count, skips, piece.skips)
            count += len(piece.batches) * piece.least
            skips = piece.skips
        if under is not None:
            count, skips = self._under(base.state, count, skips, under), under
        return count, skips

    def _under(
        self,
        state: Json,
        count: int,
        skips: Sequence[tuple[int, int]],
        later: Sequence[tuple[int, int]],
    ) -> int:
        """The same place in the data, counted while more is left out."""
        if not count or list(later) == list(skips):
            return count
        before = self._after(state, 0, count, skips)
        return count - sum(
            max(0, min(stop, end) - max(start, first))
            for start, stop in before
            for first, end in later
        )

    def _after(
        self, state: Json, first: int, stop: int, skips: Sequence[tuple[int, int]]
    ) -> Iterable[tuple[int, int]]:
        return self.examples.after(state, first, stop, skips)

    def _distance(self, one: Commit, two: Commit, skips: Sequence[tuple[int, int]]) -> int | None:
        """How many examples lie between two commits."""
        start, there = _position(one.state), _position(two.state)
        if start is None or there is None:
            return None
        low, high = 0, max(0, there - start) // self.examples.unit
        while low < high:
            middle = (low + high + 1) // 2
            reached = self.examples.reached(one.state, middle * self.examples.unit, skips)
            if reached is not None and reached <= there:
                low = middle
            else:
                high = middle - 1
        return low * self.examples.unit


def _position(state: Json) -> int | None:
    found = state.get("next_example") if isinstance(state, dict) else None
    return found if type(found) is int else None
