"""Estimates: golden numbers, the bytes of real caches, and FLOP counted pair by pair."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.kv.capacity.families import Expanded

transformers = pytest.importorskip("transformers")

from tests.kv.layouts import LAYOUTS, WINDOW, config_of  # noqa: E402

FORMATS = {
    "none": None,
    "int8": fa.kv.Format("int8"),
    "int8 in groups, zero points": fa.kv.Format("int8", group=4, zero=True),
    "int4": fa.kv.Format("int4", scale_dtype=torch.float16),
}


SINKS = fa.variant(mask_mod=lambda b, h, q, k: (k < 2) | (q - k < 5), name="Sinks")


def llama(num_layers: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> object:
    return transformers.LlamaConfig(
        num_hidden_layers=num_layers, num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads, hidden_size=num_q_heads * head_dim,
    )  # fmt: skip


def test_golden_numbers() -> None:
    """Of releases: bytes of a token in bf16, from their papers and model cards."""
    for config, token_bytes in (
        (transformers.DeepseekV3Config(), 70_272),
        (llama(80, 64, 8, 128), 327_680),  # Qwen2.5-72B
        (llama(126, 128, 8, 128), 516_096),  # Llama 3.1 405B
        (llama(32, 32, 8, 128), 131_072),  # Llama 3 8B
    ):
        assert fa.kv.estimate(config, 4096).token_bytes == token_bytes
    found = fa.kv.estimate(transformers.DeepseekV3Config(), 131_072, budget_bytes=80 << 30)
    assert f"{found.sequence_bytes / 2**30:.3f}" == "8.578"
    assert found.max_batch == 9
    assert f"{found.intensity:.1f}" == "241.8"  # 2 * 128 * 1088 FLOP for 1152 bytes
    assert found.absorption is not None and found.absorption.break_even_q_len == 171
    latents = fa.kv.Format("e4m3", group=128)
    found = fa.kv.estimate(transformers.DeepseekV3Config(), 4096, kv_format=latents)
    assert found.groups[0].row_bytes == 656


def grow(cache: fa.kv.Cache, sequences: list[fa.kv.Sequence], kv_len: int) -> None:
    """All sequences to kv_len, token by token, in common steps."""
    for n in range(kv_len):
        with cache.step([(seq, [n]) for seq in sequences]) as step:
            step.commit()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimates_are_the_bytes_of_a_real_cache(layout: str, kv_format: str) -> None:
    config = config_of(layout)
    sizes = {"page_size": 3, "kv_format": FORMATS[kv_format], "dtype": torch.float16}
    parts = [(False, 29)]
    cross_len = 7 if getattr(config, "is_encoder_decoder", False) else 0
    if cross_len:
        parts.append((True, cross_len))
    found = fa.kv.estimate(config, 29, batch=2, cross_len=cross_len, **sizes)
    num_bytes, counts = 0, [2 * g.pages for g in found.groups]
    for cross, length in parts:
        spec = fa.kv.Spec.from_config(config, cross=cross, **sizes)
        own, counts = counts[: len(spec.groups)], counts[len(spec.groups) :]
        assert cross or own == [*found.num_pages]
        cache = fa.kv.Cache(spec, own, max_kv_len=64)
        num_bytes += sum(m.nbytes for p in cache.pools for m in p.memory)
        grow(cache, [cache.open([0], publish=False) for _ in range(2)], length)
        for group in range(len(own)):  # none can do with fewer
            fewer = [n - (g == group) for g, n in enumerate(own)]
            cache = fa.kv.Cache(spec, fewer, max_kv_len=64, device="meta")
            with pytest.raises(fa.OutOfPages):
                grow(cache, [cache.open([0], publish=False) for _ in range(2)], length)
    assert found.cache_bytes == num_bytes and not counts


@pytest.mark.parametrize(
    "variant",
    [fa.Causal(), fa.SlidingWindow(8), fa.SlidingWindow(10), fa.Chunked(8), fa.Chunked(6),
     SINKS],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("reclaim", ["holes", "compact", "never"])
def test_pages_and_keys_at_every_length(variant: fa.Variant, reclaim: str) -> None:
    group = fa.kv.Group((0, 1), 2, 8, 4, 6, variant & fa.Causal(), reclaim=reclaim)  # type: ignore[arg-type]
    spec = fa.kv.Spec((group,), 4, torch.float32)
    mask = group.variant
    assert mask is not None
    cache = fa.kv.Cache(spec, 20, max_kv_len=64)
    seq, most = cache.open([0], publish=False), 0
    for kv_len in range(40):
        found = fa.kv.estimate(spec, kv_len)
        (one,) = found.groups
        most = max(most, cache.pools[0].num_used)
        assert one.pages == most, kv_len
        length = seq.group_len(0)
        q, keys = torch.tensor(length - 1), torch.arange(length)
        hook = mask.hooks()["mask_mod"]
        seen = sum(bool(hook(torch.tensor(0), torch.tensor(0), q, k)) for k in keys)
        assert one.keys == seen, kv_len
        assert one.decode_bytes == 2 * seen * 2 * (8 + 4) * 4
        assert one.decode_flops == 2 * seen * 6 * 2 * (8 + 4)
        with cache.step([(seq, [kv_len])]) as step:
            most = max(most, cache.pools[0].num_used)
            step.commit()


@pytest.mark.parametrize("reclaim", ["holes", "compact"])
def test_pages_that_later_queries_read_again(reclaim: str) -> None:
    """However few keys there are so far: the cache does not know that no query follows."""
    mask = fa.variant(mask_mod=lambda b, h, q, k: (k <= q) & ((q - k) % 64 == 0) & (q - k < 1024))
    spec = fa.kv.Spec((fa.kv.Group((0,), 1, 8, variant=mask, reclaim=reclaim),), 16)  # type: ignore[arg-type]
    for kv_len in (20, 40, 60, 130):
        found = fa.kv.estimate(spec, kv_len)
        cache = fa.kv.Cache(spec, [*found.num_pages], max_kv_len=4096, device="meta")
        seq = cache.open([1], publish=False)
        for token in range(kv_len):
            with cache.step([(seq, [token])]) as step:
                step.commit()


def test_a_step_of_a_batch() -> None:
    found = fa.kv.estimate(llama(2, 8, 2, 16), 30, batch=3, page_size=8, dtype=torch.float32)
    (group,) = found.groups
    assert (group.kind, group.pages, group.row_bytes) == ("GQA 4, Causal", 4, 2 * 2 * 16 * 4)
    assert found.held_bytes == 3 * 4 * 8 * 2 * 256
    assert found.rounding_bytes == 3 * 2 * 2 * 256  # 2 slots of 2 layers
    assert found.cache_bytes == found.held_bytes + 8 * 2 * 256
    assert found.decode_bytes == 3 * 30 * 2 * 256
    assert found.intensity == 2 * 8 * 32 / 256
    kinds = [fa.kv.estimate(llama(1, 8, n, 16), 1).groups[0].kind.split(",")[0] for n in (8, 4, 1)]
    assert kinds == ["MHA", "GQA 2", "MQA"]


@pytest.mark.parametrize("budget", [1, 4 * 8 * 512, 10 * 8 * 512, 100 * 8 * 512])
def test_the_largest_batch_fills_the_budget(budget: int) -> None:
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    found = fa.kv.estimate(config, 30, page_size=8, budget_bytes=budget)
    assert found.max_batch is not None
    for more, fits in ((0, True), (1, False)):
        batch = found.max_batch + more
        if batch:
            made = fa.kv.estimate(config, 30, batch, page_size=8)
            cache = fa.kv.Cache(made.spec, made.num_pages, max_kv_len=64)
            num_bytes = sum(m.nbytes for p in cache.pools for m in p.memory)
            assert (num_bytes <= budget) == fits


def test_lengths_of_0() -> None:
    found = fa.kv.estimate(transformers.DeepseekV3Config(), 0, budget_bytes=1 << 30)
    assert (found.held_bytes, found.decode_bytes, found.intensity, found.max_batch) == (
        0,
        0,
        0.0,
        0,
    )
    assert found.absorption is None
    assert "70,272" in str(found)


def pair_by_pair(sizes: Expanded, q_len: int, kv_len: int, absorbed: bool) -> int:
    """FLOP of one layer, each matrix product and each pair of query and key counted by itself."""
    heads, latent, nope, rope, v = sizes
    total = 0
    for _ in range(q_len if absorbed else kv_len):
        total += heads * (2 * nope * latent + 2 * latent * v)
    for i in range(q_len):
        keys = kv_len - q_len + i + 1
        width = latent + rope + latent if absorbed else nope + rope + v
        total += heads * keys * 2 * width
    return total


@pytest.mark.parametrize("kv_len", [1, 7, 40])
@pytest.mark.parametrize("latent", [4, 16, 40])
def test_what_absorbing_costs(latent: int, kv_len: int) -> None:
    config = transformers.DeepseekV3Config(
        num_hidden_layers=1, num_attention_heads=3, kv_lora_rank=latent, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12,
    )  # fmt: skip
    costs = fa.kv.estimate(config, kv_len).absorption
    assert costs is not None and costs.sizes == (3, latent, 16, 8, 12)
    assert costs.expanded_token_bytes == 3 * (16 + 8 + 12) * 2
    flops = {
        absorbed: [pair_by_pair(costs.sizes, q, kv_len, absorbed) for q in range(1, kv_len + 1)]
        for absorbed in (False, True)
    }
    for absorbed in (False, True):
        assert [costs.flops(q, absorbed) for q in range(1, kv_len + 1)] == flops[absorbed]
    cheaper = [q for q in range(1, kv_len + 1) if flops[False][q - 1] <= flops[True][q - 1]]
    assert costs.break_even_q_len == (cheaper[0] if cheaper else None)
    assert (latent == 4) == (costs.break_even_q_len is None)


def test_reports(tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = fa.kv.estimate(config_of("bart"), 100, cross_len=20, budget_bytes=1 << 20)
    assert "cross, MHA" in str(found) and "1 MiB hold" in str(found)
    text = str(fa.kv.estimate(config_of("gemma3, mixed"), 100))
    assert "GQA 3, SlidingWindow" in text and "GQA 3, Causal" in text
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(fa.InputError, match="plot="):
        found.plot(tmp_path / "a.nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_len": -1}, "kv_len=-1"), ({"kv_len": 2.0}, "kv_len"), ({"batch": 0}, "batch=0"),
        ({"budget_bytes": 0}, "budget_bytes=0"), ({"page_size": 0}, "page_size=0"),
        ({"cross_len": 3}, "cross_len=3, but the model's layers read no encoder"),
        ({"config": None}, "the config has no num_hidden_layers"),
        ({"config": fa.kv.Spec((fa.kv.Group((0,), 1, 8),)), "kv_format": fa.kv.Format("int8")},
         "kv_format goes with a config"),
        ({"kv_format": fa.kv.Format("int8", group=5)}, "group=5 does not divide head_dim"),
    ],
)  # fmt: skip
def test_what_has_no_estimate(change: dict[str, object], message: str) -> None:
    given = {"config": llama(1, 2, 2, 8), "kv_len": 9, **change}
    with pytest.raises(fa.InputError, match=message):
        fa.kv.estimate(**given)  # type: ignore[arg-type]


def test_tensors_on_another_default_device_change_nothing() -> None:
    config = config_of("gemma3, mixed")
    wanted = fa.kv.estimate(config, 100)
    with torch.device("meta"):
        assert str(fa.kv.estimate(config, 100)) == str(wanted)
