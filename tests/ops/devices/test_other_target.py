"""A target below the host's, in turns: library variants, the formats of batches, and `verify`.

`tests/harness/rotation.py` chooses the target; ids of tests name it, and the run's header says how
to choose it again. tests/full has all variants on all targets.
"""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.inspect.dims import complete_dims
from flashattn_jit.inspect.verification import verification
from flashattn_jit.inspect.verification.cases import cases
from flashattn_jit.inspect.verification.run import Runner
from tests.batch.formats import FORMATS, run_format
from tests.harness import rotation
from tests.ops.cases import DECODE, LIBRARY, SMALL, fitting, run
from tests.registry.case import Case

TARGET = rotation.other_target()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = [(shape, dtype) for shape in (SMALL, DECODE) for dtype in DTYPES]
HOOKS = ("mask", "score", "row", "normalizer", "sink", "pointwise")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", [TARGET])
@pytest.mark.parametrize(
    "case", rotation.chosen(LIBRARY, 6, lambda c: c.tags), ids=lambda c: c.name
)
def test_library_variants(case: Case, target: str) -> None:
    """Many rows or few, and one dtype, in turns."""
    for shape, dtype in rotation.turn(LIBRARY.index(case), WAYS):
        run(case, shape if case.fits(shape) else fitting(case, SMALL), dtype, target)


def of_two_hooks() -> list[Case]:
    """A case for each of two kinds of hook, in turns."""
    found = []
    for hook in rotation.chosen(HOOKS, 3):
        having = [c for c in LIBRARY if hook in c.tags]
        found += rotation.turn(HOOKS.index(hook), having)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("target", [TARGET])
@pytest.mark.parametrize("case", of_two_hooks(), ids=lambda c: c.name)
def test_batches_in_every_format(case: Case, target: str) -> None:
    for shape, dtype in rotation.turn(LIBRARY.index(case), WAYS):
        few = DECODE._replace(q_len=2)
        shape = few if shape == DECODE and case.fits(few) else fitting(case, SMALL)
        for name in FORMATS:
            if name != "token_sparse" or shape.q_len == 2:
                run_format(case, shape, name, dtype, target)


@pytest.mark.parametrize("target", [TARGET])
@pytest.mark.parametrize(
    "variant",
    rotation.turn(1, [fa.Causal(), fa.SoftCap(20.0) & fa.SlidingWindow(50)]),
    ids=lambda v: v.name,
)
def test_verify_passes(variant: fa.Variant, target: str) -> None:
    dtypes = rotation.turn(0, DTYPES)
    assert variant.verify(target=target, dtypes=dtypes, seed=rotation.seed()).ok


@pytest.mark.parametrize("target", [TARGET])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_1e4_pass_with_any_seed(target: str, dtype: torch.dtype) -> None:
    """Rows with ties of such scores are off by a thousandth; the seed decides which rows."""
    base = complete_dims(None)
    tile = verification._largest_tile(target, base, str(dtype).removeprefix("torch."))
    extreme = [c for c in cases(base, *tile) if c.extreme]
    assert len(extreme) == 2
    for seed in range(rotation.seed(), rotation.seed() + 20):
        runner = Runner(fa.Causal(), target, seed, {})
        for case in extreme:
            found = runner.compare(case, dtype)
            assert not any(c.problem for c in found), (seed, case.name, found)
