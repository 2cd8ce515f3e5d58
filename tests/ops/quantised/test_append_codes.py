"""Appending to pages of codes: what `Format.quantize` makes of the rows, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashattn_jit as fa
from flashattn_jit.codegen.spec import default_target
from flashattn_jit.errors import GradError, InputError
from tests.batch.batches import indptr
from tests.harness.rotation import other_target, some, turn
from tests.harness.toolkit import needs_nvcc
from tests.ops.batches.test_append_plans import Ones
from tests.ops.cases import normal
from tests.ops.quantised.storage import FORMATS, OF_PAGES, bits, named

Format, Stored = fa.kv.Format, fa.kv.Stored
PAGES, SIZE, HEADS = 8, 4, 3
Q_INDPTR = indptr([5, 6])
PAGED = fa.Paged(indptr([2, 2]), torch.tensor([7, 1, 3, 5]).int(), torch.tensor([3, 4]), SIZE)
# Pages and slots of the new tokens: both requests cross the end of a page.
PLACES = [(7, 2), (7, 3), (1, 0), (1, 1), (1, 2), (3, 2), (3, 3), (5, 0), (5, 1), (5, 2), (5, 3)]
OWN = [f for f in FORMATS if f.scale == "token_head"]
BOOKS = [f for f in OWN if f.values.book]
GIVEN = [f for f in FORMATS if f.scale != "token_head"]
EMULATED = [f"emulated:{name}" for name in ("sm_75", "sm_80", "sm_90", "sm_120")]
HALF = torch.float16


def rows(dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows of many magnitudes, of zeros, with outliers, NaN and infinite values."""
    x = normal(seed, 11, HEADS, dim)
    x[2] = 0.0
    x[3] *= 1e-4
    x[4, :, 5] *= 1000.0
    x[5] *= 1e-9
    x[6, 1, 3] = float("nan")
    x[7, 2, 1] = -float("inf")
    x[8] *= 1e4
    x[9, 0, ::3] = -0.0
    x[10, 1] *= 1e-6  # subnormal in fp16
    x[10, 2] = 1.4e-45  # the span over that of the codes is 0
    return x.to(dtype)


def empty(kv_format: fa.kv.Format, dim: int, fill: int = 77) -> fa.kv.Stored:
    made = kv_format.quantize(torch.zeros(PAGES, SIZE, HEADS, dim))
    bits(made.codes).fill_(fill)
    made.scales.fill_(0.5)
    if made.zeros is not None:
        made.zeros.fill_(0.5)
    return made


def check(cache: fa.kv.Stored, wanted: fa.kv.Stored, fill: int = 77) -> None:
    written = torch.zeros(PAGES, SIZE, dtype=torch.bool)
    numbers = [(cache.scales, wanted.scales)]
    if cache.zeros is not None and wanted.zeros is not None:
        numbers.append((cache.zeros, wanted.zeros))
    for i, (page, slot) in enumerate(PLACES):
        assert torch.equal(bits(cache.codes)[page, slot], bits(wanted.codes)[i]), i
        for own, other in numbers:
            torch.testing.assert_close(own[page, slot], other[i], rtol=0, atol=0, equal_nan=True)
        written[page, slot] = True
    assert (bits(cache.codes)[~written] == fill).all()
    assert all((own[~written] == 0.5).all() for own, _ in numbers)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", turn(34, [default_target(), other_target()]))
