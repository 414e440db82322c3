"""The command `ckpt`: arguments in, text or JSON out, an exit code that scripts can rely on.

What a command finds out is in `tools.commands`, `inspection` and `rewinding`, how it looks in
`tools.views`. Nothing imported here needs jax or TensorStore, and what only one command needs is
imported by that command, so that the others answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console, RenderableType

from tools import commands, views

EXIT_CODES = {
    0: "fine",
    1: "damage or a difference was found",
    2: "wrong use, or a format that this release does not read",
    3: "not found",
    4: "the store, or a process that was needed, failed",
    5: "in use by a live trainer, or superseded by one",
    70: "a fault of this program",
    130: "stopped by the user: Ctrl-C, or 'no' to a question",
}

_CODE_OF = {
    "NotFound": 3,
    "Damaged": 1,
    "Mismatch": 1,
    "BadRecord": 1,
    "Misuse": 2,
    "Unsupported": 2,
    "AlreadyExists": 2,
    "StoreFailed": 4,
    "PeerFailed": 4,
    "TrainerFailed": 4,
    "Superseded": 5,
    "InUse": 5,
}
"""By the name of an error, which says what can be done about it in both trees of errors."""

_WIDE = 100_000
"""Columns of what is no terminal: nothing is wrapped or cut there."""

_BROKEN_PIPE = 141
"""As the shell tells it of a program that SIGPIPE ended."""


def _codes(*codes: int) -> str:
    """Exit codes as the end of a help page."""
    return "\n".join(
        ["Exit codes:", *(f"[bold]{code:>3}[/]  {EXIT_CODES[code]}" for code in codes)]
    )


app = typer.Typer(
    name="ckpt",
    help="Look at, check and rewind the checkpoints of a run.",
    epilog=_codes(*EXIT_CODES),
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value, and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run.")]
RunOrStep = Annotated[
    str, typer.Argument(metavar="RUN|STEP", help="Directory of a run, or of one step in it.")
]


def main() -> None:
    """Entry of the command."""
    for stream in (sys.stdout, sys.stderr):
        # A name in an odd encoding must not end a report half-way.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Versions of this and of the libraries under it.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --version: as one JSON value.")
    ] = False,
) -> None:
    """Look at, check and rewind the checkpoints of a run."""
    if version:
        found = commands.versions()
        _answer(found, views.versions(found), as_json=as_json)
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


@app.command(epilog=_codes(0, 1, 2, 3, 4))
def ls(
    run: Run,
    every_branch: Annotated[
        bool, typer.Option("--all", help="Also steps of branches that were left.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the steps of a run: when saved, how large, in which state.

    Reads markers and manifests only; exit code 1 when one of them is damaged.

    Example: [bold]ckpt ls runs/a --all[/]
    """
    with _told(debug=debug):
        found = commands.ls(run, every_branch=every_branch)
        _answer(found, views.ls(found), as_json=as_json)
        _exit(damaged=any(row.state == "damaged" for row in found.steps))


