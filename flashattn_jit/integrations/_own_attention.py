"""Model families of transformers whose attention code does not use the attention interface.

BLOOM, MPT and Falcon add ALiBi to scores, GPT-J and CodeGen do not. `prepare` makes their layers
call the engine when the mask is a `LazyMask`, which exists only where this integration was chosen;
with any other mask the original code runs. All other such families are not changed:
`keeps_its_own_code` identifies them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from flashattn_jit.errors import InputError
from flashattn_jit.integrations._lazy_mask import LazyMask
from flashattn_jit.integrations._sources import calls_the_interface

IMPLEMENTATIONS: set[str] = set()
"""The names under which the engine is registered as an attention implementation."""

NO_WEIGHTS = (
    "output_attentions=True asks for attention weights, which a fused kernel never stores; use "
    "attn_implementation='eager' to see them"
)

Attend = Callable[..., Tensor]
"""(layer, query, key, value, mask, **parts) -> [batch, q_len, heads, head_dim_v]."""


def _bloom(attend: Attend, layer: Any, arguments: dict[str, Any]) -> tuple[Tensor, None]:
    from transformers.models.bloom.modeling_bloom import dropout_add

    if layer.pretraining_tp > 1 and layer.slow_but_exact:
        raise InputError(
            "BloomConfig(slow_but_exact=True) asks for the rounding of one tensor-parallel layout, "
            "which only attn_implementation='eager' reproduces"
        )
    hidden, alibi = arguments["hidden_states"], arguments["alibi"]
    query, key, value = layer._reshape(layer.query_key_value(hidden))
    if arguments["layer_past"] is not None:
        key, value = arguments["layer_past"].update(key, value, layer.layer_idx)
    out = attend(
        layer, query, key, value, arguments["attention_mask"],
        scaling=layer.inv_norm_factor,
        position_bias=alibi.view(query.shape[0], layer.num_heads, 1, -1),
        dropout=layer.attention_dropout.p if layer.training else 0.0,
    )  # fmt: skip
    out = layer.dense(out.flatten(2))
    return dropout_add(out, arguments["residual"], layer.hidden_dropout, layer.training), None


def _mpt(attend: Attend, layer: Any, arguments: dict[str, Any]) -> tuple[Tensor, None]:
    qkv = layer.Wqkv(arguments["hidden_states"])
    if layer.clip_qkv:
        qkv = qkv.clamp(-layer.clip_qkv, layer.clip_qkv)
    query, key, value = (
        part.unflatten(2, (layer.n_heads, layer.head_dim)).transpose(1, 2)
        for part in qkv.chunk(3, dim=2)
    )
    cache, kv_len = arguments["past_key_values"], key.shape[2]
    bias = arguments["position_bias"]
    if cache is not None:
        kv_len = cache.get_mask_sizes(kv_len, layer.layer_idx)[0]
    if bias is not None and bias.shape[-1] < kv_len:
        raise InputError(
            f"kv_len={kv_len} is more than MptConfig.max_seq_len={bias.shape[-1]}, which bounds "
            "the ALiBi of this model; raise max_seq_len"
        )
    if cache is not None:
        key, value = cache.update(key, value, layer.layer_idx)
    if bias is not None:
        bias = bias[None, :, -1:, bias.shape[-1] - key.shape[2] :]
    out = attend(
        layer, query, key, value, arguments["attention_mask"],
        scaling=layer.softmax_scale, position_bias=bias,
        dropout=layer.attn_dropout_p if layer.training else 0.0,
    )  # fmt: skip
    return layer.out_proj(out.flatten(2)), None


def _falcon(attend: Attend, layer: Any, arguments: dict[str, Any]) -> tuple[Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    parts = layer._split_heads(layer.query_key_value(arguments["hidden_states"]))
    query, key, value = (part.transpose(1, 2) for part in parts)
    alibi = arguments["alibi"]
    if alibi is None:
        rotate: Any = apply_rotary_pos_emb
        query, key = rotate(query, key, *arguments["position_embeddings"])
    else:
        # Falcon scales the sum of scores and ALiBi.
        alibi = alibi.view(query.shape[0], layer.num_heads, 1, -1) * layer.inv_norm_factor
    if arguments["layer_past"] is not None:
        key, value = arguments["layer_past"].update(key, value, layer.layer_idx)
    # Only layers with ALiBi have dropout on their weights.
    drops = alibi is not None and layer.training
    out = attend(
        layer, query, key, value, arguments["attention_mask"],
        scaling=layer.inv_norm_factor, position_bias=alibi,
        dropout=layer.attention_dropout.p if drops else 0.0,
    )  # fmt: skip
    return layer.dense(out.flatten(2)), None


def _gptj(attend: Attend, layer: Any, arguments: dict[str, Any]) -> tuple[Tensor, None]:
    value = arguments["value"]
    query, key = arguments["query"].to(value.dtype), arguments["key"]
    if key.dtype != value.dtype:
        key = key.to(value.dtype)
    out = attend(
        layer, query, key, value, arguments["attention_mask"], scaling=1 / float(layer.scale_attn),
        dropout=layer.attn_dropout.p if layer.training else 0.0,
    )  # fmt: skip
    return out.transpose(1, 2), None


@dataclasses.dataclass(frozen=True)
class _Family:
    """The method of a family that computes attention. ours: its replacement."""

    model: str
    layer: str
    method: str
    ours: Callable[[Attend, Any, dict[str, Any]], tuple[Tensor, None]]


_SERVED = {
    "bloom": _Family("BloomModel", "BloomAttention", "forward", _bloom),
    "codegen": _Family("CodeGenModel", "CodeGenAttention", "_attn", _gptj),
    "falcon": _Family("FalconModel", "FalconAttention", "forward", _falcon),
    "gptj": _Family("GPTJModel", "GPTJAttention", "_attn", _gptj),
    "mpt": _Family("MptModel", "MptAttention", "forward", _mpt),
}
"""By model type."""


def prepare(model_class: type, name: str, attend: Attend) -> None:
    """Prepares the families of a model class for the implementation `name`, once.

    Layers of the families in `_SERVED` then call `attend` for lazy masks. Some families have tables
    of layer classes by implementation: `name` is added, with the eager class.
    """
    for modeling in _modules_of(model_class):
        _prepare(modeling, name, attend)


def prepare_imported(name: str, attend: Attend) -> None:
    """`prepare` for every family of `_SERVED` that the process has imported."""
    for family in _SERVED:
        modeling = sys.modules.get(f"transformers.models.{family}.modeling_{family}")
        if modeling is not None:
            _prepare(modeling, name, attend)


@functools.cache
def _prepare(modeling: ModuleType, name: str, attend: Attend) -> None:
    for key, table in vars(modeling).items():
        if key.endswith("ATTENTION_CLASSES") and isinstance(table, dict) and "eager" in table:
            table.setdefault(name, table["eager"])
    family = _SERVED.get(family_of(modeling))
    if family is not None:
        layer, model = getattr(modeling, family.layer), getattr(modeling, family.model)
        original = getattr(layer, family.method)
        if not serves(original):
            setattr(layer, family.method, _either(original, functools.partial(family.ours, attend)))
            model.forward = _without_weights(model.forward)


def _modules_of(model_class: type) -> list[ModuleType]:
    """The modules of transformers' families that define a model class and its bases."""
    names = (base.__module__ for base in model_class.__mro__)
    modules = (sys.modules.get(n) for n in names if n.startswith("transformers.models."))
    return [modeling for modeling in modules if modeling is not None]


