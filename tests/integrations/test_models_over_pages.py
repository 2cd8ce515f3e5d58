"""Models that run over pages only within limits, or not: served right or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", minversion="5.23", reason="needs the extra [examples]"
)

import flashattn_jit as fa  # noqa: E402
from flashattn_jit.errors import InputError  # noqa: E402
from flashattn_jit.integrations._paged_rows import check_mask  # noqa: E402
from flashattn_jit.integrations.transformers import (  # noqa: E402
    LazyMask,
    PagedCache,
    generate_batch,
    register,
)
from tests.integrations.decoders import DECODERS, VOCABULARY, Family, build  # noqa: E402

NEW = 8
LIMIT = 24
SHORT_FACTORS = {"rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 8,
                 "long_factor": [4.0] * 8, "original_max_position_embeddings": LIMIT}  # fmt: skip
ROPES = {
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
                "max_position_embeddings": LIMIT},
    "longrope": {"rope_parameters": {"rope_type": "longrope", **SHORT_FACTORS},
                 "max_position_embeddings": 96},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def prompt(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    tokens: list[int] = torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()
    return tokens


def alone(model: Any, tokens: list[int], **options: Any) -> list[int]:
    found = model.generate(
        torch.tensor([tokens]), max_new_tokens=NEW, do_sample=False, **options
    )[0, len(tokens) :]  # fmt: skip
    return found.tolist()  # type: ignore[no-any-return]


def changed(name: str, **values: Any) -> tuple[Any, Any]:
    family = DECODERS[name]
    return build(Family(family.config, family.model, {**family.values, **values}))


def bart(**values: Any) -> tuple[Any, Any]:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2,
             "decoder_layers": 2, "init_std": 0.2, "pad_token_id": 0, "eos_token_id": None,
             "forced_eos_token_id": None}  # fmt: skip
    return build(Family("BartConfig", "BartForCausalLM", {**sizes, **values}))


def test_a_model_that_counts_positions_itself() -> None:
    """Rows of several requests are refused; its own loop is served."""
    eager, ours = bart()
    with pytest.raises(InputError, match=r"takes no position_ids.*use model\.generate"):
        generate_batch(ours, [prompt(5), prompt(9)], max_new_tokens=NEW)
    wanted = alone(eager, prompt(9))
    assert alone(ours, prompt(9), past_key_values=PagedCache.for_model(ours, 100)) == wanted


@pytest.mark.parametrize("kind", list(ROPES))
def test_frequencies_that_depend_on_the_length(kind: str) -> None:
    """Requests that would change those of others are refused. What transformers remembers of a long
    request does not matter to the next one."""
    eager, ours = changed("llama", **ROPES[kind])
    long, short = prompt(LIMIT + 9), [prompt(5), prompt(9), prompt(LIMIT + 1 - NEW)]
    for tokens in (long, short[0]):
        cache = PagedCache.for_model(ours, 100)
        assert alone(ours, tokens, past_key_values=cache) == alone(eager, tokens)
    ours.generate(torch.tensor([long]), max_new_tokens=NEW)
    wanted = [alone(eager, tokens) for tokens in short]
    results = generate_batch(ours, short, max_new_tokens=NEW, max_step_tokens=16)
    assert [r.tokens for r in results] == wanted
    with pytest.raises(InputError, match=f"rotary_emb .* more than {LIMIT} tokens.*longest .* 25"):
        generate_batch(ours, [*short, prompt(LIMIT + 2 - NEW)], max_new_tokens=NEW)


def test_a_padded_batch_crosses_the_limit() -> None:
    """All rows change their frequencies at once, as with transformers' cache."""
    eager, ours = changed("llama", **ROPES["dynamic"])
    ids = torch.tensor([[0] * 10 + prompt(8), prompt(18)])
    given = {"attention_mask": (ids > 0).long(), "max_new_tokens": 16, "do_sample": False}
    cache = PagedCache.for_model(ours, 100)
    assert torch.equal(eager.generate(ids, **given),
                       ours.generate(ids, past_key_values=cache, **given))  # fmt: skip


