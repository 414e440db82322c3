"""A run in a bucket: failing, slow and lost answers over real HTTP, and attempts that race."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bucket_runs import (
    IMPATIENT,
    assert_same,
    found_through_environment,
    manager_of,
    new_root,
    save_steps,
    state_of,
)
from s3_server import CUT, LOSE, TEAR, Proxy, s3_server, status

import ckpt
from ckpt import attempts, kv_requests
from ckpt.store import open_store


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def s3(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    return found_through_environment(server, monkeypatch)


@pytest.fixture
def root(s3: Proxy) -> str:
    return new_root()


def test_a_fresh_start_needs_an_answer(
    root: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_of(root, tmp_path) as m:
        with monkeypatch.context() as patch:
            patch.setattr(kv_requests, "PATIENCE", IMPATIENT)
            for trouble in (status(403), status(500), CUT):
                with s3.trouble(lambda request, n, t=trouble: t), pytest.raises(ckpt.StoreFailed):
                    m.resume()
        with pytest.raises(ckpt.NotFound, match="no checkpoint here"):
            m.resume(must_exist=True)
    assert open_store(root).list("") == []
    with manager_of("s3://not-there/run", tmp_path) as m:
        with pytest.raises(ckpt.StoreFailed, match="no such bucket"):
            m.resume()
        with pytest.raises(ckpt.StoreFailed, match="no such bucket"):
            m.latest_step()


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_under_random_trouble(root: str, s3: Proxy, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    kinds = [status(500), status(503), CUT, LOSE, TEAR, *[None] * 10]
    with s3.trouble(lambda request, number: dice.choice(kinds)):
        with manager_of(root, tmp_path, keep=ckpt.Keep(last=2)) as m:
            m.resume()
            save_steps(m, range(1, 4))
        with manager_of(root, tmp_path) as m:
            restored = m.resume()
            assert restored.step == 3, f"seed {seed}"
            assert_same(restored.state, state_of(3))
            save_steps(m, [4])
    verified = ckpt.verify(root)
    assert verified.intact, f"seed {seed}: {verified.damage}"
    assert ckpt.open(root).all_steps()[-3:] == [2, 3, 4], f"seed {seed}"


def test_a_store_that_fails_for_good_is_told(
    root: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_of(root, tmp_path) as m:
        m.resume()
        save_steps(m, [1])
        with monkeypatch.context() as patch, s3.trouble(lambda request, number: status(503)):
            patch.setattr(kv_requests, "PATIENCE", IMPATIENT)
            pending = m.save(2, state_of(2))
            assert pending is not None
            with pytest.raises(ckpt.StoreFailed, match=r"503.*tried"):
                pending.wait()
        assert ckpt.open(root).all_steps() == [1]
        save_steps(m, [3])
        assert m.all_steps() == [1, 3]


def test_the_older_of_two_attempts_is_superseded(root: str, tmp_path: Path) -> None:
    with manager_of(root, tmp_path / "a") as old:
        old.resume()
        save_steps(old, [1, 2])
        with manager_of(root, tmp_path / "b") as new:
            assert new.resume().step == 2
            pending = old.save(3, state_of(3))
            assert pending is not None
            with pytest.raises(ckpt.Superseded, match="attempt 2"):
                pending.wait()
            save_steps(new, [3])
            assert new.all_steps() == [1, 2, 3]
        with pytest.raises(ckpt.Superseded):
            old.save(4, state_of(4))
    with manager_of(root, tmp_path) as m:
        assert m.resume().step == 3
        assert m._tenure.attempt is not None
    assert attempts.list_run(open_store(root)).remains == ()


def test_of_attempts_that_start_at_once_each_has_a_number(root: str) -> None:
    numbers: list[int] = []
    barrier = threading.Barrier(4)

    def claim() -> None:
        barrier.wait()
        numbers.append(attempts.claim(open_store(root), "start"))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4]


def test_of_two_attempts_that_race_one_wins(root: str, tmp_path: Path) -> None:
    """Both have started; both save the same steps at the same time, over real HTTP."""
    both = [manager_of(root, tmp_path / name) for name in "ab"]
    numbers: list[int] = []
    for m in both:
        m.resume()
        assert m._tenure.attempt is not None
        numbers.append(m._tenure.attempt.number)
    assert numbers == [1, 2]
    barrier = threading.Barrier(2)
    outcomes: list[Any] = [None, None]

    def race(me: int) -> None:
        barrier.wait()
        try:
            for step in (1, 2):
                pending = both[me].save(step, state_of(10 * me + step))
                assert pending is not None
                pending.wait(timeout=60)
        except ckpt.Superseded as error:
            outcomes[me] = error

    threads = [threading.Thread(target=race, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for m in both:
        m.close()
    assert isinstance(outcomes[0], ckpt.Superseded), outcomes
    assert outcomes[1] is None
    assert ckpt.open(root).all_steps() == [1, 2]
    for step in (1, 2):
        assert_same(ckpt.restore(root, step=step).state, state_of(10 + step))
    assert ckpt.verify(root).intact


def test_a_slow_bucket(
    root: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is late; some come after the request was given up, and was sent again."""
    monkeypatch.setattr(kv_requests, "PATIENCE", kv_requests.Patience(60.0, 0.01, 0.02, 0.3))
    dice = random.Random(20263)
    too_late: list[str] = []

    def late(request: Any, number: int) -> None:
        seconds = dice.choice([*[0.0] * 14, *[0.01, 0.03] * 2, 0.6])
        if seconds > 0.3:
            too_late.append(request.kind)
        time.sleep(seconds)

    with s3.trouble(late):
        with manager_of(root, tmp_path) as m:
            m.resume()
            save_steps(m, [1])
        with manager_of(root, tmp_path) as m:
            restored = m.resume()
            assert restored.step == 1
            assert_same(restored.state, state_of(1))
            save_steps(m, [2])
    assert len(too_late) > 2, too_late
    assert ckpt.verify(root).intact
    assert ckpt.open(root).all_steps() == [1, 2]
