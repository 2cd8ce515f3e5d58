"""Serves the attention layers of Hugging Face `transformers` models (5.23 or later, inference).

    from flashattn_jit.integrations.transformers import register
    register()
    model = AutoModel.from_pretrained(..., attn_implementation="attn_jit")   # or
    model.set_attn_implementation("attn_jit")

Every model type either equals its eager code, is refused by name, or keeps its own code with a
warning; docs/transformers.md has the table. `served` lists a model's layers.

Masks stay functions: no [q_len, kv_len] tensor is made except for the few families that compute
with their masks, and tiles that are masked out are skipped. Soft caps, sinks, relative position
biases, ALiBi (added once for Falcon, as in its SDPA code) and grouped heads run inside one kernel.
Under torch.compile a model's graph breaks at each mask and attention layer. Query rows that may
attend to nothing, as with padding on the left, give zeros, while eager attention gives the mean of
all values.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashattn_jit.errors import InputError, TraceError
from flashattn_jit.integrations import _continuous, _latent, _own_attention, _registration
from flashattn_jit.integrations._lazy_mask import LazyMask, MaskFunction, UnmergedMask
from flashattn_jit.integrations._own_attention import IMPLEMENTATIONS
from flashattn_jit.integrations._paged_rows import KeyBias, LayerCall, PagedRows
from flashattn_jit.integrations._registration import NAME, TESTED
from flashattn_jit.integrations._served import Served, layers_of
from flashattn_jit.ops.attention import attention
from flashattn_jit.variants.builtins import q_len as q_len_of
from flashattn_jit.variants.builtins import q_row
from flashattn_jit.variants.library.biases import AdditiveBias, SoftCap
from flashattn_jit.variants.library.masks import Causal, Full
from flashattn_jit.variants.library.normalizers import Sink
from flashattn_jit.variants.variant import Variant, tensor

if TYPE_CHECKING:
    from flashattn_jit.integrations._batch_requests import Generated
    from flashattn_jit.integrations._generate import BatchGenerator, generate_batch
    from flashattn_jit.integrations._paged_cache import PagedCache

_Parts = tuple[bool, bool, bool]  # soft cap, position bias, sinks

_WITHOUT_EFFECT = frozenset({
    # Arguments of a model's forward that it passes to every layer; attention does not use them.
    "cache_position", "input_ids", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict",
    "use_cache",
    # Arguments of FlashAttention that replace a mask; eager attention ignores them as well.
    "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx", "sliding_window",
    # Chooses among FlashAttention's kernels.
    "deterministic",
})  # fmt: skip
"""Keyword arguments that do not change the result of attention."""

_KNOWN = _WITHOUT_EFFECT | {
    "module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal",
    "softcap", "s_aux", "position_bias", "output_attentions",
}  # fmt: skip
"""Keyword arguments of `attention_forward` that it computes with, or refuses by their values."""


class DenseMask(Variant):
    """A mask given as a 4-D bool tensor: key j is kept where ``keep[b, h, row, j]``.

    keep: bool tensor ``[batch, num_q_heads, q_len, kv_len]``; expand what is shared.
    """

    keep: Tensor = tensor("batch", "num_q_heads", "q_len", "kv_len", dtype=torch.bool)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``keep[b, h, row, j]``."""
        return self.keep[b, h, q_row(b, q_idx) - b * q_len_of(b), kv_idx]


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= q_idx


def register(name: str = NAME) -> str:
    """Makes `name` an attention implementation of every transformers model; returns it.

    Calling it again changes nothing. It hooks into the creation of transformers' models and the
    change of their implementation; layers of BLOOM, MPT, Falcon, GPT-J and CodeGen, which have
    attention code of their own, then call the engine for masks of this integration.

    Raises:
        ImportError: transformers is missing, or older than the versions of `TESTED`.
        InputError: transformers treats `name` specially and would not call this engine.

    Example:
        >>> model.set_attn_implementation(register())
    """
    reserved = ("flash", "sdpa", "flex_attention", "eager", "paged", "/")
    if not name or any(word in name for word in reserved):
        raise InputError(
            f"name={name!r}: transformers gives names with one of {', '.join(reserved)} a meaning "
            f"of their own and would not call this engine; use {NAME!r}"
        )
    _registration.check_version()
    from transformers import AttentionInterface, AttentionMaskInterface

    # Not compiled by torch.compile: a graph cannot hold masks, which are Python objects.
    AttentionInterface.register(name, torch.compiler.disable(attention_forward))
    AttentionMaskInterface.register(name, torch.compiler.disable(lazy_mask))
    IMPLEMENTATIONS.add(name)
    _continuous.allow(served)
    _registration.look_at_models(torch.compiler.disable(_attend), served)
    return name


