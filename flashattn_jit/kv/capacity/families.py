"""What each layer of a model stores for a token, from its Hugging Face config.

`tests/kv/capacity/test_families.py` and `tests/full/test_kv_families.py` compare these layouts with
the keys and values that transformers' own cache holds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from ...errors import InputError
from ...ops.arguments.checks import check_int, shown

FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
_LENGTHS = {WINDOW: "sliding_window", CHUNK: "attention_chunk_size"}

LATENT_FAMILIES = frozenset(
    """
    axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 longcat_flash minicpm3 mistral4 youtu
    """.split()
)
"""Families whose layers cache one latent row a token (multi-head latent attention)."""

_DECODER_SIZES = {
    **dict.fromkeys(
        "bart blenderbot blenderbot-small marian mbart mvp pegasus plbart whisper".split(),
        ("decoder_layers", "decoder_attention_heads", "d_model", None),
    ),
    **dict.fromkeys(
        "mt5 t5".split(), ("num_decoder_layers", "num_attention_heads", "d_model", "d_kv")
    ),
}
"""Families with an encoder: their names of num_hidden_layers, num_attention_heads, hidden_size and
head_dim of the decoder."""

ENCODER_FAMILIES = frozenset(_DECODER_SIZES)
"""Families whose decoder layers read an encoder's keys as well, unless they stand alone."""

FAMILIES = (
    LATENT_FAMILIES
    | ENCODER_FAMILIES
    | frozenset(
        """
    afmoe apertus arcee aria_text beam biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl
    cwm diffllama doge dots1 emu3_text_model ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon
    flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text git glm
    glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 llama llama4_text
    mellum minimax_m2 ministral ministral3 mistral mixtral mllama_text_model modernbert-decoder
    moshi mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe
    qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text
    seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm
    """.split()
    )
)
"""Model types of transformers whose layout is known. Others are an error, never a guess."""


class Layer(NamedTuple):
    """What one layer stores for a token, and which keys its mask leaves.

    kind: `FULL`, `WINDOW` or `CHUNK`; length: of the window or chunk, 0 for none. Dims are those of
    an `fa.kv.Group`.
    """

    kind: str
    length: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    v_in_k: bool


class Expanded(NamedTuple):
    """The sizes of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    latent_dim: kv_lora_rank. nope_dim, rope_dim: of a head's keys without and with positions.
    head_dim_v: of a head's values.
    """

    num_q_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    head_dim_v: int


def read_layers(config: Any, cross: bool = False) -> list[Layer]:
    """The layers that store keys, in order; layers that reuse those of another are left out.

    cross: what they store of an encoder's tokens instead.

    Raises InputError for an unknown family, a size that is missing, and a layer that is not
    attention over keys of its own.
    """
    config = _text(config)
    family = _family(config)
    if cross and not has_encoder(config):
        raise InputError(
            f"cross=True, but model_type={shown(family)} has no decoder layers that read an "
            f"encoder's keys; of those that are known {', '.join(sorted(ENCODER_FAMILIES))} have"
        )
    if family and family not in FAMILIES:
        raise InputError(
            f"model_type={shown(family)} is no family whose layout is known; known are "
            f"{', '.join(sorted(FAMILIES))}. For another one pass an fa.kv.Spec of fa.kv.Group"
        )
    config = _decoder(config)
    count = _size(config, "num_hidden_layers")
    differ = getattr(config, "per_layer_config", None) is not None  # a view of transformers'
    parts = [_of_layer(config, "per_layer_config", i) if differ else config for i in range(count)]
    stored = [i for i in range(count) if not _reuses(config, i, count)]
    if not stored:
        raise InputError(
            f'kv_sharing_modes is "reuse" for all {count} layers: one must store keys of its own'
        )
    if stored != list(range(len(stored))):
        raise InputError(
            f"layers {sorted(set(range(stored[-1])) - set(stored))} reuse the keys of others but "
            "are not the last: pass an fa.kv.Spec of the layers that store keys"
        )
    crossing = getattr(config, "cross_attention_layers", None) or ()
    for layer in stored:
        if layer in crossing:
            raise InputError(
                f"layer {layer} is cross-attention, whose keys are not those of the sequence: pass "
                "an fa.kv.Spec of the other layers, and one for what they read"
            )
    return [_layer(config, parts[i], i) for i in stored]


def has_encoder(config: Any) -> bool:
    """Whether the decoder layers of a config read an encoder's keys as well."""
    config = _text(config)
    return _family(config) in ENCODER_FAMILIES and bool(
        getattr(config, "is_encoder_decoder", False)
    )


