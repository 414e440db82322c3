"""Checks of states: the rest after a restore is the rest of a run that was never stopped."""

from __future__ import annotations

import copy
import json
from typing import Any, Final

from datapipe.conformance.check import Check, check
from datapipe.conformance.children import ask
from datapipe.conformance.loader import Ids, Loader, Setting
from datapipe.conformance.trial import FailedError, Trial, once, same, text_of

STATE_BYTES: Final = 1024


@check()
def state_at_every_batch(trial: Trial) -> None:
    """Restored into a fresh iterator, the order differs."""
    settings = [
        trial.setting(),
        trial.setting(13, shuffle=False),
        trial.setting(11, batch_size=1),
        *(trial.setting(13, batch_size=5, remainder=each) for each in trial.remainders),
    ]
    for setting in settings:
        batches, states = trial.states(setting)
        for number, state in enumerate(states):
            where = f"{len(setting.source)} records, restored at batch {number}"
            same(trial.served(setting, state=state), batches[number:], where)


@check()
def state_in_another_process(trial: Trial) -> None:
    """Restored in a new process, the order differs: it hangs on a hash or an object's address."""
    setting = trial.setting()
    batches, states = trial.states(setting)
    found = ask(_served_after, trial.loader, setting, states)
    for number, rest in enumerate(found):
        there = [tuple(batch) for batch in rest]
        same(there, batches[number:], f"restored at batch {number} in another process")


def _served_after(loader: Loader, setting: Setting, states: list[Any]) -> list[list[Ids]]:
    trial = Trial(loader, 0)
    return [trial.served(setting, state=state) for state in states]


