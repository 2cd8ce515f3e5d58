"""Small decoders of transformers with random weights, one of each kind of attention layer."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import transformers

from flashattn_jit.integrations import transformers as integration

VOCABULARY = 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 6, "intermediate_size": 64, "max_position_embeddings": 128,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = {"sliding_window": 8, "use_sliding_window": True}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: config and model class names of transformers, and config values."""

    config: str
    model: str
    values: dict[str, Any]
    static_cache: bool = True
    reference: str = "eager"


DECODERS = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", DECODER),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {**DECODER, "sliding_window": 8}),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM",
                    {**DECODER, **WINDOW, "max_window_layers": 1}),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM",
                     {**DECODER, **ALTERNATING, "sliding_window": 8, "query_pre_attn_scalar": 16,
                      "attn_logit_softcapping": 2.0}),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM",
                     {**DECODER, **ALTERNATING, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gpt_oss": Family("GptOssConfig", "GptOssForCausalLM",
                      {**DECODER, **ALTERNATING, "sliding_window": 8, "num_local_experts": 4,
                       "num_experts_per_tok": 2}),
    "cohere2": Family("Cohere2Config", "Cohere2ForCausalLM",
                      {**DECODER, **ALTERNATING, "sliding_window": 8}),
    "llama4": Family("Llama4TextConfig", "Llama4ForCausalLM",
                     {**DECODER, "attention_chunk_size": 8, "num_local_experts": 2,
                      "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
                      "no_rope_layers": [1, 0]}),
    "deepseek_v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM",
                          {**SIZES, "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16,
                           "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
                           "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
                           "topk_group": 1, "moe_intermediate_size": 32,
                           "first_k_dense_replace": 1}),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM",
                   {**{k: v for k, v in DECODER.items() if k != "head_dim"}, "hidden_size": 96,
                    "sliding_window": 8}),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", DECODER),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel",
                   {"vocab_size": VOCABULARY, "n_embd": 96, "n_layer": 2, "n_head": 6,
                    "n_positions": 128, "bos_token_id": 1, "eos_token_id": None,
                    "pad_token_id": 0}),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES),
    "bloom": Family("BloomConfig", "BloomForCausalLM",
                    {"vocab_size": VOCABULARY, "hidden_size": 96, "n_layer": 2, "n_head": 6,
                     "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}),
    "mpt": Family("MptConfig", "MptForCausalLM",
                  {"vocab_size": VOCABULARY, "d_model": 96, "n_layers": 2, "n_heads": 6,
                   "max_seq_len": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}),
    "falcon": Family("FalconConfig", "FalconForCausalLM",
                     {**{k: v for k, v in SIZES.items() if k != "intermediate_size"},
                      "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_mqa": Family("FalconConfig", "FalconForCausalLM",
                         {**{k: v for k, v in SIZES.items() if k != "intermediate_size"},
                          "multi_query": True}),
    "falcon_alibi": Family("FalconConfig", "FalconForCausalLM",
                           {**{k: v for k, v in SIZES.items() if k != "intermediate_size"},
                            "alibi": True, "multi_query": False, "bias": True},
                           # Eager code adds ALiBi twice, to scores and mask; SDPA code once.
                           static_cache=False, reference="sdpa"),
    "gptj": Family("GPTJConfig", "GPTJForCausalLM",
                   {"vocab_size": VOCABULARY, "n_embd": 96, "n_layer": 2, "n_head": 6,
                    "n_positions": 128, "rotary_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
                    "eos_token_id": None}),
    "smollm3": Family("SmolLM3Config", "SmolLM3ForCausalLM",
                      {**DECODER, "no_rope_layers": [1, 0]}),
}  # fmt: skip


def build(family: Family) -> tuple[Any, Any]:
    """(the reference model, the same weights on the engine), with weights large enough to show
    errors."""
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.values)
    config.initializer_range = 0.2
    cls = getattr(transformers, family.model)
    eager = cls._from_config(copy.deepcopy(config), attn_implementation=family.reference)
    eager.eval()
    for name, parameter in eager.named_parameters():
        if "sinks" in name or "norm" in name.lower():
            parameter.data += 0.3 * torch.randn_like(parameter)
    name = integration.register()
    ours = cls._from_config(config, attn_implementation=name).eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours
