"""`fa.scaled_dot_product_attention`: torch's function, drop-in for inference, on CPU and CUDA."""

from __future__ import annotations

import torch

from ..errors import InputError, TorchInputError
from ..torch_modes import is_direct, is_plain
from ..variants.library.masks import Causal, Full
from ..variants.variant import Variant, tensor
from .arguments import torch_inputs
from .arguments.checks import Scale, check_readable, shown
from .attention import run_dense
from .launching.repeats import Kind, call_again
from .torch_ops import as_op

_SHAPE = ("batch|1", "num_q_heads|1", "q_len|1", "kv_len|1")


class _Keep(Variant):
    """Keep the pairs for which a boolean mask is True; its dims of size 1 are broadcast."""

    attn_mask: torch.Tensor = tensor(*_SHAPE, dtype=torch.bool)

    def mask_mod(
        self, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return self.attn_mask[b, h, q_idx, kv_idx]


class _Add(Variant):
    """Add a float mask to the scores; its dims of size 1 are broadcast."""

    attn_mask: torch.Tensor = tensor(*_SHAPE)

    def score_mod(
        self,
        score: torch.Tensor,
        b: torch.Tensor,
        h: torch.Tensor,
        q_idx: torch.Tensor,
        kv_idx: torch.Tensor,
    ) -> torch.Tensor:
        return score + self.attn_mask[b, h, q_idx, kv_idx]


FULL, CAUSAL, ADD = Full(), Causal(), _Add()
_KEEP = _Keep()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Scale | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` as one fused kernel.

    Same arguments and results, head_dim_v != head_dim and any group size included; a row whose keys
    are all masked is 0. Batch dims and heads of size 1 are broadcast, those of empty results too.
    num_q_heads may be 0, for an empty result as in torch; otherwise num_kv_heads must be at least
    1.

    Args:
        query: [..., num_q_heads, q_len, head_dim] with any number of leading dims, or none;
            float32, bfloat16 or float16, any strides.
        key: [..., num_kv_heads, kv_len, head_dim] of query's dtype.
        value: [..., num_kv_heads, kv_len, head_dim_v].
        attn_mask: broadcastable to [..., num_q_heads, q_len, kv_len]: bool (True takes part) or
            float (added to the scaled scores).
        dropout_p: must be 0.
        is_causal: row i sees keys 0..i (upper-left aligned); excludes attn_mask.
        scale: multiplies q . k; 1/sqrt(head_dim) by default. A float, or a 0-dim cpu tensor.
        enable_gqa: allow num_kv_heads to divide num_q_heads.

    Returns:
        [..., num_q_heads, q_len, head_dim_v] in query's dtype.

    Raises:
        InputError: a shape, dtype, device or value is wrong; dropout was asked for.
        TorchInputError: attn_mask and is_causal were both given.
        GradError: an input requires grad while grad mode is on.

    Example:
        >>> out = fa.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    if torch.compiler.is_dynamo_compiling() or not (
        is_direct(query, key, value) and is_plain(scale)
    ):
        return as_op.sdpa(  # type: ignore[no-any-return]
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    if attn_mask is None and not torch._C._is_any_autocast_enabled():
        chosen, kind = CAUSAL if is_causal else FULL, _kind(enable_gqa)
        if type(dropout_p) in (int, float) and not dropout_p:
            results = call_again(
                chosen, kind, query, key, value, None, None, scale, False, False, {}
            )
            if results is not None:
                return results[0]
    return run_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, True)


def run_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: Scale | None,
    enable_gqa: bool,
    direct: bool | None = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` outside of the tracer. direct: see `run_dense`."""
    if not isinstance(dropout_p, float | int) or dropout_p != 0.0:
        raise InputError(
            f"dropout_p={shown(dropout_p)}: this engine is inference only; pass dropout_p=0.0, "
            "such as `p if self.training else 0.0`"
        )
    if attn_mask is not None and is_causal:
        raise TorchInputError(
            "Explicit attn_mask should not be set when is_causal=True; put both into attn_mask, or "
            "use fa.attention with a variant of both"
        )
    q, k, v, lead = as_dense_problem(query, key, value, enable_gqa, bool(direct))
    chosen: Variant = CAUSAL if is_causal else FULL
    params: dict[str, object] = {}
    if attn_mask is not None:
        mask = _dense_mask(attn_mask, (*lead, q.shape[1], q.shape[2], k.shape[2]))
        chosen, params = (_KEEP if mask.dtype == torch.bool else ADD), {"attn_mask": mask}
    if not q.shape[1]:
        return with_leading_dims(_without_heads(q, k, v, scale), lead, query.dim())
    as_given = attn_mask is None and q is query and k is key and v is value
    out, _ = run_dense(
        q, k, v, chosen, params, scale=scale, direct=direct,
        kind=_kind(enable_gqa) if as_given else None,
    )  # fmt: skip
    return with_leading_dims(out, lead, query.dim())


def _kind(enable_gqa: bool) -> Kind:
    """Of `call_again`: calls without a mask."""
    return "sdpa", bool(enable_gqa)


def as_dense_problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    enable_gqa: bool,
    direct: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """q, k, v [batch, heads, length, dim], and the leading dims that are flattened to batch.

    Raises InputError if dims cannot be broadcast, or dtypes or devices differ.
    """
    q, k, v = torch_inputs.prepare(query, key, value, direct)
    _check_ranks(q, k, v)
    if q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]:
        heads = q.shape[1], k.shape[1], v.shape[1]
        if enable_gqa or heads[0] == heads[1] == heads[2]:
            return q, k, v, (q.shape[0],)
    lead = _broadcast_lead(q, k, v, enable_gqa)
    q, k, v = (_as_dense(t, lead) for t in (q, k, v))
    if not enable_gqa:
        q, k, v = _broadcast_heads(q, k, v)
    return q, k, v, lead


def with_leading_dims(out: torch.Tensor, lead: tuple[int, ...], rank: int) -> torch.Tensor:
    """[batch, heads, q_len, head_dim_v] as the caller's dims: [*lead, heads, q_len, head_dim_v]."""
    if len(lead) == 1:
        return out
    out = out.reshape(*lead, *out.shape[1:])
    return out[0] if rank == 2 and not lead and out.shape[0] == 1 else out


def _without_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Scale | None
) -> torch.Tensor:
    """The empty output of zero query heads, after the checks of a call with one head."""
    one, keys, values = (t[:0].reshape(0, 1, *t.shape[2:]) for t in (q, k, v))
    out, _ = run_dense(one, keys, values, FULL, {}, scale=scale)
    return out.reshape(*q.shape[:3], v.shape[3])


