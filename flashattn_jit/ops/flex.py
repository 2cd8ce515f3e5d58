"""`fa.flex_attention`: FlexAttention's function, drop-in for inference, on CPU and CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..torch_modes import is_direct, is_plain
from ..variants.binding import Swap
from ..variants.variant import FULL, Dims, Variant, variant
from .arguments import checks, torch_inputs
from .arguments.calls import dense_form, dense_requests
from .attention import run_dense
from .keys.block_mask import Blocks, check_mask_device, read_block_mask
from .torch_ops import as_op

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

Mod = Callable[..., Any]

_SHARPNESS = 2.0**64  # a power of two scales exactly; fp32 can hold scaled scores up to 1e19


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: checks.Scale | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention`` as one fused kernel, without compiling.

    Same arguments, same results; lse and max_scores work on CPU too. Hooks get the scaled fp32
    score, ``h`` of the query, and ``q_idx`` from 0. A `BlockMask` is used as in compiled
    FlexAttention: only listed blocks are visited, mask_mod is evaluated on partial ones only.

    Args:
        query: [batch, num_q_heads, q_len, head_dim]; float32, bfloat16 or float16, any strides.
        key: [batch or 1, num_kv_heads, kv_len, head_dim]; batch 1 is shared, which needs a
            block_mask of query's batch, as in torch.
        value: [batch or 1, num_kv_heads, kv_len, head_dim_v].
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score`` on 0-dim tensors.
        block_mask: a torch `BlockMask` made for exactly these lengths. Its block map is cached.
        scale: multiplies q . k; 1/sqrt(head_dim) by default. A float, or a 0-dim cpu tensor.
        enable_gqa: allow num_kv_heads to divide num_q_heads; without it they must be equal.
        return_lse: also return lse [batch, num_q_heads, q_len], fp32.
        kernel_options: accepted and ignored: they tune other kernels.
        return_aux: ``AuxRequest(lse=, max_scores=)``: return (out, AuxOutput). max_scores needs
            a second pass over the keys, and supports scores of magnitude up to 1e19.

    Returns:
        out [batch, num_q_heads, q_len, head_dim_v] in query's dtype and stride order; with
        return_lse (out, lse); with return_aux (out, AuxOutput).

    Raises:
        InputError: a shape, dtype, device or value is wrong, or the block mask does not fit.
        TraceError: a mod cannot become a kernel.
        GradError: an input requires grad while grad mode is on.

    Example:
        >>> out = fa.flex_attention(q, k, v, lambda s, b, h, i, j: s + (j - i))

    Source: Dong et al. 2024, arXiv 2412.05496; torch 2.13.
    """
    if return_lse and return_aux is not None:
        raise InputError(
            "Cannot specify both return_lse and return_aux; return_lse is the older of the two: "
            "pass return_aux=AuxRequest(lse=True)"
        )
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        raise InputError(
            "return_aux must be a torch.nn.attention.flex_attention.AuxRequest or None, got "
            f"{type(return_aux).__name__}"
        )
    want_lse = return_lse or (return_aux is not None and bool(return_aux.lse))
    want_max = return_aux is not None and bool(return_aux.max_scores)
    run: Callable[..., Any] = functools.partial(run_flex, direct=True)
    if torch.compiler.is_dynamo_compiling() or not (
        is_direct(query, key, value) and is_plain(scale)
    ):
        run = as_op.flex
    out, lse, max_scores = run(
        query, key, value, score_mod, block_mask, scale, enable_gqa, want_lse, want_max
    )
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput  # the caller has imported it

    return out, AuxOutput(lse=lse, max_scores=max_scores)


