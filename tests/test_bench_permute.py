"""The benchmark of orders: every figure, in text and as JSON, and wrong orders are an error."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tools.bench import permute
from tools.bench.__main__ import app
from tools.bench.asking import WrongValuesError
from tools.bench.table import WIDTH


def test_every_figure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute, "SIZES", (100_003, 2**28 + 1))
    done = CliRunner().invoke(app, ["permute", "--rounds", "2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {"numpy", "grain", "lastgood"} <= found["versions"].keys()
    small, large = found["sizes"]
    assert (small["n"], large["n"]) == (100_003, 2**28 + 1)
    assert permute.GRAIN_ORDER in small["indices_per_s"]
    assert permute.GRAIN_ORDER not in large["indices_per_s"]
    for size in (small, large):
        for rate in (*size["indices_per_s"].values(), size["ratio"]):
            assert 0 < rate["least"] <= rate["median"] <= rate["greatest"]


def test_the_table_fits_and_names_the_worst() -> None:
    rates = dict.fromkeys((permute.FORWARD, permute.INVERSE, permute.CPU), (2e8, 1.234e8, 1e8))
    few = dict.fromkeys(rates, (2e6, 2e6, 3e6))
    theirs = {permute.GRAIN: (1e6, 1e6, 1e6)}
    results = [
        permute.Result(2**40 + 1, rates | theirs | {permute.GRAIN_ORDER: (1e6, 1e6, 2e6)}),
        permute.Result(5, few | theirs),
    ]
    text = io.StringIO()
    permute.show(results, Console(file=text, width=WIDTH))
    printed = text.getvalue()
    assert "123 (100 to 200)" in printed
    assert "no bijection" in printed
    assert "the worst: 2.0 M/s at n = 5" in printed
    assert "…" not in printed


def test_wrong_orders_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute, "index_shuffle", lambda *_: 0)
    with pytest.raises(WrongValuesError, match=r"n=100003: another order than Grain's \(seed"):
        permute.measure(100_003, 1)
    monkeypatch.setattr(permute.Permutation, "inverse", lambda _, records: np.zeros_like(records))
    with pytest.raises(WrongValuesError, match="n=100003: the inverse does not lead back"):
        permute.measure(100_003, 1)
    done = CliRunner().invoke(app, ["permute", "--rounds", "1"])
    assert done.exit_code == 1
    assert "the inverse does not lead back" in done.output
