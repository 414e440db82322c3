"""The demo: its parts one by one, and a short one played for real."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import ckpt
import formats
from ckpt.errors import StoreFailed
from tools.demo import corpus, model, picture, report
from tools.demo.compare import STATE, Compared, compare
from tools.demo.disturbed import Disturbed
from tools.demo.play import PICTURE, demo
from tools.demo.report import Kill, Outcome, Rewound, Story
from tools.demo.script import LEAST_STEPS, Script
from tools.demo.trainer import Event, Trainer, TrainerFailed, last_words


@given(steps=st.integers(LEAST_STEPS, 3000), seed=st.integers(0, 2**31))
@settings(max_examples=300)
def test_a_script_leaves_room_for_everything(steps: int, seed: int) -> None:
    script = Script.drawn(steps, seed)
    assert script == Script.drawn(steps, seed)
    saves = range(script.every, steps + 1, script.every)
    assert script.first_kill in saves
    # One save before the first kill tells what a save takes; one more try fits before the poison.
    assert 2 * script.every <= script.first_kill <= script.poison.start - script.every
    # However far back the rewind goes, the chosen save after it exists, and one more for a miss.
    after = [step for step in saves if step > script.poison.start]
    assert script.second_kill + 1 < len(after)
    # What the guard leaves out holds all poison, also when it fires a little early.
    assert len(script.poison) + 2 < 12
    assert 0 <= script.moment(1, 0.05) <= 0.05


def test_a_run_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="--steps 59: the demo needs at least 60"):
        Script.drawn(59, 0)


@pytest.mark.parametrize("format", ["array_record", "parquet"])
def test_the_poison_is_served_in_exactly_the_batches_asked_for(
    tmp_path: Path, format: corpus.Format
) -> None:
    records = corpus.pieces(3000)
    assert len(records) == 3000
    assert b"import" in b"".join(records)
    pattern = corpus.write(tmp_path, records, format)
    with formats.open_source(pattern) as source:
        assert [corpus.decode(source[i]).tobytes() for i in (0, 777, 2999)] == [
            records[i] for i in (0, 777, 2999)
        ]
    plan = corpus.pipeline(pattern, seed=5).plan
    bad = [int(record) for record in plan.records(range(20, 23))]
    changed = corpus.poisoned(records, bad, seed=5)
    assert [i for i, (a, b) in enumerate(zip(records, changed, strict=True)) if a != b] == sorted(
        bad
    )
    corpus.write(tmp_path, changed, format)
    data = corpus.pipeline(pattern, seed=5).iterator()
    known = set(records)
    noisy = [n for n in range(40) if not {row.tobytes() for row in next(data)} & known]
    assert noisy == [20, 21, 22]


def test_training_is_deterministic_and_noise_spikes_the_loss() -> None:
    records = corpus.pieces(2000)

    def losses() -> list[float]:
        chance, state, values = random.Random(1), model.start(3), []
        for number in range(12):
            rows = [corpus.decode(chance.choice(records)) for _ in range(corpus.BATCH_ROWS)]
            batch = np.stack(rows)
            if number == 11:
                batch = np.frombuffer(chance.randbytes(batch.size), np.uint8).reshape(batch.shape)
            state, loss = model.train_step(state, batch)
            values.append(float(loss))
        return values

    first = losses()
    assert first == losses()
    assert first[10] < first[0] - 1.0
    assert first[11] > first[10] + 2.0


SCRIPT = Script(steps=60, seed=7, every=5, poison=range(36, 44), first_kill=15, second_kill=1)


class Lives:
    """Trainers made of a list of events each; a kill ends the list behind `drained` events."""

    def __init__(self, *lives: list[Event], drained: int = 0) -> None:
        self.lives, self.drained = list(lives), drained
        self.damaged: list[bool] = []

    @contextlib.contextmanager
    def start(self, damage: bool) -> Iterator[Any]:
        self.damaged.append(damage)
        self.left: int | None = None
        self.coming = self.lives.pop(0)
        yield self

    def events(self) -> Iterator[Event]:
        for event in self.coming:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    return
            yield event

    def kill(self) -> None:
        self.left = self.drained


def events(*words: str) -> list[Event]:
    """`save 5` stands for a save that becomes durable."""
    found: list[Event] = []
    for word in words:
        kind, step = word.split()
        if kind == "save":
            found += [
                {"event": "saving", "step": int(step)},
                {"event": "saved", "step": int(step), "seconds": 0.001},
            ]
        else:
            found.append({"event": kind, "step": int(step)})
    return found


REWOUND = {
    "event": "rewound",
    "onset": 37,
    "to": 30,
    "skip": [36, 49],
    "reason": "spike",
    "skips": [[560, 768]],
}


def test_the_run_is_killed_where_the_script_says() -> None:
    lives = Lives(
        events("resumed 0", "save 0", "save 5", "save 10", "save 15", "save 20"),
        [
            *events("resumed 15", "save 20", "save 25", "save 30", "save 35"),
            REWOUND,
            *events("save 35", "save 40", "save 45"),
        ],
        events("resumed 35", "save 40", "save 45", "done 60"),
    )
    seen: list[str] = []
    story = Disturbed(
        SCRIPT, lives.start, lambda event: seen.append(event["event"]), damage=True
    ).play()
    assert [(k.step, k.saved_before, k.resumed) for k in story.kills] == [
        (15, 10, 15),
        (40, 35, 35),
    ]
    assert story.misses == 0
    assert lives.damaged == [False, False, True]
    assert story.rewinds[0].skips == ((560, 768),)
    assert seen.count("killed") == 2
    verdicts = report.checks(SCRIPT, story, [(576, 704)])
    assert all(check.ok for check in verdicts), verdicts


def test_a_kill_that_came_too_late_is_tried_again() -> None:
    lives = Lives(
        events("resumed 0", "save 10", "save 15"),
        events("resumed 15", "save 20", "save 25"),
        events("resumed 20", "done 60"),
        drained=1,
    )
    story = Disturbed(SCRIPT, lives.start, lambda event: None).play()
    assert story.kills == []
    assert story.misses == 2


GOOD = Story(
    kills=[Kill(15, 0.01, 10, 10), Kill(40, 0.02, 35, 40)],
    rewinds=[Rewound(37, 30, (36, 49), "spike at step 37", ((560, 768),))],
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kills": GOOD.kills[:1]},
        {"kills": [GOOD.kills[0], dataclasses.replace(GOOD.kills[1], resumed=30)]},
        {"rewinds": []},
        {"rewinds": GOOD.rewinds * 2},
        {"rewinds": [dataclasses.replace(GOOD.rewinds[0], onset=30)]},
        {"rewinds": [dataclasses.replace(GOOD.rewinds[0], to=37)]},
        {"rewinds": [dataclasses.replace(GOOD.rewinds[0], skips=((592, 768),))]},
    ],
)
def test_what_did_not_happen_is_found(wrong: dict[str, Any]) -> None:
    poisoned = [(576, 704)]
    assert all(check.ok for check in report.checks(SCRIPT, GOOD, poisoned))
    story = dataclasses.replace(GOOD, **wrong)
    assert not all(check.ok for check in report.checks(SCRIPT, story, poisoned))


def outcome(tmp_path: Path, *, theirs: str = "aa") -> Outcome:
    return Outcome(
        script=SCRIPT,
        format="parquet",
        run=GOOD,
        reference=Story(),
        checks=report.checks(SCRIPT, GOOD, [(576, 704)]),
        compared=(
            Compared("parameters", 3, 12, "aa", theirs, () if theirs == "aa" else ("w[0]",)),
        ),
        picture=tmp_path / "x.png",
        directory=None,
        seconds=1.0,
    )


def test_the_report_says_equal_only_when_all_is(tmp_path: Path) -> None:
    for theirs, word, equal in (("aa", "Equal, bit for bit", True), ("ab", "NOT equal", False)):
        text = io.StringIO()
        made = outcome(tmp_path, theirs=theirs)
        report.show(made, Console(file=text, width=200))
        assert made.equal is equal
        assert word in text.getvalue()
        assert ("w[0]" in text.getvalue()) is not equal
        assert json.loads(json.dumps(made.to_json()))["equal"] is equal


def test_the_picture_is_a_png_of_what_was_seen(tmp_path: Path) -> None:
    story = dataclasses.replace(
        GOOD,
        losses=[(s, 3.0) for s in [*range(1, 18), *range(11, 40), *range(31, 43), *range(41, 61)]],
        saves=[(s, 0.01) for s in range(5, 60, 5)],
    )
    reference = Story(losses=[(s, 3.0) for s in range(1, 61)])
    made = dataclasses.replace(outcome(tmp_path), run=story, reference=reference)
    picture.draw(made)
    assert made.picture.read_bytes().startswith(b"\x89PNG")
    left_behind, kept = picture._branches(story.losses)
    assert [step for step, _ in kept] == list(range(1, 61))
    assert sum(len(piece) - 1 for piece in left_behind) == len(story.losses) - 60


def test_a_trainer_that_fails_by_itself_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        Trainer(["--nonsense"], cache=tmp_path, log=log) as trainer,
        pytest.raises(TrainerFailed, match=r"status 2(.|\n)*required"),
    ):
        list(trainer.events())


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ValueError, match="new or empty directory"):
        demo(directory=tmp_path)
    assert (tmp_path / "precious").exists()


UNWRITABLE = Path("/proc/self")
"""Not even the superuser can make a file there."""


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("it went on")


def test_a_place_that_cannot_be_written_is_found_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "pieces", never)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file" / "below", UNWRITABLE / "demo"):
        with pytest.raises(StoreFailed, match=r"cannot write there: .*; give --dir") as caught:
            demo(directory=directory)
        assert str(directory) in str(caught.value)
    monkeypatch.chdir(UNWRITABLE)  # where the picture would go
    with pytest.raises(StoreFailed, match="cannot write there"):
        demo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / PICTURE).mkdir()
    with pytest.raises(StoreFailed, match=PICTURE):
        demo()
    (tmp_path / PICTURE).rmdir()

    usage = shutil.disk_usage(tmp_path)._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreFailed, match="needs 256 MiB, found 3 MiB free"):
        demo()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"file", "temporary"}


@pytest.mark.parametrize("how", ["corpus", "trainer"])
def test_a_disk_that_fills_up_is_one_message(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)

    def fails(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
        if how == "corpus":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise TrainerFailed("the trainer ended with status 1: it said nothing")

    monkeypatch.setattr(corpus, "write", fails)
    with pytest.raises(StoreFailed) as caught:
        demo(directory=tmp_path / "new")
    assert str(caught.value) == (
        f"{tmp_path / 'new'}: the disk is full, so the demo could not go on; make room, or give "
        "--dir a directory on another disk"
    )
    assert list((tmp_path / "new").iterdir()) == []


def test_the_last_words_of_a_trainer_are_whole() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    f()\n'
    cases = {
        "": "it said nothing",
        "usage: x\nx: error: required\n": "x: error: required",
        f"noise\n{trace}ValueError: of mine\n": "ValueError: of mine",
        f"{trace}KeyError: 1\n\nDuring handling:\n\n{trace}a.Mismatch: two:\n  w\n  b\n": (
            "a.Mismatch: two:\n  w\n  b"
        ),
        f"{trace}E: x\n" + "  word\n" * 50: "E: x\n" + "  word\n" * 19 + "...",
        trace.rstrip(): 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    f()',
    }
    for log, words in cases.items():
        assert last_words(log) == words


def test_the_report_stands_without_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, place: Any, **_: Any) -> None:
        Path(place).write_bytes(b"half of one")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(picture.Figure, "savefig", fails)
    made = picture.drawn(outcome(tmp_path))
    assert not made.picture.exists()
    assert "No space left" in made.picture_problem
    assert (made.equal, made.to_json()["picture"]) == (True, None)
    text = io.StringIO()
    report.show(made, Console(file=text, width=200))
    assert "Equal, bit for bit" in text.getvalue()
    assert "Picture:" not in text.getvalue()


def test_no_line_runs_through_words_of_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(picture.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    picture.draw(outcome(tmp_path))
    (axes,) = figures[0].axes
    words = [text for text in axes.texts if text.get_text()]
    assert any("spike at" in text.get_text() for text in words)
    for text in words:
        box = text.get_bbox_patch()
        assert box.get_facecolor() == (1, 1, 1, 1)
        assert all(text.get_zorder() > line.get_zorder() for line in axes.lines)


def test_one_bit_of_one_leaf_is_found_by_the_comparison(tmp_path: Path) -> None:
    pattern = corpus.write(tmp_path / "corpus", corpus.pieces(400), "array_record")
    state = model.start(4)
    for run in ("run", "same", "other"):
        data = corpus.pipeline(pattern, seed=4).iterator()
        if run == "other":
            nu = np.array(state["opt"][1][0].nu["scale"])
            nu.view(np.uint32)[7] ^= 1
            adam = state["opt"][1][0]
            adam = adam._replace(nu={**adam.nu, "scale": jax.numpy.asarray(nu)})
            clip, (_, *rest) = state["opt"]
            state = {**state, "opt": (clip, (adam, *rest))}
            next(data)
        with ckpt.CheckpointManager(tmp_path / run) as manager:
            manager.resume(data=data)
            manager.save(3, state, data=data)
    same = compare(str(tmp_path / "run"), str(tmp_path / "same"), pattern, seed=4)
    assert all(part.equal for part in same)
    assert [part.part for part in same] == [
        "step",
        "random keys",
        "optimizer",
        "parameters",
        "data position",
        "coming batches",
    ]
    assert sum(part.count for part in same if part.part in STATE) == len(jax.tree.leaves(state))
    other = compare(str(tmp_path / "run"), str(tmp_path / "other"), pattern, seed=4)
    found = {part.part: part.differences for part in other if not part.equal}
    assert found == {
        "optimizer": ("['opt'][1][0].nu['scale']",),
        "data position": ("next_example",),
        "coming batches": tuple(f"batch {n}" for n in range(8)),
    }


def test_a_short_demo_from_end_to_end(tmp_path: Path) -> None:
    text = io.StringIO()
    made = demo(steps=LEAST_STEPS, directory=tmp_path, console=Console(file=text, width=200))
    told = text.getvalue()
    assert made.equal, (made.script, told)
    assert len(made.run.kills) == 2
    assert len(made.run.rewinds) == 1
    assert "Equal, bit for bit" in told
    assert list(tmp_path.iterdir()) == [made.picture]


@pytest.mark.soak
@pytest.mark.parametrize("format", ["array_record", "parquet"])
@pytest.mark.parametrize("broken", [False, True])
def test_long_demos(tmp_path: Path, format: corpus.Format, broken: bool) -> None:
    made = demo(directory=tmp_path, format=format, break_restored=broken, keep=True)
    assert all(check.ok for check in made.checks), made.script
    different = {part.part for part in made.compared if not part.equal}
    assert different == ({"parameters", "optimizer"} if broken else set()), made.script
    assert (tmp_path / "run").is_dir()
