"""Attention over `fa.kv.Stored` keys and values, against the dequantised values in fp64."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.batch.batches import indptr
from tests.harness.rotation import turn
from tests.ops.cases import HOST_TARGETS, assert_close, normal
from tests.ops.quantised.storage import CHANNELS, FORMATS, OF_PAGES, named, rows_of

HQ, HKV, KEYS = 4, 2, 70
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Format, Stored = fa.kv.Format, fa.kv.Stored
INT8, INT4 = Format("int8"), Format("int4", group=16)
# Masks, hooks that see scaled rows, another normaliser: (variant, head_dim, head_dim_v).
VARIANTS: list[tuple[Any, int, int]] = [
    (None, 64, 64),
    (fa.Causal() & fa.SoftCap(5.0), 64, 64),
    (fa.SlidingWindow(20) & fa.RoPE(), 64, 64),  # rotates keys after they are scaled
    (fa.Sigmoid() & fa.Causal(), 64, 64),
    (fa.ALiBi() & fa.Causal(), 40, 24),  # rows that do not fill vectors
    (fa.variant(value_mod=lambda row, b, kv_h, kv_idx: row * 0.5), 128, 64),
]


def dense(q_len: int, dim: int, dim_v: int) -> tuple[torch.Tensor, ...]:
    sizes = ((3, HQ, q_len, dim), (3, HKV, KEYS, dim), (3, HKV, KEYS, dim_v))
    return tuple(normal(i, *size) for i, size in enumerate(sizes))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("variant", "kv_format"),
    [(i, f) for i in range(len(VARIANTS)) for f in turn(i, FORMATS)],
    ids=lambda x: named(x) if isinstance(x, Format) else str(x),
)
def test_dense_calls(kv_format: fa.kv.Format, variant: int) -> None:
    chosen, dim, dim_v = VARIANTS[variant]
    for i, q_len in enumerate((1, 3, 40)):
        number = i + 3 * variant + 7 * FORMATS.index(kv_format)
        dtype, target = DTYPES[number % 3], HOST_TARGETS[number % len(HOST_TARGETS)]
        q, k, v = dense(q_len, dim, dim_v)
        q = q.to(dtype)
        k, v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
        out = fa.attention(q, k, v, chosen, q_offset="end", target=target)
        exact, eager = (
            attention_reference(
                q, k, v, chosen, q_offset="end", dtype=t
            )[0]
            for t in (torch.float64, dtype)
        )  # fmt: skip
        assert_close(out, exact, eager)


OVER_PAGES = [
    *((f, size) for size in (1, 5, 16) for f in turn(20, FORMATS)),
    *((f, size) for size in (1, 16) for f in OF_PAGES), *((f, 64) for f in CHANNELS),
]  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("kv_format", "page_size"),
    OVER_PAGES,
    ids=lambda x: named(x) if isinstance(x, Format) else str(x),
)
@pytest.mark.parametrize("target", turn(33, HOST_TARGETS))
def test_batches_over_pages_and_packed_rows(target, kv_format, page_size) -> None:
    lengths, q_lens = (45, 1, 33), (1, 1, 20)
    order = torch.randperm(-(-300 // page_size), generator=torch.Generator().manual_seed(3))
    counts = [-(-n // page_size) for n in lengths]
    paged = fa.Paged(
        indptr(counts), order[: sum(counts)].int(),
        torch.tensor([n - (c - 1) * page_size for n, c in zip(lengths, counts, strict=True)]),
        page_size,
    )  # fmt: skip
    dtype = DTYPES[(page_size + len(named(kv_format))) % 3]
    q = normal(0, sum(q_lens), HQ, 64).to(dtype)
    pages = [kv_format.quantize(normal(i, len(order), page_size, HKV, 64)) for i in (1, 2)]
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=HQ, num_kv_heads=HKV, head_dim=64, q_dtype=dtype,
        kv_format=kv_format, target=target,
    )  # fmt: skip
    batch.plan(indptr(q_lens), paged)
    out = batch.run(q, *pages)

    slots = torch.tensor([
        int(order[sum(counts[:b]) + i // page_size]) * page_size + i % page_size
        for b, n in enumerate(lengths) for i in range(n)
    ])  # fmt: skip
    k, v = (x.dequantize().flatten(0, 1)[slots] for x in pages)
    exact, eager = (
        varlen_reference(q, k, v, indptr(q_lens), indptr(lengths), fa.Causal(), dtype=t)[0]
        for t in (torch.float64, dtype)
    )
    assert_close(out, exact, eager)
    packed = [rows_of(x, slots) for x in pages]
    out = fa.varlen_attention(
        q, *packed, indptr(q_lens), indptr(lengths), fa.Causal(), target=target
    )
    assert_close(out, exact, eager)


@pytest.mark.parametrize("kv_format", [INT8, Format("e4m3", "head")])
def test_a_cascade_over_one_cache(kv_format: fa.kv.Format) -> None:
    q = normal(0, 3, HQ, 64).bfloat16()
    pages = [kv_format.quantize(normal(i, 20, 8, HKV, 64)) for i in (1, 2)]
    tables = [[0, 1, 2, 3 + b, 6 + b] for b in range(3)]
    paged = fa.Paged(
        indptr([5] * 3), torch.tensor(tables, dtype=torch.int32).flatten(),
        torch.tensor([8, 3, 1]), 8,
    )  # fmt: skip
    results = []
    for cls in (fa.BatchAttention, fa.CascadeAttention):
        batch = cls(
            num_q_heads=HQ, num_kv_heads=HKV, head_dim=64, q_dtype=torch.bfloat16,
            kv_format=kv_format,
        )  # fmt: skip
        if cls is fa.BatchAttention:
            batch.plan(indptr([1] * 3), paged)
        else:
            plan = batch.plan(fa.cascade_levels(indptr([1] * 3), paged))
            assert "level" in str(plan.explain())
        results.append(batch.run(q, *pages))
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-2)


def test_keys_alone_or_values_alone() -> None:
    q, k, v = dense(2, 64, 64)
    plain = fa.attention(q, k, v)
    for k_format, v_format in ((INT8, None), (None, INT8)):
        stored_k, stored_v = (
            x if f is None else f.quantize(x, heads_dim=1)
            for f, x in ((k_format, k), (v_format, v))
        )
        out = fa.attention(q, stored_k, stored_v)
        torch.testing.assert_close(out, plain, rtol=0.1, atol=0.03)
        assert not torch.equal(out, plain)
        batch = fa.BatchAttention(
            num_q_heads=HQ, num_kv_heads=HKV, head_dim=64, q_dtype=torch.float32,
            kv_format=(k_format, v_format),
        )  # fmt: skip
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        batch.plan(indptr([2] * 3), fa.Ragged(indptr([KEYS] * 3)))
        k_rows, v_rows = (
            x if f is None else f.quantize(x)
            for f, x in zip((k_format, v_format), packed[1:], strict=True)
        )
        same = batch.run(packed[0], k_rows, v_rows)
        torch.testing.assert_close(same.unflatten(0, (3, 2)).transpose(1, 2), out)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kv_format", [Format(c, group=32) for c in ("int8", "e4m3")], ids=named)
@pytest.mark.parametrize("target", HOST_TARGETS)
def test_values_of_the_codes_of_keys(target: str, kv_format: fa.kv.Format) -> None:
    """A tile may decode them once, but not where one scale differs."""
    q, k, _ = dense(40, 128, 128)
    keys = kv_format.quantize(k, heads_dim=1)
    other = keys.scales.clone()
    other[1, 0, 20, 1] *= 3
    for scales in (keys.scales, other):
        values = Stored(keys.codes[..., :64], scales[..., :2], group=32)
        for q_len in (1, 10, 40):  # few rows, one block of rows, several
            new = q[:, :, -q_len:].to(torch.bfloat16)
            out = fa.attention(new, keys, values, fa.Causal(), q_offset="end", target=target)
            exact, eager = (
                attention_reference(new, keys, values, fa.Causal(), q_offset="end", dtype=t)[0]
                for t in (torch.float64, torch.bfloat16)
            )
            assert_close(out, exact, eager)


def test_copies_of_an_object_have_its_formats() -> None:
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=HQ, num_kv_heads=HKV, head_dim=64, q_dtype=torch.bfloat16,
        kv_format=(INT8, None), kv_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    copied = pickle.loads(pickle.dumps(batch))
    for made in (batch, copied):
        options = made.options
        assert (options.k_dtype, options.v_dtype) == (torch.int8, torch.float8_e4m3fn)
        assert made.variant.name == batch.variant.name
        made.plan(indptr([1]), fa.Ragged(indptr([9])))
        k, v = normal(0, 9, HKV, 64), normal(1, 9, HKV, 64)
        made.run(normal(2, 1, HQ, 64).bfloat16(), INT8.quantize(k), v.to(torch.float8_e4m3fn))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kv_format", [INT8, INT4, Format("nf4", rotate=True)], ids=named)
def test_torch_compile_takes_codes_and_scales(kv_format: fa.kv.Format) -> None:
    q, k, v = dense(1, 64, 64)
    k, v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
    more = {"codebook": k.codebook, "group": k.group, "rotated": k.rotated}

    def call(q: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        stored = Stored(*parts[:2], **more), Stored(*parts[2:], **more)  # type: ignore[arg-type]
        return fa.attention(q, *stored, fa.Causal())  # type: ignore[return-value]

    torch._dynamo.reset()  # numbers that change between calls become symbols
    parts = (k.codes, k.scales, v.codes, v.scales)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, *parts), call(q, *parts), rtol=0, atol=0)


def test_rows_of_their_own_scale_may_be_no_numbers() -> None:
    """As `Format.quantize` leaves rows with NaN: nothing is read, of up to every token's scale."""
    stored = INT8.quantize(normal(0, 9, HKV, 64))
    stored.scales[3, 1] = math.nan
    again = Stored(stored.codes, stored.scales)
    assert again.dequantize()[3, 1].isnan().all() and again.dequantize()[3, 0].isfinite().all()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.full((2,), math.nan))
        Stored(mode.from_tensor(stored.codes), fake)


