"""Cascades whose levels have formats of their own, against the dequantised values in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.codegen.targets import CUDA_TARGETS
from flashattn_jit.errors import InputError, ParamError
from flashattn_jit.variants.reference import varlen_reference
from tests.batch.batches import indptr
from tests.harness.rotation import other_target, turn
from tests.harness.toolkit import needs_nvcc
from tests.ops.cases import HOST_TARGETS, assert_close, normal

HQ, HKV, D, DV = 4, 2, 64, 32
Format, Stored = fa.kv.Format, fa.kv.Stored
INT8, ROTATED = Format("int8"), Format("int4", group=32, scale_dtype=torch.float16, rotate=True)
NF4, ZERO, E4M3 = Format("nf4", rotate=True), Format("int4", group=16, zero=True), Format("e4m3")
PLAIN = (None, None)
# Formats of a prefix of all requests, of one of some, and of the requests' own keys.
LEVELS: list[tuple[Any, ...]] = [
    (ROTATED, PLAIN, PLAIN), (ROTATED, INT8, PLAIN), (NF4, NF4, ROTATED), (PLAIN, ROTATED, E4M3),
    ((INT8, ROTATED), PLAIN, (None, NF4)),
    (Format("int8", "page_head"), Format("e5m2", "head"), Format("int4", "channel", zero=True)),
    (ZERO, ROTATED, ZERO), (INT8, INT8, INT8),
]  # fmt: skip
VARIANTS: list[Any] = [
    fa.Causal(), fa.SoftmaxOffByOne() & fa.SlidingWindow(50), fa.Causal() & fa.RoPE(),
    fa.variant(output_mod=lambda row, lse, b, h, q_idx: row * torch.sigmoid(lse + q_idx)),
    fa.Sigmoid() & fa.Causal() & fa.variant(value_mod=lambda row, b, kv_h, kv_idx: row * 0.5),
]  # fmt: skip
Q_LENS, GROUPS = (1, 3, 9), ((0, 1, 2), (0, 2))
KEYS = (40, 24, (17, 0, 64))
SIZES = {"p": (16, 8, 64), "r": (0, 0, 0)}


def both(formats: Any) -> tuple[Any, Any]:
    return formats if isinstance(formats, tuple) else (formats, formats)


class Levels:
    """The levels of a cascade, k and v of each, and the keys of each request, dequantised.

    kinds: "p" for pages and "r" for ragged keys of each level.
    """

    def __init__(self, formats: Sequence[Any], kinds: str, dtype: torch.dtype) -> None:
        self.dtype, self.q = dtype, normal(0, sum(Q_LENS), HQ, D).to(dtype)
        self.levels, self.pairs = [], []
        self.of_request: list[list[tuple[Tensor, ...]]] = [[] for _ in Q_LENS]
        caches: dict[Any, list[int]] = {}  # levels of one kind and format share k and v
        for i, (own, kind) in enumerate(zip(formats, kinds, strict=True)):
            caches.setdefault((both(own), kind), []).append(i)
        pairs: dict[int, Any] = {}
        for (own, kind), levels in caches.items():
            size = min(SIZES[kind][i] for i in levels)
            of = [KEYS[i] if isinstance(KEYS[i], tuple) else (KEYS[i],) for i in levels]
            counts = [[-(-n // size) * size if size else n for n in lens] for lens in of]
            total, first = sum(map(sum, counts)), 0
            rows = [
                normal(7 + i, total, HKV, dim) for i, dim in zip(levels * 2, (D, DV), strict=False)
            ]
            shape = (-1, size) if size else (-1,)
            made = tuple(
                self.stored(x.unflatten(0, shape), f) for x, f in zip(rows, own, strict=True)
            )
            values = [self.values(x).flatten(0, 1 if size else 0)[:total] for x in made]
            order = torch.arange(total // size if size else 0).int()
            for i, lens, taken in zip(levels, of, counts, strict=True):
                pairs[i] = made
                members = [(b,) for b in range(3)] if i == 2 else [GROUPS[i]]
                starts = [first + n for n in indptr(taken).tolist()]
                for group, at, n in zip(members, starts, lens, strict=False):
                    for b in group:
                        self.of_request[b].append((i, *(x[at : at + n] for x in values)))
                storage: Any = fa.Ragged(indptr(list(lens)))
                if size:
                    at, end = first // size, (first + sum(taken)) // size
                    storage = fa.Paged(
                        indptr([n // size for n in taken]), order[at:end],
                        torch.tensor([(n - 1) % size + 1 if n else 0 for n in lens]), size,
                    )  # fmt: skip
                first += sum(taken)
                self.levels.append((i, self.level(i, storage, own)))
        self.levels = [x for _, x in sorted(self.levels, key=lambda x: x[0])]
        self.pairs = [pairs[i] for i in range(3)]

    def stored(self, x: Tensor, form: fa.kv.Format | None) -> Any:
        return x.to(self.dtype) if form is None else form.quantize(x)

    def values(self, x: Any) -> Tensor:
        return x.float() if isinstance(x, Tensor) else x.dequantize()

    def level(self, number: int, storage: Any, formats: Any) -> fa.CascadeLevel:
        starts = indptr(list(Q_LENS))
        if number == 2:
            return fa.CascadeLevel(starts, storage, kv_format=formats)
        tokens = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in GROUPS[number]])
        return fa.CascadeLevel(indptr([len(tokens)]), storage, tokens, kv_format=formats)

    def planned(self, variant: Any, target: str | None = None, **more: Any) -> fa.CascadeAttention:
        cascade = fa.CascadeAttention(
            variant, num_q_heads=HQ, num_kv_heads=HKV, head_dim=D, head_dim_v=DV,
            q_dtype=self.dtype, target=target, **more,
        )  # fmt: skip
        cascade.plan(self.levels)
        return cascade

    def expected(self, variant: Any) -> list[Tensor]:
        """In fp64, and in the dtype of queries."""
        parts = [sorted(own, key=lambda x: x[0]) for own in self.of_request]
        k, v = (torch.cat([x[i] for own in parts for x in own]) for i in (1, 2))
        lens = [sum(len(x[1]) for x in own) for own in parts]
        return [
            varlen_reference(self.q, k, v, indptr(list(Q_LENS)), indptr(lens), variant, dtype=t)[0]
            for t in (torch.float64, self.dtype)
        ]


def check(
    formats: Sequence[Any], kinds: str, dtype: torch.dtype, variant: Any, target: str
) -> None:
    made = Levels(formats, kinds, dtype)
    out = made.planned(variant, target).run(made.q, made.pairs)
    assert_close(out, *made.expected(variant))


KINDS = ("rpp", "rrp", "ppp")


@pytest.mark.parametrize(
    ("target", "number"),
    [(HOST_TARGETS[-1], i) for i in turn(4, range(len(LEVELS)))]
    + [(other_target(), i) for i in turn(1, range(len(LEVELS)))],
)
def test_levels_of_several_formats(target: str, number: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    check(LEVELS[number], KINDS[number % 3], dtype, VARIANTS[number % len(VARIANTS)], target)


@needs_nvcc
@pytest.mark.parametrize("target", turn(2, [t for t in CUDA_TARGETS if t != "sm_90a"]))
@pytest.mark.parametrize("number", turn(2, (0, 3)))
def test_on_cuda_targets(target: str, number: int) -> None:
    dtype = torch.float16 if target == "sm_75" else torch.bfloat16
    check(LEVELS[number], "ppp", dtype, VARIANTS[number], f"emulated:{target}")


def test_pages_of_a_level_are_of_a_size_of_its_own() -> None:
    """Levels of one format share k and v, whose pages are as small as the smallest."""
    check((ROTATED, ROTATED, PLAIN), "ppp", torch.float32, fa.Causal(), HOST_TARGETS[-1])


def test_the_format_of_the_object_is_that_of_levels_that_give_none() -> None:
    made = Levels((INT8, PLAIN, INT8), "ppp", torch.float32)
    given = made.planned(fa.Causal()).run(made.q, made.pairs)
    made.levels = [
        fa.CascadeLevel(x.q_indptr, x.storage, x.tokens, None if i != 1 else PLAIN)
        for i, x in enumerate(made.levels)
    ]
    assert torch.equal(made.planned(fa.Causal(), kv_format=INT8).run(made.q, made.pairs), given)


def test_ragged_and_paged_levels_of_one_format() -> None:
    """The states of both are merged before the output is rotated back."""
    made = Levels((ROTATED,) * 3, "rpp", torch.float32)
    cascade = made.planned(fa.Causal(), kv_format=ROTATED)
    assert_close(cascade.run(made.q, made.pairs), *made.expected(fa.Causal()))
    with pytest.raises(InputError, match="partial=True gives states before output_mod"):
        cascade.run(made.q, made.pairs, partial=True)


def test_states_of_rotated_and_other_values() -> None:
    """Rows are rotated back in the kernel, so that there are states without output_mod."""
    made = Levels(LEVELS[0], "ppp", torch.float32)
    variant = fa.Causal()
    out, lse = made.planned(variant).run(made.q, made.pairs, partial=True)
    assert_close(out, *made.expected(variant))
    assert torch.isfinite(lse).all()


def test_other_formats_after_another_plan() -> None:
    first, second = (Levels(f, "ppp", torch.float32) for f in (LEVELS[0], LEVELS[3]))
    cascade = first.planned(fa.Causal())
    for made in (first, second, first):
        cascade.plan(made.levels)
        assert_close(cascade.run(made.q, made.pairs), *made.expected(fa.Causal()))


def test_a_plan_tells_the_bytes_of_each_format() -> None:
    made = Levels(LEVELS[0], "ppp", torch.bfloat16)
    words = made.planned(fa.Causal()).plan(made.levels).explain()
    assert "keys (int4)" in words and "keys (bf16)" in words


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_and_profilers() -> None:
    made = Levels(LEVELS[1], "ppp", torch.float32)
    cascade = made.planned(fa.Causal())
    wanted = cascade.run(made.q, made.pairs)
    (a, b), (c, d), (k, v) = made.pairs

    def call(q: Tensor, k: Tensor, v: Tensor, *parts: Tensor) -> Tensor:
        first = [Stored(*parts[i : i + 2], group=32, rotated=True) for i in (0, 2)]
        second = [Stored(*parts[i : i + 2]) for i in (4, 6)]
        return cascade.run(q * 1, [tuple(first), tuple(second), (k, v)])  # type: ignore[return-value]

    parts = [t for x in (a, b, c, d) for t in (x.codes, x.scales)]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(made.q, k, v, *parts), wanted)
    cascade.plan(made.levels)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(made.q, k, v, *parts), wanted)
    with torch.profiler.profile() as profile:
        assert torch.equal(cascade.run(made.q, made.pairs), wanted)
    assert any(e.key == "flashattn_jit::batch_attention" for e in profile.key_averages())


def test_levels_without_keys_or_queries() -> None:
    cascade = fa.CascadeAttention(
        num_q_heads=HQ, num_kv_heads=HKV, head_dim=D, q_dtype=torch.float32
    )
    pages, own = INT8.quantize(normal(0, 1, 4, HKV, D)), normal(1, 1, 4, HKV, D)
    for q_len, num_keys in ((0, 0), (2, 0), (0, 3), (2, 3)):
        rows, some = torch.tensor([0, q_len]), int(num_keys > 0)
        storage = fa.Paged(
            torch.tensor([0, some]), torch.zeros(some).int(), torch.tensor([num_keys]), 4
        )
        cascade.plan(
            [fa.CascadeLevel(rows, storage, kv_format=INT8), fa.CascadeLevel(rows, storage)]
        )
        q = normal(2, q_len, HQ, D)
        out, lse = cascade.run(q, [(pages, pages), (own, own)], return_lse=True)
        assert out.shape == (q_len, HQ, D) and bool(torch.isfinite(lse).all()) == bool(
            num_keys or not q_len
        )


# --- errors ---------------------------------------------------------------------------------------


def test_wrong_formats_of_levels() -> None:
    made = Levels(LEVELS[0], "ppp", torch.float32)
    cascade = made.planned(fa.Causal())
    before = cascade.run(made.q, made.pairs)
    shared, *others = made.levels
    for wrong, words in (
        ("int4", r"levels\[0\]: kv_format must be an fa.kv.Format, or a pair"),
        (Format("int4", group=48), r"levels\[0\]: group=48 does not divide head_dim=64"),
    ):
        level = fa.CascadeLevel(shared.q_indptr, shared.storage, shared.tokens, wrong)
        with pytest.raises(InputError, match=words):
            cascade.plan([level, *others])
    assert torch.equal(cascade.run(made.q, made.pairs), before)
    limits = fa.Limits(max_requests=5, max_q_tokens=26, max_kv_len=200, max_pages=40)
    with pytest.raises(InputError, match="of several formats, which cuda_graph=True does not"):
        made.planned(fa.Causal(), limits=limits, cuda_graph=True)


def test_wrong_pairs() -> None:
    made = Levels(LEVELS[0], "ppp", torch.float32)
    cascade = made.planned(fa.Causal())
    before = cascade.run(made.q, made.pairs)
    (a, b), tail, _ = made.pairs
    plain = Format("int4", group=32, scale_dtype=torch.float16).quantize(normal(0, 3, 16, HKV, D))
    for given, words in (
        ((a, b), "got 1 pairs of k and v, but 3 levels are planned, of several formats"),
        (([(a, b), tail],), "got 2 pairs of k and v, but 3 levels"),
        (([tail, tail, tail],), "level 0: k must be an fa.kv.Stored of Format"),
        (([(a, b), (a, b), tail],), "level 1: k is an fa.kv.Stored, but no kv_format was given"),
        (([(plain, b), tail, tail],), "level 0: k has rotated=False, but its format is"),
        (([(INT8.quantize(normal(0, 3, 16, HKV, D)), b), tail, tail],), "level 0: k has codes of"),
    ):
        with pytest.raises(InputError, match=words):
            cascade.run(made.q, *given)
    with pytest.raises(InputError, match=r"k_scale is given, but k is an fa\.kv\.Stored"):
        cascade.run(made.q, made.pairs, k_scale=torch.ones(3))
    with pytest.raises(ParamError, match="no param 'gain'"):
        cascade.run(made.q, made.pairs, gain=1.0)
    assert torch.equal(cascade.run(made.q, made.pairs), before)
    one = Levels((INT8,) * 3, "ppp", torch.float32)
    k, v = one.pairs[0]
    other = Stored(k.codes, k.scales.clone())
    with pytest.raises(InputError, match="level 1 has the codes of another level, but a k_scale"):
        one.planned(fa.Causal()).run(one.q, [(k, v), (other, v), (k, v)])
