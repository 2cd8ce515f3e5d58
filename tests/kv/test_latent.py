"""Groups of latent attention: rows that are keys and values at once, and caches without memory."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa

LATENT, ROTARY, HEADS = 32, 16, 4
E4M3 = fa.kv.Format("e4m3", group=8)


def spec_of(
    page_size: int = 4, kv_format: object = None, dtype: torch.dtype = torch.float32
) -> fa.kv.Spec:
    group = fa.kv.Group(
        (0, 1), 1, LATENT + ROTARY, LATENT, HEADS, fa.Causal(), v_in_k=True,
        kv_format=kv_format,
    )  # type: ignore[arg-type] # fmt: skip
    return fa.kv.Spec((group,), page_size, dtype)


def rows(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, 1, LATENT, generator=generator),
        torch.randn(num_tokens, 1, ROTARY, generator=generator),
    )


@pytest.mark.parametrize("layout", ["page", "layer"])
def test_attention_over_latents(layout: str) -> None:
    """In steps, with a fork whose last page is copied, against fp64 over the rows themselves."""
    cache = fa.kv.Cache(spec_of(), 32, max_kv_len=64, layout=layout)  # type: ignore[arg-type]
    attention = fa.BatchAttention(
        fa.Causal(), num_q_heads=HEADS, num_kv_heads=1, head_dim=LATENT + ROTARY,
        head_dim_v=LATENT, v_in_k=True, q_dtype=torch.float32, device="cpu",
    )  # fmt: skip
    scale = 0.3
    seq = cache.open(range(9))
    written: list[list[torch.Tensor]] = [[], []]
    for count, seed in ((9, 0), (1, 10), (5, 20)):
        if count == 1:
            other = seq.fork()
        with cache.step([(seq, range(count))]) as step:
            step.plan(attention)
            for layer in range(2):
                latent, rotary = rows(count, seed + layer)
                step.append(layer, latent, rotary)
                written[layer].append(torch.cat([latent, rotary], -1).squeeze(1))
                q = torch.randn(count, HEADS, LATENT + ROTARY)
                out = attention.run(q, cache.latents(layer), scale=scale)
                keys = torch.cat(written[layer]).double()
                scores = torch.einsum("qhd,kd->hqk", q.double() * scale, keys)
                kept = torch.ones(count, len(keys), dtype=torch.bool).tril(len(keys) - count)
                weights = scores.masked_fill(~kept, -torch.inf).softmax(-1)
                wanted = torch.einsum("hqk,kd->qhd", weights, keys[:, :LATENT])
                assert (out.double() - wanted).abs().max() < 5e-6
            step.commit()
    table = torch.from_numpy(other.pages().astype("int64"))
    kept_rows = cache.latents(0)[table].reshape(-1, LATENT + ROTARY)[:9]
    assert torch.equal(kept_rows, written[0][0]), "the fork's rows"
    seq.suspend()
    seq.resume()
    table = torch.from_numpy(seq.pages().astype("int64"))
    kept_rows = cache.latents(1)[table].reshape(-1, LATENT + ROTARY)[:15]
    assert torch.equal(kept_rows, torch.cat(written[1]))
    assert sum(m.nbytes for p in cache.pools for m in p.memory) == 33 * cache.spec.page_bytes(0)


@pytest.mark.parametrize("layout", ["page", "layer"])
def test_quantised_latents(layout: str) -> None:
    """The latent becomes codes as `Format.quantize` makes them, the rotary part stays."""
    spec = spec_of(3, E4M3, torch.bfloat16)
    cache = fa.kv.Cache(spec, 8, max_kv_len=24, layout=layout)  # type: ignore[arg-type]
    seq = cache.open(range(7))
    latent, rotary = (x.bfloat16() for x in rows(7, 3))
    with cache.step([(seq, range(7))]) as step:
        for layer in range(2):
            step.append(layer, latent * (layer + 1), rotary)
        step.commit()
    table = torch.from_numpy(seq.pages().astype("int64"))
    for layer in range(2):
        codes, kept = cache.tensors(layer)
        assert isinstance(codes, fa.kv.Stored) and isinstance(kept, torch.Tensor)
        wanted = E4M3.quantize(latent * (layer + 1))
        bits = codes.codes.view(torch.uint8)[table].reshape(-1, LATENT)[:7]
        assert torch.equal(bits, wanted.codes.view(torch.uint8).squeeze(1))
        scales = codes.scales[table].reshape(-1, LATENT // 8)[:7]
        assert torch.equal(scales, wanted.scales.squeeze(1))
        assert torch.equal(kept[table].reshape(-1, ROTARY)[:7], rotary.squeeze(1))
        with pytest.raises(fa.InputError, match="no rows of both parts"):
            cache.latents(layer)
    assert spec.groups[0].row_bytes(torch.bfloat16) == (LATENT + LATENT // 8 * 4, 2 * ROTARY)
    # 3 tokens of codes and of bf16: the parts of a page begin at multiples of 16 bytes.
    assert spec.page_bytes(0) == 2 * (96 + 96 + 3 * 16)
    assert sum(m.nbytes for p in cache.pools for m in p.memory) == 9 * spec.page_bytes(0)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("layout", ["page", "layer"])
@pytest.mark.parametrize("code", ["int8", "e4m3"])
def test_attention_over_quantised_rows(code: str, layout: str) -> None:
    """Both parts in one format, read as one row: as over the rows that it stands for."""
    form = fa.kv.Format(code, group=8)
    cache = fa.kv.Cache(spec_of(4, (form, form)), 8, max_kv_len=24, layout=layout)  # type: ignore[arg-type]
    attention = fa.BatchAttention(
        fa.Causal(), num_q_heads=HEADS, num_kv_heads=1, head_dim=LATENT + ROTARY,
        head_dim_v=LATENT, v_in_k=True, q_dtype=torch.float32, kv_format=form,
    )  # fmt: skip
    seq, (latent, rotary) = cache.open(range(7)), rows(7, 3)
    q = torch.randn(7, HEADS, LATENT + ROTARY)
    with cache.step([(seq, range(7))]) as step:
        step.plan(attention)
        step.append(0, latent, rotary)
        step.append(1, latent * 2, rotary)
        out = attention.run(q, cache.latents(0), scale=0.3)
        step.commit()
    keys = form.quantize(torch.cat([latent, rotary], -1)).dequantize().squeeze(1).double()
    scores = torch.einsum("qhd,kd->hqk", q.double() * 0.3, keys)
    weights = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    wanted = torch.einsum("hqk,kd->qhd", weights, keys[:, :LATENT])
    assert (out.double() - wanted).abs().max() < 5e-6
    assert sum(m.nbytes for p in cache.pools for m in p.memory) == 9 * cache.spec.page_bytes(0)


@pytest.mark.parametrize("layout", ["page", "layer"])
def test_attention_over_rows_of_two_formats(layout: str) -> None:
    """FlashMLA's rows, with a fork whose last page is copied and a sequence that was suspended."""
    form = fa.kv.Format("e4m3", group=128)
    group = fa.kv.Group((0, 1), 1, 576, 512, HEADS, fa.Causal(), v_in_k=True, kv_format=form)
    spec = fa.kv.Spec((group,), 4, torch.bfloat16)
    cache = fa.kv.Cache(spec, 8, max_kv_len=24, layout=layout)  # type: ignore[arg-type]
    assert sum(m.nbytes for p in cache.pools for m in p.memory) == 9 * spec.page_bytes(0)
    assert spec.page_bytes(0) == 2 * 4 * 656
    attention = fa.BatchAttention(
        fa.Causal(), num_q_heads=HEADS, num_kv_heads=1, head_dim=576, head_dim_v=512, v_in_k=True,
        q_dtype=torch.float32, kv_dtype=torch.uint8,
    )  # fmt: skip
    seq, generator = cache.open(range(9)), torch.Generator().manual_seed(0)
    written: list[list[torch.Tensor]] = [[], []]
    for count in (7, 1):
        with cache.step([(seq, range(count))]) as step:
            step.plan(attention)
            for layer in range(2):
                latent, rotary = (
                    torch.randn(count, 1, n, generator=generator).bfloat16() for n in (512, 64)
                )
                step.append(layer, latent, rotary)
                values = form.quantize(latent).dequantize()
                written[layer].append(torch.cat([values, rotary.float()], -1).squeeze(1))
                q = torch.randn(count, HEADS, 576, generator=generator)
                out = attention.run(q, cache.latents(layer), scale=0.05)
                keys = torch.cat(written[layer]).double()
                scores = torch.einsum("qhd,kd->hqk", q.double() * 0.05, keys)
                kept = torch.ones(count, len(keys), dtype=torch.bool).tril(len(keys) - count)
                weights = scores.masked_fill(~kept, -torch.inf).softmax(-1)
                wanted = torch.einsum("hqk,kd->qhd", weights, keys[:, :512])
                assert (out.double() - wanted).abs().max() < 5e-6
            step.commit()
        if count == 7:
            other = seq.fork()
    seq.suspend()
    seq.resume()
    for one, length in ((other, 7), (seq, 8)):
        table = torch.from_numpy(one.pages().astype("int64"))
        for layer in range(2):
            codes, rotary = cache.tensors(layer)
            parts = (codes.dequantize()[table], rotary[table].float())  # type: ignore[union-attr, index]
            found = torch.cat(parts, -1).reshape(-1, 576)[:length]
            assert torch.equal(found, torch.cat(written[layer])[:length])
    half = fa.kv.Cache(fa.kv.Spec((group,), 4, torch.float16), 2, max_kv_len=8)
    with pytest.raises(fa.InputError, match="no rows of both parts"):
        half.latents(0)  # whose rotary part is no bfloat16


