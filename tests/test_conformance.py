"""The conformance suite: a plain loader passes, and each broken one fails the check it breaks."""

from __future__ import annotations

import dataclasses

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


def test_hosts_that_end_apart_are_seen_with_short_batches_at_the_end_of_epochs():
    offers = frozenset({"keep", "hosts"})
    whole, broken = plain_loader.loader(), plain_loader.loader("hosts end together")
    check = BY_NAME["hosts end together"]
    assert check.run(dataclasses.replace(whole, offers=offers)).status == "passed"
    assert "do not end together" in check.run(dataclasses.replace(broken, offers=offers)).detail


def test_names_and_symptoms():
    assert len(BY_NAME) == len(conformance.checks)
    for check in conformance.checks:
        assert check.symptom.endswith("."), check.name
        assert check.needs <= conformance.FEATURES.keys()
