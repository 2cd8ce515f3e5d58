"""Every hook and every library variant through every format, on this CPU.

All formats but packed keys share one kernel a variant and kind of tile, except bits and trees: each
is one more mask beside the variant's own, and with it another kernel. Variants with a mask meet
both; the others, whose hooks no mask touches, meet them in turns, each hook both. Closures that are
not in the library differ in how they are traced, not in how they are lowered: every eighth one is
run here. tests/full has all variants in all formats.
"""

from __future__ import annotations

import pytest

from tests.batch.formats import FORMATS, run_format
from tests.cuda.kernels import ir_of
from tests.ops.test_attention import DECODE, SMALL, fitting
from tests.registry import CASES
from tests.registry_case import Case

LIBRARY = [c for c in CASES if "library" in c.tags]
CHOSEN = LIBRARY + [c for c in CASES if "library" not in c.tags][::8]
# Rows that both requests of a cascade share are few as well: 2 requests x 2 rows x 2 heads.
FEW_ROWS = DECODE._replace(q_len=2)
MASKED = ("block_sparse_bits", "tree")


def hooks_of(case: Case) -> frozenset[str]:
    """The tags that say which hooks a case has."""
    return case.tags - {"library", "closure", "composition"}


def formats_of(case: Case) -> list[str]:
    """All formats; one of MASKED, in turns among kernels of equal hooks, where there is no mask."""
    if "mask" in case.tags:
        return list(FORMATS)
    # Cases of one IR have one kernel, and so one turn.
    alike = list(dict.fromkeys(ir_of(c.name) for c in CHOSEN if hooks_of(c) == hooks_of(case)))
    left_out = MASKED[alike.index(ir_of(case.name)) % 2]
    return [name for name in FORMATS if name != left_out]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda c: c.name)
def test_every_format_with_few_rows(case: Case) -> None:
    shape = FEW_ROWS if case.fits(FEW_ROWS) else DECODE
    if not case.fits(shape):
        pytest.skip("the variant's tensors do not fit so few query rows")
    for name in formats_of(case):
        run_format(case, shape, name)


MANY_ROWS = [name for name in FORMATS if name != "token_sparse"]
"""A list for each token makes few rows of any number of tokens."""
MANY = LIBRARY[::3]


def met_with_many_rows(case: Case) -> list[str]:
    """Fewer cases than with few rows, of which a rare hook has one: that one meets both MASKED."""
    return [n for n in MANY_ROWS if case.tags & {"pointwise", "sink"} or n in formats_of(case)]


@pytest.mark.parametrize("case", MANY, ids=lambda c: c.name)
def test_every_format_with_many_rows(case: Case) -> None:
    for name in MANY_ROWS:
        if name in met_with_many_rows(case):
            run_format(case, fitting(case, SMALL), name)


def test_each_hook_meets_each_format() -> None:
    few = {(tag, n) for c in CHOSEN if c.fits(FEW_ROWS) for tag in c.tags for n in formats_of(c)}
    many = {(tag, name) for c in MANY for tag in c.tags for name in met_with_many_rows(c)}
    hooks = ("mask", "score", "row", "normalizer", "pointwise", "sink")
    assert few >= {(tag, name) for tag in hooks for name in FORMATS}
    assert many >= {(tag, name) for tag in hooks for name in MANY_ROWS}
