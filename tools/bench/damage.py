"""What can happen to the files of a step, drawn by a seed; and what their bytes mean. Pure.

Nothing here asks the code under test whether a damage matters: the layout of an undamaged image
says which of its bytes are header, table, chunk of which leaf, or padding that nobody reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ckpt import grid, image

PAGE_BYTES = 4096
_TRIES = 60
"""Draws in a row that give nothing new before a kind of damage counts as used up."""

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


def _flip(rng: random.Random, name: str, files: Files, others: Files) -> Damage | None:
    data = bytearray(files[name])
    if not data:
        return None
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    return Damage("bit flip", name, f"bit {bit} of byte {at} flipped", {name: bytes(data)})


def _truncate(rng: random.Random, name: str, files: Files, others: Files) -> Damage | None:
    data = files[name]
    if len(data) < 2:
        return None
    length = rng.randrange(1, len(data))
    return Damage(
        "truncation", name, f"cut to {length} of {len(data)} bytes", {name: data[:length]}
    )


def _empty(rng: random.Random, name: str, files: Files, others: Files) -> Damage | None:
    return Damage("emptied", name, "emptied", {name: b""})


def _zero_page(rng: random.Random, name: str, files: Files, others: Files) -> Damage | None:
    """A page of the file, or one that begins at any sector, as far as the file goes."""
    data = bytearray(files[name])
    if not data:
        return None
    start = rng.randrange(0, len(data), rng.choice([512, PAGE_BYTES]))
    stop = min(start + PAGE_BYTES, len(data))
    data[start:stop] = bytes(stop - start)
    return Damage("zeroed page", name, f"zeros from {start} to {stop}", {name: bytes(data)})


def _delete(rng: random.Random, name: str, files: Files, others: Files) -> Damage | None:
    return Damage("deleted", name, "deleted", {name: None})


def _swap(rng: random.Random, name: str, files: Files, others: Files) -> Damage | None:
    sibling = rng.choice([each for each in files if each != name])
    after = {name: files[sibling], sibling: files[name]}
    return Damage("swapped", name, f"swapped with {sibling}", after)


def _of_another_step(rng: random.Random, name: str, files: Files, others: Files) -> Damage | None:
    """The one of that name; where names are made up anew for each step, any of its directory."""
    directory = name.rpartition("/")[0]
    like = [each for each in sorted(others) if each.rpartition("/")[0] == directory]
    theirs = name if name in others else rng.choice(like) if like else None
    if theirs is None:
        return None
    return Damage("of another step", name, f"{theirs} of another step", {name: others[theirs]})


_Make = Callable[[random.Random, str, Files, Files], Damage | None]
_MAKES: dict[str, _Make] = {
    "bit flip": _flip,
    "truncation": _truncate,
    "emptied": _empty,
    "zeroed page": _zero_page,
    "deleted": _delete,
    "swapped": _swap,
    "of another step": _of_another_step,
}
KINDS = tuple(_MAKES)


def draw(files: Files, others: Files, count: int, seed: int) -> list[Damage]:
    """`count` damages, all different, and none of which leaves every byte as it was.

    Kinds are drawn evenly; files evenly half of the time, and by their bytes else. Some kinds have
    few members (a file is deleted in one way only): when one is used up, the others are drawn more
    often.

    Args:
        others: the files of another step of the run, for those that get mixed up.
    """
    rng = random.Random(seed)
    names, kinds = sorted(files), list(KINDS)
    sizes = [len(files[name]) for name in names]
    found: list[Damage] = []
    known: set[frozenset[tuple[str, bytes | None]]] = set()
    failed = dict.fromkeys(kinds, 0)
    while len(found) < count and kinds:
        kind = rng.choice(kinds)
        (name,) = rng.choices(names, sizes if rng.random() < 0.5 else None)
        damage = _MAKES[kind](rng, name, files, others)
        result = frozenset(damage.after.items()) if damage is not None else frozenset()
        if damage is None or result in known or _is_none(damage, files):
            failed[kind] += 1
            if failed[kind] == _TRIES:
                kinds.remove(kind)
            continue
        failed[kind] = 0
        known.add(result)
        found.append(damage)
    return found


def _is_none(damage: Damage, files: Files) -> bool:
    return all(files[name] == data for name, data in damage.after.items())


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
    matters[: grid.PAGE_BYTES] = True
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
