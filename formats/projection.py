"""Which columns of columnar files are read, and what must agree between the files of a source."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from formats.arguments import mapping, texts
from formats.columns import NullFound, describe, fill_scalar, gather, plain_type
from formats.errors import Damaged, Mismatch, Misuse, Unsupported
from formats.files import File
from formats.source import Column, Spec

_MAX_VALUES = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Projection:
    """The columns that are read.

    types: their Arrow types by name, in the order of the result.
    columns: what they are read as.
    fill_null: what stands for null, as it was given.
    fill: the same as values of Arrow.
    """

    types: Mapping[str, pa.DataType]
    columns: tuple[Column, ...]
    fill_null: Mapping[str, Any]
    fill: Mapping[str, pa.Scalar]

    @staticmethod
    def of(
        files: Sequence[File],
        schemas: Sequence[pa.Schema],
        columns: Sequence[str] | None,
        fill_null: Mapping[str, Any] | None,
    ) -> Projection:
        """Those of `columns`, None: all of the first file.

        Raises: Misuse for a column that is not there, or a value that does not stand for null;
        Mismatch where files differ in what is read.
        """
        types = _chosen(files[0], schemas[0], columns)
        _check_same(files, schemas, types, columns)
        described = tuple(describe(name, kind) for name, kind in types.items())
        given = {} if fill_null is None else mapping("fill_null", fill_null)
        return Projection(types, described, given, _fills(types, described, given))

    @property
    def names(self) -> list[str]:
        """Those of the columns."""
        return list(self.types)

    def arguments(self, columns: Sequence[str]) -> dict[str, Any]:
        """What makes a source of the same files and other columns; null is the same in them.

        Raises: Misuse for what is no list of names.
        """
        names = texts("columns", columns)
        fill = {name: value for name, value in self.fill_null.items() if name in names}
        return {"columns": names, "fill_null": fill}

    def in_fingerprint(self) -> dict[str, Any]:
        """What a fingerprint says of it."""
        fill = {name: str(value) for name, value in self.fill.items()}
        return {"columns": Spec(self.columns).to_json()["columns"], "fill_null": fill}

    def gathered(
        self, pieces: Mapping[str, Sequence[tuple[np.ndarray, Any]]], rows: int
    ) -> dict[str, np.ndarray | list[Any]]:
        """All columns of `rows` rows, from pieces of each; see `formats.columns.gather`."""
        return {each.name: gather(pieces[each.name], each, rows) for each in self.columns}


def check_schema(file: File, schema: pa.Schema) -> None:
    """Raise Unsupported for several columns of one name, Damaged for rows of an absurd size."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise Unsupported(f"{file.path} has several columns named {', '.join(twice)}")
    for field in schema:
        for size in _list_sizes(field.type, 1):
            if not 0 <= size <= _MAX_VALUES:
                raise Damaged(
                    f"{file.path}: column {field.name!r} is said to have {size} values a row;"
                    f" wanted 0 to {_MAX_VALUES}"
                )


def _list_sizes(kind: pa.DataType, outer: int) -> Iterator[int]:
    """Values a row, of each list of fixed size in `kind` with those around it."""
    if pa.types.is_fixed_size_list(kind):
        outer *= kind.list_size
        yield outer
    for number in range(kind.num_fields):
        yield from _list_sizes(kind.field(number).type, outer)


def _chosen(file: File, schema: pa.Schema, columns: Sequence[str] | None) -> dict[str, pa.DataType]:
    """Name to Arrow type of the columns to read. Raises: Misuse."""
    names = schema.names
    columns = names if columns is None else texts("columns", columns)
    if not columns:
        raise Misuse(f"no columns to read; {file.path} has {', '.join(names) or 'none'}")
    if len(set(columns)) < len(columns):
        raise Misuse(f"columns={columns} names a column twice")
    for name in columns:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            guess = f"; did you mean {close[0]!r}?" if close else ""
            raise Misuse(f"{file.path} has no column {name!r}, it has {', '.join(names)}{guess}")
    return {name: schema.field(name).type for name in columns}


def _check_same(
    files: Sequence[File],
    schemas: Sequence[pa.Schema],
    types: Mapping[str, pa.DataType],
    columns: Sequence[str] | None,
) -> None:
    """Raise Mismatch with all differences between the first file's columns and the others'."""
    differences = []
    for file, schema in zip(files[1:], schemas[1:], strict=True):
        found = dict(zip(schema.names, schema.types, strict=True))
        for name, kind in types.items():
            wanted = plain_type(kind)
            if name not in found:
                differences.append(f"{file.name}: column {name!r}: wanted {wanted}, found none")
            elif (other := plain_type(found[name])) != wanted:
                differences.append(f"{file.name}: column {name!r}: wanted {wanted}, found {other}")
        if columns is None:
            differences += [
                f"{file.name}: column {name!r}: wanted none, found {plain_type(kind)}"
                for name, kind in found.items()
                if name not in types
            ]
    if differences:
        raise Mismatch(
            f"files of one source differ from the first, {files[0].path};"
            " narrow the pattern, or read the columns that agree with columns=[...]",
            differences,
        )


def _fills(
    types: Mapping[str, pa.DataType], columns: Sequence[Column], values: Mapping[str, Any]
) -> dict[str, pa.Scalar]:
    """What stands for null, by column, checked against its type."""
    kinds = {column.name: column.kind for column in columns}
    found = {}
    for name, value in values.items():
        if kinds.get(name) not in ("array", "ragged"):
            held = f"holds {kinds[name]}, where a null is None" if name in kinds else "is not read"
            raise Misuse(f"fill_null: wanted columns of numbers, and {name!r} {held}")
        try:
            found[name] = fill_scalar(types[name], value)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise Misuse(f"fill_null: {value!r} does not fit column {name!r}: {error}") from error
    return found


def told(error: Exception, name: str) -> str:
    """Why column `name` of a row cannot be converted, and what to do."""
    if isinstance(error, NullFound):
        return (
            f"column {name!r} of numbers {error}; say what stands for it,"
            f" fill_null={{{name!r}: ...}}, or leave the column out"
        )
    return f"column {name!r}: {error}"