@pytest.mark.parametrize("layout", ["page", "layer"])
@pytest.mark.parametrize("page_size", [1, 3])
def test_parts_of_two_dtypes_hold_what_the_spec_says(page_size: int, layout: str) -> None:
    group = fa.kv.Group((0, 1), 1, 6, kv_format=(fa.kv.Format("int8"), None))
    spec = fa.kv.Spec((group,), page_size, torch.bfloat16)
    cache = fa.kv.Cache(spec, 3, max_kv_len=9, layout=layout)  # type: ignore[arg-type]
    assert sum(m.nbytes for p in cache.pools for m in p.memory) == 4 * spec.page_bytes(0)
    assert spec.page_bytes(0) > 2 * page_size * sum(group.row_bytes(torch.bfloat16))


def test_pairs_of_formats_and_fingerprints() -> None:
    both = spec_of(kv_format=(E4M3, fa.kv.Format("int8")))
    assert both.groups[0].formats == (E4M3, fa.kv.Format("int8"))
    assert spec_of(kv_format=E4M3).groups[0].formats == (E4M3, None)
    plain = fa.kv.Group((0, 1), 1, LATENT + ROTARY, LATENT, HEADS, fa.Causal())
    assert spec_of().fingerprint != fa.kv.Spec((plain,), 4, torch.float32).fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim_v": None}, "needs head_dim_v"), ({"head_dim_v": 48}, "got head_dim_v=48"),
        ({"num_kv_heads": 2}, "num_kv_heads=2 must be 1"), ({"v_in_k": 1}, "v_in_k=1"),
        ({"transform": fa.RoPE()}, "without a transform"),
        ({"kv_format": fa.kv.Format("e4m3", group=48)}, "group=48 does not divide head_dim_v=32"),
    ],
)  # fmt: skip
def test_latent_groups_that_are_none(change: dict[str, object], message: str) -> None:
    given = {"layers": (0,), "num_kv_heads": 1, "head_dim": LATENT + ROTARY, "head_dim_v": LATENT,
             "num_q_heads": HEADS, "v_in_k": True, **change}  # fmt: skip
    with pytest.raises(fa.InputError, match=message):
        fa.kv.Group(**given)  # type: ignore[arg-type]


