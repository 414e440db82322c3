"""A trainer that is sent SIGTERM, in a state that its first argument names.

Its second argument is the number of a socket, the wakeup descriptor. It says on standard output
what it sees, a line each, "ready" first.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

from ckpt import signals


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def note(number: int, frame: FrameType | None) -> None:
    del frame
    say(f"handler {number}")


def in_a_call_that_keeps_the_lock() -> None:
    """The main thread waits for the lock of the interpreter, as after a step of Python."""
    text = b"ready\n" + bytes(1 << 20)  # more than a pipe takes: this call does not come back
    write = ctypes.PyDLL(None).write
    threading.Thread(target=write, args=(1, text, ctypes.c_size_t(len(text))), daemon=True).start()
    time.sleep(0)
    signal.pause()


def asleep() -> None:
    say("ready")
    time.sleep(600)


def until_said() -> None:
    say("ready")
    sys.stdin.readline()


def with_asyncio(fd: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, heard.set)
        loop.add_signal_handler(signal.SIGUSR1, say, "usr1")
        before = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(before)
        installed = signals.install(fd)
        say("ready")
        await heard.wait()
        say("asyncio")
        installed.put_back()
        after = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(after)
        say(f"put back {before == after}")

    asyncio.run(main())


def with_jax(fd: int, *, enabled: bool) -> None:
    import jax
    from jax._src import distributed

    jax.config.update("jax_enable_preemption_service", enabled)
    port = sys.argv[3]
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    before = signals._installed_action().handler
    installed = signals.install(fd)
    if not enabled:
        asleep()
    until_said()
    manager = distributed.global_state.preemption_sync_manager
    update = 0
    while not manager.reached_sync_point(update := update + 1):
        time.sleep(0.02)
    say("jax")
    installed.put_back()
    say(f"put back {signals._installed_action().handler == before}")
    jax.distributed.shutdown()


def main() -> None:
    state, fd = sys.argv[1], int(sys.argv[2])
    if state in ("handler", "keeps the lock"):
        signal.signal(signal.SIGTERM, note)
    if state == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if state == "asyncio":
        return with_asyncio(fd)
    if state.startswith("jax"):
        return with_jax(fd, enabled=state == "jax")
    signals.install(fd)
    if state == "keeps the lock":
        in_a_call_that_keeps_the_lock()
    elif state == "default":
        asleep()
    elif state == "forked":
        if (child := os.fork()) == 0:
            asleep()
        _, status = os.waitpid(child, 0)
        say(f"child {os.waitstatus_to_exitcode(status)}")
    else:
        until_said()
    say("lives")
    return None


if __name__ == "__main__":
    main()
