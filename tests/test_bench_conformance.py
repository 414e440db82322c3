"""The benchmark of conformance: the command, and the adapters of other loaders."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from datapipe import conformance
from datapipe.conformance import ours
from tools.bench import conformance_peers
from tools.bench.__main__ import app

FEW = ["state is json", "seek counts all examples"]


@pytest.fixture(autouse=True)
def _platform(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_the_command_tells_who_passes_what():
    options = [part for name in FEW for part in ("--check", name)]
    done = CliRunner().invoke(app, ["conformance", "--seed", "3", *options])
    assert done.exit_code == 0, done.output
    heading, first, second, *_ = done.stdout.splitlines()
    assert heading.split() == ["lastgood", "Grain", "Grain", "elastic"]
    assert first.split() == [*FEW[0].split(), "passed", "passed", "passed"]
    assert second.split() == [*FEW[1].split(), "passed", "passed", "-"]
    assert "Grain: state is json: passed" in done.stderr


def test_ours_failing_is_an_error(monkeypatch):
    broken = conformance.Loader("broken", conformance_peers.GRAIN.open, ours.LOADER.offers)
    monkeypatch.setattr("tools.bench.conformance.LOADER", broken)
    command = ["conformance", "--json", "--check", "refused for another seed"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert {"grain", "lastgood"} <= found["versions"].keys()
    (result,) = found["loaders"][0]["results"]
    assert result["status"] == "failed"
    assert "taken without complaint" in result["detail"]


def test_an_unknown_check_is_refused():
    done = CliRunner().invoke(app, ["conformance", "--check", "luck"])
    assert done.exit_code == 2
    assert "wanted one of state at every batch" in " ".join(done.output.split())


@pytest.mark.parametrize("loader", [conformance_peers.GRAIN, conformance_peers.ELASTIC])
def test_the_adapters_serve_what_is_asked_for(loader):
    """Shuffled, every record once, from the source: an adapter that does not fails unfairly."""
    for name in ("each record once an epoch", "shuffled as a whole", "hosts make the same batches"):
        (check,) = (each for each in conformance.checks if each.name == name)
        assert check.run(loader).detail == ""
