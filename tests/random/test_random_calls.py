"""250 random calls against the oracle, over at most 10 kernels; every run makes other calls.

The run's header has the seed, a failure the command that repeats its call; tests/full has 20,000.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashattn_jit as fa
from tests.harness import rotation
from tests.random import calls
from tests.random.calls import KERNELS, choices, repeat

PARTS, CALLS = 1, 250


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part: int, tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    with fa.record_manifest(str(path)):
        for number in range(CALLS):
            repeat(rotation.seed(), part, number)
    assert 0 < len(path.read_text().splitlines()) <= 2 * KERNELS


def test_a_wrong_row_is_found_and_the_line_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = calls.fa.attention

    def broken(*args: Any, **options: Any) -> Any:
        got = dense(*args, **options)
        out = got[0] if isinstance(got, tuple) else got
        if out.numel():
            out[0, 0, 0] += 0.5
        return got

    seed, part = next(
        (seed, part)
        for seed in range(50)
        for part in range(PARTS)
        if any(c.form == "direct" and len(c.parts) == 1 for c in choices(seed, part))
    )
    kinds = choices(seed, part)
    number = next(n for n, c in enumerate(kinds) if c.form == "direct" and len(c.parts) == 1)
    monkeypatch.setattr(calls.fa, "attention", broken)
    for n in range(number, 400, KERNELS):
        try:
            repeat(seed, part, n)
        except AssertionError as error:
            last = str(error).splitlines()[-1]
            break
    else:
        pytest.fail("nothing was found")
    words = f"repeat: python -m tests.random.calls {seed} {part} {n} {kinds[number].target}"
    assert last == words
    with pytest.raises(AssertionError, match=r"RMS .*, allowed .* rows"):
        repeat(seed, part, n)
    monkeypatch.undo()
    repeat(seed, part, n)


def test_a_call_is_the_same_every_time() -> None:
    assert choices(3, 1) == choices(3, 1)
    assert len({str(choices(seed, 0)) for seed in range(20)}) == 20
