"""Every hook and every library variant through every format, on this CPU.

All formats but packed keys share one kernel a variant and kind of tile, so this compiles one kernel
a case that other tests do not need. Closures that are not in the library differ in how they are
traced, not in how they are lowered: every eighth one is run here, all are in tests/full.
"""

from __future__ import annotations

import pytest

from tests.batch.formats import FORMATS, run_format
from tests.ops.test_attention import DECODE, SMALL, fitting
from tests.registry import CASES
from tests.registry_case import Case

LIBRARY = [c for c in CASES if "library" in c.tags]
CHOSEN = LIBRARY + [c for c in CASES if "library" not in c.tags][::8]
FEW_ROWS = DECODE._replace(q_len=3)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda c: c.name)
def test_every_format_with_few_rows(case: Case) -> None:
    shape = FEW_ROWS if case.fits(FEW_ROWS) else DECODE
    if not case.fits(shape):
        pytest.skip("the variant's tensors do not fit so few query rows")
    for name in FORMATS:
        run_format(case, shape, name)


MANY_ROWS = [name for name in FORMATS if name != "token_sparse"]
"""A list for each token makes few rows of any number of tokens."""


@pytest.mark.parametrize("case", LIBRARY[::3], ids=lambda c: c.name)
def test_every_format_with_many_rows(case: Case) -> None:
    for name in MANY_ROWS:
        run_format(case, fitting(case, SMALL), name)
