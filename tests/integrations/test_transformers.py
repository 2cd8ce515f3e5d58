"""Hugging Face models, all of whose attention layers the engine computes, against eager code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip(
    "transformers",
    minversion="5.23",
    reason="needs the extra [examples]",
)

from flashattn_jit.errors import GradError, InputError, TraceError  # noqa: E402
from flashattn_jit.integrations import transformers as integration  # noqa: E402
from flashattn_jit.integrations._lazy_mask import LazyMask  # noqa: E402
from flashattn_jit.jit.module import default as kernels  # noqa: E402
from tests.harness import rotation  # noqa: E402
from tests.integrations import walk  # noqa: E402
from tests.integrations.decoders import (  # noqa: E402
    DECODERS,
    SIZES,
    VOCABULARY,
    Family,
    build,
)

LENGTH, BATCH = 40, 3


@pytest.fixture
def calls() -> Iterator[list[torch.nn.Module]]:
    """The layers that the engine served."""
    with walk.engine_calls() as served:
        yield served


def tokens() -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (BATCH, LENGTH))


def padding(side: str) -> torch.Tensor:
    """1 for real tokens; the rows have 0, 3 and 17 tokens of padding."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for row, length in enumerate((0, 3, 17)):
        if length:
            mask[row, slice(None, length) if side == "left" else slice(-length, None)] = 0
    return mask


def assert_close(ours: torch.Tensor, eager: torch.Tensor, keep: torch.Tensor | None = None) -> None:
    """Equal within 2e-5 of the largest value, at the positions that `keep` selects."""
    if keep is not None:
        ours, eager = ours[keep], eager[keep]
    assert torch.isfinite(eager).all()
    assert (ours - eager).abs().max() <= 2e-5 * eager.abs().max()


ALIBI = ("bloom", "mpt", "falcon_alibi")
IN_TURN = [*rotation.chosen([name for name in DECODERS if name not in ALIBI], 2), *ALIBI]


@pytest.mark.parametrize("name", IN_TURN)
@torch.no_grad()
def test_decoder_equals_eager(name: str, calls: list[torch.nn.Module]) -> None:
    eager, ours = build(DECODERS[name])
    ids = tokens()
    assert_close(ours(ids).logits, eager(ids).logits)
    assert len(calls) == 2, "every layer is served by the engine"
    for side in ("left", "right"):
        mask = padding(side)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        arguments = {"attention_mask": mask, "position_ids": positions}
        assert_close(ours(ids, **arguments).logits, eager(ids, **arguments).logits, mask.bool())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", IN_TURN)
@torch.no_grad()
def test_decoder_generates_what_eager_does(
    name: str, cache: str, calls: list[torch.nn.Module]
) -> None:
    if cache == "static" and not DECODERS[name].static_cache:
        pytest.skip("ALiBi of this family takes no static cache in transformers")
    eager, ours = build(DECODERS[name])
    ids, mask = tokens()[:, :14], padding("left")[:, :14]
    mask[2] = 1
    mask[2, :9] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True,
                "cache_implementation": "static" if cache == "static" else None}  # fmt: skip
    expected = eager.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **settings), expected)
    assert len(calls) == 2 * 8


@torch.no_grad()
def test_sequences_packed_in_one_row_do_not_see_each_other() -> None:
    eager, ours = build(DECODERS["mistral"])
    positions = torch.cat([torch.arange(13), torch.arange(20), torch.arange(7)])[None]
    ids = tokens()[:1]
    packed = ours(ids, position_ids=positions, use_cache=False).logits
    assert_close(packed, eager(ids, position_ids=positions, use_cache=False).logits)
    alone = ours(ids[:, 13:33]).logits
    assert_close(packed[:, 13:33], alone)


