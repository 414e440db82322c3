"""Checks of seeking and skipping: both count examples of the whole run, and skips stay."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any, Final

from datapipe.conformance.check import Check, check
from datapipe.conformance.loader import Ids, Records, Setting
from datapipe.conformance.trial import FailedError, Trial, by_id, flat, on_host, once, same

_SKIPPED: Final = (8, 20)  # examples


@check("seek")
def seek_counts_all_examples(trial: Trial) -> None:
    """Seeking to n goes to n per host, not of the run."""
    setting = trial.setting(40, batch_size=8)
    wanted = by_id(trial.served(setting))
    for hosts in (1, 4) if trial.offers("hosts") else (1,):
        for batch in (0, 3, len(wanted)):
            found = trial.over_hosts(setting, hosts, seek=batch * setting.batch_size)
            same(found, wanted[batch:], f"seek to batch {batch} on {hosts} hosts")


@check("rebatch")
def restored_with_another_batch_size(trial: Trial) -> None:
    """A state counts batches: with another batch size examples come twice or never."""
    setting = trial.setting(48)
    wanted = flat(trial.served(setting))
    state = trial.state_after(setting, 5)
    for size in (3, 6, 8):
        found = flat(trial.served(trial.setting(48, batch_size=size), state=state))
        same(
            found,
            wanted[20 : 96 - (76 % size)],
            f"saved by 4, restored by {size}, example by example",
        )


def _closed_up(setting: Setting, examples: Ids, size: int) -> list[Ids]:
    """The batches of what is left without the skipped examples."""
    left = [each for at, each in enumerate(examples) if not _SKIPPED[0] <= at < _SKIPPED[1]]
    full = len(left) // size * size if setting.remainder == "carry" else len(left)
    return [tuple(left[at : at + size]) for at in range(0, full, size)]


@check("skip")
def skip_counts_all_examples(trial: Trial) -> None:
    """Skipping n after the split into hosts skips n per host, or others than those asked for."""
    setting = trial.setting(40, batch_size=4, epochs=1)
    batches = _closed_up(setting, flat(trial.served(setting)), 4)
    for hosts in (1, 4) if trial.offers("hosts") else (1,):
        parts = []
        for host in range(hosts):
            with trial.opened(on_host(setting, host, hosts)) as iterator:
                first = trial.take(iterator, 1)
                iterator.skip([_SKIPPED])
                parts.append(first + trial.take(iterator))
        if len({len(part) for part in parts}) > 1:
            raise FailedError(f"{hosts} hosts do not end together after a skip")
        found = [tuple(sorted(itertools.chain(*each))) for each in zip(*parts, strict=True)]
        same(found, by_id(batches), f"with examples 8 to 19 skipped on {hosts} hosts")


@check("skip")
def skips_survive_later_resumes(trial: Trial) -> None:
    """The skip list is forgotten by the next resume."""
    setting = trial.setting(40, epochs=1)
    wanted = _closed_up(setting, flat(trial.served(setting)), 4)
    with trial.opened(setting) as iterator:
        iterator.skip([_SKIPPED])
        state: Any = copy.deepcopy(iterator.get_state())
    found: list[Ids] = []
    for _ in range(3):
        with trial.opened(setting, state) as iterator:
            found += trial.take(iterator, 2)
            state = copy.deepcopy(iterator.get_state())
    found += trial.served(setting, state=state)
    same(found, wanted, "with examples 8 to 19 skipped, after four resumes")


@check("skip")
def skips_of_a_ledger_on_an_older_state(trial: Trial) -> None:
    """After going back to an older state, the skips decided later are lost or move."""
    setting = trial.setting(40, epochs=1)
    batches = trial.served(setting)
    state = trial.state_after(setting, 1)
    with trial.opened(setting, state) as iterator:
        iterator.skip(iterator.span(state, 1, 4))  # counted from the state, as steps are
        found = trial.take(iterator)
    wanted = [batches[1], *batches[5:]]
    same(found, wanted, "batches 2 to 4 skipped from the state before batch 1")


@check("skip", "rebatch")
def skips_survive_another_batch_size(trial: Trial) -> None:
    """After a spike people lower the batch size: skips counted in batches then hit others."""
    setting = trial.setting(40, epochs=1)
    wanted = flat(_closed_up(setting, flat(trial.served(setting)), 2))
    with trial.opened(setting) as iterator:
        iterator.skip([_SKIPPED])
        found = flat(trial.take(iterator, 1))
        state = copy.deepcopy(iterator.get_state())
    found += flat(trial.served(trial.setting(40, epochs=1, batch_size=2), state=state))
    same(found, wanted, "skipped by 4, restored by 2, example by example")


@check("skip", "reweight")
def skips_survive_other_weights(trial: Trial) -> None:
    """After a spike people lower a weight: skips counted in batches or draws then hit others."""
    sources = (Records(40), Records(40, first=1000))
    setting = trial.setting(sources=sources, weights=(1, 1), epochs=1)
    batches, states = trial.states(setting)
    bad = {*batches[2], *batches[3]}
    for weights in ((3, 1), (1, 3)):
        other = dataclasses.replace(setting, weights=weights, may_change=True)
        with trial.opened(setting) as iterator:
            found = flat(trial.take(iterator, 1))
            iterator.skip(iterator.span(states[0], 2, 4))
            state = copy.deepcopy(iterator.get_state())
        found += flat(trial.served(other, state=state))
        if bad & {*found}:
            raise FailedError(f"weights {weights}: skipped, and served: {sorted(bad & {*found})}")
        if len({*found}) != len(found) or len(found) < 30:
            raise FailedError(f"weights {weights}: {len({*found})} records in {len(found)} rows")


@check("reweight")
def other_weights_repeat_nothing(trial: Trial) -> None:
    """Weights are changed, and positions jump or repeat."""
    sources = (Records(40), Records(40, first=1000))
    setting = trial.setting(sources=sources, weights=(1, 1), epochs=1)
    batches, states = trial.states(setting)
    for weights in ((3, 1), (1, 3)):
        other = dataclasses.replace(setting, weights=weights, may_change=True)
        found = flat([*batches[:5], *trial.served(other, state=states[5])])
        if len({*found}) != len(found) or len(found) < 40:
            raise FailedError(f"weights {weights}: {len({*found})} records in {len(found)} rows")


@check("grow")
def appended_records_join_the_next_epoch(trial: Trial) -> None:
    """Shards are appended, and positions jump or repeat."""
    setting = trial.setting(24, epochs=3)
    grown = Records(24, appended=8)
    batches, states = trial.states(setting)
    for number in (2, 8):
        other = trial.setting(sources=(grown,), epochs=3, may_change=True)
        found = flat([*batches[:number], *trial.served(other, state=states[number])])
        end = 24 * (1 + number // 6)
        same(found[:end], flat(batches)[:end], f"grown at batch {number}, until the epoch ends")
        while len(found) >= end + len(grown):
            where = f"grown at batch {number}, an epoch behind it"
            once(found[end : end + len(grown)], grown.ids, where)
            end += len(grown)
        if len(found) - end >= setting.batch_size:
            raise FailedError(f"grown at batch {number}: an epoch of {len(found) - end} records")
        if end < 24 + len(grown):
            raise FailedError(f"grown at batch {number}: no epoch has the new records")


CHECKS: Final[tuple[Check, ...]] = (
    restored_with_another_batch_size,
    seek_counts_all_examples,
    skip_counts_all_examples,
    skips_survive_later_resumes,
    skips_of_a_ledger_on_an_older_state,
    skips_survive_another_batch_size,
    other_weights_repeat_nothing,
    appended_records_join_the_next_epoch,
    skips_survive_other_weights,
)
