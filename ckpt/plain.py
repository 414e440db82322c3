"""Small Python values in JSON and back, exactly: static data of nodes, odd keys, text leaves.

None, bool, int, float, complex, str, bytes, tuple, list, dict and NumPy dtypes, nested; of exactly
these types, no subclass. What JSON has no form for is an object with one key, the type's name.
Decoding makes these types and nothing else, whatever the record says.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Any

import numpy as np

from ckpt import dtypes
from ckpt.errors import Damaged, Unsupported

MAX_DEPTH = 16


def encode(value: Any, depth: int = 0) -> Any:
    """The JSON form of `value`. Raises `Unsupported`, naming the type, if there is none."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise Unsupported(f"static data nested more than {MAX_DEPTH} deep")
    if value is None or kind is bool:
        return value
    if kind is int:
        # Readers of JSON limit the digits of a number; doubles hold 53 bits of it.
        return value if abs(value) < 2**53 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if kind is str:
        if is_utf8(value):
            return value
        return {"surrogates": _base64(value.encode("utf-8", "surrogatepass"))}
    if kind is bytes:
        return {"bytes": _base64(value)}
    if kind is list:
        return [encode(item, depth + 1) for item in value]
    if kind is tuple:
        return {"tuple": [encode(item, depth + 1) for item in value]}
    if kind is dict:
        pairs = [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, np.dtype) and (name := dtypes.logical_name(value)):
        return {"dtype": name}
    raise Unsupported(f"{kind.__module__}.{kind.__qualname__} has no exact form in JSON")


def decode(value: Any, depth: int = 0) -> Any:
    """The value that `encode` was given. Raises `Damaged` for JSON that it never makes."""
    if depth > MAX_DEPTH:
        raise Damaged(f"tree record: data nested more than {MAX_DEPTH} deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    try:
        match value:
            case {"int": str(text)} if len(value) == 1:
                return int(text, 16)
            case {"float": "inf" | "-inf" | "nan" as text} if len(value) == 1:
                return float(text)
            case {"complex": [real, imaginary]} if len(value) == 1:
                return complex(
                    _float(decode(real, depth + 1)), _float(decode(imaginary, depth + 1))
                )
            case {"surrogates": str(text)} if len(value) == 1:
                return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
            case {"bytes": str(text)} if len(value) == 1:
                return base64.b64decode(text, validate=True)
            case {"tuple": list(items)} if len(value) == 1:
                return tuple(decode(item, depth + 1) for item in items)
            case {"dict": list(items)} if len(value) == 1:
                return {decode(k, depth + 1): decode(v, depth + 1) for k, v in items}
            case {"dtype": str(name)} if len(value) == 1:
                return dtypes.parse(name)
    except (ValueError, TypeError, binascii.Error) as error:
        raise Damaged(f"tree record: no plain value: {str(value)[:200]}") from error
    raise Damaged(f"tree record: no plain value: {str(value)[:200]}")


def same(one: Any, other: Any) -> bool:
    """Equality that also compares types: 1, 1.0 and True are three values, nan is itself."""
    try:
        return json.dumps(encode(one)) == json.dumps(encode(other))
    except Unsupported:
        return False


def is_utf8(text: str) -> bool:
    """Whether the text has an encoding at all: lone surrogates have none."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _float(value: Any) -> float:
    if type(value) is not float:
        raise TypeError(value)
    return value
