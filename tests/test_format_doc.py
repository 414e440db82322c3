"""FORMAT.md says what the code does: its examples parse, and come out again as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ckpt
from ckpt import layout, log
from ckpt.flush import Holding, holding_name, newest_of_all
from ckpt.lineage import StepId
from ckpt.pieces import piece_name
from ckpt.steps import Manifest

DOCUMENT = Path(ckpt.__file__).with_name("FORMAT.md").read_text()
EXAMPLES = dict(re.findall(r"```json (\w+)\n(.*?)\n```", DOCUMENT, re.DOTALL))


def sealed(name: str) -> bytes:
    return layout.seal(json.loads(EXAMPLES[name]))


def test_every_example_is_tested() -> None:
    assert set(EXAMPLES) == {
        "part",
        "manifest",
        "marker",
        "unpublished",
        "claim",
        "decision",
        "log",
        "flush",
    }


def test_part() -> None:
    part = layout.Part.parse(sealed("part"), "example")
    assert (part.process, part.processes, part.size_bytes) == (0, 2, 12288)
    assert part.emit() == sealed("part")


def test_marker() -> None:
    marker = layout.Marker.parse(sealed("marker"), "example")
    assert (marker.id.step, marker.id.branch, marker.id.attempt) == (40, 1, 3)
    assert marker.emit() == sealed("marker")


def test_unpublished() -> None:
    found = layout.parse_marker(sealed("unpublished"), "example")
    assert isinstance(found, layout.Unpublished)
    assert (found.id.step, found.id.branch, found.condemned_by) == (40, 3, 5)
    assert found.emit() == sealed("unpublished")
    assert layout.parse_marker(sealed("marker"), "example").emit() == sealed("marker")


def test_claim() -> None:
    claim = layout.parse_claim(sealed("claim"), "example")
    assert (claim.attempt, claim.kind) == (5, "rewind")
    assert layout.emit_claim(claim) == sealed("claim")


def test_decision() -> None:
    decision = layout.parse_decision(sealed("decision"), "example")
    assert decision.skips == {"data": [(15360, 16384)]}
    assert layout.emit_decision(decision) == sealed("decision")


def test_manifest() -> None:
    manifest = Manifest.parse(sealed("manifest"), "example")
    assert manifest.id.step == 40
    assert manifest.images[0].size_bytes == 12288
    assert manifest.data["data"]["state"] == {"next_example": 10240}


def test_log() -> None:
    found = log.parse(EXAMPLES["log"].encode())
    assert found.unreadable == 0
    assert [event.kind for event in found.events] == [log.SAVE, log.METRICS]
    assert {event.step for event in found.events} == {StepId(40, 1, 3)}
    text = b"".join(log.emit(event.to_json()) for event in found.events)
    assert text.decode().splitlines() == EXAMPLES["log"].splitlines()
    kinds = (log.SAVE, log.DELETE, log.METRICS, log.INFLATION, log.TROUBLE, log.RECOVERED)
    for kind in (*kinds, log.RETENTION_FAILED, log.RESTARTED, log.REWOUND, log.SPIKE, log.SKIPPED):
        assert f"`{kind}`" in DOCUMENT


def test_flush() -> None:
    holding = Holding.parse(sealed("flush"), "example")
    assert (holding.process, holding.round) == (0, 1)
    assert newest_of_all([holding]) == StepId(40, 1, 3)
    assert holding.emit() == sealed("flush")


@pytest.mark.parametrize(
    ("name", "in_words"),
    [
        (layout.claim_name(7), "attempts/<n>.json"),
        (layout.decision_name(7), "attempts/<n>.from.json"),
        (layout.step_name(2, 40), "branch-<b>/<step>/"),
        (layout.making_name(2, 40, 7), "branch-<b>/<step>.orbax-checkpoint-tmp-a<n> "),
        (layout.deleted_name(2, 40, 7), "branch-<b>/<step>.orbax-checkpoint-tmp-a<n>-deleted"),
        (layout.aside_name(2, 40, 7), "branch-<b>/<step>.orbax-checkpoint-tmp-a<n>-aside"),
        (layout.part_name(7, 1), "part-a<n>-p<i>.json"),
        (layout.image_name(7, 1), "state/d/a<n>-p<i>.image"),
        (layout.index_name(7), "state/d/a<n>.index"),
        (
            piece_name(layout.image_name(7, 1), 0, 4096),
            "state/d/a<n>-p<i>.image.bytes-<start>-<stop>",
        ),
        (layout.log_name(7), "log/a<n>.jsonl"),
        (holding_name(7, 1), "flush/a<n>-p<i>.json"),
        (layout.MARKER, "commit_success.txt"),
        (layout.MANIFEST, "manifest.json"),
        (layout.TREE, "tree.json"),
    ],
)
def test_names_stand_in_the_map(name: str, in_words: str) -> None:
    assert in_words in DOCUMENT
    pattern = re.escape(in_words.strip(" /"))
    for variable in ("n", "b", "step", "i", "start", "stop"):
        pattern = pattern.replace(f"<{variable}>", r"\d+")
    assert re.fullmatch(pattern, name), (name, pattern)


@pytest.mark.parametrize("text", ["Grüße", "\ud800", "\x00\n", '"}', "\U0001f600"])
def test_any_text_is_sealed_and_comes_back(text: str) -> None:
    document = {"format": 1, "text": text, text: 1}
    assert layout.unseal(layout.seal(document), "example") == document


def test_the_version_stands_there() -> None:
    assert f"Format version **{layout.FORMAT}**" in DOCUMENT


@pytest.mark.parametrize("flip", range(8))
def test_a_flipped_bit_breaks_the_seal(flip: int) -> None:
    good = sealed("decision")
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << flip
        with pytest.raises((ckpt.Damaged, ckpt.Unsupported)):
            layout.parse_decision(bytes(bad), "example")
