"""The command `ckpt`: arguments in, text or JSON out, an exit code that scripts can rely on.

What a command finds out is in `tools.commands`, `inspection` and `rewinding`, how it looks in
`tools.views`. Nothing imported here needs jax or TensorStore, and what only one command needs is
imported by that command, so that the others answer at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from tools import commands, history, output, views
from tools.failures import CODE_OF, EXIT_CODES, Group, Refusal, exit_with, told


def _codes(*codes: int) -> str:
    """Exit codes as the end of a help page."""
    return "\n".join(
        ["Exit codes:", *(f"[bold]{code:>3}[/]  {EXIT_CODES[code]}" for code in codes)]
    )


_KINDS: dict[int, list[str]] = {}
for _kind, _code in CODE_OF.items():
    _KINDS.setdefault(_code, []).append(_kind)
_ERRORS = (
    'With --json an error is {"error": {"kind": ..., "message": ..., "exit_code": ...}}; '
    "its message stands on stderr, too. Kinds by exit code: "
    + "; ".join(f"{code} {', '.join(kinds)}" for code, kinds in sorted(_KINDS.items()))
    + "."
)

app = typer.Typer(
    name="ckpt",
    help="Look at, check and rewind the checkpoints of a run.",
    cls=Group,
    epilog=f"{_codes(*EXIT_CODES)}\n\n{_ERRORS}",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

data = typer.Typer(help="Indexes of training data.", no_args_is_help=True)
app.add_typer(data, name="data")

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON value, and nothing else; of an error, too."),
]
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
        output.answer(found, views.versions(found), as_json=as_json)
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

    Reads markers, manifests and logs only; exit code 1 when one of them is damaged.

    Example: [bold]ckpt ls runs/a --all[/]
    """
    with told(debug=debug, as_json=as_json):
        found = commands.ls(run, every_branch=every_branch)
        output.answer(found, views.ls(found), as_json=as_json)
        _exit(damaged=any(row.state == "damaged" for row in found.steps))


