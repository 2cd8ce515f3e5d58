"""Arguments of FlashAttention, FlashInfer and torch: errors say what stands for them here."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest
import torch
from torch import zeros

import flashattn_jit as fa
from flashattn_jit.variants.counterparts import COUNTERPARTS

Q, KV = zeros(1, 4, 3, 8), zeros(1, 2, 3, 8)

OF_OTHERS: dict[str, tuple[Any, str]] = {
    "causal": (True, r"there is no argument 'causal': pass the variant fa.Causal\(\)$"),
    "is_causal": (True, r"'is_causal': pass the variant fa.Causal\(\)"),
    "softmax_scale": (1.0, "'softmax_scale': pass scale="),
    "window_size": ((3, 0), r"'window_size': pass the variant fa.SlidingWindow\(left \+ 1\)"),
    "logits_soft_cap": (30.0, r"'logits_soft_cap': pass the variant fa.SoftCap\(c\)"),
    "attn_mask": (None, r"'attn_mask': a mask is a function: fa.variant\(mask_mod="),
    "dropout_p": (0.0, "'dropout_p': leave it out: this engine is inference only"),
    "block_mask": (None, "'block_mask': tiles follow from mask_mod"),
}


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("variant", [None, fa.variant(score_mod=lambda s, b, h, i, j: s)])
def test_arguments_of_other_libraries(name: str, variant: fa.Variant | None) -> None:
    value, text = OF_OTHERS[name]
    with pytest.raises(fa.ParamError, match=text):
        fa.attention(Q, KV, KV, variant, **{name: value})


def test_a_param_of_a_similar_name_comes_first() -> None:
    with pytest.raises(fa.ParamError, match=r"SlidingWindow has no .* did you mean window="):
        fa.attention(Q, KV, KV, fa.SlidingWindow(4), window_size=3)
    with pytest.raises(fa.ParamError, match=r"no argument 'softcap': pass the variant fa.SoftCap"):
        fa.SlidingWindow(4, softcap=3.0)


def test_arguments_of_flash_attn_varlen_func() -> None:
    x, ends = zeros(4, 2, 8), torch.tensor([0, 4])
    text = r"needs q_indptr, kv_indptr; cu_seqlens_q: pass q_indptr=.*; cu_seqlens_k: pass kv_ind"
    with pytest.raises(fa.InputError, match=text):
        fa.varlen_attention(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=4)
    with pytest.raises(fa.InputError, match=r"varlen_attention\(\) needs v, q_indptr, kv_indptr$"):
        fa.varlen_attention(x, x)


@pytest.mark.parametrize("text", sorted(set(COUNTERPARTS.values())))
def test_counterparts_exist(text: str) -> None:
    for path in re.findall(r"\bfa\.([\w.]+)", text):
        functools.reduce(getattr, path.split("."), fa)
    known = [fa.attention, fa.varlen_attention, fa.BatchAttention, fa.BatchAttention.plan]
    known += [fa.BatchAttention.run, fa.ALiBi.__init__, fa.variant, fa.SlidingWindow]
    names = {name for one in known for name in inspect.signature(one).parameters}
    names |= {"slopes", "causal"}  # params of variants
    assert set(re.findall(r"\b(\w+)=", text)) <= names
