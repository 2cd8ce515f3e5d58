"""Every public name with arguments of every wrong kind: it works, or raises a typed error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from tests.ops.errors.odd_tensors import MAKERS, Own, make
from tests.ops.errors.small_calls import batch, indptr, lse, packed, paged, pages, q

VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "3": 3,
    "2**70": 2**70,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "complex": 1 + 2j,
    "text": "end of the line",
    "nul": "\0",
    "bytes": b"bytes",
    "list": [1, 2],
    "tuple": (),
    "dict": {"a": 1},
    "set": {1},
    "object": object(),
    "type": torch.Tensor,
    "function": lambda x: x,
    "dtype": torch.float64,
    "device": torch.device("meta"),
    "np.int64": np.int64(3),
    "np.bool": np.True_,
    "np.array": np.zeros((2, 3)),
    "np.objects": np.array([object()]),
    "read-only array": np.broadcast_to(np.zeros(1), (4,)),
    "generator": (x for x in ()),
}
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scalar": lambda x: x.flatten()[0],
    "empty": lambda x: x[:0],
    "empty last": lambda x: x[..., :0],
    "more dims": lambda x: x[None],
    "double": lambda x: x.double(),
    "int64": lambda x: x.long(),
    "uint8": lambda x: x.to(torch.uint8),
    "bool": lambda x: x.bool(),
    "float32": lambda x: x.float(),
    "complex": lambda x: x.to(torch.complex64),
    "conj": lambda x: x.to(torch.complex64).conj(),
    "neg": lambda x: torch._neg_view(x),
    "meta": lambda x: x.to("meta"),
    "nan": lambda x: torch.full_like(x.float(), float("nan")),
    "huge": lambda x: torch.full_like(x, 2**62) if not x.is_floating_point() else x * 1e38,
    "negative": lambda x: -1 - abs(x),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x.flatten()[:1].expand(x.shape),
    "grad": lambda x: x.float().clone().requires_grad_(),
    "own": lambda x: x.as_subclass(Own),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "lazy": lambda x: torch.nn.UninitializedParameter(),
    "read-only": lambda x: torch.from_numpy(np.broadcast_to(x.numpy().flat[:1], x.shape)),
    **{kind: lambda x, kind=kind: make(kind, x) for kind in MAKERS},
}


def _plan(**changed: Any) -> Any:
    return batch().plan(**{"q_indptr": indptr, "storage": fa.Ragged(indptr), **changed})


def _run(**changed: Any) -> Any:
    made = batch()
    made.plan(indptr, fa.Ragged(indptr))
    return made.run(**{"q": packed, "k": packed, "v": packed, **changed})


def _paged(**changed: Any) -> Any:
    return _plan(storage=paged(**changed))


def _blocks(**changed: Any) -> Any:
    fields = {"indptr": torch.tensor([0, 1, 2]), "indices": indptr, "block_size": (4, 4)}
    return _plan(sparsity=fa.BlockSparse(**{**fields, "bits": None, **changed}))


def _levels(**changed: Any) -> Any:
    fields = {"q_indptr": indptr, "storage": paged(), "tokens": None}
    cascade = batch(fa.CascadeAttention)
    own = fa.CascadeLevel(indptr, paged())
    return cascade.plan([fa.CascadeLevel(**{**fields, **changed}), own])


def _cascade(**changed: Any) -> Any:
    cascade = batch(fa.CascadeAttention)
    levels = changed.pop("levels", fa.cascade_levels(indptr, paged()))
    return cascade.plan(levels, **changed)


def _append(**changed: Any) -> Any:
    fields = {"k": packed, "v": packed, "k_pages": pages(), "v_pages": pages()}
    return fa.append_paged_kv(**{**fields, "q_indptr": indptr, "paged": paged(), **changed})


BITS = torch.ones(64, dtype=torch.bool)

# By name: a call, and its arguments, each with a right value.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (
        lambda **c: fa.attention(**{"q": q, "k": q, "v": q, **c}),
        {"q": q, "k": q, "v": q, "variant": None, "scale": 1.0, "q_offset": torch.tensor([0]),
         "kv_len": torch.tensor([8]), "return_lse": False, "partial": False, "out": q,
         "target": None, "surprise": 1},
    ),
    "varlen_attention": (
        lambda **c: fa.varlen_attention(
            **{"q": packed, "k": packed, "v": packed, "q_indptr": indptr, "kv_indptr": indptr, **c}
        ),
        {"q": packed, "k": packed, "v": packed, "q_indptr": indptr, "kv_indptr": indptr,
         "variant": None, "max_q_len": 8, "max_kv_len": 8, "q_offset": torch.tensor([0]),
         "out": packed, "lse": torch.zeros(8, 2), "target": None},
    ),
    "flex_attention": (
        lambda **c: fa.flex_attention(**{"query": q, "key": q, "value": q, **c}),
        {"query": q, "key": q, "value": q, "score_mod": None, "block_mask": None, "scale": 1.0,
         "enable_gqa": False, "return_lse": False, "kernel_options": None, "return_aux": None},
    ),
    "scaled_dot_product_attention": (
        lambda **c: fa.scaled_dot_product_attention(**{"query": q, "key": q, "value": q, **c}),
        {"query": q, "key": q, "value": q, "attn_mask": torch.zeros(8, 8), "dropout_p": 0.0,
         "is_causal": False, "scale": 1.0, "enable_gqa": False},
    ),
    "merge_states": (
        lambda **c: fa.merge_states(**{"outs": [q, q], "lses": [lse, lse], **c}),
        {"outs": q, "lses": lse, "dtype": None, "out": q, "lse": lse,
         "mask": torch.ones(1, 2, 8, dtype=torch.bool), "target": None},
    ),
    "merge_states of one": (
        lambda out=q, lse=lse: fa.merge_states([q, out], [lse, lse]), {"out": q, "lse": lse},
    ),
    "append_paged_kv": (
        _append,
        {"k": packed, "v": packed, "k_pages": pages(), "v_pages": pages(), "q_indptr": indptr,
         "paged": None, "target": None},
    ),
    "BatchAttention": (
        batch,
        dict.fromkeys(
            ("variant", "num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "q_dtype",
             "kv_dtype", "device", "limits", "cuda_graph", "batch_invariant", "target")
        ) | {"workspace": torch.zeros(256, dtype=torch.uint8)},
    ),
    "plan": (
        _plan,
        {"q_indptr": indptr, "storage": None, "sparsity": None, "q_offset": torch.tensor([0]),
         "surprise": 1},
    ),
    "run": (
        _run,
        {"q": packed, "k": packed, "v": packed, "scale": 1.0, "return_lse": False,
         "partial": False, "out": packed, "lse": torch.zeros(8, 2), "surprise": 1},
    ),
    "Paged": (
        _paged,
        {"page_indptr": indptr, "page_indices": indptr, "last_page_len": indptr, "page_size": 2},
    ),
    "Ragged": (lambda kv_indptr=indptr: _plan(storage=fa.Ragged(kv_indptr)), {"kv_indptr": indptr}),
    "BlockSparse": (
        _blocks,
        {"indptr": indptr, "indices": indptr, "block_size": indptr, "bits": indptr},
    ),
    "block sizes": (
        lambda size=4: _blocks(block_size=(size, 4)), {"size": torch.tensor([4, 4])},
    ),
    "TokenSparse": (
        lambda indices=indptr: _plan(sparsity=fa.TokenSparse(indices)),
        {"indices": torch.zeros(8, 1, dtype=torch.int64)},
    ),
    "Bits": (
        lambda bits=BITS, bit_indptr=None: _plan(sparsity=fa.Bits(bits, bit_indptr)),
        {"bits": BITS, "bit_indptr": torch.tensor([0, 64])},
    ),
    "Tree": (
        lambda bits=indptr: _plan(sparsity=fa.Tree(bits)), {"bits": torch.zeros(1, 8, 8).bool()},
    ),
    "CascadeLevel": (_levels, {"q_indptr": indptr, "storage": None, "tokens": torch.arange(8)}),
    "CascadeAttention.plan": (_cascade, {"levels": None, "q_offset": torch.tensor([0])}),
    "cascade_levels": (
        lambda **c: fa.cascade_levels(**{"q_indptr": indptr, "paged": paged(), **c}),
        {"q_indptr": indptr, "paged": None, "min_shared_pages": 1},
    ),
    "Limits": (
        lambda **c: fa.Limits(
            **{"max_requests": 1, "max_q_tokens": 1, "max_kv_len": 1, "max_pages": 1, **c}
        ),
        dict.fromkeys(("max_requests", "max_q_tokens", "max_kv_len", "max_pages")),
    ),
    "workspace_bytes": (
        lambda **c: batch().workspace_bytes(**{"limits": fa.Limits(1, 1, 1), **c}),
        dict.fromkeys(("limits", "q_block", "num_levels")),
    ),
    "variant": (
        fa.variant,
        dict.fromkeys(("score_mod", "mask_mod", "query_mod", "key_mod", "value_mod",
                       "output_mod", "normalizer", "name")),
    ),
    "cpp": (lambda **c: fa.cpp(**{"text": "score", **c}), {"text": "score"}),
    "tensor": (lambda dim="batch": fa.tensor(dim), {"dim": "batch"}),
    "ALiBi": (
        lambda slopes=None: fa.attention(q, q, q, fa.ALiBi(), slopes=slopes),
        {"slopes": torch.rand(2)},
    ),
    "SlidingWindow": (
        lambda window=4: fa.attention(q, q, q, fa.SlidingWindow(window)), {"window": 4},
    ),
    "captured": (
        lambda table=lse: fa.attention(q, q, q, _captures(table)), {"table": lse[0, 0]},
    ),
    "unpack": (lambda **c: fa.unpack(**{"path": "/no/such.pack", **c}), {"targets": ()}),
}  # fmt: skip


def _captures(table: Any) -> Callable[..., Any]:
    def add(score, b, h, q_idx, kv_idx):
        return score + table[q_idx]

    return add


FLAGS = frozenset({
    "return_lse", "partial", "is_causal", "enable_gqa", "cuda_graph", "batch_invariant",
})  # fmt: skip
"""Arguments of which `bool(argument)` decides: any object is a right value."""

ARGUMENTS = [
    (call, argument)
    for call, (_, arguments) in CALLS.items()
    for argument in arguments
    if argument not in FLAGS
]


@pytest.mark.parametrize(("call", "argument"), ARGUMENTS, ids=[f"{c}-{a}" for c, a in ARGUMENTS])
def test_it_works_or_raises_a_typed_error(call, argument):
    function, arguments = CALLS[call]
    right = arguments[argument]
    values = dict(VALUES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, change in TENSORS.items():
            try:
                values[f"tensor: {name}"] = change(
                    right if isinstance(right, torch.Tensor) else torch.ones(3)
                )
            except (RuntimeError, TypeError, ValueError):
                continue  # torch makes no such tensor
        wrong = []
        for name, value in values.items():
            try:
                function(**{argument: value})
            except fa.FlashAttnJitError as error:
                if not str(error):
                    wrong.append(f"{name}: {type(error).__name__} says nothing")
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:160]}")
    assert not wrong, "\n".join(wrong)
