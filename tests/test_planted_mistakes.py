"""Every entry of the list of planted mistakes matches the code of today.

tests/full/test_planted_mistakes.py plants the mistakes.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.full.planted_mistakes import MISTAKES

ROOT = Path(__file__).resolve().parent.parent


def test_a_mistake_is_a_change_of_one_place() -> None:
    for mistake in MISTAKES:
        text = (ROOT / mistake.file).read_text()
        count = text.count(mistake.old)
        assert count == 1, f"{mistake.name}: {mistake.file} has {count} times {mistake.old!r}"
        changed = text.replace(mistake.old, mistake.new)
        assert changed != text
        if mistake.file.endswith(".py"):
            ast.parse(changed)
        assert (ROOT / mistake.tests).exists(), f"{mistake.name}: there is no {mistake.tests}"


def test_there_are_at_least_forty_of_them() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 40
    assert sum(not mistake.file.endswith(".py") for mistake in MISTAKES) >= 12
