"""Small models of any type of transformers: the type's config class with fewer, narrower layers.

`candidates(model_type)` replaces sizes of a config and its parts by name. The second candidate, for
families whose sizes depend on each other in a way that names do not show, has few layers with the
family's own widths.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCABULARY = 256
FIRST_WORD = 160
"""Tokens below it are special tokens: images, ends of text, padding."""

_HEADS, _KV_HEADS, _HEAD_DIM, _ROPE_DIM, _HIDDEN, _MLP = 4, 2, 16, 8, 64, 96
LIMIT = 200_000_000
"""Models with more parameters are not built."""

_LAYERS = frozenset(
    """
    num_hidden_layers num_layers n_layers n_layer encoder_layers decoder_layers num_encoder_layers
    num_decoder_layers num_block_layers speech_encoder_layers speech_decoder_layers
    t2u_encoder_layers t2u_decoder_layers text_encoder_num_layers resampler_layers
    perceiver_resampler_num_layers num_global_layers num_sparse_encoder_layers depth num_blocks
    num_self_attends_per_block resampler_depth l_layers x_layers r_layers decoder_num_hidden_layers
    num_nextn_predict_layers num_mtp_layers
    """.split()
)
_WIDTHS = (
    (_HEADS, """
    num_attention_heads num_heads num_head n_heads n_head attention_heads encoder_attention_heads
    decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
    decoder_num_attention_heads encoder_num_attention_heads resampler_heads resampler_n_heads
    text_num_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads
    speech_encoder_attention_heads num_cross_attention_heads num_self_attention_heads
    swa_num_attention_heads
    """),
    (_KV_HEADS, """
    num_key_value_heads num_kv_heads n_kv_heads kv_n_heads swa_num_key_value_heads
    num_key_value_attention_heads num_global_key_value_heads
    """),
    (_HEAD_DIM, """
    head_dim swa_head_dim global_head_dim attention_head_dim attention_head_size d_head d_kv
    resampler_head_dim kv_channels v_head_dim swa_v_head_dim
    """),
    (_HIDDEN, """
    hidden_size hidden_dim embedding_size embedding_dim embed_dim embed_size d_model n_embd dim
    emb_dim encoder_hidden_size decoder_hidden_size encoder_hidden_dim decoder_hidden_dim
    projection_dim word_embed_proj_dim out_hidden_size text_hidden_size vision_hidden_size
    thinker_hidden_size output_dim projector_hidden_size cross_attention_hidden_size
    vision_output_dim image_text_hidden_size input_embedding_size output_hidden_size
    backbone_hidden_size shared_expert_hidden_size
    """),
    (_MLP, "d_ff n_inner ffn_dim mlp_dim dim_feedforward d_inner intermediate_size_mlp"),
    (24, "q_lora_rank qk_head_dim"),
)  # fmt: skip
"""Sizes that must fit one another, by name."""

_COUNTS = (
    (_ROPE_DIM, "qk_rope_head_dim rotary_dim"),
    (16, "qk_nope_head_dim kv_lora_rank o_lora_rank"),
    (4, """
    num_experts n_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts
    """),
    (2, """
    num_experts_per_tok moe_topk moe_k top_k_experts moe_top_k num_experts_per_token
    num_selected_experts index_topk_blocks
    """),
    (1, "n_group topk_group n_groups num_expert_group first_k_dense_replace"),
    (8, """
    sliding_window sliding_window_size window_size attention_window attention_chunk_size
    local_attention index_topk keep_window_size lsh_attn_chunk_length local_attn_chunk_length
    patch_size
    """),
    (4, "index_block_size index_kpool"),
    (128, """
    max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx max_source_positions
    max_target_positions seq_length max_text_positions context_length
    """),
    (64, "original_max_position_embeddings"),
    (32, "image_size"),
)  # fmt: skip
"""Sizes that stand alone, by name."""


def _by_name(sizes: tuple[tuple[int, str], ...]) -> dict[str, int]:
    return {name: size for size, names in sizes for name in names.split()}


_WIDTH_OF, _COUNT_OF = _by_name(_WIDTHS), _by_name(_COUNTS)
_SPECIAL = re.compile(r"\w*_(token_id|token_index|start_id|end_id|id|token_ids)$")


class CannotBuildError(Exception):
    """No small model of this type could be built or run; the message has the reason."""


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model type made small: what to build, and how it is called."""

    model_type: str
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig | None
    width: str  # "narrow" or "own widths"
    failure: str = ""

    def build(self, implementation: str) -> PreTrainedModel:
        """The model with random weights that depend only on its shapes."""
        torch.manual_seed(0)
        config = copy.deepcopy(self.config)
        model = self.model_class._from_config(config, attn_implementation=implementation)
        return enlarge(model.eval())


