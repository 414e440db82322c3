"""Checks of hosts and workers: how many there are changes neither the data nor the state."""

from __future__ import annotations

import dataclasses
from typing import Final

from datapipe.conformance.check import Check, check
from datapipe.conformance.resuming import batches_in, epochs_hold_each_once
from datapipe.conformance.trial import FailedError, Trial, by_id, on_host, same, short, text_of

_HOSTS: Final = (1, 2, 4, 8)


@check("workers")
def each_record_once_with_workers(trial: Trial) -> None:
    """Fewer records when workers > 1; the remainder is dropped per worker."""
    for workers in (0, 1, 2, 3):
        setting = trial.setting(23, workers=workers, remainder=trial.remainders[-1])
        epochs_hold_each_once(trial, setting)


@check("workers")
def workers_keep_the_order(trial: Trial) -> None:
    """Another order with another number of workers."""
    wanted = trial.served(trial.setting(38))
    for workers in (1, 3):
        found = trial.served(trial.setting(38, workers=workers))
        same(found, wanted, f"{workers} workers")


@check("workers", "reworker")
def restored_with_other_workers(trial: Trial) -> None:
    """A state of one number of workers fails with another, or moves the data."""
    setting = trial.setting(38)
    wanted = trial.served(setting)
    states = {
        before: trial.state_after(dataclasses.replace(setting, workers=before), 5)
        for before in (0, 2)
    }
    for before, after in ((2, 0), (2, 3), (0, 1)):
        state = states[before]
        found = trial.served(dataclasses.replace(setting, workers=after), state=state)
        same(found, wanted[5:], f"saved with {before} workers, restored with {after}")


@check("hosts")
def hosts_make_the_same_batches(trial: Trial) -> None:
    """Another order, or other batches, with another number of hosts."""
    setting = trial.setting(40, batch_size=8)
    wanted = by_id(trial.served(setting))
    for hosts in _HOSTS:
        same(trial.over_hosts(setting, hosts), wanted, f"{hosts} hosts")


@check("hosts")
def hosts_end_together(trial: Trial) -> None:
    """The remainder is dropped per host: one has a batch more than the others, which then hang."""
    for count in (43, 17, 40):
        setting = trial.setting(count, batch_size=8, epochs=1)
        wanted = batches_in(count, setting)
        for hosts in _HOSTS:
            if setting.remainder == "keep" and count % setting.batch_size:
                continue  # a short batch has no fixed share for each host
            found = trial.over_hosts(setting, hosts)
            if len(found) != wanted:
                raise FailedError(
                    f"{count} records on {hosts} hosts: wanted {wanted} batches, found {len(found)}"
                )


@check("hosts", "rehost")
def restored_on_other_hosts(trial: Trial) -> None:
    """A state of one number of hosts fails with another, or one host's part is dropped."""
    setting = trial.setting(40, batch_size=8)
    wanted = by_id(trial.served(setting))
    for before, after in ((4, 1), (1, 8), (8, 2)):
        state = trial.state_after(on_host(setting, before - 1, before), 3)
        found = trial.over_hosts(setting, after, state=state)
        same(found, wanted[3:], f"saved on {before} hosts, restored on {after}")


@check("hosts")
def same_state_on_all_hosts(trial: Trial) -> None:
    """Each host has a state of its own: one that is lost, or a step older, breaks the run."""
    setting = trial.setting(40, batch_size=8)
    wanted = text_of(trial.state_after(setting, 3))
    for host, hosts in ((0, 2), (1, 2), (3, 4), (7, 8)):
        found = text_of(trial.state_after(on_host(setting, host, hosts), 3))
        if found != wanted:
            raise FailedError(
                f"host {host} of {hosts}: wanted {short(wanted)}, found {short(found)}"
            )


@check("workers")
def same_state_for_all_workers(trial: Trial) -> None:
    """The state holds the positions of the workers, and fits no other number of them."""
    setting = trial.setting(38)
    wanted = text_of(trial.state_after(setting, 5))
    for workers in (1, 2):
        found = text_of(trial.state_after(dataclasses.replace(setting, workers=workers), 5))
        if found != wanted:
            raise FailedError(f"{workers} workers: wanted {short(wanted)}, found {short(found)}")


CHECKS: Final[tuple[Check, ...]] = (
    each_record_once_with_workers,
    workers_keep_the_order,
    restored_with_other_workers,
    same_state_for_all_workers,
    hosts_make_the_same_batches,
    hosts_end_together,
    restored_on_other_hosts,
    same_state_on_all_hosts,
)
