"""The package's PTX, run by the emulator, against the fp64 reference: every variant and shape.

Bounds are those of `tests/ops/cases.py`. The variants that take their turn meet one target
and one tile kind each, with the very kernel whose resources `test_compile.py` looks at; some of the
library meet the other kind as well, on another target. Shapes and emulated targets take turns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import TileKind
from flashattn_jit.codegen.targets import EMULATED as PREFIX
from flashattn_jit.codegen.targets import sm_version
from flashattn_jit.ops.device import emulated, plan_memory
from flashattn_jit.ops.device.emulated import Recording
from flashattn_jit.planner.tiles import choose_rows
from tests.cuda.kernels import EMULATED, IN_TURN, dtype_of, ir_of, rotating, spec_of
from tests.harness import rotation
from tests.ops.cases import DECODE, SMALL, fitting, run
from tests.registry.case import Case, Shape
from tests.registry.cases import CASES, SHAPES, by_name

HEAD_DIM = 64
"""The head dim of `spec_of`."""

GROUP = SMALL.num_q_heads // SMALL.num_kv_heads


def turn(case: Case) -> int:
    return CASES.index(case)


def kind_of(case: Case) -> TileKind:
    """The tile kind of `rotating`; prefill where the variant's tensors do not fit a single row."""
    return rotating(case.name)[1] if case.fits(DECODE) else "prefill"


def shape_of(case: Case, kind: TileKind) -> Shape:
    """Two row tiles, or one row, and several key tiles, all with partial tiles."""
    shape = SMALL if kind == "prefill" else DECODE
    return fitting(case, shape._replace(head_dim=HEAD_DIM, head_dim_v=HEAD_DIM))


@pytest.mark.parametrize("case", IN_TURN, ids=lambda c: c.name)
def test_variants_on_one_rotating_target(case: Case) -> None:
    target, _ = rotating(case.name)
    dtype = getattr(torch, dtype_of(target))
    run(case, shape_of(case, kind_of(case)), dtype, PREFIX + target)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels_are_those_whose_resources_are_looked_at(case: Case) -> None:
    target, kind = rotating(case.name)
    if kind_of(case) != kind:
        pytest.skip("the variant's tensors do not fit a single query row")
    rows, dtypes = shape_of(case, kind).q_len * GROUP, (dtype_of(target),) * 3
    chosen = choose_rows(ir_of(case.name), (HEAD_DIM,) * 2, dtypes, PREFIX + target, rows)
    assert chosen == spec_of(case.name, target, kind)


LIBRARY = [c for c in IN_TURN if "library" in c.tags and c.fits(DECODE)]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", LIBRARY, ids=lambda c: c.name)
def test_library_variants_with_the_other_kind_of_tile(case: Case) -> None:
    target = EMULATED[turn(case) % len(EMULATED)]
    # fp16 and bf16 in turns, where the target has both.
    dtype = torch.float16 if turn(case) % 2 else getattr(torch, dtype_of(target))
    shape = DECODE if kind_of(case) == "prefill" else fitting(case, SMALL)
    run(case, shape, dtype, PREFIX + target)


OVERLAPPING = [target for target in EMULATED if sm_version(target) >= 90]
MERGED = ("sink", "sigmoid", "gated_output")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("name", "target"),
    [(name, t) for i, name in enumerate(MERGED) for t in rotation.turn(i, OVERLAPPING)],
)
def test_merges_that_overlap_attention(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows of one kv head, whose keys are split."""
    recorded: list[Recording] = []

    def record(*call: Any) -> Recording:
        recorded.append(emulated.record(*call))
        return recorded[-1]

    monkeypatch.setattr(plan_memory, "record", record)
    run(by_name(name), Shape(1, 3, 1, 1, 1500, HEAD_DIM, HEAD_DIM), torch.bfloat16, PREFIX + target)
    overlaps = [launch[5] for _, launch in recorded[-1].launches]
    assert overlaps == [False, True]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("shape", rotation.chosen(SHAPES, 2), ids=lambda s: s.id)
def test_every_shape(shape: Shape) -> None:
    number = SHAPES.index(shape) + rotation.seed()
    target = EMULATED[number % len(EMULATED)]
    variant = fa.Causal() if number % 2 else None
    dtype = torch.float16 if number % 7 == 6 else getattr(torch, dtype_of(target))
    run(Case("shape", lambda s, g: variant), shape, dtype, PREFIX + target)
