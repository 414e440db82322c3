"""What `ckpt/DECISIONS.md` names is there: numbers that rise, files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ckpt" / "DECISIONS.md").read_text()


def test_files_that_are_named_are_there() -> None:
    named = set(re.findall(r"`((?:ckpt|datapipe|formats|tests|tools)/[\w/*]+\.py)`", TEXT))
    assert len(named) > 40
    assert [name for name in sorted(named) if not [*ROOT.glob(name)]] == []


def test_numbers_rise() -> None:
    numbers = [int(number) for number in re.findall(r"^## (\d+)\.", TEXT, re.MULTILINE)]
    assert numbers == sorted({*numbers})
