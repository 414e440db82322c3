"""The processes of a run: who am I, what did process 0 decide, who has failed.

Over JAX's coordination service. Nothing here makes a step durable: the parts in the store do.
It carries decisions, speed and bad news. No device collectives, so any thread may call it.
"""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable
from typing import Any, final

from ckpt.errors import PeerFailed

Json = Any

TIMEOUT_S = 600.0
"""How long a process waits for another before it names it as failed."""

_SLICE_S = 0.5


class Processes(abc.ABC):
    """What the manager asks of its peers. Names of exchanges must be unique within a run."""

    index: int
    count: int

    @abc.abstractmethod
    def tell(self, name: str, value: Json) -> None:
        """Publish a JSON value under a name, once."""

    @abc.abstractmethod
    def hear(
        self, name: str, process: int, timeout_s: float, bad_news: Callable[[], str | None]
    ) -> Json:
        """The value that another process published.

        Raises:
            PeerFailed: it did not come in time, or there is bad news meanwhile.
        """

    def decide(self, name: str, make: Callable[[], Json], timeout_s: float = TIMEOUT_S) -> Json:
        """Process 0 makes a value, all get it; if making it fails there, it fails everywhere."""
        if self.index == 0:
            try:
                value = make()
            except BaseException as error:
                self.tell(name, {"failed": f"{type(error).__name__}: {error}"})
                raise
            self.tell(name, {"value": value})
            return value
        heard = self.hear(name, 0, timeout_s, lambda: None)
        if "failed" in heard:
            raise PeerFailed(f"process 0: {heard['failed']}")
        return heard["value"]

    def gather(self, name: str, value: Json, timeout_s: float = TIMEOUT_S) -> list[Json]:
        """Everybody's value, by process; names the first process that stays silent."""
        if self.count == 1:
            return [value]
        self.tell(f"{name}/{self.index}", value)
        return [
            value
            if process == self.index
            else self.hear(f"{name}/{process}", process, timeout_s, lambda: None)
            for process in range(self.count)
        ]


@final
class Alone(Processes):
    """One process: its own peer."""

    index = 0
    count = 1

    def tell(self, name: str, value: Json) -> None:
        del name, value

    def hear(
        self, name: str, process: int, timeout_s: float, bad_news: Callable[[], str | None]
    ) -> Json:
        raise AssertionError(f"a single process waits for {name}")


@final
class Distributed(Processes):
    """The processes under `jax.distributed.initialize`."""

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
        self.index = jax.process_index()
        self.count = jax.process_count()

    def tell(self, name: str, value: Json) -> None:
        self._client.key_value_set(f"lastgood/{self._run}/{name}", json.dumps(value))

    def hear(
        self, name: str, process: int, timeout_s: float, bad_news: Callable[[], str | None]
    ) -> Json:
        key = f"lastgood/{self._run}/{name}"
        end = time.monotonic() + timeout_s
        while True:
            wait_s = min(_SLICE_S, max(0.01, end - time.monotonic()))
            try:
                return json.loads(self._client.blocking_key_value_get(key, int(wait_s * 1000)))
            except Exception as error:
                # jaxlib raises its own error for a timeout; only its text tells.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerFailed(f"process {process}: {name}: {error}") from error
            news = bad_news()
            if news is not None:
                raise PeerFailed(news)
            if time.monotonic() >= end:
                raise PeerFailed(
                    f"process {process} of {self.count} was not heard of for {timeout_s:.0f} s "
                    f"({name}); it may be dead or stuck"
                )


def of_run(run: str) -> Processes:
    """The processes of this job; `run` keeps runs in one job apart."""
    import jax

    return Alone() if jax.process_count() == 1 else Distributed(run)