def _family(config: Any) -> str | None:
    family = getattr(config, "model_type", None)
    if family is None or isinstance(family, str):
        return family
    raise InputError(f'model_type={shown(family)} must be a name such as "llama", or None')


def _decoder(config: Any) -> Any:
    """The config with the sizes of the decoder by their usual names."""
    names = _DECODER_SIZES.get(_family(config) or "")
    if names is None:
        return config
    layers, heads, hidden, head_dim = names
    return SimpleNamespace(
        num_hidden_layers=_size(config, layers), num_attention_heads=_size(config, heads),
        hidden_size=_size(config, hidden), head_dim=head_dim and _size(config, head_dim),
    )  # fmt: skip


def read_expanded(config: Any) -> Expanded | None:
    """The sizes of latent attention, None where a config has none. Raises InputError."""
    config = _text(config)
    if not getattr(config, "kv_lora_rank", None):
        return None
    return Expanded(
        *(_size(config, name) for name in ("num_attention_heads", "kv_lora_rank",
                                           "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    )  # fmt: skip


def _text(config: Any) -> Any:
    """The config of the decoder of text that a config of several models has."""
    text = getattr(config, "text_config", None)
    return config if text is None else text


def _reuses(config: Any, layer: int, count: int) -> bool:
    """Whether a layer reads the keys of another one, as in Gemma 3n."""
    if getattr(config, "kv_sharing_modes", None) is not None:
        return bool(_of_layer(config, "kv_sharing_modes", layer) == "reuse")
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    rule = f"must be 0 or more, and below num_hidden_layers={count}: a layer must store its keys"
    return layer >= count - check_int("num_kv_shared_layers", shared, 0, count - 1, rule)


def _layer(config: Any, own: Any, layer: int) -> Layer:
    """own: the config with the sizes of this layer."""
    kind, length = _kind(config, own, layer)
    num_q_heads = _size(own, "num_attention_heads")
    expanded = read_expanded(own)
    if expanded is not None:
        width = expanded.latent_dim + expanded.rope_dim
        return Layer(kind, length, num_q_heads, 1, width, expanded.latent_dim, True)
    one = getattr(own, "multi_query", False)  # Falcon, GPT-BigCode
    one = one and not getattr(own, "new_decoder_architecture", False)
    num_kv_heads = _size(own, "num_key_value_heads", 1 if one else num_q_heads)
    head_dim = _size(own, "head_dim", None, missing=0)
    if not head_dim:
        hidden = _size(own, "hidden_size")
        if hidden % num_q_heads:
            raise InputError(
                f"hidden_size={hidden} is no multiple of num_attention_heads={num_q_heads}, and "
                "the config has no head_dim"
            )
        head_dim = hidden // num_q_heads
    return Layer(kind, length, num_q_heads, num_kv_heads, head_dim, head_dim, False)


def _kind(config: Any, own: Any, layer: int) -> tuple[str, int]:
    """The kind of a layer by transformers' name, with the length of its window or chunk."""
    if getattr(config, "layer_types", None) is None:
        window = getattr(own, "sliding_window", None)
        full = getattr(config, "max_window_layers", None) or 0
        sliding = window is not None and getattr(config, "use_sliding_window", True)
        sliding = sliding and layer >= check_int("max_window_layers", full, 0)
        kind = WINDOW if sliding else FULL
    else:
        kind = _of_layer(config, "layer_types", layer)
    if kind == FULL:
        return FULL, 0
    if not isinstance(kind, str) or kind not in _LENGTHS:
        raise InputError(
            f"layer_types[{layer}]={shown(kind)}; a Spec is made from a config for "
            f"{', '.join((FULL, *_LENGTHS))}"
        )
    return kind, _size(own, _LENGTHS[kind])


def _of_layer(config: Any, name: str, layer: int) -> Any:
    """A layer's entry of a list of the config."""
    entries = getattr(config, name)
    try:
        return entries[layer]
    except (IndexError, KeyError, TypeError):
        found = f" has {len(entries)} entries" if hasattr(entries, "__len__") else ""
        raise InputError(
            f"{name}{found or '=' + shown(entries)}, but layer {layer} exists: give one for each "
            "of num_hidden_layers"
        ) from None


def _size(config: Any, name: str, default: int | None = None, missing: int | None = None) -> int:
    """A positive size of the config. missing: the result where neither it nor a default is."""
    value = getattr(config, name, None)
    value = default if value is None else value
    if value is None and missing is not None:
        return missing
    if value is None:
        raise InputError(f"the config has no {name}")
    return check_int(name, value, 1)