@pytest.mark.parametrize(
    ("kv_format", "dim", "dim_v"),
    [(f, *dims) for i, dims in enumerate([(64, 64), (40, 24), (576, 512)]) for f in turn(i, OWN)]
    + [(f, 64, 64) for f in turn(3, OWN)],
    ids=lambda x: x if isinstance(x, int) else named(x),
)
def test_rows_become_the_codes_of_the_quantiser(dim, dim_v, kv_format, target, monkeypatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_TARGET", target)
    for dtype in (torch.float32, torch.bfloat16):
        k, v = rows(dim, dtype), rows(dim_v, dtype, 1)
        caches = empty(kv_format, dim), empty(kv_format, dim_v)
        fa.append_paged_kv(k, v, *caches, Q_INDPTR, PAGED)
        for cache, x in zip(caches, (k, v), strict=True):
            check(cache, kv_format.quantize(x))


@pytest.mark.by_turns(3)
@needs_nvcc
@pytest.mark.parametrize(
    ("target", "kv_format"),
    some(list(itertools.product(EMULATED, OWN)), 4) + [(EMULATED[0], f) for f in turn(7, BOOKS)],
    ids=lambda x: x if isinstance(x, str) else named(x),
)
def test_rows_become_the_codes_of_the_quantiser_on_cuda(target, kv_format) -> None:
    for dtype in (HALF,) if "75" in target else (HALF, torch.bfloat16):
        k, v = rows(64, dtype), rows(40, dtype, 1)
        caches = empty(kv_format, 64), empty(kv_format, 40)
        fa.append_paged_kv(k, v, *caches, Q_INDPTR, PAGED, target=target)
        for cache, x in zip(caches, (k, v), strict=True):
            check(cache, kv_format.quantize(x))


@needs_nvcc
@pytest.mark.parametrize(
    ("dim", "group"), [(576, 64), *some([(256, 4), (6, 3), (10, 1), (96, 32)], 2)]
)
def test_groups_of_any_size_on_cuda(dim: int, group: int) -> None:
    """More groups than lanes; rows of few bytes at odd strides; keys and values of two formats."""
    k_format = Format("int4", group=group, zero=True, scale_dtype=torch.bfloat16)
    v_format = Format("e2m1", group=group, scale_dtype=HALF)
    k, v = rows(dim, HALF), rows(dim, HALF, 1)
    caches = empty(k_format, dim), empty(v_format, dim)
    fa.append_paged_kv(k, v, *caches, Q_INDPTR, PAGED, target="emulated:sm_75")
    for cache, x, own in zip(caches, (k, v), (k_format, v_format), strict=True):
        check(cache, own.quantize(x))


@pytest.mark.parametrize("target", [None, pytest.param("emulated:sm_80", marks=needs_nvcc)])
def test_equal_values_and_any_order_of_a_codebook(target: str | None) -> None:
    book = (3.0, -1.0, 0.0, 3.0, 0.5, -0.0, 0.25, -2.5, 1.0, 1.5, 2.0, 0.75, -1.0, 4.0, 1e-3, -4.0)
    own = Format(book, scale_dtype=torch.bfloat16)
    k = rows(64, HALF)
    k[0, 0] = torch.linspace(-4, 4, 64)
    k[0, 1, :16] = 4.0 * torch.tensor(book)
    caches = empty(own, 64), empty(own, 64)
    fa.append_paged_kv(k, -k, *caches, Q_INDPTR, PAGED, target=target)
    for cache, x in zip(caches, (k, -k), strict=True):
        check(cache, own.quantize(x))


def codebooks() -> dict[str, list[float]]:
    """Values with middles far apart and close together, ordered or not, on one side or both."""
    made = {
        "nf4": list(Format("nf4").values.book),
        "e2m1": list(Format("e2m1").values.book),
        "even": [float(i - 8) for i in range(16)],
        "powers": [(-1.0) ** i * 2.0 ** -(i // 2) for i in range(16)],
        "positive": [1.0 + i * i / 7 for i in range(16)],
        "negative": [-3.0 - i / 1000 for i in range(16)],
        "almost even": [i - 7.5 + (0.51 if i == 7 else 0.0) for i in range(16)],
        "close": [-1.0, *(0.5 + i * 2.0**-23 for i in range(14)), 1.0],
        "large": [(i - 7.3) * 1e18 for i in range(16)],
        "small": [(i - 7.3) * 1e-18 for i in range(16)],
    }
    for seed in range(12):
        torch.manual_seed(seed)
        made[f"random {seed}"] = (torch.randn(16) * 10 ** torch.randn(())).tolist()
    return made


@pytest.mark.parametrize("target", turn(35, [default_target(), other_target()]))
def test_rows_at_the_middles_of_codebooks(target: str, monkeypatch) -> None:
    """And next to them; a scale of 1."""
    monkeypatch.setenv("FLASHATTN_JIT_TARGET", target)
    for name, values in codebooks().items():
        own = Format(tuple(values))
        book = torch.tensor(values)
        low = book.sort().values
        middles = (low[1:] + low[:-1]) * 0.5
        most = book.abs().max()
        near = [torch.nextafter(middles, s * torch.tensor(float("inf"))) for s in (-1, 1)]
        x = torch.cat([middles, *near, low, most[None], -most[None]])
        x = torch.cat([x, torch.full((64 - len(x),), 0.3) * most])
        k = x * torch.tensor([1.0, -1.0, 0.999])[:, None].expand(11, HEADS, 1)
        caches = empty(own, 64), empty(own, 64)
        fa.append_paged_kv(k, k.flip(-1), *caches, Q_INDPTR, PAGED)
        for cache, rows_of in zip(caches, (k, k.flip(-1)), strict=True):
            wanted = own.quantize(rows_of)
            assert (wanted.scales[:, 0] == 1).all(), name
            check(cache, wanted)


@pytest.mark.parametrize("target", turn(36, [default_target(), other_target()]))
def test_values_of_a_codebook_near_the_least_float(target: str, monkeypatch) -> None:
    """Quotients at the middles between values, where their last bits are subnormal."""
    monkeypatch.setenv("FLASHATTN_JIT_TARGET", target)
    own = Format((1.0, *((i - 7) * 2.0**-125 for i in range(15))))
    ends = torch.linspace(1.0, 1.99, 11)[:, None, None].expand(11, HEADS, 1)
    middles = (torch.arange(63) % 14 - 6.5) * 2.0**-125 * ends
    up = torch.nextafter(middles, torch.tensor(1.0))
    for rows_of in (middles, up):
        k = torch.cat([ends, rows_of], -1)
        caches = empty(own, 64), empty(own, 64)
        fa.append_paged_kv(k, -k, *caches, Q_INDPTR, PAGED)
        for cache, x in zip(caches, (k, -k), strict=True):
            check(cache, own.quantize(x))


@needs_nvcc
def test_a_transform_and_positions_on_cuda() -> None:
    """Rows that are not changed are bit-equal; the others differ by the rounding of the hooks."""
    int8 = Format("int8", group=16, zero=True)
    k, v = (normal(i, 11, HEADS, 64).half() for i in range(2))
    positions = torch.tensor([5, 0, 1, 2, 3, 7, 6, 1, 0, 4, 2])
    append, plain = (
        fa.plan_append(Q_INDPTR, PAGED, positions=positions, transform=fa.RoPE(), target=target)
        for target in ("emulated:sm_80", None)
    )
    wanted = [torch.full((PAGES, SIZE, HEADS, 64), float("nan")) for _ in range(2)]
    plain.run(k.float(), v.float(), *wanted)
    caches = empty(int8, 64), empty(int8, 64)
    append.run(k, v, *caches)
    written = ~wanted[0].isnan().any(-1).any(-1)
    assert written.sum() == 11
    assert (bits(caches[0].codes)[~written] == 77).all()
    for cache, x in zip(caches, wanted, strict=True):
        other = int8.quantize(x)
        codes = (cache.codes.int() - other.codes.int()).abs()[written]
        assert codes.max() <= (cache is caches[0]) and codes.float().mean() < 0.01
        torch.testing.assert_close(cache.scales[written], other.scales[written])
    assert torch.equal(caches[1].scales[written], int8.quantize(wanted[1]).scales[written])


@needs_nvcc
def test_invalid_pages_are_skipped_on_cuda(monkeypatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "0")
    int4 = Format("int4", group=8)
    k, v = rows(64, HALF), rows(64, HALF, 1)
    caches = empty(int4, 64), empty(int4, 64)
    paged = replace(PAGED, page_indices=torch.tensor([7, -1, PAGES, 5]).int())
    fa.append_paged_kv(k, v, *caches, Q_INDPTR, paged, target="emulated:sm_90")
    wanted = int4.quantize(k)
    there = [i for i, (page, _) in enumerate(PLACES) if page in (7, 5)]
    for i in there:
        assert torch.equal(bits(caches[0].codes)[PLACES[i]], bits(wanted.codes)[i])
    assert (bits(caches[0].codes) != 77).any(-1).any(-1).sum() <= len(there)
    assert (caches[0].scales != 0.5).any(-1).any(-1).sum() <= len(there)


def test_layers_inside_of_pages_and_strided_rows() -> None:
    int8 = Format("int8", scale_dtype=torch.float16)
    whole = torch.full((PAGES, 3, 2, SIZE, HEADS, 64), 77, dtype=torch.int8)
    scales = torch.full((PAGES, 3, 2, SIZE, HEADS), 0.5, dtype=torch.float16)
    append = fa.plan_append(Q_INDPTR, PAGED)
    for layer in range(3):
        both = normal(layer, 11, 2, HEADS, 64)
        caches = [Stored(whole[:, layer, i], scales[:, layer, i]) for i in range(2)]
        append.run(both[:, 0], both[:, 1], *caches)
        for i, cache in enumerate(caches):
            check(cache, int8.quantize(both[:, i]))


def test_a_transform_changes_rows_before_they_are_quantised() -> None:
    int8, transform = Format("int8"), fa.QKNorm() & fa.RoPE()
    k, v = (normal(i, 11, HEADS, 64).bfloat16() for i in range(2))
    k_norm = torch.rand(64) + 0.5
    append = fa.plan_append(Q_INDPTR, PAGED, transform=transform)
    plain = [torch.zeros(PAGES, SIZE, HEADS, 64) for _ in range(2)]
    append.run(k.float(), v.float(), *plain, k_weight=k_norm, q_weight=k_norm)
    caches = empty(int8, 64), empty(int8, 64)
    append.run(k, v, *caches, k_weight=k_norm, q_weight=k_norm)
    for cache, x in zip(caches, plain, strict=True):
        check(cache, int8.quantize(torch.stack([x[place] for place in PLACES])))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("kv_format", "target"),
    [(f, None) for f in (*GIVEN, *OF_PAGES)] + [
        pytest.param(f, "emulated:sm_80", marks=needs_nvcc) for f in some([*GIVEN, *OF_PAGES], 2)
    ],
    ids=lambda x: named(x) if isinstance(x, Format) else str(x),
)  # fmt: skip
def test_rows_at_given_scales_become_the_codes_of_the_quantiser(kv_format, target) -> None:
    """Filling whole pages at the scales that the quantiser chose for them."""
    dtype = HALF if target else torch.float32
    k, v = (normal(i, PAGES, SIZE, HEADS, 64).to(dtype) for i in range(2))
    wanted = [kv_format.quantize(x) for x in (k, v)]
    caches = [
        replace(x, codes=torch.zeros_like(bits(x.codes)).view(kv_format.dtype)) for x in wanted
    ]
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))
    paged = fa.Paged(indptr([PAGES]), order.int(), torch.tensor([SIZE]), SIZE)
    rows = [x[order].flatten(0, 1) for x in (k, v)]
    fa.append_paged_kv(*rows, *caches, indptr([PAGES * SIZE]), paged, target=target)
    for cache, other in zip(caches, wanted, strict=True):
        got, expected = cache.dequantize(), other.dequantize()
        # Divided as rows are in hooks: a tie may fall to either side, and values that differ do so
        # by a step.
        same = torch.isclose(got, expected, rtol=1e-5, atol=1e-6)
        assert same.float().mean() > 0.999, kv_format


