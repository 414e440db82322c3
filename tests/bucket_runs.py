"""What the tests of runs in buckets share: the bucket, states, how they are saved and compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from s3_server import BUCKET, Proxy

import ckpt
from ckpt import kv_requests

IMPATIENT = kv_requests.Patience(0.1, 0.01, 0.02, 0.3)
"""For stores that fail for good. Nothing that has to succeed goes by it: an answer may take long
on a machine that has much to do."""

_numbers = itertools.count()


def found_through_environment(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The server is the one that all stores of S3 go to, as in production."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(kv_requests, "PATIENCE", kv_requests.Patience(10.0, 0.01, 0.05, 10.0))
    return proxy


def new_root() -> str:
    return f"s3://{BUCKET}/run-{next(_numbers)}"


def spec_of(s3: Proxy, path: str) -> dict[str, Any]:
    """What TensorStore needs to read below a path of the bucket by itself."""
    return {
        "driver": "s3",
        "bucket": BUCKET,
        "path": path,
        "endpoint": s3.url,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
    }


def manager_of(root: str, place: Path, **options: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(ckpt.Shared(root, **options), arena=place / "arena")


def state_of(step: int) -> dict[str, Any]:
    key = jax.random.fold_in(jax.random.key(3), step)
    return {"w": jax.random.normal(key, (32, 16)), "b": np.full(7, step), "step": step}


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_steps(m: ckpt.CheckpointManager, steps: Iterable[int], data: Any = None) -> None:
    for step in steps:
        if data is not None:
            next(data)
        m.save(step, state_of(step), data=data)
    m.wait_until_finished()
