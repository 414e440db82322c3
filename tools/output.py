"""Answers to standard output: as text, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import typer
from rich.console import Console, RenderableType

_WIDE = 100_000
"""Columns of what is no terminal: nothing is wrapped or cut there."""

_BROKEN_PIPE = 141
"""As the shell tells it of a program that SIGPIPE ended."""


def answer(value: Any, view: Iterable[RenderableType], *, as_json: bool) -> None:
    """Print an answer; `view` is the same as text."""
    if as_json:
        print_json(value)
    else:
        print_text(view)


def print_text(view: Iterable[RenderableType]) -> None:
    """Print what a function of `tools.views` gives."""
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else _WIDE, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for each in view:
            console.print(each, soft_wrap=False)
    text = captured.get()
    _write(text if terminal else re.sub(r" +$", "", text, flags=re.MULTILINE))


def print_json(value: Any) -> None:
    """Print one JSON value."""
    _write(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """A value of dataclasses as JSON; numbers that JSON has not as text: "nan", "inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read this has seen enough; Python must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BROKEN_PIPE) from None