def _check_ranks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise InputError(
            f"query, key and value must have at least 2 dims, got {list(q.shape)}, "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{q.dtype}, key.dtype: {k.dtype} and value.dtype: {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise InputError(
            "Expected query, key, and value to have the same device, but got "
            f"{q.device}, {k.device} and {v.device}"
        )


def _broadcast_lead(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool
) -> tuple[int, ...]:
    """The dims before the heads, broadcast. Without enable_gqa heads must agree or be 1."""
    leads = [t.shape[:-3] for t in (q, k, v)]
    rank = max(map(len, leads))
    padded = [(1,) * (rank - len(lead)) + tuple(lead) for lead in leads]
    # Not torch.broadcast_shapes, whose first call imports sympy.
    lead = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
    if any(n not in (1, m) for sizes in padded for n, m in zip(sizes, lead, strict=True)):
        raise InputError(
            f"the batch dims of query {list(q.shape)}, key {list(k.shape)} and value "
            f"{list(v.shape)} cannot be broadcast to each other"
        )
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in (q, k, v)]
    most = max(heads) if heads[0] else 0  # torch also broadcasts 1 to 0
    if not enable_gqa and any(n not in (1, most) for n in heads):
        raise InputError(
            f"query has num_q_heads={heads[0]}, key {heads[1]} and value {heads[2]} heads; they "
            "must be equal, or divide it with enable_gqa=True"
        )
    return lead


def _as_dense(t: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """[..., heads, length, dim] as [batch, heads, length, dim]; a view where strides allow."""
    t = t[(None,) * (3 - t.dim())]
    t = t.expand(*lead, *t.shape[-3:])
    return t if len(lead) == 1 else _one_lead(t)


def _one_lead(t: torch.Tensor) -> torch.Tensor:
    """[..., heads, length, dim] with any number of leading dims as [batch, heads, length, dim].

    Not with reshape(-1, ...), which is ambiguous if a length is 0.
    """
    return t.unsqueeze(0) if t.dim() == 3 else t.flatten(0, -4)


def _broadcast_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Broadcast q from one head to those of k, and k and v to the same number of heads."""
    heads = max(k.shape[1], v.shape[1])
    if q.shape[1] == 1 != heads:
        q = q.expand(-1, heads, -1, -1)
    return q, k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)


def _dense_mask(mask: torch.Tensor, wanted: tuple[int, ...]) -> torch.Tensor:
    """The mask as [batch or 1, num_q_heads or 1, q_len or 1, kv_len or 1]."""
    check_readable("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f"attn_mask has dtype {mask.dtype}; it must be bool (True takes part) or float (added)"
        )
    fits = mask.dim() <= len(wanted) and all(
        size in (1, other) for size, other in zip(mask.shape[::-1], wanted[::-1], strict=False)
    )
    if not fits:
        raise InputError(
            f"attn_mask is {list(mask.shape)}, which cannot be broadcast to [..., num_q_heads, "
            f"q_len, kv_len] = {list(wanted)}"
        )
    mask = mask[(None,) * (max(4, len(wanted)) - mask.dim())]
    lead = mask.shape[:-3]
    if all(size == 1 for size in lead):
        return mask.reshape(1, *mask.shape[-3:])
    return _one_lead(mask.expand(*wanted[: len(lead)], *mask.shape[-3:]))
