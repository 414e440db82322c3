"""What breaks data loaders in the field, as checks for any loader with get_state and set_state.

::

    from datapipe import conformance

    LOADER = conformance.Loader(name="mine", open=open_mine, offers=frozenset({"drop", "hosts"}))
    print(conformance.run(LOADER))

    @pytest.mark.parametrize("check", conformance.checks, ids=lambda check: check.name)
    def test_mine(check):
        result = check.run(LOADER)
        assert result.status != "failed", result.detail

`open_mine(setting)` gives an iterator over batches of ids; see `Setting` for what it is asked for,
and `FEATURES` for what it need not offer.
"""

from __future__ import annotations

from datapipe.conformance.check import Check, Result
from datapipe.conformance.loader import FEATURES, Loader, Records, Setting
from datapipe.conformance.matrix import checks
from datapipe.conformance.report import Report, table
from datapipe.conformance.running import run

__all__ = [
    "FEATURES",
    "Check",
    "Loader",
    "Records",
    "Report",
    "Result",
    "Setting",
    "checks",
    "run",
    "table",
]
