"""What can happen to the files of a step, drawn by a seed; and what their bytes mean. Pure.

Nothing here asks the code under test whether a damage matters: the layout of an undamaged image
says which of its bytes are header, table, chunk of which leaf, or padding that nobody reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt import image
from ckpt.grid import PAGE_BYTES

_SECTOR_BYTES = 512
_TRIES = 60
"""Draws in a row that give nothing new before all that is left of a kind is listed."""

Files = Mapping[str, bytes]
"""The files of a step by name."""


@dataclass(frozen=True)
class Damage:
    """What one or two files of a step hold afterwards; None for a file that is gone."""

    kind: str
    file: str
    """The one that was chosen; a swap hits another one, too."""
    what: str
    after: Mapping[str, bytes | None]

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


class _Kind(NamedTuple):
    """A kind of damage: what there is to choose from for a file, and what comes of a choice."""

    choices: Callable[[str, Files, Files], Sequence[Any]]
    make: Callable[[Any, str, Files, Files], Damage]


def _flip(number: int, name: str, files: Files, others: Files) -> Damage:
    at, bit = divmod(number, 8)
    data = bytearray(files[name])
    data[at] ^= 1 << bit
    return Damage("bit flip", name, f"bit {bit} of byte {at} flipped", {name: bytes(data)})


def _truncate(length: int, name: str, files: Files, others: Files) -> Damage:
    data = files[name]
    return Damage(
        "truncation", name, f"cut to {length} of {len(data)} bytes", {name: data[:length]}
    )


def _empty(_: int, name: str, files: Files, others: Files) -> Damage:
    return Damage("emptied", name, "emptied", {name: b""})


def _zero_page(number: int, name: str, files: Files, others: Files) -> Damage:
    """A page of the file, or one that begins at any sector, as far as the file goes; evenly."""
    sector, at_any = divmod(number, 2)
    start = sector * _SECTOR_BYTES
    if not at_any:
        start -= start % PAGE_BYTES
    data = bytearray(files[name])
    stop = min(start + PAGE_BYTES, len(data))
    data[start:stop] = bytes(stop - start)
    return Damage("zeroed page", name, f"zeros from {start} to {stop}", {name: bytes(data)})


def _delete(_: int, name: str, files: Files, others: Files) -> Damage:
    return Damage("deleted", name, "deleted", {name: None})


def _swap(sibling: str, name: str, files: Files, others: Files) -> Damage:
    after = {name: files[sibling], sibling: files[name]}
    return Damage("swapped", name, f"swapped with {sibling}", after)


def _like(name: str, others: Files) -> list[str]:
    """The one of that name; where names are made up anew for each step, any of its directory."""
    if name in others:
        return [name]
    directory = name.rpartition("/")[0]
    return [each for each in sorted(others) if each.rpartition("/")[0] == directory]


def _of_another_step(theirs: str, name: str, files: Files, others: Files) -> Damage:
    return Damage("of another step", name, f"{theirs} of another step", {name: others[theirs]})


_KINDS = {
    "bit flip": _Kind(lambda name, files, _: range(8 * len(files[name])), _flip),
    "truncation": _Kind(lambda name, files, _: range(1, len(files[name])), _truncate),
    "emptied": _Kind(lambda *_: range(1), _empty),
    "zeroed page": _Kind(
        lambda name, files, _: range(2 * -(-len(files[name]) // _SECTOR_BYTES)), _zero_page
    ),
    "deleted": _Kind(lambda *_: range(1), _delete),
    "swapped": _Kind(lambda name, files, _: [each for each in files if each != name], _swap),
    "of another step": _Kind(lambda name, _, others: _like(name, others), _of_another_step),
}
KINDS = tuple(_KINDS)


def draw(files: Files, others: Files, count: int, seed: int) -> list[Damage]:
    """`count` damages, all different, and none of which leaves every byte as it was.

    Kinds are drawn evenly; files evenly half of the time, and by their bytes else. Some kinds have
    few members (a file is deleted in one way only): when one is used up, the others are drawn more
    often. When all are, there are fewer than `count`: every damage there is.

    Args:
        others: the files of another step of the run, for those that get mixed up.
    """
    rng = random.Random(seed)
    names, kinds = sorted(files), list(KINDS)
    sizes = [len(files[name]) for name in names]
    found: list[Damage] = []
    known: set[frozenset[tuple[str, bytes | None]]] = set()
    failed = dict.fromkeys(kinds, 0)
    left: dict[str, list[tuple[str, Any]]] = {}
    """Of a kind that is nearly used up: all there is to choose, what was drawn before, too."""

    while len(found) < count and kinds:
        kind = rng.choice(kinds)
        if kind not in left:
            (name,) = rng.choices(names, sizes if rng.random() < 0.5 else None)
            choices = _KINDS[kind].choices(name, files, others)
            chosen = (name, rng.choice(choices)) if choices else None
        elif left[kind]:
            chosen = left[kind].pop()
        else:
            kinds.remove(kind)
            continue
        damage = _made(kind, chosen, files, others)
        result = frozenset(damage.after.items()) if damage is not None else frozenset()
        if damage is None or result in known:
            failed[kind] += 1
            if failed[kind] == _TRIES and kind not in left:
                left[kind] = _all_of(kind, files, others)
                rng.shuffle(left[kind])
            continue
        failed[kind] = 0
        known.add(result)
        found.append(damage)
    return found


def _made(kind: str, chosen: tuple[str, Any] | None, files: Files, others: Files) -> Damage | None:
    """None where there is nothing to choose, or where all stays as it was."""
    if chosen is None:
        return None
    name, choice = chosen
    damage = _KINDS[kind].make(choice, name, files, others)
    same = all(files[each] == data for each, data in damage.after.items())
    return None if same else damage


def _all_of(kind: str, files: Files, others: Files) -> list[tuple[str, Any]]:
    choices = _KINDS[kind].choices
    return [(name, choice) for name in sorted(files) for choice in choices(name, files, others)]


# --- meaning -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What the bytes of an image are: u8 per byte of the file, and the chunks.

    `chunk` is i32 per byte: the row of the chunk (its CRC included) that it belongs to, or -1.
    """

    matters: np.ndarray
    chunk: np.ndarray
    params: tuple[str, ...]
    """The array of each chunk."""


