"""transformers' own continuous batching (``model.generate_batch``) with this engine's attention.

Its cache gives each layer the keys and values of all requests, one request after another, so that
no mask of all tokens by all keys is made, as its SDPA and eager attention need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import ModuleList

from flashattn_jit.errors import InputError
from flashattn_jit.integrations import _own_attention
from flashattn_jit.integrations._own_attention import IMPLEMENTATIONS
from flashattn_jit.integrations._packed_models import check_positions
from flashattn_jit.integrations._served import Served
from flashattn_jit.integrations._sources import attends_twice, passes_keywords
from flashattn_jit.ops.varlen import varlen_attention
from flashattn_jit.variants.library.masks import Causal, SlidingWindow
from flashattn_jit.variants.variant import Variant


def allow(layers: Callable[[Any], Served]) -> None:
    """Lets transformers' continuous batching keep this engine's attention, once. layers: `served`.

    Making a manager then raises InputError for a model whose layers would not get its cache.
    """
    from transformers.generation.continuous_batching import continuous_api

    manager: Any = continuous_api.ContinuousBatchingManager
    switch = manager.switch_to_cb_friendly_attn
    if getattr(switch, "_keeps_this_engine", False):
        return

    @functools.wraps(switch)
    def switched(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in IMPLEMENTATIONS:
            switch(self, model, *args, **kwargs)
        else:
            _check(model, layers)

    switched._keeps_this_engine = True  # type: ignore[attr-defined]
    manager.switch_to_cb_friendly_attn = switched


def _check(model: Any, layers: Callable[[Any], Served]) -> None:
    """Raises InputError for a model that continuous batching would serve wrongly."""
    check_positions(model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder = decoder if hasattr(decoder, "config") else model
    if _own_attention.is_served(type(model)):
        _refuse(model, "its layers do not pass continuous batching's cache to attention")
    if _own_attention.computes_with_masks(decoder.config):
        _refuse(model, "its layers compute with their masks")
    stack = "layers." if hasattr(decoder, "layers") else ""  # no encoder of images beside them
    for layer in layers(decoder):
        if not layer.name.startswith(stack):
            continue
        if layer.reason:
            _refuse(model, f"{layer.name} {layer.reason}")
        if attends_twice(_class(decoder.get_submodule(layer.name))):
            _refuse(model, f"{layer.name} attends twice, and would store its values twice")
        above = layer.name
        while above := above.rpartition(".")[0]:
            module = decoder.get_submodule(above)
            if not isinstance(module, ModuleList) and not passes_keywords(_class(module)):
                _refuse(model, f"{above} does not pass continuous batching's cache on")


def _class(module: Any) -> type:
    return type(module)  # mypy regards type[Module] as unhashable


def _refuse(model: Any, reason: str) -> NoReturn:
    raise InputError(
        f"{type(model).__name__}: {reason}; use generate_batch of "
        "flashattn_jit.integrations.transformers, or model.generate"
    )


@functools.cache
def _mask(window: int) -> Variant:
    return SlidingWindow(window) if window else Causal()


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    extend: Callable[[Variant], Variant],
    params: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention of a layer over the packed tokens of a step.

    query: [1, num_q_heads, tokens, head_dim]; kwargs: what continuous batching passes to every
    layer, its paged cache among them. Returns [1, tokens, num_q_heads, head_dim_v]. Raises
    InputError for a layer without a causal mask.
    """
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise InputError(
            f"{type(module).__name__} is not causal; continuous batching is served for causal "
            "layers alone"
        )
    cache = kwargs.pop("cache")
    if not hasattr(cache, "layer_to_allocator"):
        raise InputError(
            f"cache is a {type(cache).__name__}, and no paged cache of continuous batching"
        )
    if kwargs.get("block_table") is not None:
        raise InputError(
            "continuous batching passes block tables, which only FlashAttention reads; set "
            "max_blocks_per_request=0 in its config"
        )
    allocator = cache.layer_to_allocator[module.layer_idx]
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
    )
    q_indptr, kv_indptr = (kwargs[n].cpu() for n in ("cu_seq_lens_q", "cu_seq_lens_k"))
    rows, keys = int(q_indptr[-1]), int(kv_indptr[-1])
    q = query[0, :, :rows].transpose(0, 1)
    k, v = (x[0, :, :keys].transpose(0, 1) for x in (key, value))
    window = int(getattr(allocator, "sliding_window", 0) or 0)
    if window and kwargs.get("sliding_window") is None:
        raise InputError(
            f"{type(module).__name__} has no window, and continuous batching keeps {window} keys"
        )
    variant = extend(_mask(window))
    out = varlen_attention(
        q, k, v, q_indptr, kv_indptr, variant, scale=scaling, q_offset="end", **params
    )
    assert isinstance(out, Tensor)
    if rows < query.shape[2]:  # padding behind the tokens
        result = out.new_zeros(query.shape[2], *out.shape[1:])
        result[:rows] = out
        out = result
    return out[None]
