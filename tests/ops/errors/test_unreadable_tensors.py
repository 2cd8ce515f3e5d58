"""Sparse, nested, masked, quantized tensors and wrapper subclasses: typed errors everywhere."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.ops.errors.odd_tensors import MAKERS, Own, Refusing, Wrapper, make
from tests.ops.errors.small_calls import batch, indptr, lse, packed, paged, pages, q

KINDS = tuple(MAKERS)
REASON = {
    "coo": "layout torch.sparse_coo",
    "csr": "layout torch.sparse_csr",
    "mkldnn": r"layout torch\._mkldnn",
    "quantized": "quantized",
    "nested": "nested tensor; pass its values",
    "jagged": "nested tensor; pass its values",
    "masked": "MaskedTensor.*get_data",
    "wrapper": "Wrapper, a wrapper subclass.*pass the tensor that it wraps",
    "refusing": "Refusing, a wrapper subclass",
}


def run(*args: torch.Tensor, **options: Any) -> Any:
    one = batch()
    one.plan(indptr, fa.Ragged(indptr))
    return one.run(*args, **options)


def plan(sparsity: Any = None, storage: Any = None, **options: Any) -> Any:
    return batch().plan(indptr, storage or fa.Ragged(indptr), sparsity=sparsity, **options)


# By name: a call with the odd tensor, the dense tensor that it is made of, its name in messages.
FLOATS: dict[str, tuple[Callable[[Any], Any], torch.Tensor, str]] = {
    "q": (lambda x: fa.attention(x, q, q), q, "q"),
    "k": (lambda x: fa.attention(q, x, q), q, "k"),
    "v": (lambda x: fa.attention(q, q, x), q, "v"),
    "out": (lambda x: fa.attention(q, q, q, out=x), q, "out"),
    "q and out": (lambda x: fa.attention(x, q, q, out=q.clone()), q, "q"),
    "sdpa": (lambda x: fa.scaled_dot_product_attention(q, x, q), q, "key"),
    "attn_mask": (
        lambda x: fa.scaled_dot_product_attention(q, q, q, x), torch.zeros(8, 8), "attn_mask",
    ),
    "flex": (lambda x: fa.flex_attention(q, q, x), q, "value"),
    "merge out": (lambda x: fa.merge_states([q, x], [lse, lse]), q, r"outs\[1\]"),
    "merge lse": (lambda x: fa.merge_states([q, q], [lse, x]), lse, r"lses\[1\]"),
    "varlen q": (lambda x: fa.varlen_attention(x, packed, packed, indptr, indptr), packed, "q"),
    "varlen v": (lambda x: fa.varlen_attention(packed, packed, x, indptr, indptr), packed, "v"),
    "varlen out": (
        lambda x: fa.varlen_attention(packed, packed, packed, indptr, indptr, out=x), packed, "out",
    ),
    "append k": (
        lambda x: fa.append_paged_kv(x, packed, pages(), pages(), indptr, paged()), packed, "k",
    ),
    "append pages": (
        lambda x: fa.append_paged_kv(packed, packed, x, pages(), indptr, paged()), pages(),
        "k_pages",
    ),
    "run q": (lambda x: run(x, packed, packed), packed, "q"),
    "run k": (lambda x: run(packed, x, packed), packed, "k"),
    "run out": (lambda x: run(packed, packed, packed, out=x), packed, "out"),
    "workspace": (
        lambda x: batch(workspace=x), torch.zeros(256, dtype=torch.uint8), "workspace",
    ),
}  # fmt: skip

INTEGERS: dict[str, tuple[Callable[[Any], Any], torch.Tensor, str]] = {
    "kv_len": (lambda x: fa.attention(q, q, q, kv_len=x), torch.tensor([4]), "kv_len"),
    "q_offset": (lambda x: fa.attention(q, q, q, q_offset=x), torch.tensor([4]), "q_offset"),
    "q_indptr": (
        lambda x: fa.varlen_attention(packed, packed, packed, x, indptr), indptr, "q_indptr",
    ),
    "kv_indptr": (
        lambda x: fa.varlen_attention(packed, packed, packed, indptr, x), indptr, "kv_indptr",
    ),
    "plan q_indptr": (lambda x: batch().plan(x, fa.Ragged(indptr)), indptr, "q_indptr"),
    "plan q_offset": (lambda x: plan(q_offset=x), torch.tensor([0]), "q_offset"),
    "Ragged": (lambda x: plan(storage=fa.Ragged(x)), indptr, "kv_indptr"),
    "page_indptr": (lambda x: plan(storage=paged(page_indptr=x)), indptr, "page_indptr"),
    "page_indices": (lambda x: plan(storage=paged(page_indices=x)), indptr, "page_indices"),
    "last_page_len": (lambda x: plan(storage=paged(last_page_len=x)), indptr, "last_page_len"),
    "BlockSparse.indptr": (
        lambda x: plan(fa.BlockSparse(x, indptr, (4, 4))), indptr, r"BlockSparse\.indptr",
    ),
    "BlockSparse.indices": (
        lambda x: plan(fa.BlockSparse(torch.tensor([0, 1, 2]), x, (4, 4))), indptr,
        r"BlockSparse\.indices",
    ),
    "BlockSparse.block_size": (
        lambda x: plan(fa.BlockSparse(torch.tensor([0, 1]), indptr[:1], (x, 4))), indptr[1:],
        "block_size: Br",
    ),
    "TokenSparse": (
        lambda x: plan(fa.TokenSparse(x)), torch.zeros(8, 1, dtype=torch.int64), "TokenSparse",
    ),
    "Bits": (lambda x: plan(fa.Bits(x)), torch.zeros(64, dtype=torch.bool), r"Bits\.bits"),
    "Tree": (
        lambda x: plan(fa.Tree(x)), torch.zeros(1, 8, 1, dtype=torch.int64), r"Tree\.bits",
    ),
    "cascade_levels": (lambda x: fa.cascade_levels(x, paged()), indptr, "q_indptr"),
    "cascade_levels pages": (
        lambda x: fa.cascade_levels(indptr, paged(page_indices=x)), torch.arange(4),
        "page_indices",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", FLOATS)
def test_tensors(argument, kind):
    call, dense, name = FLOATS[argument]
    if kind in ("mkldnn", "quantized", "masked") and dense.dtype == torch.uint8:
        pytest.skip("torch makes no such tensor")
    odd = make(kind, dense)
    with pytest.raises(fa.InputError, match=f"{name} (is a|has).*{REASON[kind]}"):
        call(odd)
    call(dense.clone())  # the dense tensor works; what this call left in memory changes nothing:
    with pytest.raises(fa.InputError, match=f"{name} (is a|has).*{REASON[kind]}"):
        call(odd)


@pytest.mark.parametrize("kind", ["coo", "csr", "nested", "jagged", "masked", "wrapper"])
@pytest.mark.parametrize("argument", INTEGERS)
def test_lengths_and_indices(argument, kind):
    call, dense, name = INTEGERS[argument]
    with pytest.raises(fa.InputError, match=f"{name}.* (is a|has) .*{REASON[kind]}"):
        call(make(kind, dense))


# --- captured tensors and params -----------------------------------------------------------------


def bias(table: torch.Tensor) -> Callable[..., Any]:
    def add(score, b, h, q_idx, kv_idx):
        return score + table[q_idx, kv_idx]

    return add


class Biased(fa.Variant):
    table: torch.Tensor = fa.tensor("rows", "columns")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.table[q_idx, kv_idx]


def _run_captured(variant: Any, **params: Any) -> Any:
    one = batch(variant=variant)
    one.plan(indptr, fa.Ragged(indptr))
    return one.run(packed, packed, packed, **params)


CAPTURING = {
    "dense": lambda mod: fa.attention(q, q, q, mod),
    "varlen": lambda mod: fa.varlen_attention(packed, packed, packed, indptr, indptr, mod),
    "flex": lambda mod: fa.flex_attention(q, q, q, mod),
    "batch": _run_captured,
    "warm": lambda mod: fa.variant(score_mod=mod).bind(fa.variants.variant.Dims()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CAPTURING)
def test_captured(call, kind):
    table = torch.randn(8, 8)
    match = rf"tensor 'table' (is a|has).*{REASON[kind]}"
    with pytest.raises(fa.ParamError, match=match):
        CAPTURING[call](bias(make(kind, table)))
    CAPTURING[call](bias(table))  # the structure is known from here on
    with pytest.raises(fa.ParamError, match=match):
        CAPTURING[call](bias(make(kind, table)))


@pytest.mark.parametrize("kind", ["coo", "mkldnn", "nested", "wrapper"])
def test_captured_in_the_place_of_a_subclass(kind):
    """A structure traced with a subclass does not admit another subclass."""
    table = torch.randn(8, 8)
    fa.attention(q, q, q, bias(table.as_subclass(Own)))
    with pytest.raises(fa.ParamError, match=REASON[kind]):
        fa.attention(q, q, q, bias(make(kind, table)))


@pytest.mark.parametrize("kind", ["coo", "csr", "mkldnn", "masked", "wrapper", "refusing"])
def test_params(kind):
    table = torch.randn(8, 8)
    odd = make(kind, table)
    for _ in range(2):
        with pytest.raises(fa.ParamError, match=REASON[kind]):
            fa.attention(q, q, q, Biased(), table=odd)
        with pytest.raises(fa.ParamError, match=REASON[kind]):
            fa.attention(q, q, q, Biased(table=odd))
        with pytest.raises(fa.FlashAttnJitError, match=REASON[kind]):
            _run_captured(Biased(), table=odd)
        fa.attention(q, q, q, Biased(), table=table)


# --- what works ----------------------------------------------------------------------------------


def test_subclasses_with_entries_work():
    wanted = fa.attention(q, q, q, bias(q[0, 0, :, :8]))
    for cls in (Own, torch.nn.Parameter):
        own = q.as_subclass(Own) if cls is Own else torch.nn.Parameter(q, requires_grad=False)
        table = own[0, 0, :, :8].detach()
        for _ in range(2):
            out = fa.attention(own, own, own, bias(table))
            assert torch.equal(out.as_subclass(torch.Tensor), wanted)


def test_a_parameter_that_has_no_shape_yet():
    lazy = torch.nn.UninitializedParameter(requires_grad=False)
    with pytest.raises(fa.InputError, match=r"q is an UninitializedParameter.*run its module"):
        fa.attention(lazy, q, q)
    with pytest.raises(fa.ParamError, match="UninitializedParameter"):
        fa.attention(q, q, q, bias(lazy))


def test_a_wrapper_never_reaches_a_kernel():
    """A wrapper has no address of its own: k was once read at q's address."""

    class Bypassing(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    for args in ((Bypassing(q), q, q), (q, Bypassing(q), q), (q, q, Bypassing(q))):
        with pytest.raises(fa.InputError, match="Bypassing, a wrapper subclass"):
            fa.attention(*args)


def test_stand_ins_of_tracers_are_no_wrappers():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    from flashattn_jit.torch_modes import unreadable

    with FakeTensorMode() as mode:
        assert unreadable(mode.from_tensor(q)) == ""
    with FunctionalTensorMode():
        assert unreadable(FunctionalTensor.to_functional(q)) == ""


def test_a_distributed_tensor_names_its_local_one():
    class DTensor(Refusing):
        pass

    with pytest.raises(fa.InputError, match=re.escape("pass its to_local()")):
        fa.attention(DTensor(q), q, q)


def test_a_negated_view_of_integers_is_read_with_its_sign():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        negated = torch._neg_view(-indptr)
    for call in (
        lambda x: batch().plan(x, fa.Ragged(x)),
        lambda x: plan(storage=paged(page_indices=torch._neg_view(-torch.arange(4)))),
        lambda x: plan(fa.BlockSparse(torch._neg_view(-torch.tensor([0, 1, 2])), x * 0, (4, 4))),
        lambda x: plan(q_offset=torch._neg_view(-torch.tensor([0]))),
        lambda x: fa.cascade_levels(x, paged()),
    ):
        call(negated)