def enlarge(model: PreTrainedModel) -> PreTrainedModel:
    """Makes weights so large that attention affects the outputs, and sinks and norms random."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            noise *= min(0.25, 1.6 / parameter[0].numel() ** 0.5)
            parameter.data += noise.to(parameter.dtype)
        else:
            parameter.data += 0.2 * noise.to(parameter.dtype)
    return model


_COMPUTED = (
    "model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path",
    "out_features", "out_indices", "stage_names",
)  # fmt: skip
"""Fields of a config's dict that its constructor computes."""


def _layer_picks(values: dict[str, Any], layers: int) -> list[int]:
    """Indices of layers of every kind, by the config's lists with one entry for each layer."""
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == layers]
    kinds: dict[str, int] = {}
    for index in range(layers):
        kinds.setdefault(repr([entries[index] for entries in lists]), index)
    picks = sorted(kinds.values())[:4]
    return picks if len(picks) > 1 else list(range(min(2, layers)))


def _shrunk(config: PreTrainedConfig, narrow: bool, ids: Iterator[int]) -> PreTrainedConfig:
    values = config.to_dict()
    for key in _COMPUTED:
        values.pop(key, None)
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            values[key] = _shrunk(part, narrow, ids).to_dict()
    old = dict(values)
    layers = values.get(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    picks = list(range(2))
    if isinstance(layers, int) and layers > 2:
        picks = _layer_picks(values, layers)
        for key, entries in values.items():
            if isinstance(entries, list) and len(entries) == layers:
                values[key] = [entries[index] for index in picks]
        _pick_overrides(values, picks)
    for key, value in list(values.items()):
        values[key] = _smaller(key, value, len(picks), narrow, ids, old)
    if (
        narrow
        and _has_mrope(config)
        and "full_attention" not in (values.get("rope_parameters") or {})
    ):
        _set_mrope(values)
    return type(config)(**{**values, **_BY_HAND.get(config.model_type, {})})


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}
_BY_HAND: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": _HEADS},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "emu3_text_model": {"num_hidden_layers": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron": {"num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes that cannot be derived from names and defaults, by model type."""


def _has_mrope(config: PreTrainedConfig) -> bool:
    """Whether the family's rotary embedding has sections for time, height and width."""
    try:
        modeling = importlib.import_module(
            type(config).__module__.replace("configuration_", "modeling_")
        )
        return "mrope_section" in inspect.getsource(modeling) and hasattr(config, "rope_parameters")
    except (ImportError, OSError):
        return False


def _set_mrope(values: dict[str, Any]) -> None:
    given = values.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
    part = given.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    pairs = int(_HEAD_DIM * part) // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    values["rope_parameters"] = {**given, "mrope_section": sections}


def _pick_overrides(values: dict[str, Any], picks: list[int]) -> None:
    """Keeps the config's overrides of the layers that remain, under their new indices."""
    overrides = values.get("per_layer_config")
    if isinstance(overrides, dict):
        by_layer = {int(index): override for index, override in overrides.items()}
        values["per_layer_config"] = {
            new: {key: _size_of(key, value, True) for key, value in by_layer[index].items()}
            for new, index in enumerate(picks)
            if index in by_layer
        }


def _size_of(key: str, value: Any, narrow: bool) -> Any:
    """The small size for a field's name, at most `value`."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if "vocab_size" in key:
        return min(value, VOCABULARY)
    if narrow and key.endswith(
        ("intermediate_size", "intermediate_dim", "ffn_hidden_size", "ffn_dim")
    ):
        return min(value, _MLP)
    return min(value, _COUNT_OF.get(key, value), _WIDTH_OF.get(key, value) if narrow else value)


def _smaller(
    key: str, value: Any, layers: int, narrow: bool, ids: Iterator[int], old: dict[str, Any]
) -> Any:
    if _SPECIAL.fullmatch(key):
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return next(ids)
        if isinstance(value, list) and value and all(isinstance(entry, int) for entry in value):
            return [next(ids) for _ in value]
        return value
    if isinstance(value, int) and not isinstance(value, bool) and key in _LAYERS:
        return min(value, layers)
    if not narrow:
        return _size_of(key, value, narrow)
    heads = old.get("num_attention_heads")
    if key == "vocab_size":
        return VOCABULARY
    if key == "num_key_value_heads" and (value is None or value == heads):
        return None if value is None else _HEADS
    if key == "head_dim":
        if value is not None and value == old.get("qk_rope_head_dim"):
            return _ROPE_DIM
        return _HEAD_DIM
    if key == "num_experts_per_tok":
        return 2
    if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        width = old.get("head_dim") or (old.get("hidden_size", 0) // heads if heads else 0)
        return _rope(value, width)
    return _size_of(key, value, narrow)


def _rope(values: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Changes parameters of rotary embeddings from heads of `head_dim` to heads of `_HEAD_DIM`."""
    changed = dict(values)
    for key, value in values.items():
        if isinstance(value, dict):
            changed[key] = _rope(value, head_dim)
        elif key == "mrope_section" and head_dim:
            pairs = max(len(value), sum(value) * _HEAD_DIM // head_dim)
            share = [pairs // len(value)] * len(value)
            changed[key] = [pairs - sum(share[1:]), *share[1:]]
        elif key in ("short_factor", "long_factor"):
            changed[key] = value[: _HEAD_DIM // 2]
        elif key == "original_max_position_embeddings":
            changed[key] = 64
    return changed


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The model class of a config with the most functions: one that generates, else the base."""
    both = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )
    decoders = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    if getattr(config, "is_encoder_decoder", False):
        mappings = both
    elif getattr(config, "is_decoder", None) is False:
        mappings = ()
    else:
        mappings = decoders if not config.sub_configs else decoders[::-1]
    for mapping in (
        *mappings,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        modeling_auto.MODEL_MAPPING,
    ):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None


def candidates(model_type: str) -> Iterator[Tiny]:
    """Small configurations of a type, narrowest first."""
    config_class = CONFIG_MAPPING[model_type]
    try:
        model_class = model_class_of(config_class())
    except Exception as error:
        raise CannotBuildError(f"its config has no defaults: {line(error)}") from error
    if model_class is None:
        raise CannotBuildError("transformers has no model of its own for this config")
    for narrow in (True, False):
        try:
            config = _shrunk(config_class(), narrow, iter(range(1, FIRST_WORD)))
        except Exception as error:
            yield Tiny(
                model_type, model_class, None, "narrow" if narrow else "own widths", line(error)
            )
        else:
            yield Tiny(model_type, model_class, config, "narrow" if narrow else "own widths")


def line(error: Exception) -> str:
    text = re.sub(r"/\S+/", "", " ".join(str(error).split()))  # no paths of one machine
    return f"{type(error).__name__}: {text[:200]}"


def parameters(tiny: Tiny) -> int:
    with torch.device("meta"):
        model = tiny.model_class._from_config(
            copy.deepcopy(tiny.config), attn_implementation="eager"
        )
    return sum(p.numel() for p in model.parameters())