def _attend(
    layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: LazyMask, **parts: Any
) -> Tensor:
    return attention_forward(layer, query, key, value, mask, **parts)[0]


def served(model: torch.nn.Module) -> Served:
    """Which attention layers of a model the engine serves, and why not the others.

    Read from the classes of the layers; nothing is computed. Layers of BLOOM, MPT, Falcon, GPT-J
    and CodeGen run their own code where a user passes a 4-D mask.

    Example:
        >>> print(served(model))
        served  model.layers.0.self_attn  LlamaAttention
    """
    return layers_of(model, _KNOWN)


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = _causal,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """The mask of one forward pass, as a `LazyMask`: transformers calls this function.

    attention_mask: bool [batch, positions], True for real tokens; a `LazyMask`, which ``generate``
    may make before, is returned unchanged. q_offset: a tensor for static caches. Arguments about
    skipping or materialising masks are ignored. Families that compute with their masks get that of
    eager attention, [batch, 1, q_len, kv_len].
    """
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    config = kwargs.get("config")
    _latent.prepare_family(config)
    if _own_attention.computes_with_masks(config):
        from transformers.masking_utils import eager_mask

        dense: Any = eager_mask  # its annotations lack the tensor q_offset of a static cache
        return dense(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            **kwargs,
        )  # fmt: skip
    if _weights_are_collected():
        raise InputError(_own_attention.NO_WEIGHTS)
    if isinstance(q_offset, Tensor):
        q_offset = int(q_offset)
    kind = UnmergedMask if "falcon" in _own_attention.model_types(config) else LazyMask
    return kind(
        batch_size, q_length, kv_length, q_offset, int(kv_offset), mask_function, attention_mask,
        config,
    )  # fmt: skip


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | PagedRows | _latent.Latents,
    value: Tensor | PagedRows | _latent.Latents,
    attention_mask: Tensor | LazyMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function, which transformers calls in every attention layer.

    Args:
        module: the layer.
        query: [batch, num_q_heads, q_len, head_dim], RoPE applied.
        key: [batch, num_kv_heads, kv_len, head_dim], the cache's, heads not repeated; or handles
            of a `PagedCache`, as value; or the `Latents` of a layer with latent attention.
        value: [batch, num_kv_heads, kv_len, head_dim_v].
        attention_mask: a `LazyMask`; a 4-D tensor, bool or additive; or None, which means full
            attention, or with ``is_causal=True`` causal attention aligned to the upper left, as the
            prefill of a static cache needs.
        dropout: must be 0.
        scaling: 1/sqrt(head_dim) by default.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: attention sinks [num_q_heads].
        position_bias: added to scores, [batch or 1, num_q_heads or 1, q_len, kv_len].
        **kwargs: arguments that models pass to every layer and that attention does not use, such as
            `position_ids`; `sliding_window` and `cu_seq_lens_q` are covered by the mask, as in
            eager attention. Others must be None or False.

    Returns:
        (output [batch, q_len, num_q_heads, head_dim_v], contiguous, and None for the weights).

    Raises:
        InputError: dropout or attention weights are requested; a keyword argument is
            unknown, so might change the result; the mask has another type or size; or there is no
            mask and `module` is causal, where eager and sdpa differ.
        TraceError: the mask function of the model cannot be compiled to a kernel.
    """
    _latent.prepare(type(module))
    absorbed, expanded = None, None
    if isinstance(key, _latent.Latents):
        handles = key.handles()
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if kwargs.get("cache") is None and key.are_absorbed_for(query):
            absorbed = key.projections
            query = key.absorbed_query(query)
            key, value = key.rows() if handles is None else handles
        elif handles is None:
            key, value = key.expanded()
        else:
            expanded = key.expanded()
            key, value = handles
    parts: _Parts = (softcap is not None, position_bias is not None, s_aux is not None)
    if isinstance(key, PagedRows) and isinstance(value, PagedRows):
        _refuse(module, dropout, kwargs)
        given: dict[str, Any] = {"cap": softcap, "bias": position_bias, "sink": s_aux}
        call = _call_over_pages(module, query, key, attention_mask, scaling, parts, given, expanded)
        over_pages: Tensor = key.owner.attend(query, key, value, call)
        return over_pages if absorbed is None else absorbed.output(over_pages), None
    if not isinstance(key, Tensor) or not isinstance(value, Tensor):
        raise InputError(
            f"key and value must be tensors, got {type(key).__name__} and {type(value).__name__}"
        )
    if kwargs.get("cache") is not None:
        _refuse_dropout(dropout)
        masked = isinstance(attention_mask, Tensor)
        if masked or position_bias is not None or kwargs.get("output_attentions"):
            raise InputError(
                f"{type(module).__name__}: continuous batching is not served with a position bias, "
                "attention weights or a mask as a tensor"
            )
        given = {"cap": softcap, "sink": s_aux}
        params: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        extend = functools.partial(_extend, parts=parts)
        kwargs["is_causal"] = is_causal
        return _continuous.attend(module, query, key, value, scaling, extend, params, kwargs), None
    _refuse(module, dropout, kwargs)
    query, key, value = (_rows(tensor) for tensor in (query, key, value))
    kv_len = key.shape[2]
    if isinstance(attention_mask, LazyMask):
        _check_sizes(attention_mask, query, kv_len)
        if attention_mask.is_shared(query.shape[0], query.shape[2]):
            # One row of a mask for all queries, as in bidirectional layers, or one request for all.
            attention_mask = attention_mask.to_dense(query.device)
    params = {}
    if softcap is not None:
        params["cap"] = softcap
    if position_bias is not None:
        params["bias"] = _expand("position_bias", position_bias, query, kv_len)
    if s_aux is not None:
        params["sink"] = s_aux
    q_offset, key_len = 0, None
    if isinstance(attention_mask, LazyMask):
        chosen = attention_mask.variant(functools.partial(_extend, parts=parts), parts)
        q_offset, key_len = attention_mask.q_offset, attention_mask.key_len
    elif isinstance(attention_mask, Tensor):
        as_bool = attention_mask.dtype == torch.bool
        chosen = _dense_variant(as_bool, parts)
        whole = _expand("attention_mask", attention_mask, query, kv_len)
        params["keep" if as_bool else "mask_bias"] = whole
    elif attention_mask is not None:
        raise InputError(
            f"attention_mask is of type {type(attention_mask).__name__}; it must be a tensor "
            "[batch, heads or 1, q_len, kv_len], a mask of this integration, or None"
        )
    else:
        causal = _causal_without_a_mask(module, query.shape[2], kv_len, is_causal)
        chosen = _plain_variant(causal, parts)
    try:
        out = attention(
            query, key, value, chosen, scale=scaling, q_offset=q_offset, kv_len=key_len, **params
        )
    except TraceError as error:
        raise TraceError(
            f"{type(module).__name__}: this model's mask cannot become a kernel, and nothing else "
            f"was run in its place; use attn_implementation='eager' for it. {error}"
        ) from error
    assert isinstance(out, Tensor)
    out = out.transpose(1, 2).contiguous()
    return out if absorbed is None else absorbed.output(out), None


def _call_over_pages(
    module: torch.nn.Module,
    query: Tensor,
    key: PagedRows,
    mask: Tensor | LazyMask | None,
    scaling: float | None,
    parts: _Parts,
    given: dict[str, Any],
    expanded: tuple[Tensor, Tensor] | None,
) -> LayerCall:
    """The call of a layer whose keys and values lie in pages; see `_paged_rows`."""
    if mask is not None and not isinstance(mask, LazyMask):
        raise InputError(
            f"{type(module).__name__} has a mask of its own of type {type(mask).__name__}; over "
            "pages the masks are those that the model makes of a 2-D attention_mask"
        )
    if query.shape[2] != key.rows.shape[2]:
        raise InputError(
            f"{type(module).__name__} has {query.shape[2]} queries and {key.rows.shape[2]} keys: "
            "cross attention is not served over pages; use a cache of transformers"
        )
    params = {name: x for name, x in given.items() if x is not None}
    extend = functools.partial(_extend, parts=parts, bias=KeyBias)
    return LayerCall(mask, scaling, extend, parts, params, expanded)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise InputError(
            f"dropout={dropout}: this engine is inference only; call model.eval() first"
        )


def _refuse(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raises for arguments that would otherwise give a wrong result without an error."""
    _refuse_dropout(dropout)
    if kwargs.get("output_attentions") or _weights_are_collected():
        raise InputError(_own_attention.NO_WEIGHTS)
    for name, value in kwargs.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise InputError(
                f"{type(module).__name__} passes {name}=, which this integration does not know and "
                "may not leave out; use attn_implementation='eager' for this model"
            )


