"""Threads that make batches, and the waiting for what they make.

Built on queues that are written in C, and not on `concurrent.futures`: there, an interrupt (Ctrl-C)
that comes as a lock is taken leaves it taken, and who needs it next waits for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Bell:
    """Wakes threads that wait for something to become true.

    It may be rung in any thread and by a collector. An interrupt may end the waiting at any time.
    """

    def __init__(self) -> None:
        self._waiting: set[SimpleQueue[None]] = set()

    def ring(self) -> None:
        """Something may have become true."""
        for each in tuple(self._waiting):
            if each.empty():
                each.put(None)

    def wait(self, is_true: Callable[[], object]) -> None:
        """Until it is true. It is looked at now, and whenever the bell is rung."""
        if is_true():
            return
        news: SimpleQueue[None] = SimpleQueue()
        self._waiting.add(news)  # first, so that no ringing is missed
        try:
            while not is_true():
                news.get()
        finally:
            self._waiting.discard(news)


class Task(Generic[Result]):
    """Something that a thread is to make."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._made: list[Result] = []
        self._error: BaseException | None = None
        self.is_dropped = False

    @property
    def is_over(self) -> bool:
        """Whether `result` does not have to wait: it is made, failed or was dropped."""
        return bool(self._made) or self._error is not None or self.is_dropped

    def drop(self) -> None:
        """It is not wanted, and not made unless it is being made already."""
        self.is_dropped = True

    def run(self) -> None:
        """Makes it, in a thread."""
        if self.is_dropped:
            return
        try:
            self._made.append(self._work())
        except BaseException as error:
            self._error = error

    def result(self) -> Result:
        """What was made. Raises what making it raised."""
        if self._error is None:
            return self._made[0]
        try:
            raise self._error
        finally:
            del self  # the error refers to this frame


class Makers:
    """So many threads, started when they are needed, that take tasks in turn."""

    def __init__(self, threads: int, name: str, bell: Bell) -> None:
        self._most = threads
        self._name = name
        self._bell = bell
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], Result]) -> Task[Result]:
        """Has it made after what was submitted before; the bell tells when it is.

        Raises:
          RuntimeError: there is no thread to be had.
        """
        task = Task(work)
        if len(self._threads) < self._most:
            self._start()
        self._queue.put(task)  # type: ignore[arg-type]
        return task

    def close(self, *, wait: bool) -> None:
        """What was not begun is not made; `wait`: until the threads have ended."""
        with contextlib.suppress(Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None:
                    task.drop()
        self._queue.put(None)
        for thread in self._threads:
            if wait and thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        arguments = (self._queue, self._bell)
        thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except BaseException:  # interrupted, it may never come; if it does, it is welcome
            self._threads.remove(thread)
            raise


def _serve(queue: SimpleQueue[Task[object] | None], bell: Bell) -> None:
    while (task := queue.get()) is not None:
        task.run()
        del task
        bell.ring()
    queue.put(None)  # for the other threads
