"""The position in the data as a JSON value, and the identity of what it is a position in.

::

    {"format": 1,
     "next_example": 51200,                        first example not yet delivered
     "skips": [[25600, 26624]],                    examples never to be served again
     "segments": [{"first": 0, "records": 10000}], what the examples from `first` on number
     "plan": {"version": 1, "permutation": 1, "seed": 17, "shuffle": "global"},
     "source": {"fingerprint": "...", "records": 10000, ...},
     "transforms": ["map 1", "random_map 2"]}

It counts examples of the whole run, so that it is the same for any number of processes, threads
and workers and for any batch size. `plan`, `source` and `transforms` are the *identity*: a state
is refused where they differ. How long the run goes on (`epochs`, `remainder`) is no part of it.

A state comes from a file and is parsed as such: nothing in it is believed before it is checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from datapipe import permute, plan
from datapipe.permute import LIMIT
from formats.errors import Damaged, Misuse, Unsupported

FORMAT: Final = 1

_FIELDS: Final = ("format", "next_example", "skips", "segments", "plan", "source", "transforms")
_DETAIL_BYTES: Final = 64  # a longer field of a fingerprint is in its digest only
_DETAILS_BYTES: Final = 384

JSON = dict[str, Any]


@dataclass(frozen=True)
class State:
    """A position, the examples that are skipped, and the identity they belong to."""

    next_example: int
    skips: plan.Skips
    identity: JSON  # "segments", "plan", "source", "transforms" as in the JSON form

    def to_json(self) -> JSON:
        """The JSON value; a fresh one, made of plain dicts, lists, ints and strings."""
        skips = [[start, stop] for start, stop in self.skips.ranges]
        head = {"format": FORMAT, "next_example": self.next_example, "skips": skips}
        return {**head, **json.loads(json.dumps(self.identity))}

    @staticmethod
    def from_json(value: object) -> State:
        """Parses `value`, which may be anything.

        Raises:
          Damaged: it is no data state, or a field is absent or cannot be true.
          Unsupported: a later release wrote it.
        """
        if not isinstance(value, Mapping) or "format" not in value:
            raise Damaged(
                f"not a data state: wanted a JSON object with a 'format', found {_short(value)}; "
                "states of other loaders do not fit this one"
            )
        written = _integer(value["format"], "format", 1, LIMIT)
        if written != FORMAT:
            raise Unsupported(
                f"data state of format {written}: this release reads format {FORMAT}; "
                "restore it with the release that saved it, or a later one"
            )
        _exact_fields(value, _FIELDS, "data state")
        identity = {
            "segments": _segments(value["segments"]),
            "plan": _flat(value["plan"], "plan"),
            "source": _flat(value["source"], "source"),
            "transforms": _texts(value["transforms"], "transforms"),
        }
        next_example = _integer(value["next_example"], "next_example", 0, LIMIT)
        return State(next_example, _skips(value["skips"]), identity)


def identity(
    order: plan.Plan, fingerprint: Mapping[str, object], transforms: Sequence[str]
) -> JSON:
    """What a position is a position in.

    Args:
      order: the plan; batch size, skips, epochs and remainder are no part of the identity.
      fingerprint: of the source; kept as a digest, with its short fields for messages.
      transforms: kind and version of each, in order.
    """
    return {
        "segments": [{"first": 0, "records": order.record_count}],
        "plan": {
            "version": plan.VERSION,
            "permutation": permute.VERSION,
            "seed": order.seed,
            "shuffle": order.shuffle,
        },
        "source": _condensed(fingerprint, order.record_count),
        "transforms": list(transforms),
    }


def mismatch(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """One line per difference of two identities: the field, what was saved, what is here now.

    Empty where they are the same.
    """
    lines: list[str] = []
    for part in ("plan", "source"):
        for name in sorted({*saved[part], *mine[part]}):
            _compare(lines, f"{part}.{name}", saved[part].get(name), mine[part].get(name))
    _compare(lines, "segments", saved["segments"], mine["segments"])
    theirs, ours = saved["transforms"], mine["transforms"]
    for index in range(max(len(theirs), len(ours))):
        there = theirs[index] if index < len(theirs) else None
        here = ours[index] if index < len(ours) else None
        _compare(lines, f"transforms[{index}]", there, here)
    return lines


def _compare(lines: list[str], name: str, saved: object, mine: object) -> None:
    if saved != mine:
        lines.append(f"{name}: saved {_shown(saved)}, here {_shown(mine)}")


def _shown(value: object) -> str:
    return "nothing" if value is None else _short(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _condensed(fingerprint: Mapping[str, object], records: int) -> JSON:
    """A fingerprint of any length as a digest and as many of its short fields as have room."""
    try:
        text = json.dumps(fingerprint, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Misuse(f"the fingerprint of the source is no JSON value: {error}") from error
    found: JSON = {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:32]}
    room = _DETAILS_BYTES
    for name in sorted(fingerprint):
        value = fingerprint[name]
        length = len(json.dumps([name, value]))
        plain = isinstance(value, str | int | float | bool) and name not in (*found, "digest")
        if plain and length <= min(_DETAIL_BYTES, room):
            found[name] = value
            room -= length
    return {**found, "records": records}


# -- parsing ---------------------------------------------------------------------------------------


def _exact_fields(value: Mapping[str, object], wanted: Sequence[str], where: str) -> None:
    missing = [name for name in wanted if name not in value]
    extra = [_short(name) for name in value if name not in wanted]
    if missing or extra:
        raise Damaged(f"{where}: missing fields {missing}, unknown fields {extra}")


def _integer(value: object, where: str, first: int, last: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
        raise Damaged(
            f"data state, {where}: wanted an integer in [{first}, {last}], found {_short(value)}"
        )
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise Damaged(f"data state, {where}: wanted a list, found {_short(value)}")
    return list(value)


def _skips(value: object) -> plan.Skips:
    ranges: list[tuple[int, int]] = []
    last = -1
    for index, item in enumerate(_list(value, "skips")):
        where = f"skips[{index}]"
        pair = _list(item, where)
        if len(pair) != 2:
            raise Damaged(f"data state, {where}: wanted [start, stop], found {_short(item)}")
        start = _integer(pair[0], f"{where} start", last + 1, LIMIT)
        last = _integer(pair[1], f"{where} stop", start + 1, LIMIT)
        ranges.append((start, last))
    return plan.Skips(tuple(ranges))


def _segments(value: object) -> list[JSON]:
    segments = _list(value, "segments")
    if len(segments) != 1:
        raise Unsupported(
            f"data state with {len(segments)} segments: this release reads states with one"
        )
    segment = segments[0]
    if not isinstance(segment, Mapping):
        raise Damaged(f"data state, segments[0]: wanted an object, found {_short(segment)}")
    _exact_fields(segment, ("first", "records"), "data state, segments[0]")
    first = _integer(segment["first"], "segments[0].first", 0, 0)
    return [{"first": first, "records": _integer(segment["records"], "records", 1, LIMIT)}]


def _flat(value: object, where: str) -> JSON:
    """A JSON object of strings and numbers."""
    if not isinstance(value, Mapping):
        raise Damaged(f"data state, {where}: wanted an object, found {_short(value)}")
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, str | int | float | bool):
            raise Damaged(
                f"data state, {where}: wanted names with a text or number each, "
                f"found {_short(name)}: {_short(item)}"
            )
    return dict(value)


def _texts(value: object, where: str) -> list[str]:
    items = _list(value, where)
    for item in items:
        if not isinstance(item, str):
            raise Damaged(f"data state, {where}: wanted texts, found {_short(item)}")
    return items