def run_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    block_mask: Any,
    scale: checks.Scale | None,
    enable_gqa: bool,
    want_lse: bool,
    want_max: bool,
    swap: Swap | None = None,
    direct: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(out, lse or None, max_scores or None) of `flex_attention`. swap, direct: see `run_dense`."""
    q, k, v = torch_inputs.prepare(query, key, value, bool(direct))
    k, v, dims = _check_flex(q, k, v, block_mask, enable_gqa, bool(direct))
    _check_mod(score_mod)
    blocks = Blocks(None, (1, 1), None)
    if block_mask is not None:
        check_mask_device(block_mask, q.device)
        blocks = read_block_mask(block_mask, dims.batch, dims.num_q_heads, dims.q_len, dims.kv_len)
    out, lse = _run(q, k, v, score_mod, blocks, scale, want_lse, swap, direct)
    max_scores = _max_scores(q, k, score_mod, blocks, scale, swap) if want_max else None
    return out, lse, max_scores


def _check_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: Any,
    enable_gqa: bool,
    direct: bool,
) -> tuple[torch.Tensor, torch.Tensor, Dims]:
    """FlexAttention's checks, in its order and with its messages, then those of the kernel.

    Returns k and v, expanded to query's batch, and the dims. direct: see `prepare`.
    """
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise InputError(
            "query, key, and value must be 4D tensors [batch, heads, length, head_dim], got "
            f"{q.dim()}, {k.dim()} and {v.dim()} dims"
        )
    if q.shape[-1] != k.shape[-1]:
        raise InputError(
            "Expect query and key/value to have the same embedding dimension but got "
            f"E={q.shape[-1]} and E={k.shape[-1]}."
        )
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise InputError(
            "Expect query and key/value to have the same number of heads but got "
            f"Hq={q.shape[1]} and Hkv={k.shape[1]}. Try setting enable_gqa=True for GQA."
        )
    if q.shape[0] != k.shape[0]:
        if k.shape[0] != 1 or v.shape[0] != 1:
            raise InputError(
                f"key has batch={k.shape[0]} and value batch={v.shape[0]}, but query has batch="
                f"{q.shape[0]}; they must be equal, or 1 with a block_mask"
            )
        mask_batch = None if block_mask is None else block_mask.kv_num_blocks.shape[0]
        if mask_batch != q.shape[0]:
            raise InputError(
                "Expect query and key/value to have the same batch size, or a block_mask of "
                f"query's batch, but got Bq={q.shape[0]}, Bkv=1 and B_block_mask={mask_batch}; "
                "or share one key with key.expand(batch, -1, -1, -1)"
            )
        k, v = k.expand(q.shape[0], -1, -1, -1), v.expand(q.shape[0], -1, -1, -1)
    return k, v, dense_requests(dense_form(q, k, v, direct), None, 0).dims


def _check_mod(score_mod: object) -> None:
    if score_mod is None:
        return
    if isinstance(score_mod, Variant):
        raise InputError("score_mod is a Variant; pass variants to fa.attention")
    if not callable(score_mod):
        raise InputError(f"score_mod must be a function or None, got {type(score_mod).__name__}")


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Mod | None,
    blocks: Blocks,
    scale: checks.Scale | None,
    want_lse: bool,
    swap: Swap | None,
    direct: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    chosen: Variant = FULL
    if score_mod is not None or blocks.mask_mod is not None:
        chosen = variant(score_mod=score_mod, mask_mod=blocks.mask_mod)
    return run_dense(
        q, k, v, chosen, {}, scale=scale, return_lse=want_lse,
        block_states=blocks.states, block_size=blocks.size, swap=swap,
        direct=direct,
    )  # fmt: skip


def _max_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    score_mod: Mod | None,
    blocks: Blocks,
    scale: checks.Scale | None,
    swap: Swap | None,
) -> torch.Tensor:
    """The row maxima after score_mod and mask, [batch, num_q_heads, q_len] fp32.

    lse(c * s) / c is the maximum of s for large c: the largest weight is 1, ties add log(n) / c.
    """
    v = q.new_zeros(1).expand(*k.shape[:3], 1)
    if score_mod is None:
        scale = checks.check_scale(scale, q.shape[-1]) * _SHARPNESS
    else:
        score_mod = sharpened(score_mod)
    _, lse = _run(q, k, v, score_mod, blocks, scale, True, swap)
    assert lse is not None
    return lse / _SHARPNESS


def sharpened(score_mod: Mod) -> Mod:
    """The score_mod of the pass that computes row maxima."""

    def sharp(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        # A literal, so that the hook has the same captures as score_mod.
        return score_mod(score, b, h, q_idx, kv_idx) * 18446744073709551616.0

    return sharp
