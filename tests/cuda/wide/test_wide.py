"""Kernels of head dims above 256: every variant in the emulator, resources on every target."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.targets import CUDA_TARGETS
from flashattn_jit.errors import InputError
from flashattn_jit.planner.reachable import reachable
from flashattn_jit.planner.tiles import kernels_by_rows
from tests.cuda.kernels import EMULATED, FEATURE_SETS, assert_clean, compiled, dtype_of, ir_of
from tests.harness import rotation
from tests.ops.cases import fitting, run
from tests.registry.case import Case, Shape
from tests.registry.cases import CASES

HEAD_DIMS = ((576, 512), (320, 272), (264, 512), (512, 512), (300, 40), (300, 496))
LENGTHS = ((70, 130), (7, 75), (1, 300), (33, 64))
"""Query rows and keys; two query heads share a key."""

TARGETS = [target for target in EMULATED if target != "sm_75"]
IN_TURN = rotation.chosen(CASES, 24, lambda case: "library" in case.tags and case.tags)
ALL_FEATURES = ((), *FEATURE_SETS, ("values_in_keys",), ("paged", "values_in_keys"))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", IN_TURN, ids=lambda c: c.name)
def test_every_variant(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    number = CASES.index(case) + rotation.seed()
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", ("late", "early")[number % 2])
    target = TARGETS[number % len(TARGETS)]
    q_len, kv_len = LENGTHS[number // 2 % len(LENGTHS)]
    head_dim, head_dim_v = HEAD_DIMS[number // 3 % len(HEAD_DIMS)]
    shape = fitting(case, Shape(1, 4, 2, q_len, kv_len, head_dim, head_dim_v))
    dtype = torch.float16 if number % 5 == 4 else getattr(torch, dtype_of(target))
    run(case, shape, dtype, f"emulated:{target}")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("target", "features"),
    rotation.chosen([*itertools.product(CUDA_TARGETS[1:], ALL_FEATURES)], 12),
    ids=str,
)
def test_every_feature_on_every_target(target: str, features: tuple[str, ...]) -> None:
    number = CUDA_TARGETS.index(target) + ALL_FEATURES.index(features)
    every = HEAD_DIMS if "values_in_keys" not in features else HEAD_DIMS[:2]
    for name, of in rotation.turn(number, [*itertools.product(("causal", "plain"), every)]):
        dims = (of[0] - 1, of[1] - 2) if "unaligned" in features else of
        specs = kernels_by_rows(ir_of(name), dims, (dtype_of(target),) * 3, target, (features,))
        for spec in specs:
            assert spec.tile_kind == "prefill_wide"
            assert set(spec.features) == set(features)
            kernel = compiled(spec)
            # Where the larger tile spills, the next one is taken: most features cost registers.
            stepped = (target, of, spec.tile_q) == ("sm_80", (264, 512), 32)
            assert kernel.tile <= (1 if features or stepped else 0)
            assert_clean(kernel)


def test_rows_that_are_changed_are_loaded_for_values_again() -> None:
    features = (("values_in_keys",),)
    for name in ("rope", "plain"):
        for dims in ((576, 512), (96, 64)):
            for spec in kernels_by_rows(ir_of(name), dims, ("bfloat16",) * 3, "sm_90", features):
                shares = name == "plain" and dims == (576, 512)
                assert (spec.features == ("values_in_keys",)) == shares


def test_targets_without_room_say_so() -> None:
    q, k = torch.zeros(1, 4, 2, 320).half(), torch.zeros(1, 4, 9, 320).half()
    with pytest.raises(
        InputError, match=r"head_dim=320.* sm_75 has no kernel of head dims above.* up to 576 are"
    ):
        fa.attention(q, k, k, target="emulated:sm_75")
    assert reachable(ir_of("plain"), (320, 320), ("float16",) * 3, "sm_75") == ()
    wide = torch.zeros(1, 1, 2, 520).half()
    with pytest.raises(InputError, match="head_dim_v=520: its kernels have values of up to 512"):
        fa.attention(wide, wide, wide, target="emulated:sm_90")
    with pytest.raises(InputError, match="head_dim=577 is not supported; it must be 1 to 576"):
        fa.attention(torch.zeros(1, 1, 1, 577), *[torch.zeros(1, 1, 1, 577)] * 2)
