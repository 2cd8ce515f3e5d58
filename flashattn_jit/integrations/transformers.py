"""Serves the attention layers of Hugging Face `transformers` models (5.23 or later, inference).

    from flashattn_jit.integrations.transformers import register
    register()
    model = AutoModel.from_pretrained(..., attn_implementation="attn_jit")   # or
    model.set_attn_implementation("attn_jit")

Masks stay formulas: no [q_len, kv_len] tensor is ever made, and tiles that a mask leaves empty are
skipped. Soft caps, sinks, relative position biases and grouped heads run inside the one kernel.
Families with attention code of their own (BLOOM, MPT, Falcon, GPT-J, XLNet, ...) do not call the
interface; transformers says so in a warning and keeps their code. Under torch.compile a model's
graph breaks at each mask and attention layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashattn_jit.errors import InputError, TraceError
from flashattn_jit.integrations._lazy_mask import LazyMask, MaskFunction
from flashattn_jit.ops.attention import attention
from flashattn_jit.variants.builtins import q_len as q_len_of
from flashattn_jit.variants.builtins import q_row
from flashattn_jit.variants.library.biases import AdditiveBias, SoftCap
from flashattn_jit.variants.library.masks import Causal, Full
from flashattn_jit.variants.library.normalizers import Sink
from flashattn_jit.variants.spec import Variant, tensor

NAME = "attn_jit"
"""The registered name. transformers takes any name with "flash" in it for its own loader's."""

_Parts = tuple[bool, bool, bool]  # soft cap, position bias, sinks

_WITHOUT_EFFECT = frozenset({
    # What a model hands from its own call through every layer; none of it is attention's.
    "cache_position", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict",
    "use_cache",
    # What FlashAttention takes in place of a mask; eager attention leaves it to the mask as well.
    "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx", "sliding_window",
    # Which of FlashAttention's kernels runs.
    "deterministic",
})  # fmt: skip
"""Keyword arguments that change nothing in what attention computes."""