ENCODERS = {
    "bert": Family("BertConfig", "BertModel", SIZES),
    "modernbert": Family("ModernBertConfig", "ModernBertModel",
                         {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 2,
                          "cls_token_id": 1, "sep_token_id": 1, "eos_token_id": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoder_equals_eager(name: str, calls: list[torch.nn.Module]) -> None:
    eager, ours = build(ENCODERS[name])
    ids = tokens()
    assert_close(ours(ids).last_hidden_state, eager(ids).last_hidden_state)
    assert len(calls) == 2
    for side in ("left", "right"):
        mask = padding(side)
        expected = eager(ids, attention_mask=mask).last_hidden_state
        assert_close(ours(ids, attention_mask=mask).last_hidden_state, expected, mask.bool())


@torch.no_grad()
def test_a_compiled_model_breaks_its_graph_and_keeps_its_results() -> None:
    _, ours = build(ENCODERS["bert"])
    compiled = torch.compile(ours, backend="eager")
    ids = tokens()
    for side in ("left", "right"):
        expected = ours(ids, attention_mask=padding(side)).last_hidden_state
        assert_close(compiled(ids, attention_mask=padding(side)).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("config", "model"),
    [("T5Config", "T5ForConditionalGeneration"), ("BartConfig", "BartForConditionalGeneration")],
)
@torch.no_grad()
def test_encoder_decoder_equals_eager(
    config: str, model: str, calls: list[torch.nn.Module]
) -> None:
    values = {"vocab_size": VOCABULARY, "d_model": 96, "d_kv": 16, "d_ff": 64, "num_layers": 2,
              "num_heads": 6, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
              "decoder_ffn_dim": 64, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
              "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
              "eos_token_id": 2, "decoder_start_token_id": 1,
              "forced_eos_token_id": None}  # fmt: skip
    eager, ours = build(Family(config, model, values))
    ids, mask = tokens(), padding("right")
    arguments = {"attention_mask": mask, "decoder_input_ids": ids[:, :11]}
    assert_close(ours(ids, **arguments).logits, eager(ids, **arguments).logits)
    assert len(calls) == 2 * 3, "encoder, decoder and cross attention"
    settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1}
    expected = eager.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **settings), expected)


@torch.no_grad()
def test_vision_encoder_without_a_mask_equals_eager(calls: list[torch.nn.Module]) -> None:
    values = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
              "intermediate_size": 64, "image_size": 24, "patch_size": 4}  # fmt: skip
    eager, ours = build(Family("ViTConfig", "ViTModel", values))
    pixels = torch.randn(2, 3, 24, 24)
    assert_close(ours(pixels).last_hidden_state, eager(pixels).last_hidden_state)
    assert len(calls) == 2


@torch.no_grad()
def test_bool_and_additive_4d_masks_of_the_user() -> None:
    eager, ours = build(DECODERS["gemma2"])
    ids = tokens()
    keep = torch.ones(LENGTH, LENGTH).tril().bool() & (torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.7)
    keep |= torch.eye(LENGTH).bool()
    added = torch.where(keep, torch.randn(LENGTH, LENGTH), torch.finfo(torch.float32).min)
    assert_close(ours(ids, attention_mask=added).logits, eager(ids, attention_mask=added).logits)
    added = torch.where(keep, 0.0, -torch.inf)
    expected = eager(ids, attention_mask=added).logits
    assert_close(ours(ids, attention_mask=added).logits, expected)
    assert_close(ours(ids, attention_mask=keep).logits, expected)


