"""The benchmark of seeks: every case, nothing read, and another batch is an error."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from datapipe.order.plan import Plan
from tools.bench import seek
from tools.bench.__main__ import app
from tools.bench.asking import WrongValuesError
from tools.bench.table import WIDTH


def test_every_case_is_reported() -> None:
    done = CliRunner().invoke(app, ["seek", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [each["case"] for each in found["cases"]] == list(seek.CASES)
    for each in found["cases"]:
        for spread in each["seconds"].values():
            assert 0 < spread["least"] <= spread["median"] <= spread["greatest"]
        assert each["state_bytes"] > 200


def test_the_table_fits_and_says_who_is_within_the_bar() -> None:
    results = [
        seek.Result("plain", {seek.RESTORE: (1e-3, 2e-3), seek.AGAIN: (1e-3, 9e-3)}, 300),
        seek.Result("mixed", {seek.RESTORE: (1e-3, 2e-3), seek.AGAIN: (1e-3, 9.1e-3)}, 12_345),
    ]
    text = io.StringIO()
    seek.show(results, Console(file=text, width=WIDTH))
    plain, mixed = (
        line for line in text.getvalue().splitlines() if "12,345" in line or " 300 " in line
    )
    assert "1.5 (1 to 2)" in plain
    assert "yes" in plain
    assert "5.05 (1 to 9.1)" in mixed
    assert "no" in mixed


def test_a_seek_that_reads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    locate = Plan.locate

    def reading(plan, examples):
        for source in sources:
            source.read([0])
        return locate(plan, examples)

    made, options, skips = seek.CASES["plain"]
    sources = []
    monkeypatch.setitem(seek.CASES, "plain", (lambda: _noted(made(), sources), options, skips))
    monkeypatch.setattr(Plan, "locate", reading)
    with pytest.raises(WrongValuesError, match="plain: a seek read data"):
        seek.measure("plain", 1)


def test_another_batch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Plan.examples
    monkeypatch.setattr(Plan, "examples", lambda plan, at: examples(plan, at - 1))
    with pytest.raises(WrongValuesError, match="mixed: not the batch at example"):
        seek.measure("mixed", 1)
    done = CliRunner().invoke(app, ["seek", "--rounds", "1"])
    assert done.exit_code == 1
    assert "not the batch at example" in done.output


def _noted(made, sources):
    sources[:] = made.values()
    return made
