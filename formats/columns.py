"""Arrow columns to NumPy arrays and lists, with one fixed result type per column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from formats.arguments import mapping
from formats.errors import Misuse
from formats.source import Column


class NullFound(ValueError):
    """A null where the result type has no place for one."""


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that readers see: dictionaries, extensions and large or view layouts removed."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind


def cached_type(kind: pa.DataType) -> pa.DataType:
    """`kind` without dictionaries and views, the values in their place; read as the same."""
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_dictionary(kind):
        return cached_type(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(cached_type(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(cached_type(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(cached_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(cached_type(field.type)) for field in kind])
    return kind


def describe(name: str, kind: pa.DataType) -> Column:
    """What a column of Arrow type `kind` is read as."""
    kind = plain_type(kind)
    if pa.types.is_string(kind):
        return Column(name, "str")
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return Column(name, "bytes")
    dtype = _dtype(kind)
    if dtype:
        return Column(name, "array", dtype)
    if pa.types.is_fixed_size_list(kind):
        inner = describe(name, kind.value_type)
        if inner.kind == "array":
            return Column(name, "array", inner.dtype, (kind.list_size, *inner.shape))
    if pa.types.is_list(kind) and _dtype(kind.value_type):
        return Column(name, "ragged", _dtype(kind.value_type))
    return Column(name, "object")


def fill_scalar(kind: pa.DataType, value: Any) -> pa.Scalar:
    """`value` as the innermost type of `kind`; raises what Arrow raises if it does not fit."""
    kind = plain_type(kind)
    while pa.types.is_nested(kind):
        kind = kind.value_type
    scalar = pa.scalar(value, type=kind)
    if not scalar.is_valid:
        raise ValueError("null cannot stand for null")
    if pa.types.is_integer(kind) and scalar.as_py() != value:
        raise ValueError("no whole number")
    return scalar


def convert(array: pa.Array, column: Column, fill: pa.Scalar | None) -> np.ndarray | list[Any]:
    """The n rows of `array` as `column` says; an `array` column may share memory with it.

    Raises: NullFound for a null in an `array` column, or inside a row of a `ragged` one, without
    `fill`.
    """
    array = _plain(array)
    if column.kind == "array":
        return _dense(array, column.dtype, column.shape, fill)
    if column.kind == "ragged":
        return _ragged(array, column.dtype, fill)
    if column.kind == "str":
        return list(array.to_numpy(zero_copy_only=False))
    return list(array.to_pylist())


def taken(values: pa.Array | pa.Table, rows: np.ndarray) -> Any:
    """The rows `rows` of an array or a table, int64[n]."""
    try:
        return values.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # Arrow cannot for every layout, views for one
        pieces = [values.slice(row, 1) for row in rows.tolist()]
        return (
            pa.concat_tables(pieces) if isinstance(values, pa.Table) else pa.concat_arrays(pieces)
        )


def first_bad(array: pa.Array, column: Column, fill: pa.Scalar | None) -> int:
    """The first row that `convert` refuses; 0 if it takes each of them alone."""
    for row in range(len(array)):
        try:
            convert(array.slice(row, 1), column, fill)
        except (ValueError, pa.ArrowException):
            return row
    return 0


def arrow_array(values: Any) -> pa.Array:
    """`values` as an Arrow array; rows of an ndarray `[n, ...]` become fixed-size lists."""
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return pa.array(values)
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def as_table(columns: Mapping[str, Any]) -> pa.Table:
    """Columns to write, by name, as `arrow_array` takes them. Raises: Misuse."""
    arrays = {}
    for name, values in mapping("columns", columns).items():
        try:
            arrays[name] = arrow_array(values)
        except (pa.ArrowException, TypeError) as error:
            raise Misuse(f"column {name!r} fits no Arrow type: {error}") from error
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise Misuse(f"columns of different lengths: {lengths}")
    return pa.table(arrays)


def gather(
    pieces: Sequence[tuple[np.ndarray, np.ndarray | list[Any]]], column: Column, rows: int
) -> np.ndarray | list[Any]:
    """One column of `rows` rows from pieces of it, each with the places of its rows."""
    if column.kind == "array":
        out = np.empty((rows, *column.shape), column.dtype)
        for slots, values in pieces:
            out[slots] = values
        return out
    if column.kind in ("str", "bytes"):
        texts = np.empty(rows, object)
        for slots, values in pieces:
            texts[slots] = values
        return list(texts.tolist())
    # NumPy would look for another axis in these.
    items: list[Any] = [None] * rows
    for slots, values in pieces:
        for slot, value in zip(slots.tolist(), values, strict=True):
            items[slot] = value
    return items


def _dtype(kind: pa.DataType) -> str:
    """The NumPy dtype of a fixed-width Arrow type, or an empty string."""
    types = pa.types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype()).name
    if types.is_timestamp(kind):
        return f"datetime64[{kind.unit}]"
    if types.is_date(kind):
        return "datetime64[D]" if types.is_date32(kind) else "datetime64[ms]"
    if types.is_duration(kind):
        return f"timedelta64[{kind.unit}]"
    return ""


def _plain(array: pa.Array) -> pa.Array:
    """`array` without dictionary or extension wrapping at its top level."""
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        else:
            return array


def _dense(
    array: pa.Array, dtype: str, shape: tuple[int, ...], fill: pa.Scalar | None
) -> np.ndarray:
    """Numbers, or fixed-size lists of them, as `[n, *shape]`."""
    if array.null_count and fill is None:
        raise NullFound("holds a null")
    if not shape:
        whole = pc.fill_null(array, fill) if array.null_count else array
        return np.asarray(whole.to_numpy(zero_copy_only=False), dtype=dtype)
    valid = len(array) - array.null_count
    inner = _plain(array.flatten())  # leaves out the values of null rows
    values = _dense(inner, dtype, shape[1:], fill).reshape((valid, *shape))
    if not array.null_count or fill is None:
        return values
    out = np.full((len(array), *shape), numpy_scalar(fill, dtype), dtype)
    out[array.is_valid().to_numpy(zero_copy_only=False)] = values
    return out


def _ragged(array: pa.Array, dtype: str, fill: pa.Scalar | None) -> list[Any]:
    """Lists of numbers as 1-D arrays, views of one block; a null list is None."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    values = np.array(_dense(_plain(array.flatten()), dtype, (), fill))  # Arrow's is read-only
    ends = np.cumsum(lengths, dtype=np.int64)
    rows: list[Any] = np.split(values, ends[:-1]) if len(array) else []
    if array.null_count:
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            rows[row] = None
    return rows


def numpy_scalar(fill: pa.Scalar, dtype: str) -> np.generic:
    """What stands for null, as an element of a column of `dtype`."""
    array = pa.array([fill.as_py()], fill.type)
    return np.array(array.to_numpy(zero_copy_only=False), dtype=dtype)[0]
