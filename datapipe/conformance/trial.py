"""A loader in the hands of a check: opening, serving, comparing."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from datapipe.conformance.loader import Ids, Loader, Loading, Records, Setting
from datapipe.order.plan import Remainder

_ENDLESS: Final = 5000  # more batches than any check asks for
_REMAINDERS: Final[tuple[Remainder, ...]] = ("carry", "drop", "keep")  # the best one first


class FailedError(AssertionError):
    """A loader does not do what a check asks of it."""


class Trial:
    """One loader in one check.

    Args:
      loader: the loader.
      seed: of all that is drawn; each check draws the same for it.
    """

    def __init__(self, loader: Loader, seed: int) -> None:
        self.loader = loader
        self.rng = random.Random(seed)

    # -- settings ------------------------------------------------------------------------------

    @property
    def remainders(self) -> list[Remainder]:
        """The ways to end an epoch that are offered, the best one for checks first."""
        return [each for each in _REMAINDERS if self.offers(each)]

    def offers(self, feature: str) -> bool:
        """Whether the loader does."""
        return feature in self.loader.offers

    def setting(self, count: int = 23, **changes: Any) -> Setting:
        """One source of `count` records, with a remainder that is offered."""
        return Setting(**{"sources": (Records(count),), "remainder": self.remainders[0]} | changes)

    # -- serving -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, setting: Setting, state: Any = None) -> Iterator[Any]:
        """An iterator, at a state if there is one; closed in the end."""
        iterator = self.loader.open(setting)
        try:
            if state is not None:
                iterator.set_state(copy.deepcopy(state))
            yield iterator
        finally:
            close(iterator)

    def take(self, iterator: Loading, batches: int | None = None) -> list[Ids]:
        """The next batches; fewer at the end. None: all."""
        found: list[Ids] = []
        while batches is None or len(found) < batches:
            if len(found) > _ENDLESS:
                raise FailedError(f"does not end: more than {_ENDLESS} batches")
            try:
                batch = next(iterator)
            except StopIteration:
                break
            found.append(tuple(int(each) for each in self.loader.ids(batch)))
        return found

    def served(
        self, setting: Setting, *, state: Any = None, batches: int | None = None
    ) -> list[Ids]:
        """What a new iterator serves, from a state on."""
        with self.opened(setting, state) as iterator:
            return self.take(iterator, batches)

    def states(self, setting: Setting) -> tuple[list[Ids], list[Any]]:
        """All batches, and the states before each and behind the last."""
        with self.opened(setting) as iterator:
            states = [copy.deepcopy(iterator.get_state())]
            batches: list[Ids] = []
            while found := self.take(iterator, 1):
                batches += found
                states.append(copy.deepcopy(iterator.get_state()))
                if len(batches) > _ENDLESS:
                    raise FailedError(f"does not end: more than {_ENDLESS} batches")
        if not batches:
            raise FailedError("served no batch at all")
        return batches, states

    def state_after(self, setting: Setting, batches: int) -> Any:
        """The state after that many batches."""
        with self.opened(setting) as iterator:
            self.take(iterator, batches)
            return copy.deepcopy(iterator.get_state())

    def over_hosts(
        self, setting: Setting, hosts: int, *, state: Any = None, seek: int | None = None
    ) -> list[Ids]:
        """The global batches: those of all hosts together, each in rising order of ids."""
        parts = []
        for host in range(hosts):
            with self.opened(on_host(setting, host, hosts), state) as iterator:
                if seek is not None:
                    iterator.seek(seek)
                parts.append(self.take(iterator))
        ends = [len(part) for part in parts]
        if len({*ends}) > 1:
            raise FailedError(f"{hosts} hosts serve {ends} batches: they do not end together")
        return [tuple(sorted(itertools.chain(*each))) for each in zip(*parts, strict=True)]


def on_host(setting: Setting, host: int, hosts: int) -> Setting:
    """The same for one host of several."""
    return Setting(**{**vars(setting), "host": host, "hosts": hosts})


def close(iterator: Any) -> None:
    """If it can be closed."""
    if hasattr(iterator, "close"):
        iterator.close()


def by_id(batches: Sequence[Ids]) -> list[Ids]:
    """Each batch in rising order of ids."""
    return [tuple(sorted(batch)) for batch in batches]


def flat(batches: Sequence[Ids]) -> Ids:
    """All ids in a row."""
    return tuple(itertools.chain(*batches))


def text_of(state: Any) -> str:
    """A state as canonical JSON.

    Raises:
      FailedError: it is none.
    """
    try:
        return json.dumps(state, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise FailedError(f"the state is no JSON value: {error}") from error


def same(found: Sequence[Any], wanted: Sequence[Any], where: str) -> None:
    """Refuses batches that differ, and says where they do first."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            raise FailedError(f"{where}: batch {number}: wanted {short(other)}, found {short(one)}")
    if len(found) != len(wanted):
        raise FailedError(f"{where}: wanted {len(wanted)} batches, found {len(found)}")


def once(found: Sequence[int], wanted: Sequence[int], where: str) -> None:
    """Refuses ids that are not exactly these, in whatever order."""
    if sorted(found) != sorted(wanted):
        missing = sorted({*wanted} - {*found})
        twice = sorted({each for each in found if found.count(each) > wanted.count(each)})
        raise FailedError(
            f"{where}: {len(found)} records for {len(wanted)}: missing {short(missing)}, "
            f"too often {short(twice)}"
        )


def short(value: object) -> str:
    """For a message."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
