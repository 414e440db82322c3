"""SIGTERM, and the update after which all processes stop.

The signal does not reach all processes, nor at the same update. JAX's preemption service finds one
update for all; where it is switched off, or there is none, they find one over their board:

- A process that was sent the signal says so.
- Process 0 proposes a number of updates. Each process answers with how many it has completed; if
  that is below the proposal, it goes no further than there until it knows more.
- When nobody had gone too far, process 0 decides that this is where they stop; else they go on,
  and it proposes a later one.

All this is done by a thread, whatever the trainer does meanwhile: one that has gone too far may be
waiting, on its devices, for one that holds at the proposal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import final

from ckpt.errors import PeerFailed
from ckpt.listening import Ended, Leaving, number_on
from ckpt.processes import Processes, has_preemption_service, preempted
from ckpt.signals import Takeover, is_main_thread

_log = logging.getLogger("ckpt")

_POLL_S = 0.5
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.1
_AHEAD = 4
"""Each proposal is by this factor farther ahead than the one before; the first is the next
update."""


@final
class Sigterm:
    """Notes SIGTERM, calls the handler that was there before, and puts it back.

    If another handler was installed in between, which may call this one, nothing can be put back:
    this one then only passes the signal on.
    """

    def __init__(self, note: Callable[[], None]) -> None:
        self._note: Callable[[], None] | None = note
        self._takeover: Takeover | None = None

    def install(self) -> None:
        """Does nothing off the main thread, where Python refuses handlers."""
        if is_main_thread():
            self._takeover = Takeover(self._act, self._restore, may_end=False)

    def put_back(self) -> None:
        """Also twice. Off the main thread, or below another handler, it stays, out of use."""
        self._note = None
        if self._takeover is not None and is_main_thread() and self._takeover.is_on_top():
            self._restore()

    def _act(self, number: int) -> bool:
        del number
        note = self._note
        if note is not None:
            note()
        return note is not None

    def _restore(self) -> None:
        if self._takeover is not None:
            self._takeover.restore()
            self._takeover = None  # only now: a signal may come in between


@final
class Agreement:
    """The update after which all processes of a board stop. Each counts its own updates.

    Args:
        timeout_s: how long to hold at a proposal before another process is named as failed.
    """

    def __init__(self, board: Processes, timeout_s: float) -> None:
        self._ended = threading.Event()
        self._board = Leaving(board, self._ended)
        self._timeout_s = timeout_s
        self._name = f"stop-{number_on(board)}"
        self._changed = threading.Condition()
        self._completed = 0
        self._farthest = 0  # of all, as far as process 0 has heard
        self._in_question = False  # a proposal was made
        self._hold_at: int | None = None
        self._stop_at: int | None = None
        self._error: BaseException | None = None
        self.wanted = False
        """Set by a signal handler, which may do nothing that takes a lock."""
        self._thread = threading.Thread(target=self._talk, name="ckpt-stop", daemon=True)
        self._thread.start()

    def after_update(self, *, last: bool) -> bool:
        """To be called after each update; true when all stop here. `last`: they would anyway.

        Raises:
            PeerFailed: another process failed or was silent while this one held.
        """
        with self._changed:
            self._completed += 1
            if self._error is not None and self._in_question and not last:
                raise self._error
            if self._hold_at is None or last:
                return False
            known = self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or self._stop_at is not None
                    or self._hold_at is None
                    or self._completed < self._hold_at
                ),
                self._timeout_s,
            )
            if self._error is not None:
                raise self._error
            if not known:
                raise PeerFailed(
                    "preempted: the processes found no update after which to stop within "
                    f"{self._timeout_s:.0f} s; one of them may be dead or stuck"
                )
            return self._completed == self._stop_at

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=10.0)

    # --- the thread ---------------------------------------------------------------------------

    def _talk(self) -> None:
        try:
            decided, number, ahead = False, 0, 1
            if self._board.index == 0:
                while not (self.wanted or self._board.below(f"{self._name}/wanted")):
                    self._pause(_POLL_S)
            while not decided:
                if self._board.index == 0:
                    decided = self._propose(number, ahead)
                else:
                    decided = self._answer(number)
                number, ahead = number + 1, ahead * _AHEAD
        except Ended:
            pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
                if not self._in_question:
                    _log.warning("on SIGTERM this run will not stop after a common step: %s", error)

    def _propose(self, number: int, ahead: int) -> bool:
        """Process 0: is this proposal the one?"""
        with self._changed:
            farthest = max(self._farthest, self._completed)
            proposal = self._hold_at = farthest + ahead
            self._in_question = True
        self._board.put(f"{self._name}/proposal-{number}", str(proposal))
        answers: dict[str, str] = {}
        look_s = _FIRST_LOOK_S
        while len(answers) < self._board.count - 1:
            for process, why in self._board.below("left").items():
                raise PeerFailed(f"process {process} takes no part in the run any more: {why}")
            answers = self._board.below(f"{self._name}/answers-{number}")
            if len(answers) < self._board.count - 1:
                self._pause(look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
        self._farthest = max(farthest, *map(int, answers.values()))
        agreed = self._farthest < proposal
        self._board.put(f"{self._name}/decision-{number}", "stop" if agreed else "later")
        self._know(proposal if agreed else None)
        return agreed

    def _answer(self, number: int) -> bool:
        """The others: is this proposal the one?"""
        proposal = int(self._wait(f"proposal-{number}"))
        with self._changed:
            completed = self._completed
            self._in_question = True
            if completed < proposal:
                self._hold_at = proposal
        self._board.put(f"{self._name}/answers-{number}/{self._board.index}", str(completed))
        agreed = self._wait(f"decision-{number}") == "stop"
        self._know(proposal if agreed else None)
        return agreed

    def _know(self, stop_at: int | None) -> None:
        with self._changed:
            self._stop_at = stop_at
            if stop_at is None:
                self._hold_at = None
            self._changed.notify_all()

    def _wait(self, what: str) -> str:
        told = False
        while True:
            if self.wanted and not told:
                self._board.put(f"{self._name}/wanted/{self._board.index}", "")
                told = True
            text = self._board.get(f"{self._name}/{what}", _POLL_S)
            if text is not None:
                return text
            if self._in_question:
                for process, why in self._board.below("left").items():
                    raise PeerFailed(f"process {process} takes no part in the run any more: {why}")

    def _pause(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise Ended


@final
class Preemption:
    """Says after which update a run stops because a process of it was sent SIGTERM."""

    def __init__(self) -> None:
        self.says_stop = False
        self._sigterm = Sigterm(self._note)
        self._agreement: Agreement | None = None
        self._by_jax = False

    def begin(self, board: Processes, timeout_s: float) -> None:
        """From now on. JAX's own handler is left alone where its service does the work."""
        self._by_jax = board.count > 1 and has_preemption_service()
        if self._by_jax:
            return
        if board.count > 1:
            self._agreement = Agreement(board, timeout_s)
        self._sigterm.install()

    def stops_after_update(self, *, last: bool) -> bool:
        """To be asked once after each update. `last`: the run ends there anyway."""
        if self._by_jax:
            self.says_stop = preempted() or self.says_stop
        elif self._agreement is not None:
            self.says_stop = self._agreement.after_update(last=last) or self.says_stop
        return self.says_stop

    def end(self) -> None:
        """Also twice."""
        self._sigterm.put_back()
        if self._agreement is not None:
            self._agreement.close()

    def _note(self) -> None:
        if self._agreement is None:
            self.says_stop = True
        else:
            self._agreement.wanted = True
