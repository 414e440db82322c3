"""One state of an iterator for all processes of a run, where each has found something for itself.

A member of the state that is *united* is a list of integers, ascending, or a list of such lists by
place: each process tells those that it knows of, and the step has all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Json = Any


def common_state(taken: Sequence[Mapping[str, Json]]) -> Json | None:
    """The state that is good for all processes, of what each took; None: each needs its own.

    Args:
        taken: entries as `ckpt.states.take` makes them, in process order.
    """
    if not all(each["elastic"] for each in taken):
        return None
    states = [each["state"] for each in taken]
    if all(state == states[0] for state in states):
        return states[0]
    members = [each.get("united") for each in taken]
    if members[0] is None or any(each != members[0] for each in members):
        return None
    if any(without(state, members[0]) != without(states[0], members[0]) for state in states):
        return None
    if any(_is_mixed([state[name] for state in states]) for name in members[0]):
        return None
    found = {name: united([state[name] for state in states]) for name in members[0]}
    return {**states[0], **found}


def without(state: Mapping[str, Json], members: Sequence[str]) -> dict[str, Json]:
    """The rest of a state."""
    return {name: value for name, value in state.items() if name not in members}


def united(values: Sequence[Json]) -> list[Json]:
    """The union of several lists; of lists of lists place by place."""
    if any(isinstance(each, list) for value in values for each in value):
        places = itertools.zip_longest(*values, fillvalue=[])
        return [united(place) for place in places]
    return sorted({each for value in values for each in value})


def _is_mixed(values: Sequence[Json]) -> bool:
    """Are some lists of integers and others lists of lists? Empty ones are either."""
    return len({isinstance(each, list) for value in values for each in value}) > 1


def can_be_united(value: Json) -> bool:
    """Is it a list of integers, ascending, or a list of such lists?"""
    if not isinstance(value, list):
        return False
    if value and all(isinstance(each, list) for each in value):
        return all(_ascending(each) for each in value)
    return _ascending(value)


def _ascending(values: list[Json]) -> bool:
    whole = all(type(each) is int for each in values)
    return whole and all(one < two for one, two in itertools.pairwise(values))
