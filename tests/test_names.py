"""What the packages export, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import ckpt


def test_exported_names() -> None:
    assert ckpt.__all__ == [
        "AlreadyExists",
        "Best",
        "CheckpointError",
        "CheckpointManager",
        "Damaged",
        "Fit",
        "InUse",
        "Keep",
        "Loading",
        "Local",
        "Memory",
        "Mismatch",
        "Misuse",
        "NotFound",
        "PeerFailed",
        "Restored",
        "Run",
        "Shared",
        "SpikeGuard",
        "Status",
        "StoreFailed",
        "Superseded",
        "TooManyRewinds",
        "Unsupported",
        "metadata",
        "open",
        "pin",
        "restore",
        "rewind",
        "save",
        "unpin",
        "verify",
    ]


def test_every_name_resolves_to_what_it_says() -> None:
    for name in ckpt.__all__:
        value = getattr(ckpt, name)
        assert getattr(value, "__name__", name) == name
        assert value.__doc__, name


def _imported(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _imported("import ckpt, datapipe, formats, tools")
    assert not loaded & {"jax", "tensorstore", "orbax", "grain", "numpy", "pyarrow"}


def test_the_writer_and_the_tools_need_no_jax() -> None:
    modules = "ckpt.writer, ckpt.commit, ckpt.reader, ckpt.verification, ckpt.oneshot, ckpt.arena"
    modules += ", tools.indexing, datapipe.sources.stages"
    loaded = _imported(f"import {modules}")
    assert not loaded & {"jax", "tensorstore", "orbax", "grain"}
