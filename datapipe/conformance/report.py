"""What a loader passes: as a table for people, and as a JSON value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from datapipe.conformance.check import Result, Status

_MARKS: Final[dict[Status, str]] = {"passed": "passed", "failed": "FAILED", "not offered": "-"}


@dataclass(frozen=True)
class Report:
    """The results of one loader, in the order of the checks.

    loader: its name.
    versions: of its packages.
    seed: of what the checks drew.
    """

    loader: str
    versions: dict[str, str]
    seed: int
    results: tuple[Result, ...]

    @property
    def is_conformant(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Result, ...]:
        """The results of the checks that did."""
        return tuple(each for each in self.results if each.status == "failed")

    def count(self, status: Status) -> int:
        """How many checks ended like that."""
        return sum(each.status == status for each in self.results)

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "loader": self.loader,
            "versions": self.versions,
            "seed": self.seed,
            "results": [each.to_json() for each in self.results],
        }

    def __str__(self) -> str:
        return table([self])


def table(reports: Sequence[Report]) -> str:
    """Who passes what, one column a loader, and below it what failed and why."""
    names = [each.check for each in reports[0].results]
    cells = [[_MARKS[result.status] for result in report.results] for report in reports]
    widths = [max(len(report.loader), 6) for report in reports]
    first = max(map(len, names))

    def row(name: str, values: Sequence[str]) -> str:
        filled = [each.ljust(width) for each, width in zip(values, widths, strict=True)]
        return "  ".join([name.ljust(first), *filled]).rstrip()

    lines = [row("", [report.loader for report in reports])]
    lines += [row(name, [column[at] for column in cells]) for at, name in enumerate(names)]
    for report in reports:
        versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        lines += [
            "",
            f"{report.loader} ({versions or 'no package'}; seed {report.seed}): "
            f"{report.count('passed')} passed, {report.count('failed')} failed, "
            f"{report.count('not offered')} not offered",
        ]
        lines += [f"  {result.check}: {result.detail}" for result in report.failed]
    return "\n".join(lines)
