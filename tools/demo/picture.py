"""The loss curve of both runs with everything that happened on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ckpt.wording import counted
from tools.demo.report import Outcome, Story
from tools.demo.script import Script


def drawn(outcome: Outcome) -> Outcome:
    """The outcome with its picture written, or with the reason why there is none."""
    try:
        draw(outcome)
    except Exception as error:  # whatever it is: the runs and their comparison stand without it
        with contextlib.suppress(OSError):
            outcome.picture.unlink(missing_ok=True)  # half of one
        why = f"{outcome.picture}: no picture: {error}"
        return dataclasses.replace(outcome, picture_problem=why)
    return outcome


def draw(outcome: Outcome) -> None:
    """Write a PNG of 1400 x 750 pixels to `outcome.picture`."""
    script, run, reference = outcome.script, outcome.run, outcome.reference
    figure = Figure(figsize=(14, 7.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_columns(reference.losses), color="#c7c7c7", linewidth=4, label="reference run")
    left_behind, kept = _branches(run.losses)
    for number, piece in enumerate(left_behind):
        label = "" if number else "steps done again or left behind"
        axes.plot(*_columns(piece), color="#e08030", linewidth=1.2, label=label)
    axes.plot(*_columns(kept), color="#1f4e9c", linewidth=1.2, label="disturbed run")
    _marks(axes, script, run)
    axes.set_xlabel("step (completed updates)")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_xlim(0, script.steps)
    verdict = "equal to" if outcome.equal else "NOT equal to"
    axes.set_title(
        f"SIGKILL in the middle of {counted(len(run.kills), 'save')}, "
        f"{counted(len(run.rewinds), 'rewind')} past poisoned batches: "
        f"in the end {verdict} a run that never saw them"
    )
    axes.legend(loc="upper right", framealpha=1, edgecolor="none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(outcome.picture, format="png")


def _marks(axes: Axes, script: Script, run: Story) -> None:
    low, high = axes.get_ylim()
    floor = low + 0.02 * (high - low)
    axes.axvspan(
        script.poison.start + 0.5,
        script.poison.stop + 0.5,
        color="#f3c6c6",
        label="poison, when first met",
    )
    steps = [step for step, _ in run.saves]
    axes.plot(steps, [floor] * len(steps), "|", color="#2f8f4e", markersize=12, label="saves")
    for number, kill in enumerate(run.kills):
        label = "" if number else "SIGKILL during a save"
        axes.plot([kill.step], [floor], "x", color="#b00020", ms=11, mew=2.5, label=label)
        axes.axvline(kill.step, color="#b00020", linewidth=0.8, linestyle=":")
    for rewound in run.rewinds:
        top = high - 0.25 * (high - low)
        axes.annotate(
            "",
            xy=(rewound.to, top),
            xytext=(rewound.onset, top),
            arrowprops={"arrowstyle": "->", "color": "#6a1b9a", "linewidth": 2},
        )
        axes.text(
            rewound.to,
            top,
            f"spike at {rewound.onset}: back to step {rewound.to}  ",
            color="#6a1b9a",
            ha="right",
            va="center",
            # The lines of kills end at the words.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
            zorder=5,
        )


Points = list[tuple[int, float]]


def _branches(losses: Points) -> tuple[list[Points], Points]:
    """The pieces of the curve that were done again later, and the curve that counts.

    A piece begins wherever the step goes back; what a later piece covers does not count.
    """
    cuts = [at for at in range(1, len(losses)) if losses[at][0] <= losses[at - 1][0]]
    pieces = [losses[a:b] for a, b in itertools.pairwise([0, *cuts, len(losses)])]
    left_behind: list[Points] = []
    kept: Points = []
    covered = float("inf")
    for piece in reversed(pieces):
        count = sum(1 for step, _ in piece if step < covered)
        kept = piece[:count] + kept
        if count < len(piece):
            # One point of overlap, so that the lines join.
            left_behind.append(piece[max(0, count - 1) :])
        covered = min(covered, piece[0][0] if piece else covered)
    return left_behind, kept


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
