"""Our loader passes every check of the conformance suite."""

from __future__ import annotations

import os

import pytest

from datapipe import conformance
from datapipe.conformance import ending, ours
from datapipe.conformance.trial import Trial


def test_the_memory_that_workers_share_is_seen_before_the_kill():
    with ours.LOADER.open(Trial(ours.LOADER, 0).setting(200, workers=2)) as iterator:
        next(iterator)
        assert ending._unnamed(os.getpid())


@pytest.mark.parametrize("check", conformance.checks, ids=lambda check: check.name)
def test_ours_passes(check):
    result = check.run(ours.LOADER)
    assert (result.status, result.detail) == ("passed", "")