def layer(**values: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in values.items():
        setattr(module, name, value)
    return module


def test_layer_without_a_mask_attends_to_everything_or_says_that_it_is_causal() -> None:
    """A static cache is longer than the prompt that fills it: causal means from the upper left."""
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 33, 16), torch.randn(2, 2, 33, 8)
    bias = torch.randn(1, 4, 9, 33)

    def expected(keys: int, causal: bool, queries: int = 9) -> torch.Tensor:
        mask = bias[:, :, :queries, :keys]
        if causal:
            mask = mask.masked_fill(torch.ones(queries, keys).triu(1).bool(), -torch.inf)
        return torch.nn.functional.scaled_dot_product_attention(
            q[:, :, :queries], k[:, :, :keys], v[:, :, :keys], mask, scale=0.5, enable_gqa=True
        ).transpose(1, 2)

    def ours(module: torch.nn.Module, queries: int = 9, **arguments: Any) -> torch.Tensor:
        out, weights = integration.attention_forward(
            module, q[:, :, :queries], k, v, None, scaling=0.5,
            position_bias=bias[:, :, :queries], **arguments,
        )  # fmt: skip
        assert weights is None
        assert out.is_contiguous()
        return out

    torch.testing.assert_close(ours(layer(is_causal=False)), expected(33, causal=False))
    torch.testing.assert_close(ours(layer(is_causal=False), is_causal=True), expected(9, True))
    torch.testing.assert_close(ours(layer(), is_causal=False), expected(33, causal=False))
    torch.testing.assert_close(ours(layer(), queries=1), expected(33, False, queries=1))
    for module in (layer(), layer(is_causal=True)):
        with pytest.raises(InputError, match="eager attention attends to everything and sdpa is"):
            ours(module)


def lazy(mask_function: Callable[..., Any], **changes: Any) -> LazyMask:
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 6, "q_offset": 2, "kv_offset": 0}
    return integration.lazy_mask(**{**sizes, **changes}, mask_function=mask_function)


def test_lazy_mask_looks_like_a_mask_and_materialises_on_request() -> None:
    from transformers.masking_utils import causal_mask_function

    padded = torch.tensor([[False, True, True, True, True, False, True, False]])
    mask = lazy(causal_mask_function, q_offset=torch.tensor(3), kv_offset=1, attention_mask=padded)
    assert mask.shape == (1, 1, 4, 6)
    assert mask.ndim == 4
    assert mask.contiguous() is mask.clone() is mask.to(torch.float32) is mask
    expected = [[j <= i and bool(padded[0, j]) for j in range(1, 7)] for i in range(3, 7)]
    assert mask.to_dense().tolist() == [[expected]]
    assert integration.lazy_mask(1, 4, 6, attention_mask=mask) is mask
    with pytest.raises(InputError, match="slices its attention mask"):
        mask[:, :, :2]
    for taken_apart in (
        lambda: mask + 1, lambda: 1.0 - mask, lambda: torch.randn(4, 6) + mask, lambda: ~mask,
        lambda: mask < 0, lambda: torch.cat([mask, mask]), lambda: torch.where(mask, 0.0, 1.0),
        lambda: mask.dtype, lambda: mask.masked_fill(mask, 0.0), lambda: mask == 0,
        lambda: mask != 0, lambda: -mask, lambda: mask**2, lambda: list(mask),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"attention mask.*'eager'"):
            taken_apart()
    assert not hasattr(mask, "dtype")


@torch.no_grad()
def test_a_new_padding_neither_retraces_nor_recompiles() -> None:
    _, ours = build(DECODERS["llama"])
    ids = tokens()
    ours(ids, attention_mask=padding("left"))
    before = kernels.counters.misses
    for start in (1, 5, 9):
        mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        mask[1, :start] = 0
        ours(ids, attention_mask=mask)
    assert kernels.counters.misses == before


@torch.no_grad()
def test_an_exported_model_takes_padding_of_other_values() -> None:
    _, ours = build(DECODERS["mistral"])
    ids = tokens()
    given = {"attention_mask": padding("left"), "use_cache": False}
    exported = torch.export.export(ours, (ids,), given, strict=False).module()
    for mask in (padding("left"), padding("right"), torch.ones_like(ids)):
        given["attention_mask"] = mask
        torch.testing.assert_close(
            exported(ids, **given).logits, ours(ids, **given).logits, atol=1e-5, rtol=1e-5
        )