@pytest.mark.parametrize("scale", ["tensor", "head"])
def test_scales_that_are_given_stay_and_codes_end_at_the_largest(scale: str) -> None:
    e4m3 = Format("e4m3", scale)
    k, v = normal(0, 11, HEADS, 64), normal(1, 11, HEADS, 64)
    shape = () if scale == "tensor" else (HEADS,)
    scales = [torch.full(shape, 0.005), torch.full(shape, 0.002)]
    if scale == "head":
        scales[0][1] = 0.0
    caches = [Stored(empty(e4m3, 64).codes, s) for s in scales]
    fa.append_paged_kv(k, v, *caches, Q_INDPTR, PAGED)
    for cache, x, own in zip(caches, (k, v), scales, strict=True):
        wanted = (x / own.expand(HEADS)[:, None]).clamp(-448, 448)
        if scale == "head" and own is scales[0]:
            wanted[:, 1] = 0.0
        for i, (page, slot) in enumerate(PLACES):
            got = cache.codes[page, slot].float()
            # Divided as rows are in hooks; a tie may fall to either side.
            torch.testing.assert_close(got, wanted[i].to(e4m3.dtype).float(), rtol=0.13, atol=0)
    assert caches[1].codes.float().abs().max() == 448


@pytest.mark.parametrize("target", [None, pytest.param("emulated:sm_80", marks=needs_nvcc)])
def test_keys_alone_become_codes(target: str | None) -> None:
    int8 = Format("int8")
    k, v = rows(64, torch.bfloat16), rows(64, torch.bfloat16, 1)
    cache, plain = empty(int8, 64), torch.zeros(PAGES, SIZE, HEADS, 64, dtype=torch.bfloat16)
    fa.append_paged_kv(k, v, cache, plain, Q_INDPTR, PAGED, target=target)
    check(cache, int8.quantize(k))
    for i, place in enumerate(PLACES):
        torch.testing.assert_close(plain[place], v[i], rtol=0, atol=0, equal_nan=True)


