"""Sources of records: bytes on disk to records and columns, with batched random access."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.arrayrecord import ArrayRecordSource, write_array_record
    from formats.arrow import ArrowSource, write_arrow
    from formats.errors import (
        BadRecord,
        Damaged,
        DataError,
        Mismatch,
        Misuse,
        NotFound,
        OutOfRange,
        StoreFailed,
        Unsupported,
    )
    from formats.opening import open_source
    from formats.parquet import ParquetSource, write_parquet
    from formats.source import Source, Spec
    from formats.tokens import TokenSource

_HOME = {
    "ArrayRecordSource": "arrayrecord",
    "ArrowSource": "arrow",
    "BadRecord": "errors",
    "Damaged": "errors",
    "DataError": "errors",
    "Mismatch": "errors",
    "Misuse": "errors",
    "NotFound": "errors",
    "OutOfRange": "errors",
    "ParquetSource": "parquet",
    "Source": "source",
    "Spec": "source",
    "StoreFailed": "errors",
    "TokenSource": "tokens",
    "Unsupported": "errors",
    "open_source": "opening",
    "write_array_record": "arrayrecord",
    "write_arrow": "arrow",
    "write_parquet": "parquet",
}

__all__ = [
    "ArrayRecordSource",
    "ArrowSource",
    "BadRecord",
    "Damaged",
    "DataError",
    "Mismatch",
    "Misuse",
    "NotFound",
    "OutOfRange",
    "ParquetSource",
    "Source",
    "Spec",
    "StoreFailed",
    "TokenSource",
    "Unsupported",
    "open_source",
    "write_array_record",
    "write_arrow",
    "write_parquet",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
