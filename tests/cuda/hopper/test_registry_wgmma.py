"""The wgmma kernels in the emulator against the fp64 reference: every variant, in turns.

Asynchronous operations complete as late as they may, at once, or at moments drawn from a seed:
modes, head dims, lengths and dtypes take turns.
"""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.planner.tiles import choose_rows
from flashattn_jit.variants.reference import attention_reference
from tests.cuda.kernels import ir_of
from tests.harness import rotation
from tests.ops.cases import assert_close, fitting, inputs, run
from tests.registry.case import Case, Shape
from tests.registry.cases import CASES

TARGET = "emulated:sm_90"
HEAD_DIMS = ((64, 64), (128, 128), (72, 72), (96, 64), (64, 128), (192, 128), (256, 256))
LENGTHS = ((70, 130), (40, 520), (200, 333), (130, 64), (16, 700))
"""Query rows and keys; two query heads share a key."""

MODES = ("late", "early", "random")
IN_TURN = rotation.chosen(CASES, 12, lambda case: "library" in case.tags and case.tags)


def shape_of(case: Case, number: int) -> Shape:
    q_len, kv_len = LENGTHS[number % len(LENGTHS)]
    head_dim, head_dim_v = HEAD_DIMS[number // 2 % len(HEAD_DIMS)]
    return fitting(case, Shape(2, 4, 2, q_len, kv_len, head_dim, head_dim_v))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", IN_TURN, ids=lambda c: c.name)
def test_every_variant(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    number = CASES.index(case) + rotation.seed()
    mode = MODES[number % len(MODES)]
    monkeypatch.setenv(
        "FLASHATTN_JIT_EMULATOR_COPIES", f"{mode}:{number}" if number % 3 == 2 else mode
    )
    shape = shape_of(case, number)
    dtype = (torch.bfloat16, torch.float16)[number % 5 == 4]
    run(case, shape, dtype, TARGET)


def test_variants_run_on_wgmma() -> None:
    for case in CASES:
        spec = choose_rows(ir_of(case.name), (64, 64), ("bfloat16",) * 3, TARGET, 1000)
        assert spec.tile_kind == "prefill_wgmma", case.name


@pytest.mark.parametrize("which", ["k", "v"])
def test_keys_that_share_a_row_are_not_copied_by_tma(which: str) -> None:
    """A stride of 0 along the rows; along heads and requests TMA may have it."""
    q, k, v = inputs(Shape(2, 4, 2, 20, 100, 64, 64), torch.bfloat16)
    given = {"k": k, "v": v}
    given[which] = given[which][:, :, :1].expand_as(given[which])
    out = fa.attention(q, given["k"], given["v"], target=TARGET)
    exact, _ = attention_reference(q, given["k"], given["v"], fa.Full())
    eager, _ = attention_reference(q, given["k"], given["v"], fa.Full(), dtype=q.dtype)
    assert_close(out, exact, eager)
    heads = {name: t[:1, :1].expand_as(t) for name, t in (("k", k), ("v", v))}
    out = fa.attention(q, heads["k"], heads["v"], target=TARGET)
    exact, _ = attention_reference(q, heads["k"], heads["v"], fa.Full())
    eager, _ = attention_reference(q, heads["k"], heads["v"], fa.Full(), dtype=q.dtype)
    assert_close(out, exact, eager)