def test_scales_of_dims_of_one_entry_have_any_stride() -> None:
    """Strides that overflow when they are multiplied."""
    far, int8 = 2**62, Format("int8")
    memory = torch.zeros(4)
    own = Stored(
        torch.zeros(1, 4, 1, 64, dtype=torch.int8),
        torch.as_strided(memory, (1, 4, 1), (far, 1, far)),
    )
    other = Stored(torch.zeros_like(own.codes), torch.zeros(1, 4, 1))
    k = normal(0, 3, 1, 64)
    paged = fa.Paged(indptr([1]), torch.zeros(1).int(), torch.tensor([3]), 4)
    fa.append_paged_kv(k, k, own, other, indptr([3]), paged)
    wanted = int8.quantize(k)
    assert torch.equal(own.codes[0, :3], wanted.codes) and torch.equal(
        memory[:3], wanted.scales[:, 0]
    )


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), Ones], ids=["device", "function"])
def test_default_devices_and_function_modes_do_not_count(mode: Any) -> None:
    int8, k, v = Format("int8"), normal(0, 11, HEADS, 64), normal(1, 11, HEADS, 64)
    caches = empty(int8, 64), empty(int8, 64)
    with mode():
        fa.append_paged_kv(k, v, *caches, Q_INDPTR, PAGED)
    for cache, x in zip(caches, (k, v), strict=True):
        check(cache, int8.quantize(x))


