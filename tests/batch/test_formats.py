"""Every hook and every library variant through every format, on this CPU.

All formats except packed keys share one kernel for each variant and tile kind. Bits and trees add a
mask, which makes another kernel: each variant runs one of the two, by turns. For each hook one
variant runs, with few rows or with many, by turns (`tests/harness/rotation.py`); tests/full has all
variants in all formats.
"""

from __future__ import annotations

import pytest

from tests.batch.formats import FORMATS, run_format
from tests.harness import rotation
from tests.ops.cases import DECODE, SMALL, fitting
from tests.registry.case import Case
from tests.registry.cases import CASES

# The rows of a cascade's shared level are few as well: 2 requests x 2 rows x 2 heads.
FEW_ROWS = DECODE._replace(q_len=2)
MANY_ROWS = [name for name in FORMATS if name != "token_sparse"]
"""Formats with tiles of many rows: a list for each token makes tiles of few rows."""
MASKED = ("block_sparse_bits", "tree", "bits")
HOOKS = ("mask", "score", "row", "normalizer", "pointwise", "sink")
LIBRARY = [c for c in CASES if "library" in c.tags]


WITH_FEW = rotation.chosen(HOOKS, 2)
"""Hooks that are run with few rows; the others are run with many."""


def of_each_hook(cases: list[Case], hooks: list[str]) -> list[Case]:
    """For each hook one case that has it, by turns; all cases in a run that takes everything."""
    if rotation.takes_all():
        return cases
    found: list[Case] = []
    for hook in hooks:
        having = [c for c in cases if hook in c.tags and c not in found]
        if not any(hook in c.tags for c in found):
            found += rotation.turn(HOOKS.index(hook), having)
    return found


FEW = of_each_hook([c for c in LIBRARY if c.fits(FEW_ROWS)], WITH_FEW)
MANY = of_each_hook(LIBRARY, [hook for hook in HOOKS if hook not in WITH_FEW])


FIRST_OUT = rotation.turn(20, (0, 1, 2))[0]


def formats_of(number: int, among: list[str]) -> list[str]:
    """All formats except one of MASKED, which the cases before and after this one have."""
    if rotation.takes_all():
        return among
    return [name for name in among if name != MASKED[(FIRST_OUT + number) % len(MASKED)]]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", FEW, ids=lambda c: c.name)
def test_every_format_with_few_rows(case: Case) -> None:
    for name in formats_of(FEW.index(case), list(FORMATS)):
        run_format(case, FEW_ROWS, name)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", MANY, ids=lambda c: c.name)
def test_every_format_with_many_rows(case: Case) -> None:
    for name in formats_of(MANY.index(case), MANY_ROWS):
        run_format(case, fitting(case, SMALL), name)


def test_each_hook_meets_a_format_and_each_format_a_hook() -> None:
    assert {tag for c in FEW + MANY for tag in c.tags} >= {*HOOKS}
    for cases, among in ((FEW, list(FORMATS)), (MANY, MANY_ROWS)):
        assert len(cases) >= 2
        assert {name for i in range(len(cases)) for name in formats_of(i, among)} == {*among}