def test_layers_without_latents() -> None:
    cache = fa.kv.Cache(fa.kv.Spec((fa.kv.Group((0,), 1, 8),)), 2, max_kv_len=9)
    with pytest.raises(fa.InputError, match="needs v_in_k=True"):
        cache.latents(0)
    with pytest.raises(fa.InputError, match="layer"):
        cache.latents(1)


def test_a_cache_without_memory_counts_pages_as_any_other() -> None:
    group = fa.kv.Group((0,), 2, 8, variant=fa.SlidingWindow(8))
    spec = fa.kv.Spec((group, fa.kv.Group((1,), 2, 8, variant=fa.Causal())), 4)
    states = []
    for device in ("meta", torch.device("meta"), "cpu"):
        cache = fa.kv.Cache(spec, 24, max_kv_len=64, device=device)
        seq = cache.open(range(30))
        for new in (list(range(21)), [7], [8], [9]):
            with cache.step([(seq, new)]) as step:
                step.commit()
        child = seq.fork()
        with cache.step([(seq, [1]), (child, [2])]) as step:
            step.commit()
        cache.open(range(20))
        cache.check()
        states.append(cache.stats())
    assert states[0] == states[1] == states[2]
    assert states[0].groups[0].used < states[0].groups[1].used


def test_what_a_cache_without_memory_refuses() -> None:
    spec = fa.kv.Spec((fa.kv.Group((0,), 1, 8),), 4)
    cache = fa.kv.Cache(spec, 4, max_kv_len=16, device="meta")
    seq = cache.open([1, 2])
    with cache.step([(seq, [1, 2])]) as step:
        for ask in (step.paged, lambda: step.append(0, torch.empty(2, 1, 8), torch.empty(2, 1, 8))):
            with pytest.raises(fa.InputError, match='device="meta", which holds no keys'):
                ask()
        step.commit()
    with pytest.raises(fa.InputError, match="suspend"):
        seq.suspend()
    assert not seq.is_suspended and not cache.changing
