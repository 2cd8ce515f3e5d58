"""Every hook and every library variant through every format, on this CPU.

All formats but packed keys share one kernel a variant and kind of tile, except bits and trees: each
is one more mask beside the variant's own, and with it another kernel. Variants with a mask meet
both; the others, whose hooks no mask touches, meet them in turns, each hook both. A share of each
kind of variant is run, by turns, with few rows or many: `tests/rotation.py`; tests/full has all
variants in all formats.
"""

from __future__ import annotations

import pytest

from tests import rotation
from tests.batch.formats import FORMATS, run_format
from tests.ops.test_attention import DECODE, SMALL, fitting
from tests.registry import CASES
from tests.registry_case import Case

# Rows that both requests of a cascade share are few as well: 2 requests x 2 rows x 2 heads.
FEW_ROWS = DECODE._replace(q_len=2)
MANY_ROWS = [name for name in FORMATS if name != "token_sparse"]
"""A list for each token makes few rows of any number of tokens."""
MASKED = ("block_sparse_bits", "tree")
HOOKS = ("mask", "score", "row", "normalizer", "pointwise", "sink")


def hooks_of(case: Case) -> frozenset[str]:
    """The tags that say which hooks a case has."""
    return case.tags.intersection(HOOKS)


FEW = rotation.chosen([c for c in CASES if c.fits(FEW_ROWS)], 8, hooks_of)
MANY = rotation.chosen([c for c in CASES if c not in FEW], 12, hooks_of)


def formats_of(case: Case, cases: list[Case], among: list[str]) -> list[str]:
    """All of them; one of MASKED, in turns, where there is no mask and no lack of such cases."""
    alike = [c for c in cases if hooks_of(c) == hooks_of(case)]
    if "mask" in case.tags or len(alike) == 1 or rotation.takes_all():
        return among
    left_out = MASKED[alike.index(case) % 2]
    return [name for name in among if name != left_out]


@pytest.mark.parametrize("case", FEW, ids=lambda c: c.name)
def test_every_format_with_few_rows(case: Case) -> None:
    for name in formats_of(case, FEW, list(FORMATS)):
        run_format(case, FEW_ROWS, name)


@pytest.mark.parametrize("case", MANY, ids=lambda c: c.name)
def test_every_format_with_many_rows(case: Case) -> None:
    for name in formats_of(case, MANY, MANY_ROWS):
        run_format(case, fitting(case, SMALL), name)


def test_each_hook_meets_each_format() -> None:
    for cases, among in ((FEW, list(FORMATS)), (MANY, MANY_ROWS)):
        met = {(tag, n) for c in cases for tag in c.tags for n in formats_of(c, cases, among)}
        assert met >= {(tag, name) for tag in HOOKS for name in among}
