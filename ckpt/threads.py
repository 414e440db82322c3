"""Work shared among threads, also when the interpreter ends and no thread can be started: the last
save of a trainer goes out just then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def each(act: Callable[[_Item], _Result], items: Sequence[_Item], threads: int) -> list[_Result]:
    """`act` of each item, up to `threads` at a time; the first error is raised once all have ended.

    Nothing goes on behind the caller's back; what had not begun when one failed is left out.
    """
    if len(items) < 2:
        return [act(item) for item in items]
    count = min(threads, len(items))
    with ThreadPoolExecutor(count, thread_name_prefix="ckpt-store") as pool:
        futures = [submitted(pool, act, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def submitted(
    pool: ThreadPoolExecutor,
    act: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **named: _Arguments.kwargs,
) -> Future[_Result]:
    """A call that the pool makes, or that was made here because no thread could be started."""
    try:
        return pool.submit(act, *arguments, **named)
    except RuntimeError:
        pool.shutdown()  # a thread that it has may have taken the call all the same
    future: Future[_Result] = Future()
    try:
        future.set_result(act(*arguments, **named))
    except BaseException as error:
        future.set_exception(error)
    return future
