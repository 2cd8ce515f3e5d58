"""int8 keys and values are refused where no hook applies their scale."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.targets import CPU_TARGETS
from flashattn_jit.deploy.wanted.specs import wanted_specs
from flashattn_jit.errors import InputError
from flashattn_jit.planner.reachable import reachable, retarget
from flashattn_jit.variants.ir.ir import unscaled_integers
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import attention_reference, varlen_reference

HQ, HKV, D = 4, 2, 32
INT8, FP8, FLOAT = torch.int8, torch.float8_e4m3fn, torch.float32


def scaled(row, b, kv_h, kv_idx):
    return row * 0.05


KEY, VALUE = fa.variant(key_mod=scaled), fa.variant(value_mod=scaled)
BOTH = fa.Causal() & KEY & VALUE
# (variant, dtype of k, dtype of v, hook that is missing)
REFUSED = [
    (None, INT8, INT8, "key_mod"),
    (fa.Causal(), INT8, FLOAT, "key_mod"),
    (fa.Causal(), FLOAT, INT8, "value_mod"),
    (KEY, INT8, INT8, "value_mod"),
    (VALUE, INT8, INT8, "key_mod"),
    (fa.Causal() & KEY, FP8, INT8, "value_mod"),
]
SERVED = [
    (BOTH, INT8, INT8),
    (KEY, INT8, FLOAT),
    (fa.Causal() & VALUE, FLOAT, INT8),
    (None, FP8, FP8),
    (KEY, INT8, FP8),
]


def tensors(k: torch.dtype, v: torch.dtype, q_len: int = 6) -> tuple[torch.Tensor, ...]:
    q = torch.randn(2, HQ, q_len, D)
    return q, *(torch.randint(-20, 21, (2, HKV, 9, D)).float().to(t) for t in (k, v))


def dense(variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fa.attention(q, k, v, variant)  # type: ignore[return-value]


def few(variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fa.attention(q[:, :, :1], k, v, variant)  # type: ignore[return-value]


def empty(variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fa.attention(q, k[:, :, :0], v[:, :, :0], variant)  # type: ignore[return-value]


def packed(variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    q_indptr, kv_indptr = torch.tensor([0, 6, 12]), torch.tensor([0, 9, 18])
    return fa.varlen_attention(q, k, v, q_indptr, kv_indptr, variant)  # type: ignore[return-value]


def out(variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fa.attention(q, k, v, variant, out=torch.empty_like(q))  # type: ignore[return-value]


def compiled(variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: fa.attention(q, k, v, variant), backend="aot_eager",
                        fullgraph=True)  # fmt: skip
    return run(q, k, v)  # type: ignore[no-any-return]


def compiled_packed(
    variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    torch._dynamo.reset()
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v))
    q_indptr, kv_indptr = torch.tensor([0, 6, 12]), torch.tensor([0, 9, 18])
    run = torch.compile(
        lambda q, k, v: fa.varlen_attention(q, k, v, q_indptr, kv_indptr, variant),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    return run(q, k, v)  # type: ignore[no-any-return]


def reference(variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention_reference(q, k, v, variant)[0].to(q.dtype)


def reference_packed(
    variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = torch.tensor([0, 6, 12]), torch.tensor([0, 9, 18])
    return varlen_reference(q, k, v, *ends, variant)[0].to(q.dtype)


CALLS: list[Callable[..., torch.Tensor]] = [
    dense, few, empty, packed, out, compiled, compiled_packed, reference, reference_packed,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("variant", "k_dtype", "v_dtype", "hook"), REFUSED, ids=str)
def test_refused(
    call: Callable[..., torch.Tensor], variant: Any, k_dtype: torch.dtype, v_dtype: torch.dtype,
    hook: str,
) -> None:  # fmt: skip
    q, k, v = tensors(k_dtype, v_dtype)
    name = "k" if hook == "key_mod" else "v"
    for _ in range(2):
        with pytest.raises(InputError, match=rf"^{name} is int8.* no {hook}.*{hook}=lambda row"):
            call(variant, q, k, v)


def wanted(
    variant: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, end: bool = False
) -> torch.Tensor:
    """The result in fp64, with the scales of the variant's hooks."""
    has = set() if variant is None else set(variant.hooks())
    k = (k.float() * (0.05 if "key_mod" in has else 1)).double().repeat_interleave(2, 1)
    v = (v.float() * (0.05 if "value_mod" in has else 1)).double().repeat_interleave(2, 1)
    s = q.double() @ k.mT / math.sqrt(D)
    if "mask_mod" in has:
        first = k.shape[2] - q.shape[2] if end else 0
        late = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + first
        s = s.masked_fill(late, -math.inf)
    return torch.softmax(s, -1) @ v


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("variant", "k_dtype", "v_dtype"), SERVED, ids=str)
def test_served(variant: Any, k_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
    q, k, v = tensors(k_dtype, v_dtype)
    close = {"rtol": 2e-4, "atol": 2e-4}
    for call in (dense, out, compiled, reference):
        got = call(variant, q, k, v)
        torch.testing.assert_close(got.double(), wanted(variant, q, k, v), **close)
    got = packed(variant, q, k, v).unflatten(0, (2, 6)).transpose(1, 2)
    torch.testing.assert_close(got.double(), wanted(variant, q, k, v, end=True), **close)


def options(**more: Any) -> dict[str, Any]:
    return {"num_q_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "q_dtype": FLOAT, **more}


@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
def test_batches_refuse_it_when_they_are_made(kind: Any) -> None:
    for variant, hook in ((None, "key_mod"), (fa.Causal(), "key_mod"), (KEY, "value_mod"),
                          (VALUE, "key_mod")):  # fmt: skip
        with pytest.raises(InputError, match=rf"is int8, but the variant has no {hook}"):
            kind(variant, **options(kv_dtype=INT8))
    kind(BOTH, **options(kv_dtype=INT8))
    kind(None, **options(kv_dtype=FP8))


def test_pages_of_int8() -> None:
    q, k, v = tensors(INT8, INT8)
    batch = fa.BatchAttention(BOTH, **options(kv_dtype=INT8))
    paged = fa.Paged(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([9, 9]), 9)
    batch.plan(torch.tensor([0, 6, 12]), paged)
    pages = [x.transpose(1, 2)[[1, 0]].contiguous() for x in (k, v)]
    got = batch.run(q.transpose(1, 2).flatten(0, 1), *pages)
    assert isinstance(got, torch.Tensor)
    got = got.unflatten(0, (2, 6)).transpose(1, 2)
    torch.testing.assert_close(got.double(), wanted(BOTH, q, k, v, end=True), rtol=2e-4, atol=2e-4)


def test_torch_signatures_take_no_int8() -> None:
    q, k, v = tensors(INT8, INT8)
    for call in (fa.flex_attention, fa.scaled_dot_product_attention):
        with pytest.raises(InputError):
            call(q, k, v, enable_gqa=True)


# --- kernels that calls refuse are not offered ---------------------------------------------------


@pytest.mark.parametrize("target", [*CPU_TARGETS, "sm_80"])
def test_reachable_lists_what_calls_serve(target: str) -> None:
    for variant, (k, v) in itertools.product(
        (fa.Full(), KEY, VALUE, BOTH), itertools.product(("int8", "float8_e4m3fn"), repeat=2)
    ):
        ir = variant.bind(Dims(2, HQ, HKV, 6, 9, D, D)).ir
        specs = reachable(ir, (D, D), ("float32", k, v), target)
        assert bool(specs) == (target != "sm_80" and not unscaled_integers(ir.has, k, v))


def test_recorded_kernels_that_calls_refuse_are_not_built() -> None:
    ir = BOTH.bind(Dims(2, HQ, HKV, 6, 9, D, D)).ir
    (spec, *_) = reachable(ir, (D, D), ("float32", "int8", "int8"), "cpu:avx2")
    assert retarget(spec, "cpu:avx2")
    plain = fa.Causal().bind(Dims(2, HQ, HKV, 6, 9, D, D)).ir
    (spec, *_) = reachable(plain, (D, D), ("float32",) * 3, "cpu:avx2")
    assert retarget(dataclasses.replace(spec, k_dtype="int8"), "cpu:avx2") == ()


def test_warming_says_what_is_missing() -> None:
    sizes = {"head_dims": D, "targets": "cpu:avx2", "formats": ["dense"]}
    with pytest.raises(InputError, match=r"dtypes: Causal: k is int8, .* no key_mod"):
        wanted_specs(fa.Causal(), dtypes="bf16/int8", **sizes)
    assert len(wanted_specs(BOTH, dtypes="bf16/int8", **sizes)) == 2
    both = wanted_specs(fa.Causal(), dtypes=["bf16", "bf16/int8"], **sizes)
    assert {s.k_dtype for s in both} == {"bfloat16"}  # type: ignore[union-attr]