@app.command(epilog=_codes(0, 1, 2, 3, 4))
def log(run: Run, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show the attempts of a run, newest first, with where each went on from.

    [bold]*[/] in the lineage, [bold]o[/] left behind, [bold]x[/] never began.

    Example: [bold]ckpt log runs/a[/]
    """
    with _told(debug=debug):
        found = commands.log(run)
        _answer(found, views.log(found), as_json=as_json)
        _exit(damaged=any(row.damage for row in found.attempts))


@app.command(epilog=_codes(0, 1, 2, 3, 4))
def inspect(
    location: RunOrStep,
    glob: Annotated[
        str | None,
        typer.Argument(metavar="[LEAF-GLOB]", help="Only these leaves, such as 'params/*'."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the run; the newest without it.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Describe a step: its tree, data state, metrics and environment. Also steps of Orbax.

    Example: [bold]ckpt inspect runs/a --step 4000 'params/*'[/]
    """
    from tools import inspection

    with _told(debug=debug):
        found = inspection.inspect(location, step=step, glob=glob)
        _answer(found, views.inspect(found), as_json=as_json)
        _exit(damaged=bool(found.damage))


@app.command(epilog=_codes(0, 1, 2, 3, 4))
def verify(
    location: RunOrStep,
    shallow: Annotated[
        bool, typer.Option("--shallow", help="Leave out the values: small files and headers.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare every byte of a run, or of one step, with the digests taken when it was saved.

    Names the file and the leaf of all damage; changes nothing.

    Example: [bold]ckpt verify runs/a/branch-1/4000[/]
    """
    with _told(debug=debug):
        with _progress(shown=not shallow) as progress:
            found = commands.verify(location, shallow=shallow, progress=progress)
        _answer(found, views.verify(found), as_json=as_json)
        _exit(damaged=not found.intact)


@app.command(epilog=_codes(0, 1, 2, 3, 4, 5, 130))
def rewind(
    run: Run,
    to: Annotated[int, typer.Option("--to", min=0, help="The step to go back to.")],
    reason: Annotated[str, typer.Option(help="Why, for the log.")],
    skip_steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Never again serve the batches that steps A to B-1 used."),
    ] = None,
    skip_batches: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="The same for batches A to B-1, counted from 0."),
    ] = None,
    seen_by: Annotated[
        int | None,
        typer.Option(
            metavar="ATTEMPT",
            min=1,
            help="Whose steps or batches they are, after a rewind that saved nothing yet.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Go back to a step, so that the next resume goes on from it, on a branch of its own.

    Says first what will happen. No trainer may be running. Step s used batch s - 1.
    Steps that are left behind stay on disk.
    Exit code 1 when the step is damaged and an older one was taken.

    Example: [bold]ckpt rewind runs/a --to 1600 --skip-steps 1700:1721 --reason 'spike at 1710'[/]
    """
    from tools import rewinding

    with _told(debug=debug):
        planned = rewinding.plan(
            run,
            to,
            reason=reason,
            skip_steps=_range("--skip-steps", skip_steps),
            skip_batches=_range("--skip-batches", skip_batches),
            seen_by=seen_by,
        )
        if dry_run:
            _answer(planned, views.rewind_plan(planned), as_json=as_json)
            return
        if not as_json:
            _print(views.rewind_plan(planned))
        if not yes:
            _ask(as_json=as_json)
        done = rewinding.carry_out(planned)
        _answer(done, views.rewound(done), as_json=as_json)
        _exit(damaged=done.to != planned.to)


@app.command(epilog=_codes(0, 1, 2, 4, 130))
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Updates of each of the two runs.")] = 300,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of all that is drawn; a new one without it.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="New or empty directory to work in.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave runs and corpus there for you to look at.")
    ] = False,
    format: Annotated[
        Literal["array_record", "parquet"], typer.Option(help="Of the corpus.")
    ] = "array_record",
    break_restored: Annotated[
        bool, typer.Option("--break", help="Flip one restored bit; the demo must then fail.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train, be killed in the middle of saves, rewind past a loss spike; compare bit for bit.

    Exit code 0 only if the run ended exactly as one that was never disturbed.

    Example: [bold]ckpt demo --steps 200[/]
    """
    with _told(debug=debug):
        for package in ("optax", "matplotlib"):
            if importlib.util.find_spec(package) is None:
                _fail(f"the demo needs {package}: pip install 'lastgood[demo]'", 2)
        from tools.demo import play

        console: Console | None = Console()
        if as_json:
            console = Console(stderr=True) if sys.stderr.isatty() else None
        try:
            outcome = play.demo(
                steps=steps,
                seed=seed,
                format=format,
                directory=directory,
                keep=keep,
                break_restored=break_restored,
                console=console,
            )
        except ValueError as error:  # arguments that make no sense, says `play.demo`
            if debug:
                raise
            _fail(str(error), 2)
        if as_json:
            _print_json(outcome.to_json())
        _exit(damaged=not outcome.equal)


# --- input ---------------------------------------------------------------------------------------


def _range(option: str, text: str | None) -> range | None:
    """`A:B`, half-open."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text, re.ASCII)
    if found is None or int(found[1]) >= int(found[2]):
        message = f"wanted A:B with A < B, such as 1700:1721 for 1700 to 1720, found {text!r}"
        raise typer.BadParameter(message, param_hint=option)
    return range(int(found[1]), int(found[2]))


def _ask(*, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        _fail("nobody can be asked here: give --yes to do it, --dry-run to see what it would do", 2)
    if not typer.confirm("Do it?", err=True):
        _fail("nothing was changed", 130)


# --- output --------------------------------------------------------------------------------------


def _answer(value: Any, view: Iterable[RenderableType], *, as_json: bool) -> None:
    if as_json:
        _print_json(value)
    else:
        _print(view)


def _print(view: Iterable[RenderableType]) -> None:
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else _WIDE, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for each in view:
            console.print(each, soft_wrap=False)
    text = captured.get()
    _write(text if terminal else re.sub(r" +$", "", text, flags=re.MULTILINE))


def _print_json(value: Any) -> None:
    _write(json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """A value of dataclasses as JSON; numbers that JSON has not as text: "nan", "inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read this has seen enough; Python must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BROKEN_PIPE) from None


@contextlib.contextmanager
def _progress(*, shown: bool) -> Iterator[commands.Progress | None]:
    """A bar with a rate, if a person is watching."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _told(*, debug: bool) -> Iterator[None]:
    """Errors as one message on stderr and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if debug:
            raise
        code = _code(error)
        if code != 70:
            _fail(str(error), code)
        _fail(
            f"unexpected {type(error).__name__}: {error}; run it with --debug and report what it "
            "shows",
            code,
        )


def _code(error: Exception) -> int:
    for kind in type(error).__mro__:
        if kind.__name__ in _CODE_OF:
            return _CODE_OF[kind.__name__]
    return 4 if isinstance(error, OSError) else 70


def _fail(message: str, code: int) -> NoReturn:
    console = Console(stderr=True, highlight=False)
    console.print("[bold red]ckpt:[/] ", end="")
    console.print(views.printable(message), markup=False, emoji=False, soft_wrap=True)
    raise typer.Exit(code)


def _exit(*, damaged: bool) -> None:
    if damaged:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
