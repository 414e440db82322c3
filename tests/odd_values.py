"""Values of all kinds that somebody may hand in, by name; made anew for each use."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Thing:
    """Of no kind that anybody knows."""


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "3": lambda: 3,
    "-1": lambda: -1,
    "2**31": lambda: 2**31,
    "2**62": lambda: 2**62,
    "2**63": lambda: 2**63,
    "2**70": lambda: 2**70,
    "-2**70": lambda: -(2**70),
    "10**400": lambda: 10**400,
    "0.5": lambda: 0.5,
    "3.0": lambda: 3.0,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "1j": lambda: 1j,
    "''": lambda: "",
    "'x'": lambda: "x",
    "half a pair": lambda: "\ud800",
    "NUL": lambda: "a\0b",
    "b''": lambda: b"",
    "b'x'": lambda: b"x",
    "[]": list,
    "[1]": lambda: [1],
    "[None]": lambda: [None],
    "['x']": lambda: ["x"],
    "[[1], [1, 2]]": lambda: [[1], [1, 2]],
    "()": lambda: (),
    "(1, 2)": lambda: (1, 2),
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "{'x'}": lambda: {"x"},
    "range(3)": lambda: range(3),
    "iterator": lambda: iter([1]),
    "function": lambda: lambda each: each,
    "class": lambda: int,
    "thing": Thing,
    "...": lambda: ...,
    "path": lambda: Path("x"),
    "np.int64": lambda: np.int64(3),
    "np.uint8": lambda: np.uint8(3),
    "np.float64": lambda: np.float64(3),
    "np.True_": lambda: np.bool_(True),
    "np.str_": lambda: np.str_("x"),
    "np.datetime64": lambda: np.datetime64("2020"),
    "array(3)": lambda: np.array(3),
    "array([1, 2])": lambda: np.array([1, 2]),
}

WHOLE = {"3", "np.int64", "np.uint8"}
FROM_0 = WHOLE | {"0"}
TEXT = {"'x'", "np.str_"}
UNHASHABLE = {
    *("[]", "[1]", "[None]", "['x']", "[[1], [1, 2]]", "{}", "{'a': 1}", "{'x'}"),
    *("array(3)", "array([1, 2])"),
}
