"""Answers as text for a person: each function gives what is to be printed, and prints nothing.

Names, reasons and metrics come from files. They are shown as text, never as markup, and without
control characters, which a terminal would obey.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from ckpt.lineage import Skips
from ckpt.wording import counted
from tools.commands import Check, RunListing, StepRow

if TYPE_CHECKING:
    from tools.indexing import Indexed
    from tools.inspection import DataState, Inspection, LeafRow
    from tools.rewinding import RewindPlan, Rewound

View = Iterator[RenderableType]

_STYLES = {
    "committed": "",
    "abandoned": "dim",
    "suspect": "magenta",
    "unfinished": "yellow",
    "damaged": "bold red",
}


def versions(found: Mapping[str, str | None]) -> View:
    """A line for each."""
    for name, version in found.items():
        yield styled(f"{name} {version or '(not installed)'}")


def ls(found: RunListing) -> View:
    """A table of steps."""
    if found.attempt is None:
        foreign = bool(found.steps) and all(row.attempt == 0 for row in found.steps)
        head = "written by Orbax" if foreign else "no attempt has begun to train"
    else:
        head = f"branch {found.branch}, attempt {found.attempt}"
    yield styled(f"{found.location}  ({head})")
    if not found.steps:
        yield styled("no steps")
        return
    headings = (">step", ">branch", ">attempt", "saved", ">size", "metrics", "state", "")
    rows = [(list(_cells(row)), _STYLES[row.state]) for row in found.steps]
    yield from _table(headings, rows)


def _cells(row: StepRow) -> Iterator[str]:
    yield str(row.step)
    yield str(row.branch)
    yield "?" if row.attempt is None else str(row.attempt)
    yield moment(row.time_ns)
    yield "" if row.size_bytes is None else size(row.size_bytes)
    yield figures(row.metrics)
    yield f"{row.state}, pinned" if row.pinned else row.state
    yield row.note


# --- inspect -----------------------------------------------------------------------------------


def inspect(found: Inspection) -> View:
    """Where it comes from, then the tree, then totals and the rest."""
    yield styled(found.location)
    what = str(found.id) if found.id is not None else "a step"
    written = " of Orbax" if found.format == "orbax" else ""
    parent = f", went on from {found.parent}" if found.parent is not None else ""
    yield styled(f"{what}{written}, saved {moment(found.time_ns) or '?'}{parent}")
    for damage in found.damage:
        yield styled(f"damaged: {damage}", "bold red")
    if found.metrics:
        yield styled(f"metrics: {figures(found.metrics)}")
    yield Text("")
    yield from _tree(found.leaves, "." if found.format == "orbax" else "/")
    yield Text("")
    sums = [(total.dtype, total.leaves, total.elements, total.size_bytes) for total in found.totals]
    cells = [([dtype, *(f"{number:,}" for number in numbers)], "") for dtype, *numbers in sums]
    yield from _table(("dtype", ">leaves", ">elements", ">bytes"), cells)
    shown = "" if len(found.leaves) == found.leaf_count else f"{len(found.leaves)} of "
    leaves = counted(found.leaf_count, "leaf", "leaves")
    packed = ""
    if found.compression is not None and found.payload_bytes is not None:
        packed = f", its values compressed ({found.compression}) from {size(found.payload_bytes)}"
    yield styled(f"{shown}{leaves}; the step occupies {size(found.size_bytes)}{packed}")
    hidden = [leaf.name for leaf in found.leaves if leaf.hidden_from_orbax]
    if hidden:
        yield styled(f"hidden from Orbax: {', '.join(hidden)}")
    for state in found.data:
        yield styled(f"data {state.name!r}: {_position(state)}")
    if found.extra is not None:
        yield styled(f"extra: {json.dumps(found.extra, indent=2)}")
    if found.environment:
        told = (f"{name} {value!r}" for name, value in sorted(found.environment.items()))
        yield styled(f"environment: {', '.join(told)}")


def _tree(leaves: Sequence[LeafRow], separator: str) -> View:
    """Leaves under the names of their subtrees, types and sizes in columns."""
    lines: list[tuple[str, str, str]] = []
    above: list[str] = []
    for leaf in leaves:
        *parents, name = leaf.name.split(separator)
        same = 0
        while same < min(len(parents), len(above)) and parents[same] == above[same]:
            same += 1
        for depth in range(same, len(parents)):
            lines.append(("  " * depth + parents[depth], "", ""))
        above = parents
        where = "  " * len(parents) + name
        lines.append((where, _type(leaf), f"{leaf.size_bytes:,} B" if leaf.size_bytes else ""))
    width = max((len(line[0]) for line in lines if line[1]), default=0)
    second = max((len(line[1]) for line in lines), default=0)
    third = max((len(line[2]) for line in lines), default=0)
    text = "\n".join(
        f"{name.ljust(width)}  {kind.ljust(second)}  {nbytes.rjust(third)}".rstrip()
        for name, kind, nbytes in lines
    )
    if text:
        yield styled(text)


def _type(leaf: LeafRow) -> str:
    if leaf.shape is None:
        return f"{leaf.kind}, not readable"
    shape = f"[{','.join(map(str, leaf.shape))}]"
    if leaf.kind in ("jax", "key"):
        return f"{leaf.dtype}{shape}"
    if leaf.kind in ("numpy", "numpy_scalar"):
        return f"{leaf.dtype}{shape} {leaf.kind}"
    return f"{leaf.dtype}{shape} {leaf.kind}" if leaf.size_bytes else leaf.kind


def _position(state: DataState) -> str:
    if state.next_example is None:
        return json.dumps(state.state)
    records = counted(state.records or 0, "record")
    told = f"next example {state.next_example:,}, in epoch {state.epoch} of {records}"
    if state.batch_size:
        told += f", batches of {state.batch_size}"
    if state.skipped:
        told += f"; left out: {ranges({'': state.skipped}).strip()}"
    return told


# --- verify and rewind -------------------------------------------------------------------------


def verify(found: Check) -> View:
    """All damage, then one line that says what was looked at."""
    damage = [*found.records, *(each for step in found.steps for each in step.damage)]
    for each in damage:
        yield styled(str(each), "bold red")
    for name in found.unfinished:
        yield styled(f"{name}: unfinished; the next attempt publishes or removes it", "yellow")
    if found.unverifiable:
        steps = step_list(found.unverifiable)
        yield styled(f"not looked at: {steps} of Orbax, which stores no digests", "yellow")
    broken = sum(not step.intact for step in found.steps)
    depth = "small files and headers" if found.shallow else size(found.bytes_read)
    if not found.shallow and found.seconds > 0:
        depth += f" at {size(round(found.bytes_read / found.seconds))}/s"
    looked_at = f"{counted(len(found.steps), 'step')}, {depth}, {found.seconds:.1f} s"
    if found.intact:
        yield styled(f"{found.location}: intact ({looked_at})", "green")
    elif not broken:
        yield styled(f"{found.location}: damaged ({looked_at})", "bold red")
    else:
        told = f"{counted(broken, 'step')} damaged ({looked_at})"
        yield styled(f"{found.location}: {told}", "bold red")


def indexed(found: Indexed) -> View:
    """One line: what the index says, and what it took."""
    if found.kind == "keep":
        said = f"{found.kept} of {counted(found.records, 'record')} kept"
    else:
        said = f"{found.tokens} tokens in {counted(found.records, 'document')}"
    took = f"{size(found.size_bytes)}, {found.seconds:.1f} s"
    yield styled(f"{found.path}: {said} by {found.function} version {found.version} ({took})")


def rewind_plan(planned: RewindPlan) -> View:
    """What is going to happen."""
    yield styled(planned.location)
    yield styled(f"go back to     {planned.to}", "bold")
    steps = [str(step.step) for step in planned.left_behind]
    stays = " (it stays on disk)" if len(steps) == 1 else " (they stay on disk)"
    behind = f"{counted(len(steps), 'step')}: {shortened(steps)}{stays}" if steps else "no steps"
    yield styled(f"leave behind   {behind}")
    yield styled(f"on a branch    {planned.attempt}, by attempt {planned.attempt}")
    yield styled(f"after          {planned.supersedes or 'steps of Orbax only'}")
    yield styled(f"reason         {planned.reason}")
    if planned.batches is not None:
        first, stop = planned.batches
        yield styled(
            f"leave out      batches {first}:{stop}, which steps {first + 1}:{stop + 1} used"
        )
        yield styled(f"               examples {ranges(planned.new_skips)}")
        origin = f"counted from {planned.counted_from} as attempt {planned.as_seen_by} saw them"
        yield styled(f"               {origin}")
    for start, stop in planned.covering:
        told = f"no step tells the batch size of batches {start}:{stop} any more"
        yield styled(f"               {told}; all examples that they may have held", "bold yellow")
    if planned.skips and planned.skips != planned.new_skips:
        yield styled(f"left out then  examples {ranges(planned.skips)}")


def rewound(done: Rewound) -> View:
    """What has happened."""
    if done.to != done.plan.to:
        yield styled(f"{done.plan.to} is damaged: an older one was taken", "bold red")
    told = f"attempt {done.attempt} went back to {done.to}; the next resume goes on from it"
    yield styled(f"{told}, on branch {done.branch}", "green")


# --- words -------------------------------------------------------------------------------------


def _table(headings: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> View:
    """Lines of cells, each with a style; headings with `>` stand over numbers.

    Rich's tables take ten times as long, which is felt where a run has a thousand steps.
    """
    shown = [([printable(cell).replace("\n", " ") for cell in row], style) for row, style in rows]
    widths = [
        max([cell_len(heading.lstrip(">")), *(cell_len(row[place]) for row, _ in shown)])
        for place, heading in enumerate(headings)
    ]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            " " * (width - cell_len(cell)) + cell
            if heading.startswith(">")
            else cell + " " * (width - cell_len(cell))
            for cell, heading, width in zip(cells, headings, widths, strict=True)
        ).rstrip()

    yield Text(line([heading.lstrip(">") for heading in headings]), "bold")
    for style, group in groupby(shown, key=lambda row: row[1]):
        yield Text("\n".join(line(cells) for cells, _ in group), style)


def step_list(steps: Sequence[Any]) -> str:
    """`step 5`, `steps 5, 10`."""
    return f"{'step' if len(steps) == 1 else 'steps'} {shortened(steps)}"


def shortened(steps: Sequence[Any]) -> str:
    """Steps as text, the middle of a long list left out."""
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:2], "...", *shown[-3:]])


def styled(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def printable(text: str) -> str:
    """The same with control characters and lone surrogates as escapes; lines stay lines."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else ascii(char)[1:-1] for char in text
    )


def size(count: int) -> str:
    """Bytes as a person reads them: `12.5 MiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.4g} {unit}"


def moment(time_ns: int | None) -> str:
    """Local time to the second; empty for None and for times no calendar has."""
    if time_ns is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"


def figures(metrics: Mapping[str, float] | None) -> str:
    """`loss=0.25 accuracy=0.9`."""
    if not isinstance(metrics, Mapping):
        return ""
    return " ".join(
        f"{name}={value:.6g}" if is_number(value) else f"{name}={value}"
        for name, value in sorted(metrics.items())
    )


def ranges(skips: Skips) -> str:
    """`data 1024:2048 (1024 in all)`."""
    return "; ".join(_range(name, list(pairs)) for name, pairs in sorted(skips.items()))


def _range(name: str, pairs: Sequence[tuple[int, int]]) -> str:
    total = sum(stop - start for start, stop in pairs)
    return f"{name} {shortened([f'{start}:{stop}' for start, stop in pairs])} ({total:,} in all)"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
