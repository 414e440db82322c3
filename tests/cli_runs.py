"""Runs made by the real manager and the real pipeline, for the tests of the command."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from memory_source import Records, number
from typer.testing import CliRunner, Result

import ckpt
from datapipe import Pipeline
from tools import cli

BATCH = 4
EVERY = 5


def state() -> dict[str, Any]:
    return {
        "params": {"dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4, jnp.bfloat16)}},
        "opt": (np.arange(3, dtype=np.int64), None),
        "key": jax.random.key(0),
        "note": b"raw",  # Orbax cannot see it
        "step": 7,
    }


def iterator(records: int = 1000) -> Any:
    source = Records(records)
    return Pipeline(source, batch_size=BATCH, seed=3).map(number, version="1").iterator()


class Trainer:
    """A trainer that writes down which records each step used."""

    def __init__(self, root: Path, data: Any = None, every: int = EVERY) -> None:
        self.data = iterator() if data is None else data
        self.manager = ckpt.CheckpointManager(ckpt.Shared(root, every=every))
        self.step = 0
        self.used: dict[int, list[int]] = {}

    def resume(self) -> int:
        self.step = self.manager.resume(data=self.data).step
        return self.step

    def rewind(self, to: int, **how: Any) -> None:
        self.step = self.manager.rewind(to, data=self.data, **how).step

    def train(self, last: int, metrics: Any = None) -> None:
        for step in range(self.step + 1, last + 1):
            self.used[step] = [int(record) for record in next(self.data)]
            told = {"loss": 1 / step} if metrics is None else metrics
            self.manager.save(step, state(), data=self.data, metrics=told)
        self.step = last

    def records(self, first: int, stop: int) -> set[int]:
        return {record for step in range(first, stop) for record in self.used[step]}


@contextmanager
def training(root: Path, **how: Any):
    trainer = Trainer(root, **how)
    with trainer.manager:
        yield trainer


def ckpt_command(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.app, [str(each) for each in arguments])


def answer(*arguments: Any, code: int = 0) -> Any:
    """What a command prints with `--json`, and nothing else anywhere."""
    result = ckpt_command(*arguments, "--json")
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
    assert result.stderr == ""
    return json.loads(result.stdout, parse_constant=lambda name: 1 / 0)


def refusal(*arguments: Any, code: int) -> str:
    """The one message of a command that fails, without a traceback."""
    result = ckpt_command(*arguments)
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("ckpt: ")
    if "--json" in arguments:
        assert json.loads(result.stdout)["error"]["exit_code"] == code
    else:
        assert result.stdout == ""
    return " ".join(result.stderr.split())
