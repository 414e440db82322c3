"""The processes of a run: what process 0 decided, what the others say, who has failed.

Over JAX's coordination service. Nothing here makes a step durable: the parts in the store do.
It carries decisions, speed and bad news. No device collectives, so any thread may call it.

What the processes settle together is a *matter*: a start, one save, a deletion. Every process takes
part in it by making the same call. A process that cannot go on with a matter says so, and whoever
waits for it in that matter hears it at once, with the reason, instead of running into a timeout.

A process that dies says nothing. JAX itself ends the others then: at once when it was process 0,
which holds the coordination service, else after the heartbeat timeout that was given to
`jax.distributed.initialize`. Whoever waits here is told earlier if `timeout_s` is shorter.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar, final

import xxhash

from ckpt import errors
from ckpt.errors import CheckpointError, Damaged, PeerFailed, Superseded

Json = Any
T = TypeVar("T")

TIMEOUT_S = 600.0
"""How long a process waits for another before it names it as failed."""

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
"""Bounds of one question to the coordination service; between two the bad news are looked at."""

_VERDICTS = ("NotFound", "AlreadyExists", "Mismatch", "Damaged", "Unsupported", "Misuse")
"""What process 0 found out for the run; the other errors say that process 0 itself failed."""


class Processes(abc.ABC):
    """Who there is, and a board on which each process can read what the others have put up."""

    index: int
    count: int

    @abc.abstractmethod
    def put(self, key: str, text: str) -> None:
        """Put up a text, or replace it. Raises PeerFailed when the board is gone."""

    @abc.abstractmethod
    def get(self, key: str, wait_s: float) -> str | None:
        """The text under a key as soon as it is there; None after `wait_s` without it."""

    @abc.abstractmethod
    def below(self, prefix: str) -> dict[str, str]:
        """The texts whose keys begin with `prefix/`, by the last component of the key."""

    @abc.abstractmethod
    def remove(self, prefix: str) -> None:
        """Take down all that is below a prefix."""

    @final
    def leave(self, why: str) -> None:
        """Tell the others that this process takes part in nothing any more."""
        if self.count > 1:
            with contextlib.suppress(PeerFailed):  # then there is nobody to hear it
                self.put(f"left/{self.index}", why)

    @final
    def matter(self, name: str, timeout_s: float = TIMEOUT_S) -> Matter:
        """What all processes settle together under a name, which is used once in a run.

        Args:
            timeout_s: how long to wait for another process before it is named as failed.
        """
        return Matter(self, name, timeout_s)


@final
class Matter:
    """One thing that all processes settle together.

    As a context manager it tells the others of an exception that leaves the block.
    """

    def __init__(self, processes: Processes, name: str, timeout_s: float) -> None:
        self._processes = processes
        self._name = name
        self._timeout_s = timeout_s
        self._failed = False
        self.index, self.count = processes.index, processes.count

    def __enter__(self) -> Matter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)

    def decide(self, what: str, make: Callable[[], Json]) -> Json:
        """Process 0 makes a value, all get it.

        If making it fails there, it fails everywhere: with an error of the same type if it is about
        the run, as PeerFailed if it is about process 0.

        Raises:
            PeerFailed: process 0 was not heard of in time, or a process gave this matter up.
        """
        if self.index != 0:
            # Process 0 may itself wait for a third one, which it will name.
            return self._hear(what, 0, time.monotonic() + 2 * self._timeout_s)
        try:
            value = make()
        except BaseException as error:
            self.fail(error, decided=True)
            raise
        self._tell(what, value)
        return value

    def gather(self, what: str, value: Json) -> list[Json]:
        """Everybody's value, by process; the same list everywhere.

        Raises:
            PeerFailed: names the first process that was not heard of in time, or that gave up.
        """
        if self.index != 0:
            self._tell(f"{what}/{self.index}", value)
            return self._hear(f"{what}/all", 0, time.monotonic() + 2 * self._timeout_s)
        end = time.monotonic() + self._timeout_s
        values = [value, *(self._hear(f"{what}/{i}", i, end) for i in range(1, self.count))]
        self._tell(f"{what}/all", values)
        return values

    def vote(self, what: str, act: Callable[[], T]) -> T:
        """Everybody acts; all get what their own act gave, or all get an error.

        Raises:
            Damaged: somebody found damage, and nobody had another error; tells who found what.
            CheckpointError: another error of this process, or PeerFailed with that of a peer.
        """
        error: CheckpointError | None = None
        try:
            value = act()
        except CheckpointError as caught:
            error = caught
        vote = None if error is None else [isinstance(error, Damaged), _described(error)]
        votes = self.gather(what, vote)
        if error is not None and (not isinstance(error, Damaged) or self.count == 1):
            raise error
        # From the same votes all draw the same conclusion, or some would go on without the others.
        against = {process: each for process, each in enumerate(votes) if each is not None}
        for process, (damaged, text) in against.items():
            if not damaged:
                raise PeerFailed(f"process {process}: {text}") from error
        if against:
            lines = (f"process {process}: {text}" for process, (_, text) in against.items())
            raise Damaged("\n".join(lines)) from error
        return value

    def fail(self, error: BaseException, *, decided: bool = False) -> None:
        """Tell the others that this process does not go on with the matter, and why.

        `decided`: it is so for the run, not just here. Only the first call counts.
        """
        if self._failed or self.count == 1:
            return
        self._failed = True
        note = {
            "type": type(error).__name__,
            "text": str(error),
            "decided": decided,
        }
        with contextlib.suppress(PeerFailed):  # there is an error already, and nobody to hear it
            self._processes.put(self._key(f"failed/{self.index}"), json.dumps(note))

    def check(self) -> None:
        """Raise the bad news there are: what another process told with `fail`, or that it left."""
        for process, text in self._others(self._key("failed")):
            raise _error_of(process, json.loads(text))
        for process, why in self._others("left"):
            raise PeerFailed(f"process {process} takes no part in {self._name} any more: {why}")

    def forget(self) -> None:
        """Take down all that was said. Only when nobody can still be waiting for it."""
        self._processes.remove(self._name)

    def _key(self, what: str) -> str:
        return f"{self._name}/{what}"

    def _others(self, prefix: str) -> list[tuple[int, str]]:
        found = self._processes.below(prefix)
        return sorted((int(i), text) for i, text in found.items() if int(i) != self.index)

    def _tell(self, what: str, value: Json) -> None:
        if self.count > 1:
            self._processes.put(self._key(what), json.dumps(value))

    def _hear(self, what: str, process: int, end: float) -> Json:
        """What a process says, until the monotonic time `end`."""
        wait_s = _FIRST_WAIT_S
        trouble: CheckpointError | None = None
        while True:
            left_s = end - time.monotonic()
            text = self._processes.get(self._key(what), max(0.0, min(wait_s, left_s)))
            if text is not None:
                return json.loads(text)
            if trouble is not None:
                raise trouble
            if left_s <= 0:
                raise PeerFailed(
                    f"process {process} of {self.count} was not heard of within "
                    f"{self._timeout_s:.0f} s ({self._name}: {what}); it may be dead or stuck, or "
                    "has not made the same call for the same location"
                )
            try:
                self.check()
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            except CheckpointError as error:
                trouble, wait_s = error, 0.0  # look once more: it may have been said just before


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _error_of(process: int, note: Json) -> CheckpointError:
    kind, text = note["type"], note["text"]
    if kind == Superseded.__name__ or (note["decided"] and kind in _VERDICTS):
        found: CheckpointError = getattr(errors, kind)(f"process {process}: {text}")
        return found
    if kind == PeerFailed.__name__:
        return PeerFailed(text)  # what it heard from a third one, or did not hear
    return PeerFailed(f"process {process} failed: {kind}: {text}")


@final
class Alone(Processes):
    """One process: nobody to tell, nobody to hear."""

    index = 0
    count = 1

    def put(self, key: str, text: str) -> None:
        del key, text

    def get(self, key: str, wait_s: float) -> str | None:
        raise AssertionError(f"a single process waits for {key}")

    def below(self, prefix: str) -> dict[str, str]:
        del prefix
        return {}

    def remove(self, prefix: str) -> None:
        del prefix


@final
class Distributed(Processes):
    """The processes under `jax.distributed.initialize`.

    Args:
        run: keeps the runs of one job apart; the same text in all processes. Boards of one run
            are numbered as they are first used, so a manager that only one process makes, to look,
            disturbs nobody.
    """

    def __init__(self, run: str) -> None:
        import jax
        from jax._src import distributed  # the client has no public name; Orbax uses it as well

        client = distributed.global_state.client
        if client is None:
            raise PeerFailed(
                "several processes, but jax.distributed.initialize() was not called in this one"
            )
        self._client = client
        self._run = run
        self._board: str | None = None
        self.index = jax.process_index()
        self.count = jax.process_count()

    def put(self, key: str, text: str) -> None:
        with _translated():
            self._client.key_value_set(self._path(key), text, allow_overwrite=True)

    def get(self, key: str, wait_s: float) -> str | None:
        with _translated():
            try:
                return self._client.blocking_key_value_get(
                    self._path(key), max(1, int(wait_s * 1000))
                )
            except RuntimeError as error:
                # jaxlib has one error for everything; only its text tells.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                return None

    def below(self, prefix: str) -> dict[str, str]:
        with _translated():
            found = self._client.key_value_dir_get(f"{self._path(prefix)}/")
        return {key.rsplit("/", 1)[1]: text for key, text in found}

    def remove(self, prefix: str) -> None:
        with _translated():
            self._client.key_value_delete(f"{self._path(prefix)}/")

    def _path(self, key: str) -> str:
        if self._board is None:
            name = xxhash.xxh3_64_hexdigest(self._run.encode())
            self._board = f"lastgood/{name}-{_next_board(self._client, name)}"
        return f"{self._board}/{key}"


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerFailed(f"the coordination service of JAX does not answer: {error}") from error


_boards: Counter[str] = Counter()
_boards_at: Any = None


def _next_board(client: Any, run: str) -> int:
    """Numbers begin anew with each coordination service, which knows nothing of the one before."""
    global _boards_at
    if _boards_at is not client:
        _boards.clear()
        _boards_at = client
    _boards[run] += 1
    return _boards[run]


def of_run(location: str) -> Processes:
    """The processes of this job, for what they do with the run at `location`."""
    import jax

    return Alone() if jax.process_count() == 1 else Distributed(location)


def of_tree(location: str, tree: Any) -> Processes:
    """Those who must read together: all, if a leaf lies on devices of several processes."""
    jax = sys.modules.get("jax")
    if jax is None:
        return Alone()
    try:
        leaves = jax.tree.leaves(tree)
    except (TypeError, ValueError, RecursionError, SystemError):  # keys of several types, or worse
        from ckpt.tree import flatten

        leaves = flatten(tree, abstract=True).values
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    together = any(each is not None and not each.is_fully_addressable for each in shardings)
    return of_run(location) if together else Alone()


_updates = itertools.count(1)
"""Never goes back, as steps do; JAX compares it between processes."""


def preempted() -> bool:
    """Was a process sent SIGTERM, and is this the point at which all of them stop?

    All processes ask after each update, and get the same answer. It is JAX that answers, a second
    or two after the signal; its own handler must be in place in each process, and its preemption
    service not switched off.
    """
    from jax._src import distributed

    service = distributed.global_state.preemption_sync_manager
    return service is not None and service.reached_sync_point(next(_updates))


def has_preemption_service() -> bool:
    """Is there a service of JAX that `preempted` can ask?"""
    from jax._src import distributed

    return distributed.global_state.preemption_sync_manager is not None


def here() -> tuple[int, int]:
    """Index of this process, and how many there are."""
    import jax

    return jax.process_index(), jax.process_count()