class DenseMask(Variant):
    """Keep ``keep[b, h, row, j]``: a mask that a model or its user gives as a 4-D bool tensor.

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

    Calling it again changes nothing.

    Raises:
        ImportError: transformers is missing, or older than its attention and mask interfaces.
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
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register() needs Hugging Face transformers 5.23 or later; install it with "
            "pip install 'transformers>=5.23'"
        ) from error
    # Under torch.compile both run as they are: masks are Python objects, which no graph can hold.
    AttentionInterface.register(name, torch.compiler.disable(attention_forward))
    AttentionMaskInterface.register(name, torch.compiler.disable(lazy_mask))
    return name


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
    """What transformers calls to make the mask of one forward pass; returns a `LazyMask`.

    attention_mask: bool [batch, positions], True for real tokens. q_offset: a tensor for static
    caches. A mask that was made before, as ``generate`` does, comes back as it is. The arguments
    that ask for skipped or materialised masks do not apply.
    """
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    if isinstance(q_offset, Tensor):
        q_offset = int(q_offset)
    return LazyMask(
        batch_size, q_length, kv_length, q_offset, int(kv_offset), mask_function, attention_mask
    )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LazyMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer.

    Args:
        module: the layer; `is_causal` comes from it where the call does not say.
        query: [batch, num_q_heads, q_len, head_dim], RoPE applied.
        key: [batch, num_kv_heads, kv_len, head_dim], the cache's, heads not repeated.
        value: [batch, num_kv_heads, kv_len, head_dim_v].
        attention_mask: of `lazy_mask`; a 4-D tensor of the user's, bool or additive; or None, which
            means causal (aligned to the upper left, as a static cache's prefill needs) if
            `is_causal`, and everything else or for one query row.
        dropout: 0; anything else raises.
        scaling: 1/sqrt(head_dim) by default.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: attention sinks [num_q_heads].
        position_bias: added to scores, [batch or 1, num_q_heads or 1, q_len, kv_len].
        **kwargs: what a model hands through every layer and attention has no use for, such as
            `position_ids`; `sliding_window` and `cu_seq_lens_q` are left to the mask, as eager
            attention does. Others may be None or False.

    Returns:
        (output [batch, q_len, num_q_heads, head_dim_v], contiguous, and None for the weights).

    Raises:
        InputError: dropout, attention weights or a paged cache are asked for, or a keyword argument
            is unknown: it may ask for what the engine does not compute.
        TraceError: a mask function of the model cannot become a kernel.
    """
    _refuse(module, dropout, kwargs)
    kv_len = key.shape[2]
    parts: _Parts = (softcap is not None, position_bias is not None, s_aux is not None)
    params: dict[str, Any] = {}
    if softcap is not None:
        params["cap"] = softcap
    if position_bias is not None:
        params["bias"] = _expand(position_bias, query, kv_len)
    if s_aux is not None:
        params["sink"] = s_aux
    q_offset, key_len = 0, None
    if isinstance(attention_mask, LazyMask):
        _check_sizes(attention_mask, query, kv_len)
        chosen = attention_mask.variant(functools.partial(_extend, parts=parts), parts)
        q_offset, key_len = attention_mask.q_offset, attention_mask.key_len
    elif isinstance(attention_mask, Tensor):
        as_bool = attention_mask.dtype == torch.bool
        chosen = _dense_variant(as_bool, parts)
        params["keep" if as_bool else "mask_bias"] = _expand(attention_mask, query, kv_len)
    else:
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        chosen = _plain_variant(is_causal and query.shape[2] > 1, parts)
    try:
        out = attention(
            query, key, value, chosen, scale=scaling, q_offset=q_offset, kv_len=key_len, **params
        )
    except TraceError as error:
        raise TraceError(
            f"{type(module).__name__}: this model's mask cannot become a kernel, and nothing else "
            f"was run in its place; use attn_implementation='sdpa' for it. {error}"
        ) from error
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raises for what would otherwise be computed wrongly in silence."""
    if dropout:
        raise InputError(
            f"dropout={dropout}: this engine is inference only; call model.eval() first"
        )
    if kwargs.get("output_attentions"):
        raise InputError(
            "output_attentions=True asks for attention weights, which a fused kernel never holds; "
            "use attn_implementation='eager' to see them"
        )
    if kwargs.get("cache") is not None:
        raise InputError(
            "continuous batching (generate_batch) passes a paged cache, which this integration "
            "does not serve; use attn_implementation='sdpa' for it"
        )
    for name, value in kwargs.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise InputError(
                f"{type(module).__name__} passes {name}=, which this integration does not know and "
                "may not leave out; use attn_implementation='sdpa' or 'eager' for this model"
            )


def _expand(values: Tensor, query: Tensor, kv_len: int) -> Tensor:
    """[batch or 1, num_q_heads or 1, q_len, keys] as [batch, num_q_heads, q_len, kv_len]."""
    return values[..., :kv_len].expand(*query.shape[:3], kv_len)


def _check_sizes(mask: LazyMask, query: Tensor, kv_len: int) -> None:
    if mask.shape[0] not in (1, query.shape[0]) or mask.shape[2:] != (query.shape[2], kv_len):
        raise InputError(
            f"the mask was made for [batch, 1, q_len, kv_len] = {list(mask.shape)}, but the layer "
            f"has batch={query.shape[0]}, q_len={query.shape[2]}, kv_len={kv_len}; use "
            "attn_implementation='sdpa' for this model"
        )


def _extend(base: Variant, parts: _Parts) -> Variant:
    """`base` with the score and normaliser parts that a layer asks for.

    The soft cap comes first: `base` may hold an additive mask, which is not capped.
    """
    softcap, bias, sinks = parts
    if softcap:
        base = SoftCap() & base
    if bias:
        base = base & AdditiveBias()
    if sinks:
        base = base & Sink()
    return base


@functools.cache
def _plain_variant(causal: bool, parts: _Parts) -> Variant:
    return _extend(Causal() if causal else Full(), parts)


@functools.cache
def _dense_variant(as_bool: bool, parts: _Parts) -> Variant:
    return _extend(DenseMask() if as_bool else AdditiveBias().named("mask"), parts)


__all__ = ["NAME", "DenseMask", "LazyMask", "attention_forward", "lazy_mask", "register"]