@check()
def three_crashes_and_resumes(trial: Trial) -> None:
    """The second resume shifts or restarts the data."""
    for _ in range(4):
        setting = trial.setting(trial.rng.randrange(20, 40), seed=trial.rng.randrange(1000))
        wanted = trial.served(setting)
        found: list[Ids] = []
        state = None
        for _ in range(3):
            with trial.opened(setting, state) as iterator:
                kept = trial.take(iterator, trial.rng.randrange(1, len(wanted) // 4))
                state = copy.deepcopy(iterator.get_state())
                trial.take(iterator, trial.rng.randrange(3))  # not saved before the crash
            found += kept
        found += trial.served(setting, state=state)
        same(found, wanted, f"{len(setting.source)} records, seed {setting.seed}")


@check()
def states_at_the_borders_of_epochs(trial: Trial) -> None:
    """An epoch is dropped or repeated by a resume at its end, at its beginning, or at the end."""
    for remainder in trial.remainders:
        for count in (15, 16):
            setting = trial.setting(count, epochs=3, remainder=remainder)
            batches, states = trial.states(setting)
            wanted = batches_in(count, setting)
            where = f"{count} records, remainder {remainder}"
            if len(batches) != wanted:
                raise FailedError(f"{where}: wanted {wanted} batches, found {len(batches)}")
            borders = {0, 1, wanted - 1, wanted}
            for epoch in (1, 2):
                end = wanted * epoch // 3
                borders |= {end - 1, end, end + 1}
            for number in sorted(borders):
                rest = trial.served(setting, state=states[number])
                same(rest, batches[number:], f"{where}, restored at batch {number}")


def batches_in(count: int, setting: Setting) -> int:
    """How many batches a run of one source has."""
    size, epochs = setting.batch_size, setting.epochs
    if setting.remainder == "carry":
        return count * epochs // size
    return epochs * (count // size if setting.remainder == "drop" else -(-count // size))


@check()
def state_is_json(trial: Trial) -> None:
    """A state cannot be written into a checkpoint, or comes back as something else."""
    setting = trial.setting()
    batches, states = trial.states(setting)
    for number in (0, 1, len(batches) // 2, len(batches)):
        read = json.loads(text_of(states[number]))
        rest = trial.served(setting, state=read)
        same(rest, batches[number:], f"restored at batch {number} from JSON")


@check()
def state_is_small(trial: Trial) -> None:
    """The state grows with workers, hosts, records or with the length of the run."""
    for workers in (0, 2) if trial.offers("workers") else (0,):
        setting = trial.setting(700, batch_size=8, epochs=3, workers=workers)
        with trial.opened(setting) as iterator:
            for taken in (0, 1, 200):
                trial.take(iterator, taken)
                found = len(text_of(iterator.get_state()))
                if found > STATE_BYTES:
                    raise FailedError(
                        f"{found} bytes after {taken} batches with {workers} workers, "
                        f"wanted at most {STATE_BYTES}"
                    )


@check()
def get_state_changes_nothing(trial: Trial) -> None:
    """Asking for a state moves the data; a state changes after it was taken."""
    setting = trial.setting()
    wanted = trial.served(setting)
    with trial.opened(setting) as iterator:
        kept: list[tuple[Any, str]] = []
        found: list[Ids] = []
        while taken := trial.take(iterator, 1):
            found += taken
            for _ in range(3):
                state = iterator.get_state()
            kept.append((state, repr(state)))
            other = iterator.get_state()
            if isinstance(other, dict):
                other.clear()  # the caller's own
    same(found, wanted, "with states asked for in between")
    for number, (state, text) in enumerate(kept, start=1):
        if repr(state) != text:
            raise FailedError(f"the state after batch {number} was {text}, became {state!r}")


@check()
def set_state_at_any_time(trial: Trial) -> None:
    """A state can be set only before the first batch, or what was made ahead is served first."""
    setting = trial.setting()
    batches, states = trial.states(setting)
    with trial.opened(setting) as iterator:
        iterator.set_state(copy.deepcopy(states[2]))
        same(trial.take(iterator, 3), batches[2:5], "set before iterating")
        iterator.set_state(copy.deepcopy(states[7]))
        same(trial.take(iterator, 2), batches[7:9], "set forwards while iterating")
        iterator.set_state(copy.deepcopy(states[1]))
        iterator.set_state(copy.deepcopy(states[1]))
        same(trial.take(iterator), batches[1:], "set backwards while iterating")
        iterator.set_state(copy.deepcopy(states[3]))
        same(trial.take(iterator), batches[3:], "set behind the end")


@check()
def absent_state_is_an_error(trial: Trial) -> None:
    """A restore is asked for, the state is not there, and the run silently starts from scratch."""
    nothing: list[Any] = [None, {}]
    for absent in nothing:
        with trial.opened(trial.setting()) as iterator:
            trial.take(iterator, 2)
            try:
                iterator.set_state(absent)
                trial.take(iterator, 1)
            except Exception:
                continue
        raise FailedError(f"set_state({absent!r}) is accepted without complaint")


@check()
def each_record_once_an_epoch(trial: Trial) -> None:
    """Records are missing or come twice, at sizes that do not divide."""
    for count, size in ((1, 1), (7, 3), (23, 4), (24, 4), (31, 8), (64, 16)):
        for remainder in trial.remainders:
            setting = trial.setting(count, batch_size=size, epochs=2, remainder=remainder)
            epochs_hold_each_once(trial, setting)


def epochs_hold_each_once(trial: Trial, setting: Setting) -> None:
    """Refuses a run whose epochs do not hold each record once; the remainder says what is left."""
    count, size = len(setting.source), setting.batch_size
    where = f"{count} records by {size}, remainder {setting.remainder}, {setting.workers} workers"
    batches = trial.served(setting)
    wanted = batches_in(count, setting)
    if len(batches) != wanted:
        raise FailedError(f"{where}: wanted {wanted} batches, found {len(batches)}")
    ids = [each for batch in batches for each in batch]
    per_epoch = count // size * size if setting.remainder == "drop" else count
    for epoch in range(setting.epochs):
        served = ids[epoch * per_epoch : (epoch + 1) * per_epoch]
        if len(served) == count:
            once(served, setting.source.ids, f"{where}, epoch {epoch}")
        elif len({*served}) != len(served) or not {*served} <= {*setting.source.ids}:
            raise FailedError(f"{where}, epoch {epoch}: a record comes twice")


CHECKS: Final[tuple[Check, ...]] = (
    state_at_every_batch,
    state_in_another_process,
    three_crashes_and_resumes,
    states_at_the_borders_of_epochs,
    state_is_json,
    state_is_small,
    get_state_changes_nothing,
    set_state_at_any_time,
    absent_state_is_an_error,
    each_record_once_an_epoch,
)