def test_phi3_begins_again_with_a_cache_of_its_own() -> None:
    """Where the prompt crosses the limit, transformers drops the cache for one without pages."""
    factors = {**SHORT_FACTORS, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    eager, ours = changed(
        "phi3", sliding_window=None, original_max_position_embeddings=LIMIT,
        rope_parameters={"rope_type": "longrope", **factors},
    )  # fmt: skip
    cache = PagedCache.for_model(ours, 100)
    tokens = prompt(LIMIT - 3)
    assert alone(ours, tokens, past_key_values=cache) == alone(eager, tokens)
    cache.reset()
    cache.pages.check()
    assert alone(ours, prompt(5), past_key_values=cache) == alone(eager, prompt(5))


def test_queries_that_are_scaled_by_position() -> None:
    """Llama 4: served while no position of a step reaches the scale's first one."""
    eager, ours = changed("llama4", floor_scale=32, attn_scale=2.0, attn_temperature_tuning=True)
    tokens = [prompt(5), prompt(11)]
    results = generate_batch(ours, tokens, max_new_tokens=NEW, max_step_tokens=13)
    assert [r.tokens for r in results] == [alone(eager, x) for x in tokens]
    with pytest.raises(InputError, match=r"floor_scale=32 .* reduce max_step_tokens"):
        generate_batch(ours, tokens, max_new_tokens=NEW, max_step_tokens=14)
    cache = PagedCache.for_model(ours, 100)
    assert alone(ours, prompt(40), past_key_values=cache) == alone(eager, prompt(40))


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_another_number_of_layers(layers: int) -> None:
    _, ours = build(DECODERS["llama"])
    spec = fa.kv.Spec((fa.kv.Group(range(layers), 2, 16, variant=fa.Causal()),), 4, torch.float32)
    pages = fa.kv.Cache(spec, 50, max_kv_len=64)
    cache = PagedCache(pages)
    message = f"the model has 2 layers, and the cache's spec {layers}; .*from_config"
    with pytest.raises(InputError, match=message):
        alone(ours, prompt(9), past_key_values=cache)
    pages.check()
    assert not pages.sequences
    with pytest.raises(InputError, match=message):
        generate_batch(ours, [prompt(9)], max_new_tokens=NEW, cache=pages)
    pages.check()
    assert not pages.sequences


def test_the_layers_are_the_decoders() -> None:
    eager, ours = bart(encoder_layers=3, decoder_layers=1)
    cache = PagedCache.for_model(ours, 100)
    assert cache.pages.spec.num_layers == 1
    assert alone(ours, prompt(9), past_key_values=cache) == alone(eager, prompt(9))


def cache_of_two(heads: int = 4, head_dim: int = 8) -> PagedCache:
    spec = fa.kv.Spec((fa.kv.Group((0, 1), heads, head_dim, variant=fa.Causal()),), 4,
                      torch.float32)  # fmt: skip
    return PagedCache(fa.kv.Cache(spec, 80, max_kv_len=64))


def test_models_with_an_encoder() -> None:
    sizes = {"vocab_size": VOCABULARY, "decoder_start_token_id": 2}
    t5 = transformers.T5Config(**sizes, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    both = transformers.BartConfig(
        **sizes, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_layers=2, decoder_layers=2,
    )  # fmt: skip
    for config, name in ((t5, "T5"), (both, "Bart")):
        cls = getattr(transformers, f"{name}ForConditionalGeneration")
        model = cls._from_config(copy.deepcopy(config), attn_implementation=register()).eval()
        with pytest.raises(InputError, match="this model has an encoder"):
            PagedCache.for_model(model, 100)
        cache = cache_of_two()
        with pytest.raises(InputError, match=r"an encoder|cross attention"):
            model.generate(torch.tensor([prompt(9)]), max_new_tokens=3, past_key_values=cache)
        cache.pages.check()
        assert not cache.pages.sequences


def test_a_position_bias_of_queries_and_keys() -> None:
    """T5's, in its decoder without an encoder."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
        is_decoder=True, is_encoder_decoder=False,
    )  # fmt: skip
    from transformers.models.t5.modeling_t5 import T5Stack

    config._attn_implementation = register()
    stack = T5Stack(config).eval()
    stack.set_input_embeddings(torch.nn.Embedding(VOCABULARY, 32))
    cache = cache_of_two()
    with pytest.raises(InputError, match=r"adds a bias of shape \[1, 4, 9, 9\].*on the query"):
        stack(torch.tensor([prompt(9)]), past_key_values=cache, use_cache=True)
    cache.pages.check()
    assert not cache.pages.sequences


def test_a_mask_that_reads_tensors_of_the_forward_pass() -> None:
    """As that of Gemma 4, by blocks of image tokens."""
    blocks = torch.zeros(9, dtype=torch.bool)
    mask = LazyMask(1, 9, 9, 0, 0, lambda b, h, q_idx, kv_idx: blocks[kv_idx], None)
    with pytest.raises(InputError, match="layer 1: the model's mask reads a tensor"):
        check_mask(cache_of_two().pages, 1, mask, {0: 0}, range(9))


@pytest.mark.parametrize("row", [0, 1])
def test_a_mask_that_depends_on_the_tokens_of_one_row(row: int) -> None:
    """Two tokens of an image that see each other, as in Gemma 3, in a cache without room left:
    all positions of the mask's tensor exist."""
    block = torch.full((2, 64), -1)
    block[row, 40:42] = 0

    def mask_function(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        same = (block[b, q_idx] == block[b, kv_idx]) & (block[b, q_idx] >= 0)
        return (q_idx >= kv_idx) | same

    mask = LazyMask(2, 64, 64, 0, 0, mask_function, None)
    pages = cache_of_two().pages
    with pytest.raises(InputError, match="the model's mask keeps key 41 of query 40"):
        check_mask(pages, 1, mask, {0: 0, 1: 0}, range(64))
    block[row] = -1
    check_mask(pages, 1, mask, {0: 0, 1: 0}, range(64))
