"""Checks of what a state belongs to: other data refuse it, and stay as they were."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from datapipe.conformance.check import Check, check
from datapipe.conformance.loader import Records, Setting
from datapipe.conformance.trial import FailedError, Trial, same


def _refused(trial: Trial, setting: Setting | None = None, **changes: Any) -> None:
    """Refuses a loader that takes a state of a setting, by default a plain one, under another."""
    if setting is None:
        setting = trial.setting(24)
    for name, value in changes.items():
        state = trial.state_after(setting, 3)
        other = dataclasses.replace(setting, **{name: value})
        wanted = trial.served(other)
        with trial.opened(other) as iterator:
            before = trial.take(iterator, 1)
            try:
                iterator.set_state(state)
            except Exception:
                rest = [*before, *trial.take(iterator)]
                same(rest, wanted, f"going on after a state was refused for its {name}")
                continue
            taken = trial.take(iterator, 1)
        raise FailedError(f"it is taken without complaint, and {taken} is served")


@check()
def refused_for_another_seed(trial: Trial) -> None:
    """A state restores under another seed without complaint: records come twice, others never."""
    _refused(trial, seed=18)


@check()
def refused_without_the_shuffle(trial: Trial) -> None:
    """A state restores under another order without complaint."""
    _refused(trial, shuffle=False)


@check()
def refused_for_other_records(trial: Trial) -> None:
    """A state restores into another dataset of the same length without complaint."""
    _refused(trial, sources=(Records(24, name="others"),))


@check()
def refused_for_more_records(trial: Trial) -> None:
    """A state restores into a longer or shorter dataset without complaint."""
    _refused(trial, sources=(Records(29),))
    _refused(trial, sources=(Records(22),))


@check()
def refused_for_other_functions(trial: Trial) -> None:
    """A state restores behind another tokenizer without complaint."""
    _refused(trial, version="2")


@check("reweight")
def refused_for_other_weights(trial: Trial) -> None:
    """A state restores under other weights although nobody said that they may change."""
    sources = (Records(24), Records(24, first=1000))
    _refused(trial, trial.setting(sources=sources, weights=(1, 1), epochs=1), weights=(3, 1))


CHECKS: Final[tuple[Check, ...]] = (
    refused_for_another_seed,
    refused_without_the_shuffle,
    refused_for_other_records,
    refused_for_more_records,
    refused_for_other_functions,
    refused_for_other_weights,
)
