"""Every hook and every library variant through every format, on this CPU.

All formats but packed keys share one kernel a variant and kind of tile, except bits and trees: each
is one more mask beside the variant's own, and with it another kernel. Variants with a mask meet
both; the others, whose hooks no mask touches, meet them in turns. A variant with each hook is run
with few rows, another with many, by turns: `tests/rotation.py`; tests/full has all variants in all
formats.
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
LIBRARY = [c for c in CASES if "library" in c.tags]


def of_each_hook(cases: list[Case], left_out: list[Case]) -> list[Case]:
    """One case that has it for each hook, by turns; all where nothing is left to other runs."""
    if rotation.takes_all():
        return cases
    found: list[Case] = []
    for hook in HOOKS:
        having = [c for c in cases if hook in c.tags and c not in found]
        having = [c for c in having if c not in left_out] or having
        if not any(hook in c.tags for c in found):
            found += rotation.turn(HOOKS.index(hook) + len(left_out), having)
    return found


FEW = of_each_hook([c for c in LIBRARY if c.fits(FEW_ROWS)], [])
MANY = of_each_hook(LIBRARY, FEW)


def formats_of(case: Case, among: list[str]) -> list[str]:
    """All of them; one of MASKED, by turns, where there is no mask and the hook is a common one."""
    if case.tags & {"mask", "pointwise", "sink"} or rotation.takes_all():
        return among
    first_hook = next(hook for hook in HOOKS if hook in case.tags)
    (left_out,) = rotation.turn(HOOKS.index(first_hook), MASKED)
    return [name for name in among if name != left_out]


@pytest.mark.parametrize("case", FEW, ids=lambda c: c.name)
def test_every_format_with_few_rows(case: Case) -> None:
    for name in formats_of(case, list(FORMATS)):
        run_format(case, FEW_ROWS, name)


@pytest.mark.parametrize("case", MANY, ids=lambda c: c.name)
def test_every_format_with_many_rows(case: Case) -> None:
    for name in formats_of(case, MANY_ROWS):
        run_format(case, fitting(case, SMALL), name)


def test_each_hook_meets_each_format() -> None:
    for cases, among in ((FEW, list(FORMATS)), (MANY, MANY_ROWS)):
        assert {tag for c in cases for tag in c.tags} >= {*HOOKS}
        met = {(hook, n) for c in cases for hook in c.tags & {*HOOKS} for n in formats_of(c, among)}
        rare = [(hook, n) for hook in ("mask", "pointwise", "sink") for n in among]
        common = [(hook, n) for hook in HOOKS for n in among if n not in MASKED]
        assert met >= {*rare, *common}
