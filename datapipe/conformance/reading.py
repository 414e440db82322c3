"""Checks of reading: what is read, in how many calls, and what becomes of a bad record."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Final

from datapipe.conformance.check import Check, check
from datapipe.conformance.loader import Ids, Records, Setting
from datapipe.conformance.trial import FailedError, Trial, flat, same


@check()
def shuffled_as_a_whole(trial: Trial) -> None:
    """Shuffled inside shards or a buffer only; the same order every epoch or for every seed."""
    setting = trial.setting(256, batch_size=16, epochs=2)
    ids = flat(trial.served(setting))
    first, second = ids[:256], ids[256:]
    if first == second:
        raise FailedError("both epochs have the same order")
    if ids == flat(trial.served(dataclasses.replace(setting, seed=99))):
        raise FailedError("two seeds give the same order")
    for part in range(4):
        there = first[part * 64 : (part + 1) * 64]
        quarters = [sum(each // 64 == quarter for each in there) for quarter in range(4)]
        if min(quarters) == 0:  # by chance: 10^-8
            raise FailedError(
                f"quarter {part} of an epoch has {quarters} records of the quarters of the source"
            )


@check()
def stored_order_without_the_shuffle(trial: Trial) -> None:
    """Without a shuffle the records do not come as they are stored."""
    found = flat(trial.served(trial.setting(24, shuffle=False)))
    same(found, (*range(24), *range(24)), "record by record")


@check()
def growing_records_stay_whole(trial: Trial) -> None:
    """Strings are truncated to the length of the first one in the batch."""
    setting = trial.setting(60, shuffle=False, raw=True, epochs=1)
    found: list[bytes] = []
    with trial.opened(setting) as iterator:
        for batch in iterator:
            found += [_bytes(each) for each in batch]
    if not found:
        raise FailedError("served no batch at all")
    for record in found:
        number, point, _ = record.partition(b".")
        if not point or record != Records.record(int(number)):
            raise FailedError(f"a record is not as it was written: {record!r}")


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@check()
def seeking_reads_nothing(trial: Trial) -> None:
    """A restore reads again what was served before: minutes to hours in a long run."""
    count, size, batch = 4096, 8, 300
    setting = trial.setting(count, batch_size=size, epochs=1)
    with trial.opened(setting) as iterator:
        before = {*flat(trial.take(iterator, batch))}
        state = copy.deepcopy(iterator.get_state())
    ways = ["set_state", "seek"] if trial.offers("seek") else ["set_state"]
    for way in ways:
        source = Records(count)
        with trial.opened(dataclasses.replace(setting, sources=(source,))) as iterator:
            if way == "seek":
                iterator.seek(batch * size)
            else:
                iterator.set_state(state)
            served = trial.take(iterator, 1)
        _seen(source, served)
        again = before & {*flat(source.calls)}
        if again:
            raise FailedError(f"{way} reads {len(again)} of the {len(before)} records before it")


@check()
def records_are_read_in_batches(trial: Trial) -> None:
    """One-by-one reads, which are 10 to 40 times slower than batched ones."""
    setting = trial.setting(256, batch_size=16, epochs=1)
    batches = trial.served(setting)
    _seen(setting.source, batches)
    calls = len(setting.source.calls)
    if calls > len(batches) + 2:
        raise FailedError(f"{calls} calls of the source for {len(batches)} batches")


def _seen(source: Records, served: list[Ids]) -> None:
    """Refuses calls that do not account for what was served: a copy of the source was read.

    That is a failure and not a feature that is not offered: without workers a loader reads the
    source that it was given (see `Setting.sources`), and of other reads nothing can be said.
    """
    if not served:
        raise FailedError("served no batch at all")
    unseen = {*flat(served)} - {*flat(source.calls)}
    if unseen:
        raise FailedError(
            f"reads are not seen: {len(unseen)} of {len(flat(served))} records were served without "
            "a call of the source; without workers, read the source of the setting, not a copy"
        )


_FIRST_ID: Final = 700_000  # a number that an error does not hold by chance


def _some(**options: Any) -> Records:
    return Records(40, first=_FIRST_ID, **options)


def _good(trial: Trial, **changes: Any) -> Setting:
    return trial.setting(sources=(_some(),), epochs=1, **changes)


def _with_bad(trial: Trial, bad: int, **changes: Any) -> Setting:
    return trial.setting(sources=(_some(bad=[bad]),), epochs=1, **changes)


@check()
def bad_record_is_raised(trial: Trial) -> None:
    """A corrupt record kills a worker and its slice vanishes, or its batch is lost."""
    good = _good(trial)
    wanted = trial.served(good)
    bad = wanted[4][1]
    for workers in (0, 2) if trial.offers("workers") else (0,):
        where = f"record {bad} of batch 4 is bad, {workers} workers"
        told, batches, state = _until_raised(trial, _with_bad(trial, bad, workers=workers))
        if not told:
            raise FailedError(f"{where}: nothing is raised, {len(batches)} batches come")
        same(batches, wanted[:4], f"{where}: before the error")
        if str(bad) not in told:
            raise FailedError(f"{where}: the error does not name it: {told[:100]}")
        if not trial.offers("reworker"):
            good = _good(trial, workers=workers)
        rest = trial.served(good, state=state)
        same(rest, wanted[4:], f"{where}: after it was mended, from the state behind the error")


def _until_raised(trial: Trial, setting: Any) -> tuple[str, list[Ids], Any]:
    """What the error says, the batches before it, and the state behind it."""
    batches: list[Ids] = []
    with trial.opened(setting) as iterator:
        try:
            while found := trial.take(iterator, 1):
                batches += found
        except Exception as error:
            return _chain(error), batches, copy.deepcopy(iterator.get_state())
    return "", batches, None


def _chain(error: BaseException | None) -> str:
    """All that an error and its causes say, as a traceback shows them."""
    told = []
    while error is not None:
        told += [str(error), *getattr(error, "__notes__", [])]
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)
    return "\n".join(told)


@check("replace")
def bad_record_is_replaced(trial: Trial) -> None:
    """A record that is left out shifts the data, or makes a batch shorter on one host only."""
    wanted = trial.served(_good(trial))
    bad = wanted[4][1]
    setting = _with_bad(trial, bad, on_bad_record="replace")
    found, states = trial.states(setting)
    others = [tuple(each for each in batch if each != bad) for batch in wanted]
    if [len(batch) for batch in found] != [len(batch) for batch in wanted]:
        raise FailedError(f"batches of {[len(batch) for batch in found]} rows")
    if bad in flat(found):
        raise FailedError(f"record {bad} is bad, and served")
    kept = [
        tuple(one for one, other in zip(batch, there, strict=True) if other != bad)
        for batch, there in zip(found, wanted, strict=True)
    ]
    same(kept, others, "rows of the other records")
    for number, state in enumerate(states):
        same(trial.served(setting, state=state), found[number:], f"restored at batch {number}")


@check("replace", "hosts")
def bad_record_on_one_host(trial: Trial) -> None:
    """A bad record on one host only leaves the others stuck, or moves their data."""
    setting = _good(trial, batch_size=8)
    bad = trial.served(setting)[2][3]
    broken = _with_bad(trial, bad, batch_size=8, on_bad_record="replace")
    wanted = [tuple(sorted(batch)) for batch in trial.served(broken)]
    same(trial.over_hosts(broken, 4), wanted, f"record {bad} is bad, 4 hosts")


CHECKS: Final[tuple[Check, ...]] = (
    shuffled_as_a_whole,
    stored_order_without_the_shuffle,
    growing_records_stay_whole,
    seeking_reads_nothing,
    records_are_read_in_batches,
    bad_record_is_raised,
    bad_record_is_replaced,
    bad_record_on_one_host,
)
