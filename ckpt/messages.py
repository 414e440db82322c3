"""What trainer and writer say to each other: frozen values, and their form as JSON lines.

The same values go to a writer in a thread, as they are, and to one in a process of its own, over a
Unix socket. The first line each side sends carries the version. An error arrives with its class,
its text and its causes; see `_ERRORS` for which classes.

============== ===================================================================================
to the writer  `Setup` (once, first), `Begin`, `Job`, `Abandon`, `Note`, `Flush`, `Settle`, `Close`
from it        `Ready` (once, first), `Released`, `Done`, `Failed`, `Trouble`, `Said`, `Settled`,
               `Noted`
============== ===================================================================================
"""

from __future__ import annotations

import builtins
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt import errors
from ckpt.errors import CheckpointError, Damaged, Mismatch, difference_lines
from ckpt.lineage import Lineage, Reach, StepId
from ckpt.retention import Best, Keep
from ckpt.tiers import Durable, Local, Shared, patience_of

VERSION = 3
Json = Any


@dataclass(frozen=True)
class Setup:
    """All that a writer has to know of its trainer."""

    tiers: dict[str, Durable]
    """By name, nearest first; the tier "shared" is the home of the run."""
    arena: str
    """Directory of the slots."""
    index: int
    count: int
    timeout_s: float
    """How long process 0 waits for the parts of the others."""
    grace_s: float
    """How long the writer goes on after the death of its trainer."""


@dataclass(frozen=True)
class Begin:
    """From now on the run is that of this attempt; nothing of an older one is under way."""

    owner: int
    line: Lineage


@dataclass(frozen=True)
class Job:
    """A snapshot that is to reach some tiers."""

    id: StepId
    """Its attempt is older than the owner where a new attempt makes up for an old one."""
    tiers: tuple[str, ...]
    """Nearest first; Local and Shared ones only."""
    slot: int | None
    """In which it lies; None: in the first Local tier that has its image."""
    figures: dict[str, Json] = field(default_factory=dict)
    """For the log."""


@dataclass(frozen=True)
class Abandon:
    """Another process cannot save this step: it will never be one."""

    id: StepId
    error: CheckpointError


@dataclass(frozen=True)
class Note:
    """An event for the log of the attempt."""

    event: dict[str, Json]


@dataclass(frozen=True)
class Flush:
    """Bring the newest valid snapshot to the durable tiers, whatever is due."""


@dataclass(frozen=True)
class Settle:
    """Say `Settled` when nothing is under way any more, be it a deletion."""

    number: int = 0
    """For the answer: one that comes late is none to whoever asks again."""


@dataclass(frozen=True)
class Close:
    """Finish everything, then end."""


@dataclass(frozen=True)
class Ready:
    """The writer is there."""

    pid: int


@dataclass(frozen=True)
class Released:
    """The slot is not needed any more for this step."""

    id: StepId
    slot: int


@dataclass(frozen=True)
class Done:
    """This process has done its share: image or part are durable; on process 0, for a Shared tier,
    the step is acknowledged."""

    id: StepId
    tier: str
    figures: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The tier will not have the step. With `tier` empty: an error that belongs to no save."""

    id: StepId | None
    tier: str
    error: BaseException


@dataclass(frozen=True)
class Trouble:
    """A tier fails and is tried again; with an empty text: it works again."""

    tier: str
    text: str
    since_ns: int = 0


@dataclass(frozen=True)
class Said:
    """A line for the trainer's log."""

    level: int
    text: str


@dataclass(frozen=True)
class Noted:
    """Metrics that came late are in the log; with an error, they will never be."""

    time_ns: int
    """That of their event, by which a `Note` of metrics is known."""
    error: BaseException | None = None


@dataclass(frozen=True)
class Settled:
    """The answer to the `Settle` of the same number."""

    number: int = 0


ToWriter = Setup | Begin | Job | Abandon | Note | Flush | Settle | Close
Report = Ready | Released | Done | Failed | Trouble | Said | Settled | Noted
Message = ToWriter | Report
Tell = Callable[[Report], None]


def emit(message: Message) -> bytes:
    """One line."""
    kind = type(message).__name__
    body: dict[str, Json]
    match message:
        case Setup():
            tiers = [_emit_tier(name, tier) for name, tier in message.tiers.items()]
            body = {**vars(message), "tiers": tiers, "version": VERSION}
        case Ready():
            body = {"pid": message.pid, "version": VERSION}
        case Begin():
            body = {"owner": message.owner, "line": [list(vars(r).values()) for r in message.line]}
        case Job() | Done() | Released():
            body = {**vars(message), "id": _emit_id(message.id)}
        case Abandon() | Failed():
            body = {
                **vars(message),
                "id": _emit_id(message.id),
                "error": _emit_error(message.error),
            }
        case Noted():
            error = None if message.error is None else _emit_error(message.error)
            body = {"time_ns": message.time_ns, "error": error}
        case _:
            body = dict(vars(message))
    return json.dumps([kind, body], separators=(",", ":")).encode() + b"\n"


