"""The benchmark of packing; and that ours leaves no more padding than Grain's."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tools.bench import packing
from tools.bench.__main__ import app
from tools.bench.asking import WrongValuesError
from tools.bench.table import WIDTH

GRAIN_BINS = (32, 128)


@pytest.fixture(scope="module")
def paddings():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packing, "GRAIN_BINS", GRAIN_BINS)
        return packing.paddings(3000)


def test_ours_is_no_worse_than_that_of_grain(paddings):
    """Grain's closes all bins at once when a document fits nowhere; ours goes by documents."""
    shares = {(each.side, each.strategy, each.scope): each.share for each in paddings}
    assert len(shares) == 10
    for strategy in packing.STRATEGIES:
        ours = shares["lastgood", strategy, 16384]
        for bins in GRAIN_BINS:
            assert ours <= shares["grain", strategy, bins] + 1e-12
    assert min(shares.values()) > 0
    assert max(shares.values()) < 0.2


def test_every_figure_is_reported(monkeypatch, paddings):
    monkeypatch.setattr(packing, "paddings", lambda documents: paddings)
    done = CliRunner().invoke(app, ["packing", "--documents", "20000", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {"numpy", "grain", "lastgood"} <= found["versions"].keys()
    assert [each["index"] for each in found["cost"]] == ["first-fit", "best-fit", "concatenate"]
    for each in found["cost"]:
        assert each["documents"] == 20000
        assert 0 < each["seek_s"]["median"] <= each["seek_s"]["greatest"]
        assert (each["file_bytes"] > 0) == (each["index"] != "concatenate")
    assert len(found["padding"]) == 10
    text = io.StringIO()
    cost = packing.costs(5000)
    packing.show(paddings, cost, Console(file=text, width=WIDTH))
    assert "…" not in text.getvalue()
    assert f"{paddings[0].share:.2%}" in text.getvalue()


def test_lost_tokens_are_an_error(monkeypatch):
    lengths = np.full(50, 100)
    monkeypatch.setattr(packing, "drawn", lambda documents: lengths)
    monkeypatch.setattr(packing.Lengths, "of", lambda given: packing.Lengths(lengths[:40]))
    done = CliRunner().invoke(app, ["packing", "--documents", "50"])
    assert done.exit_code == 1
    assert "other tokens (seed 7)" in done.output
    with pytest.raises(WrongValuesError, match="other tokens"):
        packing.paddings(50)
