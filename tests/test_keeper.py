"""The keeper: retention that delays nobody, and a log that loses nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from kept_places import LINE, WAIT_S, Held, Unreachable, Watched, begun, events, one, settled

import ckpt
from ckpt import layout, log
from ckpt.errors import StoreFailed, Superseded
from ckpt.lineage import Lineage, Reach, StepId
from ckpt.messages import Noted
from ckpt.retention import Best, Keep
from ckpt.store import FileStore


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    yield found
    for keeper in found.keepers:
        keeper.close()
        assert not keeper._thread.is_alive()


@pytest.fixture
def home(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "run")


# --- nobody waits --------------------------------------------------------------------------------


def test_saves_go_on_while_a_deletion_sleeps(watched: Watched, home: FileStore) -> None:
    place = Held(Keep(last=2), [one(n) for n in range(1, 4)])
    place.gate.clear()
    keeper = begun(watched, home, {"shared": place})
    for number in range(4, 54):
        place.there.add(one(number))
        keeper.saved("shared", one(number), {"blocking_s": 0.001})
        if number == 4:
            assert place.entered.wait(WAIT_S)
    # All fifty were acknowledged, and the first deletion has not returned yet.
    assert len(place.there) == 53
    assert events(home) == [("save", 4)]
    assert place.asked["steps"] == 1
    place.gate.set()
    keeper.close()
    assert place.there == {one(52), one(53)}
    assert place.asked["steps"] <= 3  # one look for all that came meanwhile
    found = events(home)
    assert [each for each in found if each[0] == "save"] == [("save", n) for n in range(4, 54)]
    assert [each for each in found if each[0] == "delete"] == [("delete", n) for n in range(1, 52)]


def test_a_hanging_tier_does_not_hold_up_who_makes_room_in_another(
    watched: Watched, home: FileStore
) -> None:
    slow, full = Held(Keep(last=1), [one(1), one(2)]), Held(Keep(last=1), [one(1), one(2)])
    slow.gate.clear()
    keeper = begun(watched, home, {"local": full, "shared": slow})
    keeper.saved("shared", one(2), {})
    assert slow.entered.wait(WAIT_S)
    assert keeper.lost("local", one(3)) == 1
    assert full.there == {one(2)}
    assert keeper.lost("local", one(3)) == 0
    slow.gate.set()
    assert settled(keeper)
    assert sorted(events(home)) == [("delete", 1), ("delete", 1), ("save", 2)]


def test_settling_takes_no_longer_than_it_may(watched: Watched, home: FileStore) -> None:
    place = Held(Keep(last=1), [one(1), one(2)])
    place.gate.clear()
    keeper = begun(watched, home, {"shared": place})
    keeper.saved("shared", one(2), {})
    assert not settled(keeper, 0.01)
    place.gate.set()
    assert settled(keeper)
    assert place.there == {one(2)}


def test_a_save_costs_one_listing_and_reads_its_own_metrics_only(
    watched: Watched, home: FileStore
) -> None:
    place = Held(Keep(best=Best("loss", 3)))
    keeper = begun(watched, home, {"shared": place})
    for number in range(1, 21):
        place.there.add(one(number))
        place.figures[one(number)] = {"loss": abs(number - 10)}
        keeper.saved("shared", one(number), {})
        assert settled(keeper)
    assert place.asked["steps"] == 20
    read = {name: count for name, count in place.asked.items() if name != "steps"}
    assert read == {f"metrics of {n}": 1 for n in range(1, 21)}
    assert place.there == {one(9), one(10), one(11), one(20)}


def test_without_rules_nothing_is_listed(watched: Watched, home: FileStore) -> None:
    place = Held(Keep(), [one(1)])
    keeper = begun(watched, home, {"shared": place})
    keeper.saved("shared", one(1), {})
    assert keeper.lost("shared", one(2)) == 0
    assert settled(keeper)
    assert place.asked["steps"] == 0


# --- what stays ----------------------------------------------------------------------------------


def test_what_is_queued_or_pinned_stays(watched: Watched, home: FileStore) -> None:
    place = Held(Keep(last=1), [one(n) for n in (1, 2, 3, 4)])
    place.queued = {one(2)}
    home.put(layout.pin_name(one(3)), b"x")
    keeper = begun(watched, home, {"shared": place})
    keeper.saved("shared", one(4), {})
    assert settled(keeper)
    assert place.there == {one(2), one(3), one(4)}
    home.delete(layout.pin_name(one(3)))
    place.queued.clear()
    keeper.saved("shared", one(4), {})
    assert settled(keeper)
    assert place.there == {one(4)}


@pytest.mark.parametrize(
    "error", [ckpt.Damaged("rotten"), ckpt.NotFound("gone"), ckpt.Unsupported("format 9")]
)
def test_a_step_whose_metrics_cannot_be_read_stays(
    watched: Watched, home: FileStore, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Held(Keep(best=Best("loss")), [one(n) for n in (1, 2, 3)])
    place.figures = {one(n): {"loss": n} for n in (1, 2, 3)}
    read = place.metrics

    def metrics(step: StepId) -> Mapping[str, float]:
        if step == one(2):
            raise error
        return read(step)

    monkeypatch.setattr(place, "metrics", metrics)
    keeper = begun(watched, home, {"shared": place})
    keeper.saved("shared", one(3), {})
    assert settled(keeper)
    assert place.there == {one(1), one(2), one(3)}
    assert any("keeps step 2" in text for text in watched.warnings)


def test_late_metrics_decide(watched: Watched, home: FileStore) -> None:
    """Those in logs of older attempts, and those of this one before they are in any log."""
    line: Lineage = (Reach(2, 1, 4, None), Reach(1, 1, -1, 4))
    steps = [one(n) for n in (1, 2, 3, 4)]
    place = Held(Keep(best=Best("eval", mode="max")), [*steps, StepId(5, 1, 2)])
    for number in (1, 2):
        claim = {"attempt": number, "format": 1, "host": "h", "kind": "resume", "pid": 1}
        home.put(layout.claim_name(number), layout.seal({**claim, "time_ns": 0}))
    home.append(layout.log_name(1), log.emit(log.measured(one(2), {"eval": 0.7}).to_json()))
    home.append(layout.log_name(1), log.emit(log.measured(one(1), {"eval": 0.9}).to_json()))
    keeper = watched.keeper(home, {"shared": place})
    keeper.begin(2, line)
    keeper.note(log.measured(one(1), {"eval": 0.1}).to_json())
    keeper.note(log.measured(one(3), {"eval": 0.6}).to_json())
    keeper.saved("shared", StepId(5, 1, 2), {})
    assert settled(keeper)
    assert place.there == {one(2), StepId(5, 1, 2)}
    assert events(home, 2) == [
        *(("metrics", 1), ("metrics", 3), ("save", 5)),
        *(("delete", 1), ("delete", 3), ("delete", 4)),
    ]
    place.there.add(StepId(6, 1, 2))
    keeper.note(log.measured(StepId(5, 1, 2), {"eval": 0.8}).to_json())
    keeper.saved("shared", StepId(6, 1, 2), {})
    assert settled(keeper)
    assert place.there == {StepId(5, 1, 2), StepId(6, 1, 2)}


def test_another_attempt_may_have_measured_meanwhile(watched: Watched, home: FileStore) -> None:
    place = Held(Keep(best=Best("eval")), [one(1), one(2)])
    for number in (1, 2, 3):
        home.put(layout.claim_name(number), b"")
    keeper = begun(watched, home, {"shared": place})
    keeper.note(log.measured(one(2), {"eval": 2}).to_json())
    place.queued = {one(1)}
    keeper.saved("shared", one(2), {})
    assert settled(keeper)
    home.append(layout.log_name(2), log.emit(log.measured(one(1), {"eval": 1}).to_json()))
    place.there.add(StepId(3, 1, 3))
    place.queued.clear()
    keeper.begin(3, (Reach(3, 1, 2, None), Reach(1, 1, -1, 2)))
    keeper.saved("shared", StepId(3, 1, 3), {})
    assert settled(keeper)
    assert place.there == {one(1), StepId(3, 1, 3)}


# --- troubles ------------------------------------------------------------------------------------


def test_one_step_that_cannot_go_does_not_keep_the_others(
    watched: Watched, home: FileStore
) -> None:
    place = Held(Keep(last=1), [one(n) for n in (1, 2, 3, 4)])
    place.fails[one(2)] = StoreFailed("not permitted")
    keeper = begun(watched, home, {"shared": place})
    keeper.saved("shared", one(4), {})
    assert settled(keeper)
    assert place.there == {one(2), one(4)}
    assert events(home)[-1] == ("retention failed", None)
    assert watched.failed == []
    assert any("retention of shared: not permitted" in text for text in watched.warnings)
    place.fails.clear()
    keeper.saved("shared", one(4), {})
    assert settled(keeper)
    assert place.there == {one(4)}


def test_who_is_superseded_is_told_once_and_stops(watched: Watched, home: FileStore) -> None:
    place = Held(Keep(last=1), [one(n) for n in (1, 2, 3)])
    place.fails[one(1)] = Superseded("attempt 2")
    keeper = begun(watched, home, {"shared": place})
    for _ in range(3):
        keeper.saved("shared", one(3), {})
        assert settled(keeper)
    assert [type(error) for error in watched.failed] == [Superseded]
    assert place.there == {one(1), one(2), one(3)}
    assert keeper.lost("shared", one(4)) == 0
    place.fails.clear()
    keeper.begin(2, (Reach(2, 1, 3, None), *LINE))
    keeper.saved("shared", one(3), {})
    assert settled(keeper)
    assert place.there == {one(3)}


def test_who_has_begun_anew_meanwhile_is_not_superseded(watched: Watched, home: FileStore) -> None:
    """The newer attempt that the deletion found was the one that has begun here."""
    place = Held(Keep(last=1), [one(1), one(2)])
    place.gate.clear()
    place.fails[one(1)] = Superseded("attempt 2")
    keeper = begun(watched, home, {"shared": place})
    keeper.saved("shared", one(2), {})
    assert place.entered.wait(WAIT_S)
    keeper.begin(2, (Reach(2, 1, 2, None), *LINE))
    place.gate.set()
    assert settled(keeper)
    assert watched.failed == []
    place.fails.clear()
    keeper.saved("shared", one(2), {})
    assert settled(keeper)
    assert place.there == {one(2)}


def test_metrics_that_are_in_no_log_yet_decide(watched: Watched, home: FileStore) -> None:
    class ReadOnly(Unreachable):
        def append(self, key: str, data: bytes) -> None:
            raise StoreFailed("quota")

    home.put(layout.claim_name(1), b"")
    place = Held(Keep(best=Best("eval")), [one(1), one(2), one(3)])
    keeper = begun(watched, ReadOnly(home), {"shared": place})
    keeper.note(log.measured(one(1), {"eval": 1}).to_json())
    keeper.saved("shared", one(3), {})
    assert settled(keeper)
    assert place.there == {one(1), one(3)}


def test_what_nobody_expects_is_told_and_the_thread_goes_on(
    watched: Watched, home: FileStore
) -> None:
    place = Held(Keep(last=1), [one(1), one(2)])
    place.fails[one(1)] = ZeroDivisionError("a bug")
    keeper = begun(watched, home, {"shared": place})
    keeper.saved("shared", one(2), {})
    assert settled(keeper)
    assert [type(error) for error in watched.failed] == [ZeroDivisionError]
    place.fails.clear()
    keeper.saved("shared", one(2), {})
    assert settled(keeper)
    assert place.there == {one(2)}


def test_lines_wait_for_a_home_that_is_down(watched: Watched, home: FileStore) -> None:
    store = Unreachable(home)
    place = Held(Keep(last=1))
    place.on_host = True
    keeper = begun(watched, store, {"local": place})
    keeper.saved("local", one(1), {})
    assert settled(keeper)
    store.down = True
    keeper.note(log.trouble("shared", "nobody answers").to_json())
    for number in (2, 3):
        place.there |= {one(number - 1), one(number)}
        keeper.saved("local", one(number), {})
        assert settled(keeper)
    # The host does with the pins of before: its disk must not run full meanwhile.
    assert place.there == {one(3)}
    assert events(home) == [("save", 1)]
    store.down = False
    keeper.note(log.recovered("shared", 30.0).to_json())
    keeper.close()
    assert events(home) == [
        *(("save", 1), ("trouble", None), ("save", 2), ("delete", 1)),
        *(("save", 3), ("delete", 2), ("recovered", None)),
    ]
    times = [event.time_ns for event in log.read(home, 1).events]
    assert times == sorted(times)


def test_metrics_are_acknowledged_and_told_of_when_they_are_lost(
    watched: Watched, home: FileStore
) -> None:
    store = Unreachable(home)
    keeper = begun(watched, store, {})
    written, lost = ({**log.measured(one(1), {"eval": n}).to_json(), "time_ns": n} for n in (1, 2))
    keeper.note(written)
    assert settled(keeper)
    assert [each for each in watched.told if isinstance(each, Noted)] == [Noted(1)]
    store.down = True
    keeper.note(lost)
    assert settled(keeper)
    keeper.close()
    told = [each for each in watched.told if isinstance(each, Noted)][1:]
    assert [each.time_ns for each in told] == [2]
    assert "metrics that came late" in str(told[0].error)


def test_a_host_that_never_knew_the_pins_deletes_nothing(watched: Watched, home: FileStore) -> None:
    store = Unreachable(home)
    store.down = True
    place = Held(Keep(last=1), [one(1), one(2)])
    place.on_host = True
    keeper = begun(watched, store, {"local": place})
    assert keeper.lost("local", one(3)) == 0
    assert place.there == {one(1), one(2)}


@pytest.mark.parametrize("before", [b"", b'{"event":"save","step":1,"time_ns":1}\n'])
def test_a_torn_line_stays_by_itself(watched: Watched, home: FileStore, before: bytes) -> None:
    home.append(layout.log_name(1), before + b'{"event":"sa')
    keeper = begun(watched, home, {"shared": Held(Keep())})
    keeper.saved("shared", one(2), {})
    keeper.saved("shared", one(3), {})
    keeper.close()
    found = log.read(home, 1)
    assert found.unreadable == 1
    assert [event.members["step"] for event in found.events][-2:] == [2, 3]


def test_a_torn_addition_is_made_good(watched: Watched, home: FileStore) -> None:
    """The store failed in the middle of a line: the next addition begins a new one."""

    class Tearing(Unreachable):
        def append(self, key: str, data: bytes) -> None:
            if torn:
                home.append(key, data[: len(data) // 2])
                raise StoreFailed("full")
            home.append(key, data)

    torn = [1]
    keeper = begun(watched, Tearing(home), {"shared": Held(Keep())})
    keeper.saved("shared", one(1), {})
    assert settled(keeper)
    torn.clear()
    keeper.saved("shared", one(2), {})
    keeper.close()
    found = log.read(home, 1)
    assert [event.members["step"] for event in found.events] == [1, 2]
    assert found.unreadable == 1


def test_other_processes_clean_and_do_not_write(watched: Watched, home: FileStore) -> None:
    place = Held(Keep(last=1), [one(1), one(2)])
    keeper = begun(watched, home, {"local": place}, index=1)
    keeper.saved("local", one(2), {})
    keeper.saved("shared", one(2), {})
    keeper.note({"event": "trouble", "tier": "local"})
    assert keeper.lost("shared", one(3)) == 0
    keeper.close()
    assert place.there == {one(2)}
    assert home.list("log") == []
    assert watched.told == []


def test_what_is_queued_before_the_first_attempt_is_left(watched: Watched, home: FileStore) -> None:
    place = Held(Keep(last=1), [one(1), one(2)])
    keeper = watched.keeper(home, {"shared": place})
    keeper.saved("shared", one(2), {})
    assert keeper.lost("shared", one(3)) == 0
    keeper.close()
    assert place.there == {one(1), one(2)}