def anatomy(data: bytes, name: str) -> Anatomy:
    """Of an undamaged image. Header page, table and chunks matter; all else is padding."""
    header = image.decode(lambda at, n: data[at : at + n], len(data), name)
    matters, chunk = np.zeros(len(data), bool), np.full(len(data), -1, np.int32)
    matters[:PAGE_BYTES] = True
    # The page says where the table lies; see `_PAGE` in ckpt/table.py.
    table_at, table_bytes = np.frombuffer(data, "<u8", 2, offset=24).tolist()
    matters[table_at : table_at + table_bytes] = True
    for row, (start, length) in enumerate(image.payload_ranges(header).tolist()):
        matters[start : start + length] = True
        chunk[start : start + length] = row
    params = tuple(header.arrays[array].param for array in header.columns.array.tolist())
    return Anatomy(matters, chunk, params)


def changed(old: bytes, new: bytes) -> np.ndarray:
    """Offsets of the bytes that differ, of two files of one length."""
    return np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8))


def is_harmless(damage: Damage, files: Files, images: Mapping[str, Anatomy]) -> bool:
    """Whether all that changed is padding of images."""
    for name, data in damage.after.items():
        if name not in images or data is None or len(data) != len(files[name]):
            return False
        if images[name].matters[changed(files[name], data)].any():
            return False
    return True


def hit_params(damage: Damage, files: Files, images: Mapping[str, Anatomy]) -> set[str]:
    """The arrays whose chunks changed, where that is all that changed; empty otherwise."""
    found: set[str] = set()
    for name, data in damage.after.items():
        if name not in images or data is None or len(data) != len(files[name]):
            return set()
        at = changed(files[name], data)
        at = at[images[name].matters[at]]
        rows = images[name].chunk[at]
        if (rows < 0).any():
            return set()
        found |= {images[name].params[row] for row in set(rows.tolist())}
    return found
