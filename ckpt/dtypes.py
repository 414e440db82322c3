"""Names of dtypes: the one a leaf has, and the one that its bytes have in an image.

TensorStore has no reader for some dtypes; their elements are stored as unsigned integers of the
same width, times as int64 (`is_reinterpreted`). A leading `>` marks big-endian NumPy arrays: the
image holds little-endian bytes, and the order is put back when the array is revived.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import ml_dtypes
import numpy as np

from ckpt.errors import Unsupported
from ckpt.specs import dtype_of

FLOAT0 = np.dtype([("float0", np.void, 0)])
"""What JAX calls float0: the tangent of an integer, without any bytes."""

_UNREADABLE = {
    "int1": "uint8",
    "uint1": "uint8",
    "uint2": "uint8",
    "uint4": "uint8",
    "float6_e2m3fn": "uint8",
    "float6_e3m2fn": "uint8",
    "float8_e4m3": "uint8",
    "complex32": "uint32",
    "bcomplex32": "uint32",
}
_TIME = re.compile(r"(datetime64|timedelta64)(\[[0-9]{0,9}[A-Za-zμ]{1,2}\])?")


@functools.cache
def logical_name(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype that can be held; None for objects, text, records and long doubles."""
    if dtype == FLOAT0:
        return "float0"
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        return None
    name = (">" if dtype.byteorder == ">" else "") + dtype.newbyteorder("=").name
    try:
        return name if parse(name) == dtype else None
    except Unsupported:
        return None


@functools.cache
def parse(name: str) -> np.dtype[Any]:
    """The dtype of a logical name; only names that `logical_name` gives are understood.

    Raises:
        Unsupported: any other name.
    """
    if name == "float0":
        return FLOAT0
    if name.startswith(">"):
        swapped = parse(name[1:]).newbyteorder(">")
        if swapped.byteorder != ">":
            raise Unsupported(f"dtype {name!r} has no byte order")
        return swapped
    if name in _UNREADABLE and hasattr(ml_dtypes, name):
        return np.dtype(getattr(ml_dtypes, name))
    if _TIME.fullmatch(name):
        try:
            return np.dtype(name)
        except (TypeError, ValueError, OverflowError) as error:
            raise Unsupported(f"dtype {name!r} has an unknown unit of time") from error
    return dtype_of(name)


@functools.cache
def storage_name(name: str) -> str | None:
    """The dtype in the image for a logical name; None for float0, which has no bytes.

    Raises:
        Unsupported: a name that `logical_name` does not give.
    """
    parse(name)
    native = name.removeprefix(">")
    if native == "float0":
        return None
    return "int64" if _TIME.fullmatch(native) else _UNREADABLE.get(native, native)


def is_reinterpreted(name: str) -> bool:
    """Whether the image holds other numbers with the same bits: other readers would be misled."""
    return storage_name(name) != name.removeprefix(">")
