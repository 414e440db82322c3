"""The loop helper in two real processes that talk beside the training."""

from __future__ import annotations

import process_loops
import pytest
from process_play import Seen, play, same


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    found, statuses = play(tmp_path_factory.mktemp("loops"), *process_loops.SCENES)
    assert statuses == [0, 0]
    return found


def test_a_spike_that_one_process_sees_rewinds_both(seen: Seen) -> None:
    found = seen["guarded_alone"]
    (rewound,) = same(found, "rewinds")
    assert "onset=41, to=35, skip=range(39, 47)" in rewound
    # The same mean in both processes, and in the commit.
    saved = same(found, "saved")
    assert len(saved) > 8
    assert all(0.99 < each["loss"] < 1.07 for step, each in saved.items() if step != "0")
    same(found, "weight")


def test_both_stop_at_the_same_step_without_the_service_of_jax(seen: Seen) -> None:
    found = seen["preempted_without_jax"]
    assert same(found, "preempted")
    assert 7 <= same(found, "step") < 2000
    assert same(found, "steps") == [found[0]["step"]]
    assert same(found, "handler_is_back")
