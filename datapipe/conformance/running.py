"""All checks on one loader, in processes that are ended when they stop answering."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from datapipe.conformance.check import LIMIT_S, Check, Result
from datapipe.conformance.children import Child, NoAnswerError, Tell
from datapipe.conformance.loader import Loader
from datapipe.conformance.matrix import checks as all_checks
from datapipe.conformance.report import Report

_GRACE_S = 10.0  # a thread may hold the interpreter


def run(
    loader: Loader,
    *,
    seed: int = 0,
    limit_s: float = LIMIT_S,
    checks: Sequence[Check] = all_checks,
    tell: Callable[[Result], None] | None = None,
) -> Report:
    """Runs checks on a loader, one after the other, in a process of its own.

    A check that has not ended after `limit_s` seconds has failed: its process and all that it
    started are killed, and the next check runs in a new one. `open` and `ids` of the loader must
    be functions of a module.

    Args:
      loader: the loader.
      seed: of what the checks draw.
      limit_s: for each check.
      checks: those of `conformance.checks` to run.
      tell: is called with each result as it comes.

    Raises:
      ValueError: `open` or `ids` stands in a script, where another process does not find it; or a
        check is none of these.
    """
    for function in (loader.open, loader.ids):
        if getattr(function, "__module__", None) == "__main__":
            raise ValueError(f"{function.__qualname__} must stand in a module, not in a script")
    for each in checks:
        if each not in all_checks:
            raise ValueError(f"{each.name} is none of conformance.checks; run it by itself")
    results: list[Result] = []
    while len(results) < len(checks):
        left = checks[len(results) :]
        names = [each.name for each in left]
        with Child(_run_all, loader, names, seed, limit_s) as child:
            for each in left:
                try:
                    result = Result(**child.answer(limit_s + _GRACE_S))
                except NoAnswerError as error:
                    result = Result(each.name, "failed", str(error), is_stuck=True)
                results.append(result)
                if tell is not None:
                    tell(result)
                if result.is_stuck:
                    break
    return Report(loader.name, loader.versions, seed, tuple(results))


def _run_all(tell: Tell, loader: Loader, names: list[str], seed: int, limit_s: float) -> None:
    by_name = {each.name: each for each in all_checks}
    for name in names:
        tell(by_name[name].run(loader, seed=seed, limit_s=limit_s).to_json())