def family_of(modeling: ModuleType) -> str:
    """The family of a module ``modeling_<family>`` of transformers."""
    return modeling.__name__.rpartition("modeling_")[2]


def _either(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, or `ours` where ``attention_mask`` is a `LazyMask`."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if not isinstance(bound.arguments.get("attention_mask"), LazyMask):
            return original(self, *args, **kwargs)
        bound.apply_defaults()
        return ours(self, bound.arguments)

    method._serves_lazy_masks = True  # type: ignore[attr-defined]
    return method


def _without_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `forward` that raises where attention weights are requested of the engine."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = signature.bind(self, *args, **kwargs).arguments.get("output_attentions")
        if wanted is None:
            wanted = self.config.output_attentions
        if wanted and self.config._attn_implementation in IMPLEMENTATIONS:
            raise InputError(NO_WEIGHTS)
        return forward(self, *args, **kwargs)

    return method


def serves(method: object) -> bool:
    """Whether `method` is one that `prepare` installed."""
    return bool(getattr(method, "_serves_lazy_masks", False))


def is_served(model_class: type) -> bool:
    """Whether a model class or a base of it is of a family in `_SERVED`."""
    return any(family_of(modeling) in _SERVED for modeling in _modules_of(model_class))


def model_types(config: object) -> set[str]:
    """The model types of a config's class and of its bases."""
    found = (vars(base).get("model_type") for base in type(config).__mro__)
    return {name for name in found if isinstance(name, str) and name}


_MERGES_MASKS = frozenset({
    "bigbird_pegasus", "deepseek_v4", "doge", "gemma4_audio", "git", "lasr_encoder",
    "siglip2_vision_model", "t5gemma2_decoder",
})  # fmt: skip
"""Model types whose layers compute with their masks and then call the attention interface."""


def computes_with_masks(config: object) -> bool:
    """Whether models of a config may have attention code that reads masks as tensors.

    A family of transformers does if `keeps_its_own_code` holds for its module. A class from
    elsewhere may, unless its module has attention classes and all of them call the interface.
    """
    if model_types(config) & _MERGES_MASKS:
        return True
    theirs: list[type] = []
    for base in type(config).__mro__:
        if base.__module__.startswith("transformers."):
            break
        modeling = _modeling_of(base)
        if modeling is not None and base is not object:
            theirs += attention_classes(modeling, imported=True)
    else:
        return False  # not a config of transformers
    if base is not type(config):
        return not theirs or not all(map(calls_the_interface, theirs))
    family = _modeling_of(base)
    return family is not None and keeps_its_own_code(family)


def _modeling_of(config_class: type) -> ModuleType | None:
    """The module with the models of a config class, if the process has imported it."""
    return sys.modules.get(config_class.__module__.replace("configuration_", "modeling_"))


@functools.cache
def keeps_its_own_code(modeling: ModuleType) -> bool:
    """Whether the attention layers of a family's module never call the engine."""
    if hasattr(modeling, "ALL_ATTENTION_FUNCTIONS") or family_of(modeling) in _SERVED:
        return False
    return bool(attention_classes(modeling))


def attention_classes(modeling: ModuleType, imported: bool = False) -> list[type]:
    """The layer classes with "Attention" in their name that a module defines, or also imports."""
    return [
        value
        for name, value in vars(modeling).items()
        if "Attention" in name
        and isinstance(value, type)
        and issubclass(value, nn.Module)
        and (imported or value.__module__ == modeling.__name__)
    ]
