"""The position in the data as a JSON value, and the identity of what it is a position in.

::

    {"format": 4,
     "next_example": 51200,                        first example not yet delivered
     "skips": [25600, 1024],                       never to be served: gap, length, gap, ...
     "replaced": [[37, 4711], [120]],              bad records, source by source
     "segments": [{"first": 0, "items": [10000, 500], "counts": [3, 1]}],
     "plan": {"version": 1, "permutation": 1, "seed": 17, "shuffle": "global"},
     "sources": [["web", {"fingerprint": "...", "records": 10000, ...}], ["code", {...}]],
     "transforms": ["map 1", "random_map 2"],
     "remainder": "keep"}                          of the end of an epoch; none: "carry"

It counts examples of the whole run, so that it is the same for any number of processes, threads and
workers and for any batch size. `plan`, `sources`, `transforms` and the last segment are the
*identity*: a state is refused if they differ, unless a segment may open that leads from one to the
other (see `datapipe.segments`). `epochs` is neither part of the identity nor saved: a run can be
made longer. `remainder` is saved, for counting the batches around a saved position, but is no part
of the identity either: an iterator goes on with its own.

If blocks are shuffled (`datapipe.order.block_shuffle`), `plan` has the size of their windows, and
each source a digest of how it is cut. Skips are addresses (`datapipe.order.addresses`); `plan` has
`"skips": "records"` if their records do not come back in later epochs. Sources stand in the order
of their numbers; a new one comes last. `replaced` has the ids of bad records, for which others
stand in (see `datapipe.batches.substitutes`), even if they can be read by now. Earlier formats are
read as well: 2 has no `replaced`, and 2 and 3 have no `remainder`.

A state comes from a file: nothing in it is trusted before it is checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from datapipe.batches.substitutes import Replaced
from datapipe.integers import LIMIT
from datapipe.order import addresses
from datapipe.order.examples import Examples, Segment
from datapipe.order.mixture import BLOCK
from datapipe.order.plan import REMAINDERS, Remainder
from datapipe.texts import shown
from formats.errors import Damaged, Misuse, Unsupported

FORMAT: Final = 4

_FIELDS: Final = (
    *("format", "next_example", "skips", "replaced", "segments", "plan", "sources", "transforms"),
)
_NUMBERS: Final = ("version", "permutation", "seed", "blocks", "shuffle_window")  # of a plan
_TEXTS: Final = ("shuffle", "skips")
_UNTOLD: Final = 3  # the last format that does not tell the remainder

JSON = dict[str, Any]


@dataclass(frozen=True)
class State:
    """A position, what is skipped and replaced, and the identity they belong to.

    remainder: what became of the ends of epochs; None: an earlier release did not save it.
    """

    next_example: int
    skips: tuple[tuple[int, int], ...]  # addresses: sorted, disjoint, non-adjacent
    replaced: Replaced
    identity: JSON  # "segments", "plan", "sources", "transforms" as in the JSON form
    remainder: Remainder | None

    def to_json(self) -> JSON:
        """The JSON value: a fresh one of plain dicts, lists, ints and strings."""
        skips: list[int] = []
        last = 0
        for start, stop in self.skips:
            skips += [start - last, stop - start]
            last = stop
        head = {
            "format": _UNTOLD if self.remainder is None else FORMAT,
            "next_example": self.next_example,
            "skips": skips,
            "replaced": [list(ids) for ids in self.replaced.ids],
        }
        told = {} if self.remainder in (None, "carry") else {"remainder": self.remainder}
        return {**head, **json.loads(json.dumps(self.identity)), **told}

    @staticmethod
    def from_json(value: object) -> State:
        """Parses `value`, which may be anything.

        Raises:
          Damaged: it is no data state, or a field is missing or impossible.
          Unsupported: a later release wrote it.
        """
        if not isinstance(value, Mapping) or "format" not in value:
            raise Damaged(
                f"not a data state: wanted a JSON object with a 'format', found {shown(value)}; "
                "states of other loaders do not fit this one"
            )
        written = _integer(value["format"], "format", 1, LIMIT)
        if not 2 <= written <= FORMAT:
            raise Unsupported(
                f"data state of format {written}: this release reads formats 2 to {FORMAT}; "
                "restore it with the release that saved it, or a later one"
            )
        fields = [name for name in _FIELDS if written > 2 or name != "replaced"]
        known = [name for name in value if written <= _UNTOLD or name != "remainder"]
        _exact_fields(known, fields, "data state")
        identity: JSON = {
            "segments": _segments(value["segments"]),
            "plan": _plan(value["plan"]),
            "sources": _sources(value["sources"]),
            "transforms": _texts(value["transforms"], "transforms"),
        }
        if len(identity["sources"]) != len(identity["segments"][-1]["items"]):
            raise Damaged(
                f"data state: wanted items of {len(identity['sources'])} sources in the last "
                f"segment, found {identity['segments'][-1]['items']}"
            )
        count = len(identity["sources"])
        next_example = _integer(value["next_example"], "next_example", 0, LIMIT)
        replaced = _replaced(value.get("replaced", []), count)
        remainder = _remainder(value, count) if written > _UNTOLD else None
        return State(next_example, _skips(value["skips"], count), replaced, identity, remainder)


def segments_in(segments: Iterable[Segment]) -> list[JSON]:
    """Segments of a plan as in an identity; the inverse of `segments_of`."""
    return [
        {"first": each.first, "items": list(each.items), "counts": list(each.counts)}
        for each in segments
    ]


# -- parsing ---------------------------------------------------------------------------------------


def _exact_fields(found: Iterable[str], wanted: Sequence[str], where: str) -> None:
    names = list(found)
    missing = [name for name in wanted if name not in names]
    extra = [shown(name) for name in names if name not in wanted]
    if missing or extra:
        raise Damaged(f"{where}: missing fields {missing}, unknown fields {extra}")


def _integer(value: object, where: str, first: int, last: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
        raise Damaged(
            f"data state, {where}: wanted an integer in [{first}, {last}], found {shown(value)}"
        )
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise Damaged(f"data state, {where}: wanted a list, found {shown(value)}")
    return list(value)


def _skips(value: object, sources: int) -> tuple[tuple[int, int], ...]:
    numbers = _list(value, "skips")
    if len(numbers) % 2:
        raise Damaged(f"data state, skips: wanted pairs of gap and length, found {shown(value)}")
    ranges: list[tuple[int, int]] = []
    last = 0
    for index in range(0, len(numbers), 2):
        least = 1 if last % LIMIT else 0  # neighbours of one source would be one range
        gap = _integer(numbers[index], f"skips[{index}], a gap", least, addresses.END - last)
        start = last + gap
        length = _integer(numbers[index + 1], f"skips[{index + 1}], a length", 1, LIMIT)
        last = start + length
        if start // LIMIT != (last - 1) // LIMIT:
            raise Damaged(f"data state, skips[{index}]: {start} to {last} is of two sources")
        if start // LIMIT >= sources:
            raise Damaged(
                f"data state, skips[{index}]: wanted sources 0 to {sources - 1}, found source "
                f"{start // LIMIT}"
            )
        ranges.append((start, last))
    return tuple(ranges)


def _replaced(value: object, sources: int) -> Replaced:
    found: list[tuple[int, ...]] = []
    for number, each in enumerate(_list(value, "replaced")):
        ids: list[int] = []
        for id in _list(each, f"replaced[{number}]"):
            least = ids[-1] + 1 if ids else 0
            ids.append(_integer(id, f"replaced[{number}], a record", least, LIMIT - 1))
        found.append(tuple(ids))
    if len(found) > sources or (found and not found[-1]):
        raise Damaged(
            f"data state, replaced: wanted records of {sources} sources or fewer, the last of "
            f"which has some, found {shown(value)}"
        )
    return Replaced(tuple(found))


def _segments(value: object) -> list[JSON]:
    found = []
    for number, segment in enumerate(_list(value, "segments")):
        where = f"segments[{number}]"
        if not isinstance(segment, Mapping):
            raise Damaged(f"data state, {where}: wanted an object, found {shown(segment)}")
        _exact_fields(segment, ("first", "items", "counts"), f"data state, {where}")
        items = _list(segment["items"], f"{where}.items")
        counts = _list(segment["counts"], f"{where}.counts")
        parsed = {
            "first": _integer(segment["first"], f"{where}.first", 0, LIMIT),
            "items": [_integer(each, f"{where}.items", 1, LIMIT) for each in items],
            "counts": [_integer(each, f"{where}.counts", 0, BLOCK) for each in counts],
        }
        found.append(parsed)
    try:
        Examples(segments_of(found), seed=0)
    except Misuse as error:
        raise Damaged(f"data state, segments: {error}") from error
    return found


def segments_of(segments: Sequence[JSON]) -> tuple[Segment, ...]:
    """Segments of an identity as in a plan; the inverse of `segments_in`."""
    return tuple(
        Segment(each["first"], tuple(each["items"]), tuple(each["counts"])) for each in segments
    )


def _sources(value: object) -> list[Any]:
    found: dict[str, JSON] = {}
    for number, pair in enumerate(_list(value, "sources")):
        where = f"sources[{number}]"
        parts = _list(pair, where)
        if len(parts) != 2 or not isinstance(parts[0], str) or parts[0] in found:
            raise Damaged(f"data state, {where}: wanted a new name and an object, found {pair!r}")
        source = _flat(parts[1], where)
        if not isinstance(source.get("fingerprint"), str):
            raise Damaged(
                f"data state, {where}: wanted a text as fingerprint, found "
                f"{shown(source.get('fingerprint'))}"
            )
        found[parts[0]] = source
    return [[name, source] for name, source in found.items()]


def _plan(value: object) -> JSON:
    found = _flat(value, "plan")
    for name in _NUMBERS:
        if name in found:
            _integer(found[name], f"plan.{name}", 0, (1 << 64) - 1)
    for name in _TEXTS:
        if name in found and not isinstance(found[name], str):
            raise Damaged(f"data state, plan.{name}: wanted a text, found {shown(found[name])}")
    return found


def _remainder(value: Mapping[str, object], sources: int) -> Remainder:
    found = value.get("remainder", "carry")
    for known in REMAINDERS:
        if found == known and (sources == 1 or known == "carry"):
            return known
    raise Damaged(
        f"data state, remainder: wanted one of {', '.join(REMAINDERS)}, of which several sources "
        f"have 'carry' only, found {shown(found)} with {sources} sources"
    )


def _flat(value: object, where: str) -> JSON:
    """A JSON object of strings and numbers."""
    if not isinstance(value, Mapping):
        raise Damaged(f"data state, {where}: wanted an object, found {shown(value)}")
    for name, item in value.items():
        is_plain = isinstance(item, str | int) or (isinstance(item, float) and math.isfinite(item))
        if not isinstance(name, str) or not is_plain:
            raise Damaged(
                f"data state, {where}: wanted names with a text or number each, "
                f"found {shown(name)}: {shown(item)}"
            )
    return dict(value)


def _texts(value: object, where: str) -> list[str]:
    items = _list(value, where)
    for item in items:
        if not isinstance(item, str):
            raise Damaged(f"data state, {where}: wanted texts, found {shown(item)}")
    return items
