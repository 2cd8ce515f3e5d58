"""What stands here for arguments of FlashAttention, FlashInfer, FlexAttention and torch's SDPA."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_CAUSAL = "pass the variant fa.Causal()"
_WINDOW = (
    "pass the variant fa.SlidingWindow(left + 1), which counts the row's own key, or "
    "fa.SlidingWindow(n, causal=False) for n keys to both sides"
)
_SOFT_CAP = "pass the variant fa.SoftCap(c); `&` combines variants"
_SCALE = "pass scale=, of a batch to run()"
_SINK = "pass the variant fa.Sink(sink)"
_MODS = "the variant is an argument: fa.variant(score_mod=..., mask_mod=...)"
_PAGES = "pass fa.Paged(page_indptr, page_indices, last_page_len, page_size) to plan()"
_CPU = ", a cpu tensor"
_RAGGED = f"pass kv_indptr={_CPU}; of a batch fa.Ragged(kv_indptr) or fa.Paged(...)"
_INVARIANT = (
    "pass batch_invariant=True to the constructor of a batch: splits then do not depend on "
    "the other requests"
)
_CODES = "pass kv_format=fa.kv.Format(...) and run over fa.kv.Stored(pages, scales)"
_INFERENCE = "leave it out: this engine is inference only, without dropout"
_MASK = (
    "a mask is a function: fa.variant(mask_mod=lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]); "
    "fa.scaled_dot_product_attention takes an attn_mask"
)
_BITS = "pass sparsity=fa.Bits(bits) to plan() of a batch, or write the mask as a mask_mod"

COUNTERPARTS = {
    "alibi_slopes": "pass the variant fa.ALiBi(slopes=...)",
    "attn_bias": "pass a score_mod that adds the bias",
    "attn_mask": _MASK,
    "block_mask": "tiles follow from mask_mod; fa.flex_attention takes a BlockMask",
    "block_table": _PAGES,
    "cache_seqlens": "pass kv_len=; of a batch fa.Paged(...) has the lengths",
    "causal": _CAUSAL,
    "cu_seqlens_k": _RAGGED,
    "cu_seqlens_kv": _RAGGED,
    "cu_seqlens_q": f"pass q_indptr={_CPU}",
    "custom_mask": _BITS,
    "deterministic": "leave it out: every call is deterministic",
    "disable_split_kv": _INVARIANT,
    "dropout_p": _INFERENCE,
    "enable_gqa": "query heads that share keys need no option",
    "fixed_split_size": _INVARIANT,
    "head_dim_qk": "pass head_dim=",
    "head_dim_vo": "pass head_dim_v=",
    "is_causal": _CAUSAL,
    "k_scale": _CODES,
    "key": "pass k",
    "kv_data_type": "pass kv_dtype=",
    "kv_indptr": _RAGGED,
    "kv_layout": "layouts are strides: pass pages.transpose(1, 2) to run()",
    "learnable_sink": _SINK,
    "logits_soft_cap": _SOFT_CAP,
    "lses": "lse is a result: the call returns (out, lse) with return_lse=True",
    "mask_mod": _MODS,
    "max_seqlen_k": "pass max_kv_len=, or leave it out",
    "max_seqlen_q": "pass max_q_len=, or leave it out",
    "num_qo_heads": "pass num_q_heads=",
    "num_splits": _INVARIANT,
    "packed_custom_mask": _BITS,
    "page_size": _PAGES,
    "paged_kv_indices": _PAGES,
    "paged_kv_indptr": _PAGES,
    "paged_kv_last_page_len": _PAGES,
    "pos_encoding_mode": "pass the variant fa.RoPE(theta) or fa.ALiBi()",
    "q_data_type": "pass q_dtype=",
    "qo_indptr": f"pass q_indptr={_CPU}",
    "query": "pass q",
    "return_attn_probs": "pass return_lse=True; weights are not stored",
    "return_softmax_lse": "pass return_lse=True",
    "s_aux": _SINK,
    "score_mod": _MODS,
    "seqused_k": "pass kv_len=, of a dense call",
    "sinks": _SINK,
    "sm_scale": _SCALE,
    "softcap": _SOFT_CAP,
    "softmax_scale": _SCALE,
    "use_cuda_graph": "pass cuda_graph=True and limits=fa.Limits(...)",
    "v_scale": _CODES,
    "value": "pass v",
    "window_left": _WINDOW,
    "window_size": _WINDOW,
}
"""By the name of the argument, the remedy that messages give."""


def counterparts_of(names: Iterable[str]) -> str:
    """The remedies for those of the names that have one, each after "; "; else empty."""
    return "".join([f"; {name}: {COUNTERPARTS[name]}" for name in names if name in COUNTERPARTS])


def instead_of(x: object) -> str:
    """What to pass in place of something that is no variant, for a message."""
    if type(x).__name__ == "BlockMask":  # torch's, whose import takes a second
        return "; give it to fa.flex_attention(..., block_mask=...), or pass its mask_mod"
    if isinstance(x, str):
        named = {"causal": "fa.Causal()", "full": "fa.Full()", "none": "None"}.get(x.lower())
        return f" {x!r:.60}; pass {named or 'an object, such as fa.Causal()'}"
    if isinstance(x, torch.Tensor):
        hook = (
            "mask_mod=lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]" if x.dtype == torch.bool else
            "score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx]"
        )  # fmt: skip
        return (
            f"; pass fa.variant({hook}), or give it to "
            "fa.scaled_dot_product_attention(..., attn_mask=...)"
        )
    return "; join variants with `&`" if isinstance(x, list | tuple) else ""
