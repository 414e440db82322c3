"""What a saved position belongs to: the order of the examples, the sources, the functions.

An identity is a JSON value, part of every state (`datapipe.state`). Of each source it holds a
digest of the fingerprint, and short fields of the fingerprint for messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from datapipe.order import block_shuffle, permute
from datapipe.order.examples import Examples
from datapipe.order.plan import VERSION, Plan
from datapipe.state import JSON, segments_in
from datapipe.texts import is_utf8, shown
from formats.errors import Misuse

_DETAIL_BYTES: Final = 64  # a longer field of a fingerprint is in its digest only
_DETAILS_BYTES: Final = 384  # of all sources together


def identity_of(
    plan: Plan, fingerprints: Mapping[str, Mapping[str, object]], transforms: Sequence[str]
) -> JSON:
    """The identity of a pipeline.

    Args:
      plan: its order; batch size, remainder and number of epochs do not enter.
      fingerprints: of the sources, by name, in the order of their numbers.
      transforms: kind and version of each function, in their order.

    Raises:
      Misuse: a fingerprint is no JSON object.
    """
    order = plan.order
    found = {
        "segments": segments_in(order.segments),
        "plan": {
            "version": VERSION,
            "permutation": permute.VERSION,
            "seed": order.seed,
            "shuffle": order.shuffle,
            **_windows(order),
            **({"skips": "records"} if plan.skip_records else {}),
        },
        "sources": [
            [name, {**condensed(found, len(fingerprints)), **_cuts(order, number)}]
            for number, (name, found) in enumerate(fingerprints.items())
        ],
        "transforms": list(transforms),
    }
    return cast(JSON, json.loads(json.dumps(found)))  # as it comes back from a file


def _windows(order: Examples) -> JSON:
    """For a shuffle by blocks; how each source is cut into them stands with the source."""
    if not order.blocks:
        return {}
    return {"blocks": block_shuffle.VERSION, "shuffle_window": order.blocks[0].window}


def _cuts(order: Examples, source: int) -> JSON:
    return {"blocks": order.blocks[source].digest} if order.blocks else {}


def mismatch(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """One line per difference of two identities: the field, its saved value, its value here.

    Empty if they are equal.
    """
    lines: list[str] = []
    for name in sorted({*saved["plan"], *mine["plan"]}):
        _compare(lines, f"plan.{name}", saved["plan"].get(name), mine["plan"].get(name))
    before, now = dict(saved["sources"]), dict(mine["sources"])
    _compare(lines, "sources", [*before], [*now])
    for source in sorted({*before} & {*now}):
        fields = {*before[source]} | {*now[source]}
        if len(before) != len(now):  # more sources have less room each: fields may be left out
            fields = {*before[source]} & {*now[source]}
        for name in sorted(fields):
            there, here = before[source].get(name), now[source].get(name)
            _compare(lines, f"sources.{source}.{name}", there, here)
    old, new = saved["segments"][-1], mine["segments"][-1]
    for name in ("items", "counts"):
        _compare(lines, f"segment.{name}", old[name], new[name])
    theirs, ours = saved["transforms"], mine["transforms"]
    for index in range(max(len(theirs), len(ours))):
        there = theirs[index] if index < len(theirs) else None
        here = ours[index] if index < len(ours) else None
        _compare(lines, f"transforms[{index}]", there, here)
    return lines


def _compare(lines: list[str], name: str, saved: object, mine: object) -> None:
    if saved != mine or type(saved) is not type(mine):  # for Python True is 1 and 1.0
        lines.append(f"{name}: saved {_told(saved)}, here {_told(mine)}")


def _told(value: object) -> str:
    return "nothing" if value is None else shown(value)


def condensed(fingerprint: Mapping[str, object], sources: int = 1) -> JSON:
    """A fingerprint of any length as a digest and as many of its short fields as fit.

    Args:
      fingerprint: a JSON object.
      sources: how many share the room for fields.

    Raises:
      Misuse: it is no JSON object.
    """
    try:
        text = json.dumps(fingerprint, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Misuse(f"the fingerprint of the source is no JSON value: {error}") from error
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise Misuse(f"the fingerprint of the source is no JSON object: {fingerprint!r:.80}")
    found: JSON = {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:32]}
    room = _DETAILS_BYTES // sources
    for name, value in sorted(fields.items()):
        length = len(json.dumps([name, value]))
        plain = isinstance(value, str | int | float | bool) and name not in (*found, "digest")
        plain = plain and is_utf8(f"{name}{value}")
        if plain and length <= min(_DETAIL_BYTES, room):
            found[name] = value
            room -= length
    return found