def _weights_are_collected() -> bool:
    """Whether the running model collects the weights that its layers return.

    Most families leave output_attentions to a decorator of transformers, so layers never get it.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    collected = collector.get() if collector is not None else None
    return any(key.endswith("attentions") for key in collected or ())


def _causal_without_a_mask(
    module: torch.nn.Module, q_len: int, kv_len: int, is_causal: bool | None
) -> bool:
    """Whether a layer without a mask is causal; raises where eager and sdpa attention differ."""
    if is_causal is None and q_len > 1 and kv_len > 1 and getattr(module, "is_causal", True):
        raise InputError(
            f"{type(module).__name__} has no mask and is_causal="
            f"{getattr(module, 'is_causal', 'unset')}: eager attention attends to everything and "
            "sdpa is causal; pass is_causal= or a mask, or use one of them for this model"
        )
    return bool(is_causal) and q_len > 1


def _rows(tensor: Tensor) -> Tensor:
    """`tensor` with a contiguous last dim, as kernels need; a few families pass transposed keys."""
    return tensor if tensor.stride(-1) == 1 or tensor.numel() == 0 else tensor.contiguous()


def _expand(name: str, values: Tensor, query: Tensor, kv_len: int) -> Tensor:
    """`values`, each size of which may be 1, as [batch, num_q_heads, q_len, kv_len]."""
    shape = (*query.shape[:3], kv_len)
    if values.ndim != 4 or any(x not in (1, n) for x, n in zip(values.shape, shape, strict=True)):
        batch, heads, q_len = shape[:3]
        raise InputError(
            f"{name} has shape {list(values.shape)}; it must be [batch={batch} or 1, num_q_heads="
            f"{heads} or 1, q_len={q_len} or 1, kv_len={kv_len} or 1]: this layer holds the newest "
            f"{kv_len} keys"
        )
    return values.expand(shape)


def _check_sizes(mask: LazyMask, query: Tensor, kv_len: int) -> None:
    batch, q_len = query.shape[0], query.shape[2]
    fits = mask.shape[0] in (1, batch) and mask.shape[2] in (1, q_len) and mask.shape[3] == kv_len
    if not fits:
        raise InputError(
            f"the mask was made for [batch, 1, q_len, kv_len] = {list(mask.shape)}, but the layer "
            f"has batch={batch}, q_len={q_len}, kv_len={kv_len}; use attn_implementation='eager' "
            "for this model"
        )


def _extend(base: Variant, parts: _Parts, bias: Callable[[], Variant] = AdditiveBias) -> Variant:
    """`base` with the soft cap, position bias and sinks of a layer.

    bias: makes the variant of the position bias.
    The soft cap comes first: `base` may hold an additive mask, which is not capped.
    """
    softcap, biased, sinks = parts
    if softcap:
        base = SoftCap() & base
    if biased:
        base = base & bias()
    if sinks:
        base = base & Sink()
    return base


@functools.cache
def _plain_variant(causal: bool, parts: _Parts) -> Variant:
    return _extend(Causal() if causal else Full(), parts)


@functools.cache
def _dense_variant(as_bool: bool, parts: _Parts) -> Variant:
    return _extend(DenseMask() if as_bool else AdditiveBias().named("mask"), parts)


_LAZY = {"PagedCache": "_paged_cache", "generate_batch": "_generate", "BatchGenerator": "_generate",
         "Generated": "_batch_requests"}  # fmt: skip
"""What needs transformers to be imported, with its module."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _registration.check_version()
    return getattr(importlib.import_module(f"{__package__}.{_LAZY[name]}"), name)


__all__ = [
    "NAME",
    "TESTED",
    "BatchGenerator",
    "DenseMask",
    "Generated",
    "LazyMask",
    "PagedCache",
    "attention_forward",
    "generate_batch",
    "lazy_mask",
    "register",
    "served",
]
