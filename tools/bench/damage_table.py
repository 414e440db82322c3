"""What came of a survey of damage, as tables for people and as one JSON value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench.damage import KINDS, Damage
from tools.bench.damaged_run import Ours, Survey, Theirs
from tools.bench.table import environment

_SMALL = {
    "commit_success.txt": "marker",
    "manifest.json": "manifest",
    "tree.json": "tree record",
}
FILES = ("marker", "manifest", "tree record", "part", "image", "index", "data", "Orbax's JSON")
"""Kinds of file. An image holds our chunks; data what Orbax keeps in its place."""

OUR_COLUMNS: dict[str, Callable[[Ours], bool]] = {
    "found by verify": lambda each: each.verify,
    "refused by restore": lambda each: each.asked == "refused",
    "older step instead, exactly": lambda each: each.newest == "older step",
    "not needed: exact, and told": lambda each: each.asked == "right, reported",
    "harmless": lambda each: each.harmless,
    "not found": lambda each: not each.is_found,
    "WRONG VALUES": lambda each: "WRONG VALUES" in (each.asked, each.newest),
}
_LEGEND = (
    "harmless: only padding changed, in which nothing lies; not needed: files (receipts, and those "
    "for Orbax) without which the step itself is restored, with a report of the file"
)
THEIR_COLUMNS = ("refused", "right", "other tree", "WRONG VALUES")


def kind_of_file(name: str) -> str:
    """One of `FILES`, for a file of a step of ours or of Orbax."""
    last = name.rpartition("/")[2]
    if name in _SMALL:
        return _SMALL[name]
    if name.startswith("part-"):
        return "part"
    if name.endswith(".image"):
        return "image"
    if last == "manifest.ocdbt" or name.endswith(".index"):
        return "index"
    return "data" if "/d/" in name else "Orbax's JSON"


def readers(found: Survey) -> dict[str, Sequence[Theirs]]:
    """Everybody but us, with the step that was read."""
    return {
        **{f"{name}, our step": answers for name, answers in found.peers.items()},
        "Orbax v0, its own step": found.own,
    }


def to_json(found: Survey) -> dict[str, Any]:
    """All counts, and the environment they were taken in."""
    return {
        **environment(),
        "seed": found.seed,
        "damages": len(found.ours),
        "compression": found.compression,
        "ours": {
            "by damage": _ours_by(found.ours, lambda damage: damage.kind),
            "by file": _ours_by(found.ours, lambda damage: kind_of_file(damage.file)),
            "not found": [f"{each.damage}: {each}" for each in found.ours if not each.is_found],
        },
        "others": {name: _theirs_by(answers) for name, answers in readers(found).items()},
    }


def _ours_by(found: Iterable[Ours], key: Callable[[Damage], str]) -> dict[str, dict[str, int]]:
    groups: dict[str, list[Ours]] = {}
    for each in found:
        groups.setdefault(key(each.damage), []).append(each)
    return {
        name: {
            "damages": len(group),
            **{column: sum(map(holds, group)) for column, holds in OUR_COLUMNS.items()},
        }
        for name, group in groups.items()
    }


def _theirs_by(found: Sequence[Theirs]) -> dict[str, Any]:
    def count(some: Iterable[Theirs]) -> dict[str, int]:
        return dict(Counter(each.answer for each in some))

    return {
        "damages": len(found),
        "all": count(found),
        "wrong values that are those of the other step": sum(
            each.older for each in found if each.answer == "WRONG VALUES"
        ),
        "by damage": {k: count(e for e in found if e.damage.kind == k) for k in KINDS},
        "by file": {
            k: count(e for e in found if kind_of_file(e.damage.file) == k)
            for k in FILES
            if any(kind_of_file(e.damage.file) == k for e in found)
        },
    }


def show(found: Survey, console: Console) -> None:
    """Print what we found, then what the others did with the same and with their own."""
    console.print(
        f"[bold]{len(found.ours)} damages[/] to the newest step of a run of ours "
        f"({found.compression or 'no compression'}), seed {found.seed}",
        highlight=False,
    )
    _show_ours(found.ours, console)
    console.print(
        "The same read by others, and such damages to a step that Orbax wrote, with its defaults",
        highlight=False,
    )
    _show_theirs(found, console)
    where = environment()
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    console.print(f"Python {where['python']}, {versions}", highlight=False)


def _show_ours(found: Sequence[Ours], console: Console) -> None:
    table = _table("", "damages", *OUR_COLUMNS)
    keys: list[tuple[Sequence[str], Callable[[Damage], str]]] = [
        (KINDS, lambda damage: damage.kind),
        (FILES, lambda damage: kind_of_file(damage.file)),
    ]
    for names, key in keys:
        rows = _ours_by(found, key)
        for name in names:
            if name in rows:
                table.add_row(name, *map(_figure, rows[name].values()))
        table.add_section()
    (total,) = _ours_by(found, lambda _: "all").values()
    table.add_row("all", *map(_figure, total.values()), style="bold")
    console.print(table)
    console.print(_LEGEND, highlight=False)


def _show_theirs(found: Survey, console: Console) -> None:
    table = _table("", "file", "damages", *THEIR_COLUMNS, "of them, of the other step")
    for reader, answers in readers(found).items():
        groups = {k: [e for e in answers if kind_of_file(e.damage.file) == k] for k in FILES}
        present = {kind: group for kind, group in groups.items() if group}
        for kind, group in [*present.items(), ("all", list(answers))]:
            counts = Counter(each.answer for each in group)
            older = sum(each.older for each in group if each.answer == "WRONG VALUES")
            figures = [len(group), *(counts[c] for c in THEIR_COLUMNS), older]  # type: ignore[index]
            style = "bold" if kind == "all" else ""
            table.add_row(reader, kind, *map(_figure, figures), style=style)
        table.add_section()
    console.print(table)


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "file") else "right")
    return table


def _figure(count: int) -> str:
    return f"{count:,}" if count else "-"
