"""The benchmark of pipelines: every side serves full batches, every figure is reported."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tools.bench import pipeline
from tools.bench.__main__ import app
from tools.bench.asking import WrongValuesError
from tools.bench.pipeline_sides import Next, Side
from tools.bench.table import WIDTH


def test_every_figure_is_reported(tmp_path: Path) -> None:
    arguments = ["pipeline", "--pairs", "2", "--scale", "0.005", "--json", "--dir", str(tmp_path)]
    for name in ("records", "rows", "tokens"):
        arguments += ["--case", name]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {"numpy", "grain", "lastgood"} <= found["versions"].keys()
    records, rows, tokens = found["cases"]
    assert {"lastgood", "grain", "grain, 2 threads"} <= records["batches_per_s"].keys()
    assert "our source, a read a batch" in rows["batches_per_s"]
    assert "lastgood / numpy, mapped, a gather a batch" in tokens["ratios"]
    for case in (records, rows, tokens):
        assert case["window_bytes"] == 16 * 256 * 1024
        names = ("batches_per_s", "ratios", "cpu_s", "cpu_ratios")
        figures = [figure for name in names for figure in case[name].values()]
        for figure in (*figures, case["planning_share"]):
            assert 0 < figure["least"] <= figure["median"] <= figure["greatest"]
    assert not list(tmp_path.iterdir())


def _side(name: str, size: int, calls: list[str]) -> Side:
    @contextlib.contextmanager
    def opened() -> Iterator[Next]:
        calls.append(name)
        yield lambda: np.zeros(size)

    return Side(name, opened, part=0.5)


def test_sides_take_turns_and_another_size_is_an_error() -> None:
    calls: list[str] = []
    sides = tuple(_side(name, 4, calls) for name in "abc")
    result = pipeline.measure(pipeline.Case("x", "y", 4, sides, 10), 3)
    assert calls == [*"abc", *"bca", *"cab"]
    assert all(len(rates) == 3 for rates in result.rates.values())
    wrong = pipeline.Case("x", "y", 4, (_side("short", 3, calls),), 10)
    with pytest.raises(WrongValuesError, match="short, x: wanted batches of 4, found 3"):
        pipeline.measure(wrong, 1)


def test_the_table_tells_ratios_memory_and_planning() -> None:
    sides = (_side("lastgood", 1, []), _side("grain", 1, []))
    case = pipeline.Case("records", "some files", 256, sides, 10)
    rates = {"lastgood": (200.0, 300.0), "grain": (10.0, 20.0)}
    cpu_s = {"lastgood": (0.001, 0.002), "grain": (0.03, 0.04)}
    text = io.StringIO()
    share = pipeline.Spread(0.015, 0.01, 0.02)
    results = [pipeline.Result(case, rates, cpu_s, share, 3 << 20)]
    pipeline.show(results, Console(file=text, width=WIDTH))
    printed = text.getvalue()
    assert "lastgood / this" in printed
    assert "17.5 (15..20)" in printed
    assert "25 (20..30)" in printed
    assert (
        "a window holds 3 MiB of records, two are held at most; planning takes 1.5 % of reading"
        in printed
    )


def test_peers_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["pipeline", "--case", "rows", "--peers"])
    assert done.exit_code == 2
    assert ".[peers]" in done.output
    assert CliRunner().invoke(app, ["pipeline", "--case", "what"]).exit_code == 2


def test_a_peer_that_is_not_there_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    case = pipeline.case_of("records", tmp_path, 0.001, peers=True)
    assert "MosaicML streaming is not installed" in case.about
    assert "streaming" not in {side.name for side in case.sides}
