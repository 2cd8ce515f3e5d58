"""A quantised cache on a device holds the codes of `Format.quantize`, and attention reads them."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import varlen_reference
from tests.gpu.place import DEVICE, TARGET

HEADS, KV_HEADS, DIM = 8, 2, 64
INT8, INT4 = fa.kv.Format("int8"), fa.kv.Format("int4", group=16, zero=True)
E4M3 = fa.kv.Format("e4m3", scale_dtype=torch.bfloat16)
PAIRS = [
    (INT8, None), (E4M3, INT4),
    (fa.kv.Format("int4", rotate=True), fa.kv.Format("nf4", scale_dtype=torch.float16)),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["page", "layer"])
@pytest.mark.parametrize("formats", PAIRS, ids=["int8", "e4m3-int4", "int4-nf4"])
def test_pages_hold_the_codes_of_their_rows(formats, layout):
    """Bit for bit, after copies, and back from the host as well."""
    groups = tuple(
        fa.kv.Group(
            (i,), KV_HEADS, DIM, num_q_heads=HEADS, variant=fa.SlidingWindow(20), kv_format=formats
        )
        for i in range(2)
    )
    spec = fa.kv.Spec(groups, 8, torch.float16)
    cache = fa.kv.Cache(spec, 32, max_kv_len=64, layout=layout, device=DEVICE)
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(2, 2, 40, KV_HEADS, DIM, generator=g).half()  # layer, part, token

    def step(items: list[tuple[fa.kv.Sequence, list[int]]]) -> None:
        with cache.step(items) as step:
            new = torch.from_numpy(step.token_ids).long()
            for layer in range(2):
                step.append(layer, *(rows[layer, part, new].to(DEVICE) for part in range(2)))
            step.commit()

    first = cache.open(list(range(14)))
    step([(first, list(range(14)))])
    second = first.fork()
    first.suspend()
    step([(second, [20, 21, 22])])
    first.resume()
    step([(first, [30]), (second, [31])])
    cache.check()
    for seq in (first, second):
        tokens = torch.from_numpy(seq.token_ids).long()
        for layer in range(2):
            table = torch.from_numpy(seq.tables[layer].view.copy()).long()
            for part, pages in enumerate(cache.tensors(layer)):
                form, own = formats[part], rows[layer, part, tokens]
                wanted = own if form is None else form.quantize(own).dequantize()
                values = pages if form is None else pages.dequantize()
                found = values.cpu()[table].flatten(0, 1)[: len(tokens)]
                # The device may rotate values back by other sums.
                exact = form is None or not form.rotate
                tolerance = 0.0 if exact else 1e-5
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("formats", [(INT8, INT8), (E4M3, INT4)], ids=["int8", "e4m3-int4"])
def test_attention_over_a_quantised_cache(formats):
    """Against attention over rows that are quantised and turned back."""
    group = fa.kv.Group(
        (0,), KV_HEADS, DIM, num_q_heads=HEADS, variant=fa.Causal(), kv_format=formats
    )
    cache = fa.kv.Cache(fa.kv.Spec(group, 8, torch.float16), 32, max_kv_len=64, device=DEVICE)
    attention = fa.BatchAttention(
        fa.Causal(), num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
        q_dtype=torch.float16, device=DEVICE, target=TARGET, kv_format=formats,
    )  # fmt: skip
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(21, n, DIM, generator=g).half() for n in (HEADS, KV_HEADS, KV_HEADS))
    seq, outs = cache.open([1]), []
    for begin, end in ((0, 17), (17, 18), (18, 21)):
        with cache.step([(seq, list(range(begin, end)))]) as step:
            step.plan(attention)
            step.append(0, k[begin:end].to(DEVICE), v[begin:end].to(DEVICE))
            outs.append(attention.run(q[begin:end].to(DEVICE), *cache.tensors(0)).cpu())
            step.commit()
    k, v = (f.quantize(x).dequantize() for f, x in zip(formats, (k, v), strict=True))
    ends = torch.tensor([0, 21])
    exact = varlen_reference(q.float(), k, v, ends, ends, fa.Causal())[0]
    torch.testing.assert_close(torch.cat(outs).float(), exact.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("variant", [fa.Causal(), fa.SlidingWindow(70)], ids=str)
def test_attention_over_full_pages_and_a_tail(variant):
    """Keys by channel: codes of full pages, and the last rows as they are, forked and suspended."""
    formats = fa.kv.Format("int4", "channel", zero=True), INT4
    group = fa.kv.Group((0,), KV_HEADS, DIM, num_q_heads=HEADS, variant=variant, kv_format=formats)
    spec = fa.kv.Spec(group, 64, torch.float16)
    cache = fa.kv.Cache(spec, (16, 4), max_kv_len=512, device=DEVICE)
    attention = fa.CascadeAttention(
        variant, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, q_dtype=torch.float16,
        device=DEVICE, target=TARGET,
    )  # fmt: skip
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(230, n, DIM, generator=g).half() for n in (HEADS, KV_HEADS, KV_HEADS))
    seq = cache.open([1], publish=False)
    other = None
    for begin, end in ((0, 150), (150, 151), (151, 192), (192, 230)):
        with cache.step([(seq, list(range(begin, end)))]) as step:
            step.plan(attention)
            step.append(0, k[begin:end].to(DEVICE), v[begin:end].to(DEVICE))
            out = attention.run(q[begin:end].to(DEVICE), *step.tensors(0)).cpu()
            step.commit()
        cache.check()
        full = end // 64 * 64
        both = [
            torch.cat([f.quantize(x[:full]).dequantize(), x[full:end].float()])
            for f, x in zip(formats, (k, v), strict=True)
        ]
        ends = [torch.tensor([0, n]) for n in (end - begin, end)]
        exact = varlen_reference(q[begin:end].float(), *both, *ends, variant)[0]
        torch.testing.assert_close(out.float(), exact.float(), rtol=2e-2, atol=1e-2)
        if other is not None:
            other.close()
        other = seq.fork()
        seq.suspend()
        seq.resume()
