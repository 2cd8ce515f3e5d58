"""Runs a case of the registry on a device, and compiles the kernels that it needs.

A case's tensors are made and bound on the CPU, and the bound tensors are moved to the device, so
that every case runs on a GPU, closures over tensors included. `device="cpu"` runs the same code
without a GPU: on CPU kernels or, with a target, in the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import cuda_target
from flashattn_jit.jit.module import load_stepping
from flashattn_jit.ops.attention import run_dense
from flashattn_jit.planner.tiles import Problem, build_requests, choose, fallbacks
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import attention_reference
from flashattn_jit.variants.variant import Bound, as_variant
from tests.batch.oracle import Math
from tests.gpu.place import DEVICE, TARGET
from tests.ops.cases import EPS, assert_close, effect_of_approximations, inputs, largest
from tests.registry.case import Case, Shape
from tests.registry.cases import by_name

PLAIN = {
    "plain full": lambda: None,
    "plain causal": fa.Causal,
    "plain window": lambda: fa.SlidingWindow(40),
    "plain alibi": fa.ALiBi,
}
"""Variants, by name, of tests that do not depend on the variant."""


def case_named(name: str) -> Case:
    """The case of a name in `PLAIN`, of a batch variant's name, or of the registry."""
    if name in PLAIN:
        return Case(name, lambda shape, generator: PLAIN[name]())
    if name.startswith(Math.PREFIX):
        return Case(name, lambda shape, generator: Math.named(name).variant(shape.num_q_heads))
    return by_name(name)


@dataclass(frozen=True)
class Want:
    """A kernel that a test needs, as data that can be pickled."""

    case: str
    shape: Shape
    dtype: torch.dtype
    features: tuple[str, ...] = ()


def features_for(shape: Shape) -> tuple[str, ...]:
    """The features that a dense call of contiguous tensors needs on CUDA."""
    return ("unaligned",) if shape.head_dim % 8 or shape.head_dim_v % 8 else ()


def device_target() -> str:
    """The target of the current CUDA device."""
    return cuda_target(*torch.cuda.get_device_capability())


def compile_wanted(want: Want, target: str) -> str:
    """Compiles a wanted kernel into the cache if it is missing; returns its tile."""
    case, shape = case_named(want.case), want.shape
    name = str(want.dtype).removeprefix("torch.")
    problem = Problem(
        (shape.q_len,), (shape.kv_len,), shape.num_q_heads, shape.num_kv_heads, shape.head_dim,
        shape.head_dim_v, name, name, name,
    )  # fmt: skip
    bound, title = _bound(case, shape)
    spec = choose(bound.ir, problem, target, want.features or features_for(shape), title)
    taken = (spec, *fallbacks(spec))[load_stepping(build_requests(spec))[0]]
    return f"{taken.tile_kind} {taken.tile_q} x {taken.tile_kv}"


def _bound(case: Case, shape: Shape) -> tuple[Bound, str]:
    variant, params = case.build(shape)
    chosen = as_variant(variant)
    return chosen.bind(Dims(*shape), params), chosen.name


def run_case(
    case: Case,
    shape: Shape,
    dtype: torch.dtype,
    device: str = DEVICE,
    target: str | None = TARGET,
) -> None:
    """Runs a case on a device and checks it against fp64 by the bound of docs/semantics.md."""
    bound, _ = _bound(case, shape)
    q, k, v = inputs(shape, dtype)
    call = {"scale": case.scale, "q_offset": case.q_offset}
    offset = shape.kv_len - shape.q_len if case.q_offset == "end" else case.q_offset
    scale = case.scale if case.scale is not None else shape.head_dim**-0.5
    variant, params = case.build(shape)
    pointwise = bound.structure.pointwise
    placed = [t.to(device) for t in (q, k, v)]
    placed_params = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in params.items()
    }
    out, lse = run_dense(
        *placed, as_variant(variant), placed_params, scale=scale, q_offset=offset,
        return_lse=not pointwise, target=target or device_target(),
        swap=lambda tensors, numbers: (tuple(t.to(device) for t in tensors), numbers),
    )  # fmt: skip
    exact, exact_lse = attention_reference(q, k, v, variant, params=params, **call)
    eager, _ = attention_reference(q, k, v, variant, params=params, dtype=dtype, **call)
    assert out.dtype == dtype and out.shape == exact.shape
    moved = effect_of_approximations(
        case, [x for x in (exact, exact_lse) if x is not None],
        lambda errors: attention_reference(q, k, v, variant, params=params, errors=errors, **call),
    )  # fmt: skip
    assert_close(out.cpu(), exact, eager, moved[0])
    if lse is not None:
        # Rows that hooks changed are rounded to the matrix dtype, and scores carry that rounding.
        tolerance = 16 * EPS[dtype] if "row" in case.tags else 1e-4
        torch.testing.assert_close(
            lse.cpu().double(), exact_lse.double(), rtol=tolerance, equal_nan=True,
            atol=tolerance + 1.5 * largest(moved[1]),
        )  # fmt: skip
