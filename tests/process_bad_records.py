"""Scenes in which a record is bad on one host only, as each of several processes sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memory_source import Columns
from process_stage import Stage, data_sharding, error_of, rows_of

from datapipe import Pipeline

BAD = ((7, 30, 31), (31, 90, 91, 92))
"""Of each host; it cannot read them, and would not know of those that the other one cannot read."""


def pipeline(
    bad: tuple[int, ...] = (), *, policy: Any = "replace", batch_size: int = 16
) -> Pipeline:
    """Twelve and a half batches an epoch."""
    source = Columns(200, bad=bad)
    pipe = Pipeline(source, batch_size=batch_size, seed=5, epochs=4, on_bad_record=policy)
    return pipe.map(_numbers, version="1")


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"]}


def replaced_on_one_host(stage: Stage) -> dict[str, Any]:
    """Steps through the first epoch, and on in the same attempt."""
    with (
        stage.manager() as m,
        pipeline(BAD[stage.index]).iterator(sharding=data_sharding()) as data,
    ):
        m.resume(data=data)
        seen = []
        for step in range(1, 14):
            seen.append(rows_of(next(data)))
            m.save(step, {"step": step}, data=data)
        m.wait_until_finished()
        own = data.get_state()
        seen += [rows_of(next(data)) for _ in range(6)]
    stage.meet()
    return {"seen": seen, "own": own, **gone_on(stage)}


def gone_on(stage: Stage) -> dict[str, Any]:
    """Go on from the newest step; by now all hosts can read everything."""
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        restored = m.resume(data=data)
        position = data.get_state()
        coming = [rows_of(next(data)) for _ in range(6)]
    return {"restored": restored.step, "position": position, "coming": coming}


def raised_on_one_host(stage: Stage) -> dict[str, Any]:
    """One host finds a bad record; all leave it out, as its message says, and go on together."""
    bad = (BAD[0][0],) if stage.index == 0 else ()
    with pipeline(bad, policy="raise").iterator(sharding=data_sharding()) as data:
        seen = []
        order = pipeline().plan.records(range(4)).tolist()
        example = order.index(BAD[0][0])
        while data.next_example + 16 <= example:
            seen.append(rows_of(next(data)))
        before = data.get_state()
        raised = error_of(lambda: next(data))
        if raised is None:  # here it went well: back to where the other one stands
            data.set_state(before)
        same = data.get_state() == before
        data.skip(data.plan.addresses([(example, example + 1)]))
        seen += [rows_of(next(data)) for _ in range(4)]
        after = data.get_state()
    return {
        "seen": seen,
        "error": raised,
        "example": example,
        "kept": same,
        "after": after,
    }


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    scene.__name__: scene for scene in (replaced_on_one_host, raised_on_one_host)
}
SCENES["alone_before"] = gone_on
