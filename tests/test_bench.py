"""The benchmark runs on tiny states, reports what it should, and would notice wrong values."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tools.bench import cases, files, limits, table
from tools.bench.pairs import Plan, Result, Run, WrongValuesError

_RUN = Run(0.1, 0.2, 1.0, 1.1, 0.5, "cold", 1000, 0, 0, ())


def _bench(*arguments: str, directory: Path) -> Any:
    command = [sys.executable, "-m", "tools.bench", "checkpoint", "--json", "--dir", str(directory)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_both_sides_restore_the_values_and_report_every_figure(tmp_path: Path) -> None:
    found = _bench("--case", "leaves", "--pairs", "2", "--scale", "0.003", directory=tmp_path)
    assert {"jax", "orbax-checkpoint", "lastgood"} <= found["versions"].keys()
    assert found["cpus"] >= 1
    (case,) = found["cases"]
    assert (case["leaves"], case["bytes"], case["pairs"]) == (30, 30 * 256, 2)
    assert case["sides"].keys() == {"lastgood", "orbax", "orbax, no compression"}
    for side in case["sides"].values():
        assert len(side["runs"]) == 1  # the first pair is dropped
        for figure in ("blocking_s", "first_blocking_s", "durable_s", "restore_s"):
            assert 0 < side[figure]["least"] <= side[figure]["median"] <= side[figure]["greatest"]
        assert side["runs"][0]["cache"]
        assert min(side["disk_bytes"], side["peak_save_bytes"], side["peak_restore_bytes"]) > 0
    for figure in ("write_s", "read_s", "copy_s"):
        assert case["limits"][figure]["median"] > 0
    ours, theirs = (case["sides"][name]["runs"][0] for name in ("lastgood", "orbax"))
    ratio = case["ratios"]["orbax"]["durable_s"]["median"]
    assert ratio == pytest.approx(ours["durable_s"] / theirs["durable_s"])
    assert not list(tmp_path.iterdir())


def test_sharded_states_come_back(tmp_path: Path) -> None:
    (case,) = cases.cases_of("sharded", 0.0001)
    assert case.devices == 4
    result = Plan(tmp_path, 0.0001, 1, ("lastgood", "orbax")).measure(case, "sharded")
    assert result.runs.keys() == {"lastgood", "orbax"}


def test_memory_is_watched_over_many_saves(tmp_path: Path) -> None:
    plan = Plan(tmp_path, 0.02, 3, ("lastgood",))
    (case,) = cases.cases_of("soak", 0.02)
    result = plan.measure(case, "soak")
    (run,) = result.runs["lastgood"]
    assert len(run.pss_bytes) == case.saves == 5
    assert min(run.pss_bytes) > case.nbytes
    assert result.growth_bytes("lastgood") is not None


def test_wrong_values_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench.pairs.truth", lambda *_: "0" * 32)
    (case,) = cases.cases_of("leaves", 0.0005)
    with pytest.raises(WrongValuesError, match="lastgood, leaves: wanted values of digest 000"):
        Plan(tmp_path, 0.0005, 1, ("lastgood",)).measure(case, "leaves")
    assert not list(tmp_path.iterdir())


def test_ratios_are_taken_pair_by_pair() -> None:
    (case,) = cases.cases_of("leaves", 0.001)
    slow = Run(1.0, 1.0, 10.0, 10.0, 5.0, "cold", 1000, 0, 0, ())
    runs = {"lastgood": (_RUN, slow), "orbax": (slow, slow)}
    limit = {"write_s": 0.5, "read_s": 0.5, "copy_s": 0.05}
    result = Result(case, 3, runs, (limit, limit), {})
    ratio = result.ratio("durable_s")
    assert ratio is not None
    assert (ratio.least, ratio.median, ratio.greatest) == (0.1, 0.55, 1.0)
    to_limit = result.to_limit("restore_s", "read_s")
    assert to_limit is not None
    assert (to_limit.least, to_limit.greatest) == (1.0, 10.0)


def test_the_table_says_what_its_words_mean_and_small_sizes_in_kib() -> None:
    (case,) = cases.cases_of("leaves", 0.001)
    limit = {"write_s": 0.5, "read_s": 0.5, "copy_s": 0.05, "write": "direct"}
    peaks = {"lastgood": (3 * 2**20, 5 * 2**20)}
    result = Result(case, 1, {"lastgood": (_RUN,)}, (limit,), peaks)
    told = io.StringIO()
    table.show([result], Console(width=table.WIDTH, file=told))
    text = told.getvalue()
    assert "1.0 KiB" in text, "1000 bytes on disk"
    assert "5 MiB" in text
    assert " 0 MiB" not in text
    assert "first: the blocking part of the first save of a process" in text
    assert "limit: the same bytes" in text


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", table.WIDTH), ("x", table.WIDTH)])
def test_columns_are_respected_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert table.console().width == width


def test_growth_is_a_slope_over_the_saves_after_the_first() -> None:
    (case,) = cases.cases_of("soak", 0.02)
    run = Run(1.0, 1.0, 1.0, 1.0, 1.0, "cold", 1000, 0, 0, (9, 100, 110, 120, 130))
    result = Result(case, 1, {"lastgood": (run,)}, ({},), {})
    assert result.growth_bytes("lastgood") == pytest.approx(10)


def test_values_are_seeded_and_every_step_changes_them() -> None:
    (case,) = cases.cases_of("model", 0.0001)
    assert case.nbytes == sum(array.nbytes for _, array in cases.values(case, 3))
    digests = {cases.truth(case, seed, step) for seed in (3, 4) for step in (0, 1, 2)}
    assert len(digests) == 6
    assert cases.truth(case, 3, 2) == cases.truth(case, 3, 2)


def test_digest_sees_name_shape_and_bytes() -> None:
    array = np.arange(6, dtype=np.float32)
    found = [
        cases.digest([("a", array)]),
        cases.digest([("b", array)]),
        cases.digest([("a", array.reshape(2, 3))]),
        cases.digest([("a", array + 1)]),
    ]
    assert len(set(found)) == 4


def test_full_scale_is_what_the_bars_speak_of() -> None:
    sizes = {name: cases.cases_of(name, 1.0) for name in cases.NAMES}
    assert len(sizes["leaves"][0].shapes) == 10_000
    assert len(sizes["model"][0].shapes) == 144
    assert 1.1 * 2**30 <= sizes["model"][0].nbytes < 1.15 * 2**30
    assert sizes["one"][0].nbytes == 2 * 2**30
    assert (sizes["soak"][0].nbytes, sizes["soak"][0].saves) == (64 * 2**20, 200)
    assert [len(case.shapes) for case in sizes["many"]] == [10_000, 30_000, 100_000]


def test_limits_leave_nothing_behind(tmp_path: Path) -> None:
    found = limits.measure(tmp_path / "limit", 3 * 2**20 + 17)
    assert {"write_s", "read_s", "copy_s"} <= found.keys()
    assert not list(tmp_path.iterdir())


def test_cache_state_tells_what_was_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    path.read_bytes()
    assert files.cache_state(tmp_path) in ("warm", "unknown")
    assert files.drop_cache(tmp_path) in ("cold", "warm", "unknown")
    assert files.size_bytes(tmp_path) >= 1 << 20
