"""20,000 random calls against the oracle, over 400 kernels; tests/random has other calls."""

from __future__ import annotations

import pytest

from tests.harness import rotation
from tests.random.calls import repeat

PARTS, CALLS, FIRST = 40, 500, 100
"""These parts come after the parts of tests/random with the same seed."""


@pytest.mark.parametrize("part", range(FIRST, FIRST + PARTS))
def test_random_calls(part: int) -> None:
    for number in range(CALLS):
        repeat(rotation.seed(), part, number)
