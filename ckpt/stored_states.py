"""States of iterators in JSON and back, exactly, whatever plain values they are made of.

JSON stays as it is, but for the order of keys in objects. What it has no form for is an object of
one member, `$`: a list of the kind and what it takes. Reading makes plain values and nothing else,
whatever a file says.

::

    {"$": ["utf-8", "{...}"]}                     bytes that are text, such as those of a DataLoader
    {"$": ["bytes", "AP8="]}                      other bytes, in base64
    {"$": ["tuple", [1, 2]]}
    {"$": ["dict", [[3, {"next_index": 0}]]]}     with other keys than texts, or with a key "$"
    {"$": ["int", "0x1..."]}                      of more than 1,024 bits
    {"$": ["array", "<i8", [], "BQAAAAAAAAA="]}   NumPy: type, shape, bytes; a scalar is none
    {"$": ["scalar", "<i8", "BQAAAAAAAAA="]}
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any, Final

import numpy as np

from ckpt.errors import Damaged, Misuse

Json = Any
MAX_BYTES: Final = 16 << 20
"""Of one state in JSON: it is a position, and every process reads those of all."""

_DEPTH: Final = 100
_TAG: Final = "$"
_INT_BITS: Final = 1024  # Python refuses to read very long numbers
_DTYPE: Final = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,6})")


def stored(state: Any, what: str) -> Json:
    """A state as a JSON value, of which `loaded` makes it again.

    Subclasses of plain types, but not of tuples, come back as what they derive from.

    Raises:
        Misuse: it holds something else than plain values and NumPy arrays, or is too deep or long.
    """
    found = _stored(state, what, 0)
    size_bytes = len(json.dumps(found))
    if size_bytes > MAX_BYTES:
        raise Misuse(
            f"{what}: wanted at most {MAX_BYTES} bytes in JSON, found {size_bytes}: a state is a "
            "position, what an iterator has buffered is to be read again"
        )
    return found


def loaded(value: Json, where: str) -> Any:
    """The state that `stored` was given. Raises Damaged: it never makes such a value."""
    try:
        return _loaded(value, 0)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise Damaged(f"{where}: no state of an iterator: {error}") from error


def _stored(value: Any, what: str, depth: int) -> Json:
    if depth > _DEPTH:
        raise Misuse(f"{what:.200}: wanted at most {_DEPTH} levels, found a deeper one")
    if isinstance(value, np.generic | np.ndarray):
        return _stored_array(value, what)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        whole = int(value)
        return whole if whole.bit_length() <= _INT_BITS else _tagged("int", hex(whole))
    if isinstance(value, bytes):
        return _stored_bytes(value)
    if isinstance(value, dict):
        return _stored_dict(value, what, depth)
    if isinstance(value, list) or type(value) is tuple:
        items = [_stored(item, f"{what}[{place}]", depth + 1) for place, item in enumerate(value)]
        return items if isinstance(value, list) else _tagged("tuple", items)
    kind = type(value)
    raise Misuse(
        f"{what:.200}: wanted a state of plain values and NumPy arrays, found "
        f"{kind.__module__}.{kind.__qualname__}: let get_state turn it into such, and "
        "set_state back"
    )


def _stored_dict(value: dict[Any, Any], what: str, depth: int) -> Json:
    pairs = [(key, _stored(item, f"{what}[{key!r:.40}]", depth + 1)) for key, item in value.items()]
    if all(type(key) is str for key in value) and _TAG not in value:
        return dict(pairs)
    return _tagged(
        "dict", [[_stored(key, f"{what}: a key", depth + 1), item] for key, item in pairs]
    )


def _stored_bytes(value: bytes) -> Json:
    try:
        return _tagged("utf-8", value.decode())
    except UnicodeDecodeError:
        return _tagged("bytes", _base64(value))


def _stored_array(value: np.generic | np.ndarray, what: str) -> Json:
    if not _DTYPE.fullmatch(value.dtype.str):
        raise Misuse(
            f"{what:.200}: wanted numbers or texts in a NumPy array, found {value.dtype}: let "
            "get_state turn it into plain values, and set_state back"
        )
    data = _base64(value.tobytes())
    if isinstance(value, np.generic):
        return _tagged("scalar", value.dtype.str, data)
    return _tagged("array", value.dtype.str, list(value.shape), data)


def _tagged(*parts: Json) -> Json:
    return {_TAG: list(parts)}


def _loaded(value: Json, depth: int) -> Any:
    if depth > _DEPTH + 1:
        raise ValueError(f"nested more than {_DEPTH} deep")
    if isinstance(value, list):
        return [_loaded(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _loaded(item, depth + 1) for key, item in value.items()}
    match value:
        case {"$": ["int", str(text)]} if len(value) == 1:
            return int(text, 16)
        case {"$": ["utf-8", str(text)]} if len(value) == 1:
            return text.encode()
        case {"$": ["bytes", str(text)]} if len(value) == 1:
            return base64.b64decode(text, validate=True)
        case {"$": ["tuple", list(items)]} if len(value) == 1:
            return tuple(_loaded(item, depth + 1) for item in items)
        case {"$": ["dict", list(pairs)]} if len(value) == 1:
            return {_loaded(key, depth + 1): _loaded(item, depth + 1) for key, item in pairs}
        case {"$": ["scalar", str(dtype), str(text)]} if len(value) == 1:
            return _array(dtype, [], text)[()]
        case {"$": ["array", str(dtype), list(shape), str(text)]} if len(value) == 1:
            return _array(dtype, shape, text)
    raise ValueError(f"wanted what a value is made of, found {value!s:.80}")


def _array(dtype: str, shape: list[Json], text: str) -> np.ndarray:
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"wanted a type of numbers or texts, found {dtype!r:.40}")
    if not all(type(side) is int and 0 <= side < 1 << 48 for side in shape) or len(shape) > 32:
        raise ValueError(f"wanted a shape, found {shape!s:.80}")
    data = base64.b64decode(text, validate=True)
    wanted = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) != wanted:
        raise ValueError(f"wanted {wanted} bytes of {dtype}{shape}, found {len(data)}")
    if not wanted:
        return np.zeros(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
