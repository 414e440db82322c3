"""Iterators that are there when a program ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import formats

WITH_WORKERS = """
def column(record):
    return record["id"]


if __name__ == "__main__":
    import datapipe, formats

    pipe = datapipe.Pipeline(formats.open_source("ids.parquet"), batch_size=4, seed=1)
    iterator = pipe.map(column, version="1").iterator(workers=1)
    next(iterator)
"""
GRAIN_FIRST = """
import grain, datapipe, formats

iterator = datapipe.Pipeline(formats.open_source("ids.parquet"), batch_size=4, seed=1).iterator()
next(iterator)
"""


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("code", [WITH_WORKERS, GRAIN_FIRST])
def test_the_end_of_a_program_is_silent(code: str, closed: bool, tmp_path: Path) -> None:
    """Modules that an iterator needs may be gone before it is."""
    formats.write_parquet(tmp_path / "ids.parquet", {"id": np.arange(40)})
    indent = "    " if "__main__" in code else ""
    (tmp_path / "program.py").write_text(code + f"{indent}iterator.close()\n" * closed)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
