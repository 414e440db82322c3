"""Random plans: whatever fails when, each job ends once in each tier, in order, and its slot comes
back once, after the last reader."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from writer_runs import Play, Weather, quick, tiers_of

from ckpt import attempts, disk
from ckpt.errors import Damaged, StoreFailed
from ckpt.messages import Done, Released

__all__ = ["quick"]  # a fixture

KINDS = [
    ("shared",),
    ("shared", "shared-2"),
    ("local", "shared"),
    ("local", "local-2", "shared"),
    ("local", "shared", "shared-2"),
]

weathers = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from(["fails", "is damaged", "is lost"])), max_size=8
).map(dict)


class Stormy(Weather):
    """Some of its calls fail, by their number."""

    def __init__(self, location: Any, storms: dict[int, str]) -> None:
        super().__init__(location)
        self.storms = storms
        self.count = threading.Lock()

    def meet(self, name: str, key: str) -> None:
        with self.count:
            self.calls.append((name, key))
            kind = self.storms.get(len(self.calls))
        if kind == "fails":
            raise StoreFailed(f"{name} {key}")
        if kind == "is damaged":
            raise Damaged(f"{name} {key}")
        if kind == "is lost":
            raise ValueError(f"{name} {key}")


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), kinds=st.sampled_from(KINDS), patience_s=st.sampled_from([0, 60]))
def test_every_job_ends_once_in_each_tier(
    data: st.DataObject,
    kinds: tuple[str, ...],
    patience_s: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("plan")
    shared = [kind for kind in kinds if kind.startswith("shared")]
    storms = {kind: data.draw(weathers, kind) for kind in shared}
    full = data.draw(st.sets(st.integers(1, 12), max_size=3), "writes of local that fail")
    due = st.lists(st.sampled_from(kinds), min_size=1, unique=True)
    jobs = data.draw(st.lists(due, min_size=1, max_size=5), "jobs")
    tiers = tiers_of(root, kinds, patience_s=patience_s)
    stores = {kind: Stormy(root / kind, storms[kind]) for kind in shared}
    real_write = disk.write_bulk
    writes = 0

    def write(path: Path, source: Any) -> None:
        nonlocal writes
        if ".image.tmp-" in path.name:
            writes += 1
            if writes in full:
                raise OSError(5, "Input/output error")
        real_write(path, source)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "write_bulk", write)
        play = Play(root, tiers, stores, slots=2, make_keeper=None)
        real_hear = play.hear

        def hear(report: Any) -> None:
            if isinstance(report, Released):
                slot = play.slots[report.id].number
                known = play.writer._depot.slots._known.get(slot)
                assert known is None or known._readers == 0, f"{report}: it is being read"
            real_hear(report)

        play.writer._tell = hear
        try:
            for step, names in enumerate(jobs, 1):
                play.save(step, *(kind for kind in kinds if kind in names))
        finally:
            play.close()
    wanted = {(step, name) for step, names in enumerate(jobs, 1) for name in names}
    assert {key: len(found) for key, found in play.ends().items()} == dict.fromkeys(wanted, 1)
    assert sorted(each.id.step for each in play.of(Released)) == [*range(1, len(jobs) + 1)]
    for name in kinds:
        assert play.order(name) == sorted(play.order(name))
    for name in shared:
        done = [
            step
            for (step, tier), [end] in play.ends().items()
            if tier == name and isinstance(end, Done)
        ]
        there = [step.step for step in attempts.list_run(stores[name].inner).steps]
        assert set(done) <= set(there)
        kinds_of_storm = {kind for each in storms.values() for kind in each.values()}
        if patience_s and kinds_of_storm <= {"fails"}:
            assert sorted(done) == [step for step, names in enumerate(jobs, 1) if name in names]
        for tier_name in kinds:
            if tier_name.startswith("local") and not full:
                images = play.writer._depot.images[tier_name].list()
                assert [each.id.step for each in images] == [
                    step for step, names in enumerate(jobs, 1) if tier_name in names
                ]
