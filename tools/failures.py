"""How the command fails: one message, one exit code; with `--json` one JSON value, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from tools import output, views

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

CODE_OF = {
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
    "OSError": 4,
    "Stopped": 130,
    "Fault": 70,
}
"""By the kind of an error: its name, which says what can be done about it in both trees of errors,
and three that are no classes there. Wrong arguments are Misuse."""


class Refusal(Exception):
    """What a command finds by itself, with its kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Group(TyperGroup):
    """The commands; wrong arguments of one that was to answer in JSON are told in JSON, too."""

    _as_json = False

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        self._as_json = _wants_json(args)
        with self._told():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with self._told():
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Typer's own errors, which it prints and turns into exit code 2 after this.
            words = getattr(error, "format_message", None)
            if self._as_json and words is not None:
                _print_error("Misuse", words(), 2)
            raise


@contextlib.contextmanager
def told(*, debug: bool, as_json: bool) -> Iterator[None]:
    """Errors as one message on stderr and an exit code; as JSON on stdout if that was wanted."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        if as_json:
            _print_error("Stopped", "stopped by Ctrl-C", CODE_OF["Stopped"])
        raise
    except Exception as error:
        kind, message = kind_of(error), str(error)
        if kind == "Fault":
            message = f"unexpected {type(error).__name__}: {error}; run it with --debug and report "
            message += "what it shows"
        if as_json:
            _print_error(kind, message, CODE_OF[kind])
        if debug:
            raise
        exit_with(message, CODE_OF[kind])


def kind_of(error: Exception) -> str:
    """The kind of an error, which has a place in `CODE_OF`."""
    if isinstance(error, Refusal):
        return error.kind
    return next(
        (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in CODE_OF), "Fault"
    )


def exit_with(message: str, code: int) -> NoReturn:
    """One message on stderr, and the end."""
    console = Console(stderr=True, highlight=False)
    console.print("[bold red]ckpt:[/] ", end="")
    console.print(views.printable(message), markup=False, emoji=False, soft_wrap=True)
    raise typer.Exit(code)


def _print_error(kind: str, message: str, code: int) -> None:
    # The output may be what failed; the message on stderr is still to come.
    with contextlib.suppress(OSError):
        output.print_json({"error": {"kind": kind, "message": message, "exit_code": code}})


def _wants_json(args: Sequence[str]) -> bool:
    options = list(args)
    if "--" in options:
        del options[options.index("--") :]
    return "--json" in options
