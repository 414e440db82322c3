"""Sources over a source: filtered, packed, laid end to end. A plan sees only their lengths.

They work in index space: making one reads no documents, and a read makes one call of the source
beneath, for the documents that are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from datapipe.order.block_shuffle import Blocks
from datapipe.order.streams import SHUFFLES, Orders, Shuffle
from datapipe.sources import concatenation
from datapipe.sources import epoch_sources as by_epoch
from datapipe.sources.concatenation import Concatenation
from datapipe.sources.documents import Documents
from datapipe.sources.epoch_sources import EpochSource, OrderedSource
from datapipe.sources.indexes import Kept
from datapipe.sources.packing import Bins
from datapipe.sources.pieces import Pieces, assemble
from formats.errors import BadRecord, Misuse
from formats.source import Batch, Column, Source, Spec, as_rows, blocks_of, sealed

_NAMED: Final = 3  # documents of a row that a message names


@final
class Filtered(EpochSource):
    """The records of a source that a filter keeps, in their order.

    Raises:
      Misuse: `kept` is of another number of records.
    """

    def __init__(self, source: Source, kept: Kept) -> None:
        if kept.records != len(source):
            raise Misuse(
                f"filter: an index of {kept.records} records for a source of {len(source)}"
            )
        self.source = source
        self.kept = kept

    def __len__(self) -> int:
        return len(self.kept)

    def __repr__(self) -> str:
        return f"Filtered({self.source!r}, {len(self)} of {self.kept.records} records)"

    @property
    def varies(self) -> bool:
        """Whether the items of the source do."""
        return by_epoch.varies(self.source)

    def read_epochs(self, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """See `EpochSource.read_epochs`."""
        records = self.kept.ids[as_rows(items, len(self))]
        try:
            return by_epoch.read(self.source, by_epoch.keys(self.source, records, epochs))
        except BadRecord as error:
            if 0 <= error.index < self.kept.records:
                item = int(self.kept.items(error.index))
                if item >= 0:
                    raise _moved(error, item) from error
            raise

    @property
    def spec(self) -> Spec:
        """That of the source."""
        return self.source.spec

    def fingerprint(self) -> dict[str, Any]:
        """That of the source, with a digest of the records that are kept."""
        return _over(self.source, len(self), {"filter": self.kept.digest})

    def where(self, index: int) -> str:
        """See `Source.where`."""
        (row,) = as_rows([index], len(self))
        return self.source.where(int(self.kept.ids[row]))

    @property
    def blocks(self) -> np.ndarray:
        """The blocks of the source, without the records that are not kept."""
        return np.searchsorted(self.kept.ids, blocks_of(self.source))

    def close(self) -> None:
        """See `Source.close`."""
        self.source.close()


@final
class PackedRows(Source):
    """Bins of documents; see `datapipe.sources.packing`. A record is a bin, as `assemble` makes it.

    `read` returns `tokens`, `segment_ids` and `positions`, each `[n, capacity]`.
    """

    def __init__(self, documents: Documents, bins: Bins, pad: int) -> None:
        self.documents = documents
        self.bins = bins
        self.pad = pad

    def __len__(self) -> int:
        return len(self.bins)

    def __repr__(self) -> str:
        return f"PackedRows({self.documents.source!r}, {len(self)} bins of {self.bins.capacity})"

    def pieces(self, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> Pieces:
        """What bins `items`, int64[n], hold; the same in every epoch."""
        return self.bins.pieces(items)

    def items(self, record: int, epoch: int) -> NDArray[np.int64]:
        """The bins that hold a document, int64, ascending."""
        return self.bins.bins(record)

    def read(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """See `Source.read`. Each document is read once."""
        rows = as_rows(indices, len(self))
        return _read_rows(
            self.documents, self.bins.pieces(rows), rows, self.bins.capacity, self.pad
        )

    @property
    def spec(self) -> Spec:
        """Three columns of arrays."""
        return _spec(self.documents.dtype, self.bins.capacity)

    def fingerprint(self) -> dict[str, Any]:
        """That of the source, with all that decides the bins."""
        made = self.bins.made
        about = {
            "pack": made.strategy,
            "bins": made.digest,
            "capacity": made.capacity,
            "pack_window": made.window,
        }
        return _over(self.documents.source, len(self), about | _told(self.documents, self.pad))

    def where(self, index: int) -> str:
        """See `Source.where`."""
        records = self.bins.pieces(as_rows([index], len(self))).records.tolist()
        named = [self.documents.source.where(record) for record in records[:_NAMED]]
        more = f" and {len(records) - _NAMED} more" if len(records) > _NAMED else ""
        return f"a bin of {'; '.join(named)}{more}"

    @property
    def blocks(self) -> np.ndarray:
        """Bins whose first documents lie together."""
        firsts = self.bins.records[self.bins.bounds[:-1]]
        return np.searchsorted(firsts, blocks_of(self.documents.source))

    def close(self) -> None:
        """See `Source.close`."""
        self.documents.source.close()


@final
class ConcatenatedRows(OrderedSource):
    """Documents end to end, cut into rows; see `datapipe.sources.concatenation`.

    A record is a row of an epoch. `read` returns what that of `PackedRows` does.
    """

    def __init__(self, documents: Documents, laid: Concatenation, pad: int) -> None:
        self.documents = documents
        self.laid = laid
        self.pad = pad

    def __len__(self) -> int:
        return len(self.laid)

    def __repr__(self) -> str:
        return f"ConcatenatedRows({self.documents.source!r}, {len(self)} of {self.laid.capacity})"

    def shuffled(self, shuffle: Shuffle, seed: int, number: int, window: int) -> ConcatenatedRows:
        """See `OrderedSource.shuffled`. Raises Misuse: no such order."""
        if shuffle not in SHUFFLES:
            raise Misuse(f"wanted one of {', '.join(SHUFFLES)}, found {shuffle!r}")
        documents = self.documents.source
        blocks = Blocks(blocks_of(documents), window) if shuffle == "blocks" else None
        orders = Orders(shuffle, len(documents), seed, number, blocks)
        if orders == self.laid.orders:
            return self
        laid = Concatenation(
            self.documents.lengths, self.laid.capacity, orders, self.laid.remainder
        )
        return ConcatenatedRows(self.documents, laid, self.pad)

    def pieces(self, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> Pieces:
        """What row `items[i]` of epoch `epochs[i]` holds, int64[n] each."""
        found = [
            (there := np.flatnonzero(epochs == epoch), self.laid.pieces(epoch, items[there]))
            for epoch in np.unique(epochs).tolist()
        ]
        if len(found) == 1:
            return found[0][1]
        rows = [there[pieces.rows] for there, pieces in found]
        order = np.argsort(np.concatenate([_NONE, *rows]), kind="stable")

        def joined(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
            return np.concatenate([_NONE, *parts])[order]

        return Pieces(
            rows=joined(rows),
            records=joined(pieces.records for _, pieces in found),
            starts=joined(pieces.starts for _, pieces in found),
            lengths=joined(pieces.lengths for _, pieces in found),
            offsets=joined(pieces.offsets for _, pieces in found),
        )

    def items(self, record: int, epoch: int) -> NDArray[np.int64]:
        """The rows of an epoch that hold a document, int64, ascending."""
        return self.laid.rows(epoch, record)

    def read_epochs(self, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """See `EpochSource.read_epochs`. Each document is read once."""
        rows = as_rows(items, len(self))
        return _read_rows(
            self.documents, self.pieces(rows, epochs), rows, self.laid.capacity, self.pad
        )

    @property
    def spec(self) -> Spec:
        """Three columns of arrays."""
        return _spec(self.documents.dtype, self.laid.capacity)

    def fingerprint(self) -> dict[str, Any]:
        """That of the source, with its lengths and all that decides the rows but the seed."""
        about = {
            "pack": f"concatenate {concatenation.VERSION}",
            "lengths": self.documents.lengths.digest,
            "capacity": self.laid.capacity,
            "remainder": self.laid.remainder,
            "document_order": getattr(self.laid.orders, "name", ""),
        }
        return _over(self.documents.source, len(self), about | _told(self.documents, self.pad))

    def where(self, index: int) -> str:
        """See `Source.where`."""
        (row,) = as_rows([index], len(self))
        return f"row {row} of an epoch of {len(self.documents.source)} documents"

    def close(self) -> None:
        """See `Source.close`."""
        self.documents.source.close()


_NONE: Final = np.zeros(0, np.int64)


def _read_rows(
    documents: Documents, pieces: Pieces, items: NDArray[np.int64], capacity: int, pad: int
) -> dict[str, NDArray[Any] | list[Any]]:
    records = np.unique(pieces.records)
    try:
        tokens = documents.read(records)
    except BadRecord as error:
        holding = pieces.rows[pieces.records == error.index]
        if holding.size:
            raise _moved(error, int(items[holding[0]])) from error
        raise
    shape = (items.size, capacity)
    return {**assemble(pieces, shape, records, tokens, documents.dtype, pad)}


def _spec(dtype: str, capacity: int) -> Spec:
    return Spec(
        (
            Column("tokens", "array", np.dtype(dtype).name, (capacity,)),
            Column("segment_ids", "array", "int32", (capacity,)),
            Column("positions", "array", "int32", (capacity,)),
        )
    )


def _told(documents: Documents, pad: int) -> dict[str, str | int]:
    return {"tokens": documents.column, "tokens_dtype": documents.dtype, "pad": pad}


def _over(source: Source, records: int, about: dict[str, Any]) -> dict[str, Any]:
    """The fingerprint of a view: that of the source, with what the view is."""
    beneath = dict(source.fingerprint())
    under = {"under": beneath.pop("digest", ""), "under_records": len(source)}
    return sealed(beneath | under | {"records": records} | about)


def _moved(error: BadRecord, item: int) -> BadRecord:
    """The same error with the number that the record has in the view."""
    return BadRecord(str(error), index=item, file=error.file, position=error.position)
