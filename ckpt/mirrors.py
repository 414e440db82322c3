"""Further Shared tiers: roots of their own, with the records of the home beside their steps.

Which steps count is decided by the records alone, so a root that has them can be opened by itself,
and gives a lost home its records back.
"""

from __future__ import annotations

import logging

from ckpt import layout
from ckpt.errors import AlreadyExists, Misuse, NotFound
from ckpt.store import Store

_log = logging.getLogger("ckpt")


def copy_records(source: Store, target: Store) -> None:
    """Put the claims and decisions of `source` into `target`, where they are absent there.

    Raises:
        Misuse: `target` has other records: it belongs to another run.
        StoreFailed.
    """
    there = {entry.name for entry in target.list(layout.ATTEMPTS)}
    names = [entry.name for entry in source.list(layout.ATTEMPTS) if _is_record(entry.name)]
    both = [
        name for name in names if name in there and layout.parse_decision_name(name) is not None
    ]
    _must_agree(source, target, both)
    wanted = sorted(set(names) - there, key=_order)
    keys = [f"{layout.ATTEMPTS}/{name}" for name in wanted]
    for key, data in zip(keys, source.read_many(keys), strict=True):
        if isinstance(data, NotFound):
            continue
        if not isinstance(data, bytes):
            _log.warning("%s/%s: not copied to %s: %s", source.location, key, target.location, data)
            continue
        try:
            target.put_if_absent(key, data)
        except AlreadyExists:
            if target.read(key) != data:
                raise _another_run(source, target, key) from None


def _is_record(name: str) -> bool:
    return layout.parse_claim_name(name) is not None or layout.parse_decision_name(name) is not None


def _order(name: str) -> tuple[int, bool]:
    """Claims before decisions, older attempts first."""
    claim = layout.parse_claim_name(name)
    number = claim if claim is not None else layout.parse_decision_name(name)
    return number or 0, claim is None


def _must_agree(source: Store, target: Store, names: list[str]) -> None:
    """The newest decision that both have tells of all before it."""
    if not names:
        return
    key = f"{layout.ATTEMPTS}/{max(names, key=_order)}"
    if source.read(key) != target.read(key):
        raise _another_run(source, target, key)


def _another_run(source: Store, target: Store, key: str) -> Misuse:
    return Misuse(
        f"{target.location}: {key} is not that of {source.location}: the two are roots of "
        "different runs; give this tier a location of its own"
    )
