"""Every planted mistake is caught by the tests that it names. `-s` shows the table."""

from __future__ import annotations

import pytest

from tests.full.planted_mistakes import MISTAKES
from tests.full.planting import plant


@pytest.mark.timeout(3 * 3600)
def test_every_mistake_is_caught() -> None:
    assert not plant(MISTAKES)