def test_a_mask_that_cannot_be_traced_raises_with_the_reason() -> None:
    def even(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= q if bool(q > k) else k < q

    q = torch.randn(1, 2, 4, 8)
    k = torch.randn(1, 2, 6, 8)
    with pytest.raises(TraceError, match="cannot become a kernel"):
        integration.attention_forward(layer(), q, k, k, lazy(even))


def test_what_is_not_served_is_an_error() -> None:
    q = torch.randn(1, 2, 4, 8)
    forward = integration.attention_forward
    with pytest.raises(InputError, match=r"dropout=0\.1"):
        forward(layer(), q, q, q, None, dropout=0.1)
    with pytest.raises(InputError, match="output_attentions"):
        forward(layer(), q, q, q, None, output_attentions=True)
    with pytest.raises(InputError, match="no paged cache of continuous"):
        forward(layer(), q, q, q, None, cache=object())
    with pytest.raises(InputError, match="attention_mask is of type list; it must be a tensor"):
        forward(layer(), q, q, q, [[True]])
    for shape in ((2, 1, 4, 4), (1, 3, 4, 4), (1, 1, 3, 4), (1, 1, 4, 3), (1, 1, 4, 6), (4, 4)):
        with pytest.raises(InputError, match=r"attention_mask has shape .* must be \[batch=1 or 1"):
            forward(layer(), q, q, q, torch.zeros(shape))
        with pytest.raises(InputError, match="position_bias has shape"):
            forward(layer(is_causal=False), q, q, q, None, position_bias=torch.zeros(shape))
    with pytest.raises(InputError, match="the mask was made for"):
        forward(layer(), q, q, q, lazy(lambda b, h, i, j: j <= i, q_length=1))
    with pytest.raises(InputError, match="the mask was made for"):
        forward(layer(), q, q, q, lazy(lambda b, h, i, j: j <= i))
    with pytest.raises(GradError, match="no_grad"):
        forward(layer(is_causal=False), q.requires_grad_(), q, q, None)


@pytest.mark.parametrize("name", ["block_indices", "indices", "sinks", "head_mask"])
def test_keyword_arguments_that_it_does_not_know_are_refused_by_name(name: str) -> None:
    q = torch.randn(1, 2, 4, 8)
    given = {name: torch.ones(2)}
    with pytest.raises(InputError, match=f"Module passes {name}=, which this integration does not"):
        integration.attention_forward(layer(), q, q, q, None, **given)
    module = layer(is_causal=False)
    expected, _ = integration.attention_forward(module, q, q, q, None)
    unused = {name: None, "position_ids": torch.arange(4), "use_cache": True, "sliding_window": 3,
              "output_attentions": False, "output_router_logits": True}  # fmt: skip
    assert torch.equal(integration.attention_forward(module, q, q, q, None, **unused)[0], expected)


@pytest.mark.parametrize("name", ["flash_jit", "my_sdpa", "paged|x", "user/repository", ""])
def test_names_that_transformers_treats_specially_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="of their own"):
        integration.register(name)


@torch.no_grad()
def test_keys_whose_head_dim_is_not_contiguous() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 8, 6).transpose(2, 3)
    module = layer(is_causal=False)
    out, _ = integration.attention_forward(module, q, k, k, None)
    expected, _ = integration.attention_forward(module, q, k.contiguous(), k.contiguous(), None)
    assert torch.equal(out, expected)


@torch.no_grad()
def test_one_row_of_a_mask_is_every_rows() -> None:
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8)
    padded = torch.tensor([[True] * 7, [False, True, True, False, True, True, True]])
    mask = integration.lazy_mask(
        2, 1, 7, mask_function=lambda b, h, i, j: j >= 0, attention_mask=padded
    )
    out, _ = integration.attention_forward(layer(), q, k, k, mask)
    keep = padded[:, None, None, :]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, keep).transpose(1, 2)
    torch.testing.assert_close(out, expected)


@torch.no_grad()
def test_one_requests_padding_is_every_requests() -> None:
    q, k = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    padded = torch.tensor([[False, True, True, True, False]])
    mask = integration.lazy_mask(
        1, 5, 5, attention_mask=padded, mask_function=lambda b, h, i, j: j >= 0
    )
    out, _ = integration.attention_forward(layer(), q, k, k, mask)
    keep = padded[:, None, None, :]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, keep).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    assert mask in [None, mask]
    assert mask != lazy(lambda b, h, i, j: j >= 0)
