"""The conformance suite: a plain loader passes, and each broken one fails the check it breaks."""

from __future__ import annotations

import plain_loader
import pytest

from datapipe import conformance
from datapipe.conformance import ending

BY_NAME = {check.name: check for check in conformance.checks}
OTHER_PROCESS = {"state in another process", "killed and nothing is left"}
IN_PROCESS = [check for check in conformance.checks if check.name not in OTHER_PROCESS]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    plain_loader.released.set()
    plain_loader.released.clear()


@pytest.mark.parametrize("check", conformance.checks, ids=lambda check: check.name)
def test_a_plain_loader_passes(check):
    result = check.run(plain_loader.loader())
    assert (result.status, result.detail) == ("passed", "")


@pytest.mark.parametrize("fault", [*BY_NAME, *plain_loader.EXTRA_FAULTS])
def test_a_broken_loader_fails_the_check_that_it_breaks_and_no_other(fault, monkeypatch):
    monkeypatch.setattr(ending, "_ROUNDS", 20)
    monkeypatch.setattr(ending, "_THREADS_S", 0.2)
    monkeypatch.setattr(ending, "_LEFT_S", 0.5)
    broken = plain_loader.loader(fault)
    name = plain_loader.EXTRA_FAULTS.get(fault, fault)
    checks = [BY_NAME[name], *IN_PROCESS] if name in OTHER_PROCESS else IN_PROCESS
    results = [check.run(broken) for check in checks]
    assert {result.check for result in results if result.status == "failed"} == {name}
    assert all(result.detail for result in results if result.status == "failed")


def test_names_and_symptoms():
    assert len(BY_NAME) == len(conformance.checks)
    for check in conformance.checks:
        assert check.symptom.endswith("."), check.name
        assert check.needs <= conformance.FEATURES.keys()
