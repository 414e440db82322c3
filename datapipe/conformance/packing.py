"""Checks of packing: rows of tokens resume exactly, and are the same on any number of hosts."""

from __future__ import annotations

from collections import Counter
from typing import Final

from datapipe.conformance.check import Check, check
from datapipe.conformance.loader import Records
from datapipe.conformance.trial import FailedError, Trial, flat, on_host, same

_ROW_TOKENS: Final = 128


@check("pack")
def packed_rows_resume_exactly(trial: Trial) -> None:
    """Counters are off by the packing ratio: documents come twice or never after a resume."""
    setting = trial.setting(40, batch_size=2, row_tokens=_ROW_TOKENS)
    rows, states = trial.states(setting)
    for number, state in enumerate(states):
        found = trial.served(setting, state=state)
        same(found, rows[number:], f"restored at batch {number}, token by token")


@check("pack")
def packing_loses_no_token(trial: Trial) -> None:
    """Documents are cut, dropped or doubled on their way into rows."""
    setting = trial.setting(40, batch_size=1, epochs=1, row_tokens=_ROW_TOKENS)
    found = Counter(flat(trial.served(setting)))
    del found[0]  # padding
    wanted = Counter(b"".join(Records.record(each) for each in setting.source.ids))
    if found != wanted:
        raise FailedError(f"wanted {wanted.total()} tokens, found {found.total()}")


@check("pack", "hosts")
def packed_rows_on_all_hosts(trial: Trial) -> None:
    """Packing happens on each host by itself: another number of hosts, other rows."""
    setting = trial.setting(60, batch_size=4, row_tokens=_ROW_TOKENS)
    wanted = trial.over_hosts(setting, 1)
    same(trial.over_hosts(setting, 4), wanted, "4 hosts")
    if trial.offers("rehost"):
        state = trial.state_after(on_host(setting, 3, 4), 2)
        found = trial.over_hosts(setting, 2, state=state)
        same(found, wanted[2:], "saved on 4 hosts, restored on 2")


CHECKS: Final[tuple[Check, ...]] = (
    packed_rows_resume_exactly,
    packing_loses_no_token,
    packed_rows_on_all_hosts,
)
