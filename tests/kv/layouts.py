"""Small configs of transformers, one of each layout, and what transformers' cache of them holds.

Sizes that a layout tells apart differ, so that none stands for another by chance.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

import flashattn_jit as fa

TOKENS = 24
WINDOW = 8

_SIZES = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
_GQA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 24}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    **_SIZES, "num_key_value_heads": 6, "kv_lora_rank": 40, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "q_lora_rank": 24, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
_GEMMA4 = {
    **_GQA, **_MIXED, "global_head_dim": 48, "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 0,
}  # fmt: skip
_ENCODER = {
    "vocab_size": 256, "d_model": 96, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 6, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0,
    "decoder_start_token_id": 1,
}  # fmt: skip

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, head_dim": ("Llama", _GQA),
    "llama, as many KV heads": ("Llama", {**_SIZES, "num_key_value_heads": None}),
    "mistral, window": ("Mistral", {**_GQA, "sliding_window": WINDOW}),
    "qwen2, windows behind the first layers":
        ("Qwen2", {**_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 3,
                   "max_window_layers": 2, "use_sliding_window": True, "sliding_window": WINDOW}),
    "gemma3, mixed": ("Gemma3Text/Gemma3", {**_GQA, **_MIXED}),
    "gpt_oss, mixed": ("GptOss", {**_GQA, **_MIXED, **_EXPERTS}),
    "llama4, chunks":
        ("Llama4Text/Llama4", {**_GQA, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64,
                               "interleave_moe_layer_step": 2, "num_local_experts": 2,
                               "layer_types": ["chunked_attention", "full_attention"]}),
    "gpt2": ("GPT2/GPT2LMHeadModel", {"vocab_size": 256, "n_embd": 96, "n_layer": 2, "n_head": 6}),
    "gpt_bigcode, one KV head":
        ("GPTBigCode", {"vocab_size": 256, "n_embd": 96, "n_layer": 2, "n_head": 6,
                        "multi_query": True}),
    "falcon, one KV head":
        ("Falcon", {"vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 2,
                    "num_attention_heads": 6, "multi_query": True}),
    "falcon, groups that it repeats":
        ("Falcon", {"vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 2,
                    "num_attention_heads": 6, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma4, two head dims": ("Gemma4Text/Gemma4", _GEMMA4),
    "gemma4, values that are keys": ("Gemma4Text/Gemma4", {**_GEMMA4, "attention_k_eq_v": True}),
    "gemma4, shared keys":
        ("Gemma4Text/Gemma4",
         {**_GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
          "hidden_size_per_layer_input": 8,
          "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3n, shared keys":
        ("Gemma3nText/Gemma3n",
         {**_GQA, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
          "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": 64,
          "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
          "activation_sparsity_pattern": [0.0] * 4}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v2, q_lora_rank None":
        ("DeepseekV2", {**_LATENT, "topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "minicpm3": ("MiniCPM3", {**_LATENT, "dim_model_base": 96}),
    "longcat_flash, two latents a layer":
        ("LongcatFlash",
         {**{k: v for k, v in _LATENT.items() if k != "num_hidden_layers"}, "num_layers": 2,
          "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 1,
          "head_dim": 8}),
    "bart": ("Bart/BartForConditionalGeneration", _ENCODER),
    "whisper":
        ("Whisper/WhisperForConditionalGeneration",
         {**_ENCODER, "max_source_positions": 12, "max_target_positions": 64, "num_mel_bins": 8,
          "bos_token_id": 2, "eos_token_id": 3}),
    "t5":
        ("T5/T5ForConditionalGeneration",
         {"vocab_size": 256, "d_model": 96, "d_kv": 24, "d_ff": 32, "num_layers": 1,
          "num_decoder_layers": 2, "num_heads": 6, "pad_token_id": 0,
          "decoder_start_token_id": 1}),
}  # fmt: skip
"""The names of a config's and a model's class, and the values of the config."""

Held = tuple[int, int, int, bool]
"""Of a layer: KV heads, head dim of keys and of values, and whether it forgets keys."""


def config_of(layout: str) -> PreTrainedConfig:
    """The config of a layout."""
    import transformers

    names, values = LAYOUTS[layout]
    made: PreTrainedConfig = getattr(transformers, f"{names.partition('/')[0]}Config")(**values)
    return made


def model_of(layout: str) -> PreTrainedModel:
    """A model of it with random weights."""
    import transformers

    torch.manual_seed(0)
    config, _, model = LAYOUTS[layout][0].partition("/")
    name = model or config
    cls = getattr(transformers, name if "For" in name or "LM" in name else f"{name}ForCausalLM")
    made: PreTrainedModel = cls._from_config(config_of(layout), attn_implementation="eager").eval()
    return made


def held_by_transformers(model: PreTrainedModel, cross: bool = False) -> list[Held]:
    """The layers that hold keys after a prompt of TOKENS tokens, longer than any window.

    cross: what they hold of the encoder's tokens instead.
    """
    ids = torch.randint(160, 250, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs = {model.main_input_name: ids, "decoder_input_ids": ids}
        if model.main_input_name == "input_features":
            length = 2 * model.config.max_source_positions
            inputs["input_features"] = torch.randn(1, model.config.num_mel_bins, length)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    if hasattr(cache, "cross_attention_cache"):
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    held = [layer for layer in cache.layers if layer.keys is not None]
    return [
        (k.shape[1], k.shape[3], v.shape[3], k.shape[2] < WINDOW)
        for k, v in ((layer.keys, layer.values) for layer in held)
    ]


def held_by_spec(spec: fa.kv.Spec) -> list[Held]:
    """The same of a spec; the parts of a latent row are transformers' keys and values."""
    found = {
        layer: (g.num_kv_heads, *g.part_dims,
                isinstance(g.variant, fa.variants.SlidingWindow | fa.variants.Chunked))
        for g in spec.groups
        for layer in g.layers
    }  # fmt: skip
    return [found[layer] for layer in range(spec.num_layers)]