def parse(line: bytes) -> Message:
    """The message of one line.

    Raises:
        Damaged: it is none, or one of another version.
    """
    try:
        kind, body = json.loads(line)
        if kind in ("Setup", "Ready") and (version := body.pop("version")) != VERSION:
            raise Damaged(
                f"wanted version {VERSION} of the messages between trainer and writer, found "
                f"{version}: both must be of one release; was the package replaced meanwhile?"
            )
        if "id" in body:
            body["id"] = None if body["id"] is None else StepId(*body["id"])
        if body.get("error") is not None:
            body["error"] = _parse_error(body["error"])
        if kind == "Setup":
            body["tiers"] = dict(map(_parse_tier, body["tiers"]))
        if kind == "Begin":
            body["line"] = tuple(Reach(*each) for each in body["line"])
        if kind == "Job":
            body["tiers"] = tuple(body["tiers"])
        return _KINDS[kind](**body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"no message between trainer and writer ({error}): {line[:200]!r}") from error


def _emit_id(step: StepId | None) -> Json:
    return None if step is None else [step.step, step.branch, step.attempt]


def _emit_error(error: BaseException) -> Json:
    """An error and what caused it, the error itself first."""
    chain: list[Json] = []
    link: BaseException | None = error
    while link is not None and len(chain) < _CAUSES + 1:
        chain.append(_emit_link(link))
        link = link.__cause__
    return chain


def _emit_link(error: BaseException) -> Json:
    """Class, text, and the differences of a Mismatch."""
    differences = error.differences if isinstance(error, Mismatch) else ()
    # An error of one text is made of it again; KeyError would show it in quotes twice.
    plain = len(error.args) == 1 and isinstance(error.args[0], str)
    text = (error.args[0] if plain else str(error)).removesuffix(difference_lines(differences))
    kind = next((each.__name__ for each in type(error).__mro__ if _is_known(each)), "")
    if kind != type(error).__name__:
        text = f"{type(error).__name__}: {text}"
    return [kind, text, list(differences)]


def _parse_error(value: Json) -> BaseException:
    made: BaseException | None = None
    for kind, text, differences in reversed(value):
        error = _ERRORS.get(kind, CheckpointError)(text)
        if differences:
            error = Mismatch(text, differences)
        error.__cause__ = made
        made = error
    if made is None:
        raise ValueError("an error without a class")
    return made


def _is_known(kind: type) -> bool:
    return _ERRORS.get(kind.__name__) is kind


def _takes_text(kind: type[Exception]) -> bool:
    try:
        return "text" in str(kind("text"))
    except TypeError:
        return False


_CAUSES = 7
"""So many causes of an error are carried, one behind the other."""

_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (*vars(builtins).values(), *vars(errors).values())
    # The two that end a loop or a generator would do so, unseen, in whoever raises them again.
    if isinstance(each, type)
    and issubclass(each, Exception)
    and not issubclass(each, StopIteration | StopAsyncIteration)
    and _takes_text(each)
}
"""What arrives as what it was: errors of this package, and builtin ones that are made of a text.
Others arrive as the nearest of these that they are a kind of, with their name in the text."""


def _emit_tier(name: str, tier: Durable) -> Json:
    keep = {**vars(tier.keep), "best": None if tier.keep.best is None else vars(tier.keep.best)}
    patience_s = patience_of(tier)
    return {
        "name": name,
        "kind": type(tier).__name__,
        "location": os.fspath(tier.location),
        "every": tier.every,
        "keep": keep,
        "compression": tier.compression if isinstance(tier, Shared) else None,
        "patience_s": None if math.isinf(patience_s) else patience_s,
    }


def _parse_tier(value: Json) -> tuple[str, Durable]:
    best = value["keep"]["best"]
    keep = Keep(**{**value["keep"], "best": None if best is None else Best(**best)})
    patience_s = math.inf if value["patience_s"] is None else value["patience_s"]
    place, every = value["location"], value["every"]
    if value["kind"] == "Local":
        return value["name"], Local(place, every, keep, patience_s)
    return value["name"], Shared(place, every, keep, value["compression"], patience_s)


_KINDS: dict[str, Callable[..., Message]] = {
    each.__name__: each
    for each in (
        *(Setup, Begin, Job, Abandon, Note, Flush, Settle, Close),
        *(Ready, Released, Done, Failed, Trouble, Said, Settled, Noted),
    )
}