def test_the_op_that_is_traced_has_no_codes() -> None:
    int8, k = Format("int8"), normal(0, 11, HEADS, 64)
    one, other = empty(int8, 64), empty(int8, 64)
    with FakeTensorMode() as mode:
        fake = Stored(one.codes, mode.from_tensor(one.scales))
    with pytest.raises(InputError, match="pages of codes are not part of the op"):
        fa.append_paged_kv(k, k, fake, other, Q_INDPTR, PAGED)
    with pytest.raises(InputError, match="does not run under"):
        torch.vmap(lambda s: fa.append_paged_kv(
            k, k, Stored(one.codes, s), other, Q_INDPTR, PAGED
        ))(torch.stack([one.scales] * 2))  # fmt: skip


def test_attention_over_what_was_appended() -> None:
    """A prompt and a token at a time, quantised on the way in, against the rows themselves."""
    int8 = Format("int8")
    k, v, q = (normal(i, 11, h, 64) for i, h in enumerate((HEADS, HEADS, 2 * HEADS)))
    caches = empty(int8, 64), empty(int8, 64)
    pages = torch.tensor([4, 0, 6]).int()
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=2 * HEADS, num_kv_heads=HEADS, head_dim=64,
        q_dtype=torch.float32, kv_format=int8,
    )  # fmt: skip
    outs = []
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 11)):
        count = -(-end // SIZE)
        paged = fa.Paged(
            indptr([count]), pages[:count], torch.tensor([end - SIZE * (count - 1)]), SIZE
        )
        new = slice(begin, end)
        fa.append_paged_kv(k[new], v[new], *caches, indptr([end - begin]), paged)
        batch.plan(indptr([end - begin]), paged)
        outs.append(batch.run(q[new], *caches))
    plain = fa.varlen_attention(q, k, v, indptr([11]), indptr([11]), fa.Causal())
    torch.testing.assert_close(torch.cat(outs), plain, rtol=0.05, atol=0.02)


def test_pairs_of_codes_are_copied_as_they_are() -> None:
    """Rows of as many bytes as there are; longer ones are refused, and nothing is written."""
    k, v = (Format("int4").quantize(normal(i, 11, HEADS, 64)).codes for i in range(2))
    caches = [torch.zeros(PAGES, SIZE, HEADS, 32, dtype=torch.uint8) for _ in range(2)]
    pairs = [x.view(torch.bits4x2) for x in caches]
    fa.append_paged_kv(k, v, *pairs, Q_INDPTR, PAGED)
    for i, (page, slot) in enumerate(PLACES):
        assert torch.equal(caches[0][page, slot], bits(k)[i])
    wide = torch.full((11, HEADS, 64), 0x11, dtype=torch.uint8).view(torch.bits4x2)
    with pytest.raises(InputError, match="rows of 128, but k_pages has 3 and 64"):
        fa.append_paged_kv(wide, wide.clone(), *pairs, Q_INDPTR, PAGED)
    for i, (page, slot) in enumerate(PLACES):
        assert torch.equal(caches[1][page, slot], bits(v)[i])


def wrong_appends() -> dict[str, tuple[Any, type[Exception], str]]:
    int8 = Format("int8")
    k, v = normal(0, 11, HEADS, 64), normal(1, 11, HEADS, 64)
    one, other = empty(int8, 64), empty(int8, 64)
    wide = Stored(other.codes, torch.zeros(1, 1, 1).expand(PAGES, SIZE, HEADS))
    plain = torch.zeros(PAGES, SIZE, HEADS, 64, dtype=torch.bfloat16)
    taken = Stored(other.codes, one.scales)
    memory = torch.zeros(one.scales.numel() + 1)
    halves = [
        Stored(cache.codes, part.view(one.scales.shape))
        for cache, part in ((one, memory[:-1]), (other, memory[1:]))
    ]

    def append(*tensors: Any, target: str | None = None, **params: Any) -> Any:
        return lambda: fa.plan_append(Q_INDPTR, PAGED, target=target).run(*tensors, **params)

    given = Stored(other.codes, torch.ones(HEADS))
    negated = Stored(other.codes, torch._neg_view(other.scales))
    return {
        "dtypes": (append(k, v.half(), one, other), InputError, "rows of one dtype"),
        "codes": (append(one.codes[0], v, one, other), InputError, "k has num_tokens|rows of one"),
        "plain": (append(k, v, one, plain), InputError, "v has dtype torch.float32"),
        "no scales": (
            append(k, v, one, other.codes), InputError, "v has dtype torch.float32, but v_pages",
        ),
        "negated": (append(k, v, one, negated), InputError, "are not part of the op"),
        "expanded": (append(k, v, one, wide), InputError, "scales of v_pages are an expanded"),
        "same": (append(k, v, one, taken), InputError, "start at the same entry"),
        "shared": (append(k, v, *halves), InputError, "and their scales and zeros share memory"),
        "fp32 on CUDA": (
            append(k, v, one, other, target="emulated:sm_80"), InputError,
            "on CUDA one that attention takes there",
        ),
        "params": (append(k, v, one, given, v_scale=torch.ones(3)), InputError, "v_scale is given"),
        "size": (
            append(k, v, one, Stored(torch.zeros(PAGES, 2, HEADS, 64).char(), torch.ones(()))),
            InputError, "page_size=2",
        ),
        "grad": (append(k.clone().requires_grad_(), v, one, other), GradError, "grad"),
    }  # fmt: skip


@pytest.mark.parametrize("wrong", wrong_appends())
def test_what_is_refused_writes_nothing(wrong: str) -> None:
    call, kind, message = wrong_appends()[wrong]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("kv_format", [None, fa.kv.Format("int4", rotate=True)])
def test_a_constant_taken_off_all_keys_is_not_seen_by_softmax(kv_format) -> None:
    """An append's transform takes the mean key off, and codes of 4 bits lose less."""
    mean, q = 6.0 * normal(0, 2, 64), normal(1, 3, 4, 64)
    k, v = normal(2, 20, 2, 64) + mean, normal(3, 20, 2, 64)
    centred = fa.variant(key_mod=lambda row, b, kv_h, kv_idx: row - mean[kv_h])
    paged = fa.Paged(torch.tensor([0, 3]), torch.tensor([2, 0, 1]).int(), torch.tensor([4]), 8)
    weights = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) / 8
    wanted = torch.einsum("hqk,khd->qhd", weights.softmax(-1), v.double().repeat_interleave(2, 1))
    errors = []
    for transform in (None, centred):
        empty = torch.zeros(3, 8, 2, 64)
        k_pages = empty.clone() if kv_format is None else kv_format.quantize(empty)
        ends = torch.tensor([0, 20])
        fa.append_paged_kv(k, v, k_pages, empty, ends, paged, transform=transform)
        batch = fa.BatchAttention(
            num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype=q.dtype,
            kv_format=(kv_format, None),
        )  # fmt: skip
        batch.plan(torch.tensor([0, 3]), paged)
        errors.append(
            float((batch.run(q, k_pages, empty).double() - wanted).norm() / wanted.norm())
        )
    if kv_format is None:
        assert max(errors) < 1e-5
    else:
        assert errors[1] < 0.5 * errors[0]
