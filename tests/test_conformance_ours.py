"""Our loader passes every check of the conformance suite."""

from __future__ import annotations

import pytest

from datapipe import conformance
from datapipe.conformance import ours


@pytest.mark.parametrize("check", conformance.checks, ids=lambda check: check.name)
def test_ours_passes(check):
    result = check.run(ours.LOADER)
    assert (result.status, result.detail) == ("passed", "")