def run(batch: fa.BatchAttention, k: Any, v: Any, **params: Any) -> None:
    batch.plan(indptr([1]), fa.Ragged(indptr([9])))
    batch.run(normal(2, 1, HQ, 64), k, v, **params)


def wrong_calls() -> dict[str, tuple[Any, str]]:
    rows = normal(0, 9, HKV, 64)
    stored, e4m3 = INT8.quantize(rows), Format("e4m3").quantize(rows)
    sizes = {"num_q_heads": HQ, "num_kv_heads": HKV, "head_dim": 64, "q_dtype": torch.float32}
    made = fa.BatchAttention(**sizes, kv_format=INT8)
    plain = fa.BatchAttention(**sizes)
    of_groups = fa.BatchAttention(**sizes, kv_format=INT4)
    turned = fa.BatchAttention(**sizes, kv_format=Format("int8", rotate=True))
    pages = normal(0, 4, 3, HKV, 64)
    inside = Stored(
        INT8.quantize(pages).codes, torch.rand(4, 2, 3, HKV)[:, 0]
    )  # layers inside of pages
    paged = fa.Paged(indptr([3]), torch.tensor([0, 1, 2]).int(), torch.tensor([3]), 3)

    def over_pages() -> None:
        made.plan(indptr([1]), paged)
        made.run(normal(2, 1, HQ, 64), inside, inside)

    return {
        "code": (lambda: Format("int3"), "code='int3' must be one of int8, e4m3, e5m2"),
        "scale": (lambda: Format("int8", "row"), "scale='row' must be one of tensor, head"),
        "15 numbers": (lambda: Format([1.0] * 15), "a codebook is 16 numbers, .* got 15 of them"),
        "no numbers": (lambda: Format(["a"] * 16), "a codebook is 16 numbers; got"),  # type: ignore[list-item]
        "infinite": (lambda: Format([math.inf] * 16), "must be finite, and not all 0"),
        "only zeros": (lambda: Format([0.0] * 16), "must be finite, and not all 0"),
        "zero": (lambda: Format("nf4", zero=True), "zero=True goes with int8 and int4, not"),
        "zero dtype": (lambda: Format("int4", zero=1), "zero=1 must be one of False, True"),  # type: ignore[arg-type]
        "group": (lambda: Format("int4", group=0), "group=0 must be a number of channels"),
        "group of a head": (lambda: Format("int4", "head", group=8), "group=8 goes with scale="),
        "group and dim": (lambda: INT4.quantize(rows[..., :40]), "group=16 does not divide"),
        "odd": (lambda: Format("e2m1").quantize(rows[..., :9]), "head_dim=9 is odd, but e2m1"),
        "rows of a page": (
            lambda: Format("int8", "page_head").quantize(rows), "scale='page_head' is of pages",
        ),
        "pages of 3": (
            lambda: Format("int8", "page_head").quantize(pages), "pages of 2..n slots, not of 3",
        ),
        "tail": (lambda: Format("int8", "channel").quantize(rows), "multiples of 64 slots, but x"),
        "odd batch": (
            lambda: fa.BatchAttention(**{**sizes, "head_dim": 9}, kv_format=Format("int4")),
            "head_dim=9 is odd, but int4",
        ),
        "group of a batch": (
            lambda: fa.BatchAttention(**{**sizes, "head_dim": 24}, kv_format=INT4),
            "group=16 does not divide head_dim=24",
        ),
        "zeros": (
            lambda: Stored(stored.codes, stored.scales, torch.zeros(9, 1)), "zeros are .* but",
        ),
        "codebook of bytes": (
            lambda: Stored(stored.codes, stored.scales, codebook=torch.rand(16)),
            "a codebook is for codes of 4 bits",
        ),
        "codebook": (
            lambda: Stored(INT4.quantize(rows).codes, stored.scales, codebook=torch.rand(15)),
            r"codebook must be \[16\]",
        ),
        "codebook dtype": (
            lambda: Stored(INT4.quantize(rows).codes, stored.scales, codebook=torch.ones(16).int()),
            "codebook must be a tensor of float32",
        ),
        "NaN scale": (
            lambda: Stored(stored.codes, torch.tensor(math.nan)), "scales is nan, which many slots",
        ),
        "NaN of a head": (
            lambda: Stored(stored.codes, torch.tensor([1.0, math.nan])), r"scales\[1\] is nan",
        ),
        "infinite zero point": (
            lambda: Stored(stored.codes, torch.ones(2), torch.tensor([math.inf, 0.0])),
            r"zeros\[0\] is inf, which many slots share",
        ),
        "NaN in a codebook": (
            lambda: Stored(
                INT4.quantize(rows).codes, torch.ones(2), codebook=torch.full((16,), math.nan)
            ),
            r"codebook\[\d+\] is nan",
        ),
        "block": (
            lambda: Stored(stored.codes, stored.scales, block=3), "block=3 must be a power of two",
        ),
        "blocks": (lambda: Stored(stored.codes, stored.scales, block=2), "in blocks of 2 slots"),
        "groups": (
            lambda: Stored(stored.codes, stored.scales, group=16), "with groups of 16 channels",
        ),
        "group of codes": (
            lambda: Stored(stored.codes, stored.scales, group=5), "group=5 does not divide",
        ),
        "other groups": (
            lambda: run(of_groups, Format("int4").quantize(rows), INT4.quantize(rows)),
            "k has groups=1, but its format is",
        ),
        "other dtype": (
            lambda: run(made, Format("int8", scale_dtype=torch.half).quantize(rows), stored),
            "k has scale_dtype=torch.float16, but",
        ),
        "no zeros": (
            lambda: run(made, Format("int8", zero=True).quantize(rows), stored), "k has zeros=True",
        ),
        "partial": (
            lambda: run(turned, *2 * [Format("int8", rotate=True).quantize(rows)], partial=True),
            "partial=True gives states before output_mod, which rotates",
        ),
        "dtype": (lambda: Format("int8", scale_dtype=torch.float64), "scale_dtype=torch.float64"),
        "no dtype": (lambda: Format("int8", scale_dtype=1), "scale_dtype=1 must be one of"),  # type: ignore[arg-type]
        "no float": (lambda: INT8.quantize(torch.ones(2, 2).int()), "x must be a floating tensor"),
        "heads_dim": (lambda: INT8.quantize(rows, heads_dim=2), "heads_dim=2 is no dim before"),
        "no heads_dim": (lambda: INT8.quantize(rows, heads_dim="x"), "heads_dim='x' is no dim"),  # type: ignore[arg-type]
        "far heads_dim": (lambda: stored.dequantize(heads_dim=9), "heads_dim=9 is no dim before"),
        "huge": (lambda: Format([10**400] + [0] * 15), "of a codebook must be finite"),
        "codes": (lambda: Stored(rows, rows[..., 0]), "codes must be a tensor of int8"),
        "scales": (lambda: Stored(stored.codes, stored.codes[..., 0]), "scales must be a tensor"),
        "shape": (
            lambda: Stored(stored.codes, torch.rand(9, 3)), r"scales \[9, 3\] do not broadcast",
        ),
        "rank": (
            lambda: Stored(stored.codes, torch.rand(1, 9, 2)), r"scales \[1, 9, 2\] do not",
        ),
        "both": (
            lambda: fa.BatchAttention(**sizes, kv_format=INT8, kv_dtype=torch.int8),
            "give no kv_dtype",
        ),
        "triple": (
            lambda: fa.BatchAttention(**sizes, kv_format=(INT8, INT8, INT8)),  # type: ignore[arg-type]
            "kv_format must be an fa.kv.Format, or a pair",
        ),
        "no format": (lambda: run(plain, stored, stored), "no kv_format was given for k"),
        "no stored": (lambda: run(made, rows, stored), "k must be an fa.kv.Stored of Format"),
        "other": (lambda: run(made, stored, e4m3), "v has codes of torch.float8_e4m3fn, but its"),
        "twice": (
            lambda: run(made, stored, stored, k_scale=torch.ones(9, HKV)), "k_scale is given, but",
        ),
        "dense": (
            lambda: fa.attention(
                normal(0, 1, HQ, 1, 64), *2 * [Stored(stored.codes[None], torch.tensor(1.0))]
            ),
            "k has num_kv_heads=9",
        ),
        "layers inside": (over_pages, "scales of k have strides"),
        "partial of a call": (
            lambda: fa.attention(
                normal(0, 1, HQ, 1, 64),
                *2 * [Format("int8", rotate=True).quantize(normal(0, 1, HKV, 9, 64), heads_dim=1)],
                partial=True,
            ),
            "partial=True gives states before output_mod",
        ),
    }  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Format("int8"), r"scales of k have strides \[256, 2, 1\]: .* pass scales\.contiguous\(\), "
         r"in memory \[num_pages, page_size, num_kv_heads\]$"),
        (Format("int8", group=16), r"scales of k .* pass scales\.contiguous\(\), in memory "
         r"\[num_pages, page_size, num_kv_heads, groups\]$"),
        (Format("int8", zero=True), r"zeros of k .* pass zeros\.contiguous\(\), in memory \["),
    ],
)  # fmt: skip
def test_scales_of_layers_inside_of_pages(form: fa.kv.Format, text: str) -> None:
    whole = form.quantize(normal(0, 3, 16, HKV, 64))
    inside = "zeros" if form.zero else "scales"
    apart = torch.stack([getattr(whole, inside)] * 8, 1)[:, 0]
    made = fa.BatchAttention(
        fa.Causal(), num_q_heads=HQ, num_kv_heads=HKV, head_dim=64, q_dtype=torch.float32,
        kv_format=form,
    )  # fmt: skip
    made.plan(indptr([1]), fa.Paged(indptr([3]), torch.tensor([0, 1, 2]), torch.tensor([3]), 16))
    stored = replace(whole, **{inside: apart})
    q = normal(2, 1, HQ, 64)
    with pytest.raises(InputError, match=text):
        made.run(q, stored, stored)
    stored = replace(whole, **{inside: apart.contiguous()})
    assert torch.equal(made.run(q, stored, stored), made.run(q, whole, whole))


@pytest.mark.parametrize("wrong", wrong_calls())
def test_errors(wrong: str) -> None:
    call, message = wrong_calls()[wrong]
    with pytest.raises(InputError, match=message):
        call()
