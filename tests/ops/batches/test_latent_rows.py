"""Rows of FlashMLA's fp8 cache, 512 codes, 4 scales and 64 values of bfloat16: written and read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from flashattn_jit.variants.reference import attention_reference
from tests.harness import rotation
from tests.ops.cases import EPS, HOST_TARGETS, normal, rms

HEADS, PAGE, SCALE = 8, 8, 0.07
Q_LEN, KV_LEN = (1, 5, 20, 2, 0), (70, 33, 24, 0, 9)
FORM = fa.kv.Format("e4m3", group=128)
EMULATED = ("emulated:sm_80", "emulated:sm_86", "emulated:sm_90")
DOCUMENTS = torch.arange(80) // 13
VARIANTS: dict[str, Any] = {
    "causal": fa.Causal(),
    "window": fa.SlidingWindow(24),
    "documents": fa.variant(
        mask_mod=lambda b, h, q_idx, kv_idx: DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]
    ),
    "cap and sink": fa.SoftCap(5.0) & fa.Sink(sink=torch.linspace(-1, 1, HEADS)) & fa.Causal(),
    "changed keys": fa.RoPE() & fa.Causal(),
    "changed values": fa.variant(value_mod=lambda row, b, kv_h, kv_idx: row * 0.5),
}


def indptr(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def parts(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Latents of channels of very different sizes, among them a row of zeros, and rotary parts."""
    latent = normal(seed, num_tokens, 512) * torch.logspace(-3, 1, 512)
    latent[num_tokens // 2] = 0.0
    return latent.bfloat16(), normal(seed + 1, num_tokens, 64).bfloat16()


def values_of(latent: Tensor, k_rope: Tensor) -> Tensor:
    """What stored rows stand for: [num_tokens, 576], fp32."""
    return torch.cat([FORM.quantize(latent[:, None]).dequantize()[:, 0], k_rope.float()], -1)


def stored(target: str | None = None) -> tuple[Tensor, fa.Paged, list[Tensor]]:
    """Pages in random order, written by an append, NaN where no key is; each request's rows."""
    counts = tuple(-(-n // PAGE) for n in KV_LEN)
    pages = torch.full((sum(counts) + 2, PAGE, 1, 656), 255, dtype=torch.uint8)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int() + 1
    last = torch.tensor([(n - 1) % PAGE + 1 for n in KV_LEN]).int()
    paged = fa.Paged(indptr(counts), order, last, page_size=PAGE)
    latent, k_rope = parts(sum(KV_LEN), 2)
    fa.append_paged_latent(latent, k_rope, pages, indptr(KV_LEN), paged, target=target)
    return pages, paged, list(values_of(latent, k_rope).split(KV_LEN))


def made(target: str | None = None, **given: Any) -> fa.BatchAttention:
    return fa.BatchAttention(
        given.pop("variant", fa.Causal()), num_q_heads=HEADS, num_kv_heads=1, head_dim=576,
        head_dim_v=512, v_in_k=True, target=target, q_dtype=given.pop("q_dtype", torch.bfloat16),
        kv_dtype=torch.uint8, **given,
    )  # fmt: skip


def check(out: Tensor, q: Tensor, rows: Tensor, variant: Any, **given: Any) -> None:
    """One request against the fp64 reference, by the rule of docs/semantics.md."""
    k = rows[None, None]
    call = q.transpose(0, 1)[None], k, k[..., :512], variant
    exact, _ = attention_reference(*call, scale=SCALE, q_offset="end", **given)
    eager, _ = attention_reference(*call, scale=SCALE, q_offset="end", dtype=q.dtype, **given)
    assert not exact.isnan().any()
    error = rms(out.transpose(0, 1)[None].double() - exact)
    bound = 1.5 * rms(eager.double() - exact) + EPS[q.dtype] * rms(exact)
    assert error <= bound, f"{error:.3g} above {bound:.3g}"


CASES = [
    *((name, None, torch.bfloat16) for name in VARIANTS),
    *(("causal", target, torch.float32) for target in rotation.chosen(HOST_TARGETS, 2)),
    *(("causal", target, torch.bfloat16) for target in rotation.chosen(HOST_TARGETS, 2)),
    *(("causal", target, torch.float16) for target in rotation.chosen(EMULATED, 3)),
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("name", "target", "dtype"), CASES, ids=str)
def test_attention_reads_rows_where_they_are(
    name: str, target: str | None, dtype: torch.dtype
) -> None:
    """Few rows and many of a request."""
    batch = made(target, variant=VARIANTS[name], q_dtype=dtype)
    pages, paged, rows = stored()
    q = normal(3, sum(Q_LEN), HEADS, 576).to(dtype)
    batch.plan(indptr(Q_LEN), paged)
    out = batch.run(q, pages, scale=SCALE)
    for own, own_q, own_out in zip(rows, q.split(Q_LEN), out.split(Q_LEN), strict=True):
        if len(own_q) and len(own):
            check(own_out, own_q, own, VARIANTS[name])
    assert not out.split(Q_LEN)[3].any(), "no keys"


@pytest.mark.parametrize("target", [None, *rotation.chosen(EMULATED, 3)])
def test_sparse_keys_ragged_keys_and_cascades(target: str | None) -> None:
    pages, paged, rows = stored()
    q = normal(3, len(KV_LEN), HEADS, 576).bfloat16()
    tokens = [sorted({0, *range(n - 16, n, 3)} & {*range(n)}) for n in KV_LEN]
    padded = [own + [-1] * (7 - len(own)) for own in tokens]
    batch, each = made(target, variant=fa.Full()), torch.arange(len(KV_LEN) + 1).int()
    batch.plan(each, paged, sparsity=fa.TokenSparse(torch.tensor(padded).int()))
    out = batch.run(q, pages, scale=SCALE)
    for i, own in enumerate(tokens):
        if own:
            check(out[i, None], q[i, None], rows[i][own], fa.Full())
    assert not out[3].any()

    latent, k_rope = parts(sum(KV_LEN), 2)
    flat = torch.zeros(1, sum(KV_LEN), 1, 656, dtype=torch.uint8)
    whole = fa.Paged(*(torch.tensor(x).int() for x in ([0, 1], [0], [sum(KV_LEN)])), sum(KV_LEN))
    fa.append_paged_latent(latent, k_rope, flat, indptr((sum(KV_LEN),)), whole)
    batch.plan(each, fa.Ragged(indptr(KV_LEN)))
    out = batch.run(q, flat[0], scale=SCALE)
    for i, own_rows in enumerate(rows):
        if len(own_rows):
            check(out[i, None], q[i, None], own_rows, fa.Full())

    if target is not None:
        return
    cascade = fa.CascadeAttention(
        fa.Causal(), num_q_heads=HEADS, num_kv_heads=1, head_dim=576, head_dim_v=512, v_in_k=True,
        q_dtype=torch.bfloat16, kv_dtype=torch.uint8, target=target,
    )  # fmt: skip
    indices = paged.page_indices.clone()
    indices[paged.page_indptr[1:3].long()] = int(indices[0])
    shared = fa.Paged(paged.page_indptr, indices, paged.last_page_len, page_size=PAGE)
    cascade.plan(fa.cascade_levels(each, shared))
    out = cascade.run(q, pages, scale=SCALE)
    for i in range(3):
        own_rows = torch.cat([rows[0][:PAGE], rows[i][PAGE:]])
        check(out[i, None], q[i, None], own_rows, fa.Causal())


@pytest.mark.parametrize("target", [None, "emulated:sm_80"])
def test_appends_quantise_as_formats_do(target: str | None) -> None:
    """Bit for bit, into every second page of memory of which nothing else changes."""
    memory = torch.full((6, 2, PAGE, 1, 656), 255, dtype=torch.uint8)
    pages, (latent, k_rope) = memory[:, 1], parts(11, 5)
    latent[3, 130] = torch.nan
    paged = fa.Paged(*(torch.tensor(x).int() for x in ([0, 2], [4, 1], [3])), page_size=PAGE)
    fa.append_paged_latent(latent, k_rope, pages, indptr((11,)), paged, target=target)
    codes = FORM.quantize(latent)
    expected = torch.cat(
        [codes.codes.view(torch.uint8), codes.scales.view(torch.uint8), k_rope.view(torch.uint8)],
        -1,
    )
    assert torch.equal(pages[4, :, 0], expected[:PAGE])
    assert torch.equal(pages[1, :3, 0], expected[PAGE:])
    memory[4, 1], memory[1, 1, :3] = 255, 255
    assert (memory == 255).all()
    latents, rotary = fa.kv.latent_parts(expected)
    wanted = codes.dequantize()
    torch.testing.assert_close(latents.dequantize(), wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rotary, k_rope)


@pytest.mark.parametrize("target", HOST_TARGETS)
def test_nan_codes_and_the_largest_scales_are_no_other_numbers(target: str) -> None:
    """Kernels read codes of e4m3 as halves, which have neither their NaN nor such scales."""
    pages, paged, _ = stored(target)
    batch, q = made(target), normal(5, len(KV_LEN), HEADS, 576).bfloat16()
    batch.plan(indptr((1,) * len(KV_LEN)), paged)
    row = pages[paged.page_indices[0], 3, 0]
    row[:128] = 0
    wanted = batch.run(q, pages, scale=SCALE)
    row[512:516].view(torch.float32).fill_(3e38)
    torch.testing.assert_close(batch.run(q, pages, scale=SCALE), wanted, rtol=0, atol=0)
    row[200] = 0x7F
    assert batch.run(q, pages, scale=SCALE)[0].isnan().any()


def test_calls_take_keys_and_their_first_bytes() -> None:
    latent, k_rope = parts(24, 7)
    rows = torch.zeros(24, 1, 656, dtype=torch.uint8)
    codes, rotary = fa.kv.latent_parts(rows)
    quantised = FORM.quantize(latent[:, None])
    codes.codes.copy_(quantised.codes)
    codes.scales.copy_(quantised.scales)
    rotary.copy_(k_rope[:, None])
    q, known = normal(8, 3, HEADS, 576), values_of(latent, k_rope)
    given: dict[str, Any] = {"scale": SCALE, "q_offset": "end"}
    dense, at = rows.transpose(0, 1)[None], q.transpose(0, 1)[None]
    out = fa.attention(at, dense, dense[..., :528], fa.Causal(), **given)
    check(out[0].transpose(0, 1), q, known, fa.Causal())
    packed = fa.varlen_attention(
        q, rows, rows[..., :528], indptr((3,)), indptr((24,)), fa.Causal(), **given
    )
    torch.testing.assert_close(packed, out[0].transpose(0, 1))
    exact, _ = attention_reference(at, dense, dense[..., :528], fa.Causal(), **given)
    again, _ = attention_reference(
        at, known[None, None], known[None, None, :, :512], fa.Causal(), **given
    )
    assert torch.equal(exact, again), "the reference decodes rows"
    explained = fa.Causal().explain(at, dense, dense[..., :528])
    assert "head_dim 576, head_dim_v 512, float32 q, uint8 k" in str(explained)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("shape", [(), (1,), (5, PAGE, 1, 1)])
def test_one_scale_of_all_groups(shape: tuple[int, ...]) -> None:
    """Where a part of the row is read alone: of keys their first columns."""
    codes = torch.randint(-99, 99, (5, PAGE, 1, 128), dtype=torch.int8)
    keys = fa.kv.Stored(codes, torch.full(shape, 0.01), group=64)
    q, last = normal(1, 3, HEADS, 128), torch.tensor([3]).int()
    paged = fa.Paged(indptr((5,)), torch.arange(5).int(), last, page_size=PAGE)
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=HEADS, num_kv_heads=1, head_dim=128, head_dim_v=64, v_in_k=True,
        q_dtype=torch.float32, kv_format=fa.kv.Format("int8", group=64),
    )  # fmt: skip
    batch.plan(indptr((3,)), paged)
    rows = keys.dequantize().view(1, 1, -1, 128)[:, :, : 4 * PAGE + 3]
    wanted = fa.attention(
        q.transpose(0, 1)[None], rows, rows[..., :64].contiguous(), fa.Causal(), scale=SCALE,
        q_offset="end",
    )  # fmt: skip
    torch.testing.assert_close(batch.run(q, keys, scale=SCALE), wanted[0].transpose(0, 1))


def test_explanations_name_them() -> None:
    _, paged, _ = stored()
    text = made().plan(indptr(Q_LEN), paged).explain()
    assert "a token has 656 bytes of keys (fp8_ds_mla), whose first 512 columns are" in text


def test_errors() -> None:
    with pytest.raises(InputError, match="head_dim=64, but uint8 is of latent rows"):
        fa.BatchAttention(
            num_q_heads=2, num_kv_heads=1, head_dim=64, head_dim_v=32, v_in_k=True,
            q_dtype=torch.bfloat16, kv_dtype=torch.uint8,
        )  # fmt: skip
    pages, paged, _ = stored()
    batch, q = made(), normal(0, sum(Q_LEN), HEADS, 576).bfloat16()
    batch.plan(indptr(Q_LEN), paged)
    for wrong, message in (
        (torch.zeros(*pages.shape[:3], 640, dtype=torch.uint8), "k of uint8 must have latent rows"),
        (torch.zeros(*pages.shape[:3], 576).bfloat16(), "kv_dtype=uint8"),
        (fa.kv.latent_parts(pages)[0], "no kv_format was given"),
        (pages.repeat_interleave(2, -1)[..., ::2], "last dim .head_dim. must be contiguous"),
    ):
        with pytest.raises(InputError, match=message):
            batch.run(q, wrong, scale=SCALE)
    dense = torch.zeros(1, 1, 4, 656, dtype=torch.uint8)
    with pytest.raises(InputError, match="v of uint8 must have latent rows of 528 bytes"):
        fa.attention(q[None, :HEADS, :1], dense, dense, fa.Full())
    for rows, message in (
        (pages[..., :640], r"must be uint8 \[..., num_kv_heads, 656\], got torch.uint8 \[21, 8"),
        (pages.float(), "got torch.float32"), (None, "got NoneType"),
        (torch.zeros(4, 659, dtype=torch.uint8)[:, :656], r"strides \[659, 1\]"),
        (torch.zeros(659, dtype=torch.uint8)[3:], "begin at byte 3"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            fa.kv.latent_parts(rows)  # type: ignore[arg-type]
    latent, k_rope = parts(sum(KV_LEN), 2)
    given = pages, indptr(KV_LEN), paged
    with pytest.raises(InputError, match="as latent has 508 columns and k_rope 64"):
        fa.append_paged_latent(latent[:, :508], k_rope, *given)
    with pytest.raises(InputError, match="rows of 448, but k_pages has 1 and 512"):
        fa.append_paged_latent(latent[:, :448], latent[:, :128], *given)