@app.command(epilog=_codes(0, 1, 2, 3, 4))
def log(run: Run, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show the attempts of a run, newest first: where each went on from, its saves, its troubles.

    [bold]*[/] in the lineage, [bold]o[/] left behind, [bold]x[/] never began.

    Example: [bold]ckpt log runs/a[/]
    """
    with told(debug=debug, as_json=as_json):
        found = commands.log(run)
        output.answer(found, history.log(found), as_json=as_json)
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

    with told(debug=debug, as_json=as_json):
        found = inspection.inspect(location, step=step, glob=glob)
        output.answer(found, views.inspect(found), as_json=as_json)
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
    with told(debug=debug, as_json=as_json):
        with _progress("verifying", shown=not shallow) as progress:
            found = commands.verify(location, shallow=shallow, progress=progress)
        output.answer(found, views.verify(found), as_json=as_json)
        _exit(damaged=not found.intact)


@app.command(epilog=_codes(0, 1, 2, 3, 4, 5, 130))
def rewind(
    run: Run,
    to: Annotated[int, typer.Option("--to", min=0, help="The step to go back to.")],
    reason: Annotated[str, typer.Option(help="Why, for the log.")],
    branch: Annotated[
        int | None,
        typer.Option(min=0, help="Branch of that step, if it was left: see `ckpt ls RUN --all`."),
    ] = None,
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

    with told(debug=debug, as_json=as_json):
        planned = rewinding.plan(
            run,
            to,
            reason=reason,
            branch=branch,
            skip_steps=_range("--skip-steps", skip_steps),
            skip_batches=_range("--skip-batches", skip_batches),
            seen_by=seen_by,
        )
        if dry_run:
            output.answer(planned, views.rewind_plan(planned), as_json=as_json)
            return
        if not as_json:
            output.print_text(views.rewind_plan(planned))
        if not yes:
            _ask(as_json=as_json)
        done = rewinding.carry_out(planned)
        output.answer(done, views.rewound(done), as_json=as_json)
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
    with told(debug=debug, as_json=as_json):
        for package in ("optax", "matplotlib"):
            if importlib.util.find_spec(package) is None:
                message = f"the demo needs {package}: pip install 'lastgood[demo]'"
                raise Refusal("Misuse", message)
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
            raise Refusal("Misuse", str(error)) from error
        if as_json:
            output.print_json(outcome.to_json())
        _exit(damaged=not outcome.equal)
        if outcome.picture_problem:
            exit_with(outcome.picture_problem, 4)


@data.command(epilog=_codes(0, 1, 2, 3, 4, 130))
def index(
    patterns: Annotated[
        list[str], typer.Argument(metavar="PATTERN...", help="Files of the source, in order.")
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="The index; an older one is replaced.")
    ],
    kind: Annotated[
        Literal["keep", "lengths"],
        typer.Option(help="What the function returns: a boolean, or a number of tokens."),
    ],
    function: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Called with each record.")],
    version: Annotated[str, typer.Option(help="Of the function, for those who find the index.")],
    column: Annotated[
        list[str] | None,
        typer.Option(help="Read only this one of Parquet or Arrow files; may be given again."),
    ] = None,
    fill_null: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=NUMBER",
            help="What stands for null in a column of numbers; may be given again.",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a record of token files (.bin, .npy).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one record to the next; by default the window.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of a token in .bin files, such as uint32.")
    ] = None,
    header_bytes: Annotated[
        int | None, typer.Option(help="To leave out at the start of each .bin file.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="array_record, arrow, parquet or tokens, where no suffix says it."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Ask a function about every record: which are kept, or how many tokens each has.

    Reads all data once. A pipeline takes the file: filter=FILE, or pack=Pack(..., lengths=FILE).
    The function gets a record as bytes, or as a dict of columns ({"tokens": ...} of token files);
    its module may lie in the current directory.

    Example: [bold]ckpt data index 'web-*.parquet' --column text --kind keep
    --function filters:good --version 1 --out web.keep[/]
    """
    with told(debug=debug, as_json=as_json):
        from tools import indexing

        opening = {
            "columns": column,
            "fill_null": _numbers("--fill-null", fill_null or []),
            "window": window,
            "stride": stride,
            "dtype": dtype,
            "header_bytes": header_bytes,
            "format": format,
        }
        with _progress("indexing", shown=True, in_bytes=False) as progress:
            found = indexing.index(
                patterns,
                out,
                kind=kind,
                function=function,
                version=version,
                opening=opening,
                progress=progress,
            )
        output.answer(found, views.indexed(found), as_json=as_json)


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


def _numbers(option: str, texts: list[str]) -> dict[str, int | float] | None:
    """`NAME=NUMBER`, by name; None without any."""
    found: dict[str, int | float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            found[name] = int(number) if re.fullmatch(r"[+-]?\d+", number) else float(number)
        except ValueError:
            name = ""
        if not name:
            message = f"wanted COLUMN=NUMBER, such as score=0, found {text!r}"
            raise typer.BadParameter(message, param_hint=option)
    return found or None


def _ask(*, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        message = "nobody can be asked here: give --yes to do it, --dry-run to see what it would do"
        raise Refusal("Misuse", message)
    if not typer.confirm("Do it?", err=True):
        raise Refusal("Stopped", "nothing was changed")


# --- output --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(
    doing: str, *, shown: bool, in_bytes: bool = True
) -> Iterator[commands.Progress | None]:
    """A bar with a rate, or with the time that is left, if a person is watching."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars

    done: tuple[bars.ProgressColumn, ...] = (bars.MofNCompleteColumn(), bars.TimeRemainingColumn())
    if in_bytes:
        done = (bars.DownloadColumn(), bars.TransferSpeedColumn())
    console = Console(stderr=True)
    with bars.Progress(
        bars.TextColumn(doing), bars.BarColumn(), *done, console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _exit(*, damaged: bool) -> None:
    if damaged:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
