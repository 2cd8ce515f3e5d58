"""Every wrong argument raises a typed error that names it; nothing is compiled or kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import zeros
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashattn_jit as fa
from flashattn_jit.jit import module as jit_module
from flashattn_jit.ops.arguments.calls import dense_form
from flashattn_jit.ops.launching import launches

B, HQ, HKV, SQ, SKV, D = 2, 4, 2, 8, 12, 16


@pytest.fixture(autouse=True)
def _nothing_compiled_or_kept() -> Iterator[None]:
    counters = jit_module.default.counters
    before = (counters.compiles, counters.misses, dict(counters.hits), len(launches._launches))
    yield
    after = (counters.compiles, counters.misses, dict(counters.hits), len(launches._launches))
    assert after == before


def q(**options: Any) -> torch.Tensor:
    return zeros(B, HQ, SQ, D, **options)


def kv(**options: Any) -> torch.Tensor:
    return zeros(B, HKV, SKV, D, **options)


class Needs(fa.Variant):
    """A variant with every kind of param."""

    slopes: torch.Tensor = fa.tensor("num_q_heads")
    table: torch.Tensor = fa.tensor("batch", "anything", dtype=torch.float32)
    cap: float = fa.scalar(30.0)
    window: int = fa.scalar(4)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return self.cap * torch.tanh(score / self.cap) + self.slopes[h] + self.table[b, 0]

    def mask_mod(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.window


NEEDS = Needs()
GOOD = {"slopes": zeros(HQ), "table": zeros(B, 3)}


def score(fn: Callable[..., Any]) -> fa.Variant:
    return fa.variant(score_mod=fn)


def mask(fn: Callable[..., Any]) -> fa.Variant:
    return fa.variant(mask_mod=fn)


_SHARED = zeros(4 * B * HQ * SQ * D)
_SHARED_Q = q()

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call(**changes: Any) -> Arguments:
    """Right arguments of `fa.attention`, with some changed."""
    arguments = {"q": q(), "k": kv(), "v": kv(), "variant": None, **changes}
    return tuple(arguments.pop(name) for name in ("q", "k", "v", "variant")), arguments


# By mistake: the arguments of the call, the error, a pattern of its message.
ATTENTION: dict[str, tuple[Callable[[], Arguments], type[Exception], str]] = {
    "q_not_a_tensor": (lambda: call(q=[1.0]), fa.InputError, r"q must be a torch.Tensor"),
    "q_3d": (lambda: call(q=q()[0]), fa.InputError, r"q must be \[batch, num_q_heads"),
    "k_5d": (lambda: call(k=kv()[None]), fa.InputError, r"k must be \[batch, num_kv_heads"),
    "v_2d": (lambda: call(v=kv()[0, 0]), fa.InputError, r"v must be \[batch"),
    "k_batch": (lambda: call(k=kv()[:1]), fa.InputError, r"k has batch=1, but q has batch=2"),
    "v_batch": (lambda: call(v=kv()[:1]), fa.InputError, r"v has batch=1"),
    "heads_do_not_divide": (
        lambda: call(k=zeros(B, 3, SKV, D), v=zeros(B, 3, SKV, D)),
        fa.InputError,
        r"num_kv_heads=3, which does not divide num_q_heads=4",
    ),
    "tokens_before_heads": (
        lambda: call(q=zeros(B, SQ, HQ, D), k=zeros(B, SKV, HKV, D), v=zeros(B, SKV, HKV, D)),
        fa.InputError,
        r"num_kv_heads=12.*\[batch, heads, tokens, head_dim\]: .* pass q\.transpose\(1, 2\)",
    ),
    "more_kv_heads": (
        lambda: call(k=zeros(B, 8, SKV, D), v=zeros(B, 8, SKV, D)),
        fa.InputError,
        r"num_kv_heads=8",
    ),
    "no_heads": (
        lambda: call(q=q()[:, :0], k=kv()[:, :0], v=kv()[:, :0]),
        fa.InputError,
        r"num_q_heads=0",
    ),
    "v_heads": (lambda: call(v=kv()[:, :1]), fa.InputError, r"v has num_kv_heads=1.*v.repeat_int"),
    "v_more_heads": (
        lambda: call(v=kv().repeat_interleave(2, 1)),
        fa.InputError,
        r"to share each head of k, pass k.repeat_interleave\(2, 1\)",
    ),
    "kv_lengths": (lambda: call(v=kv()[:, :, 1:]), fa.InputError, r"v has kv_len=11"),
    "head_dims": (lambda: call(k=zeros(B, HKV, SKV, 8)), fa.InputError, r"k has head_dim=8"),
    "head_dim_0": (lambda: call(q=q()[..., :0], k=kv()[..., :0]), fa.InputError, r"head_dim=0"),
    "head_dim_577": (
        lambda: call(q=zeros(1, 1, 1, 577), k=zeros(1, 1, 1, 577), v=zeros(1, 1, 1, 8)),
        fa.InputError,
        r"head_dim=577",
    ),
    "head_dim_v_600": (
        lambda: call(q=zeros(1, 1, 1, 8), k=zeros(1, 1, 1, 8), v=zeros(1, 1, 1, 600)),
        fa.InputError,
        r"head_dim_v=600",
    ),
    "too_long": (
        lambda: call(
            q=zeros(1, 1, 1, 1).expand(1, 2, 2**30 + 2, 1), k=zeros(1, 1, 1, 1), v=zeros(1, 1, 1, 1)
        ),
        fa.InputError,
        r"32 bits",
    ),
    "q_float64": (
        lambda: call(q=q(dtype=torch.float64)),
        fa.InputError,
        r"q has dtype torch.float64",
    ),
    "q_int": (lambda: call(q=q(dtype=torch.int32)), fa.InputError, r"q has dtype torch.int32"),
    "q_complex": (lambda: call(q=q(dtype=torch.complex64)), fa.InputError, r"complex64"),
    "k_bool": (lambda: call(k=kv(dtype=torch.bool)), fa.InputError, r"k has dtype torch.bool"),
    "v_float64": (lambda: call(v=kv(dtype=torch.float64)), fa.InputError, r"v has dtype"),
    "q_meta": (lambda: call(q=q(device="meta")), fa.InputError, r"q is on device meta"),
    "k_meta": (lambda: call(k=kv(device="meta")), fa.InputError, r"k is on device meta"),
    "k_sparse": (lambda: call(k=kv().to_sparse()), fa.InputError, r"k has layout"),
    "q_last_stride": (
        lambda: call(q=zeros(B, HQ, D, SQ).transpose(2, 3)),
        fa.InputError,
        r"q's last dim .*stride",
    ),
    "v_last_stride": (
        lambda: call(v=zeros(B, HKV, SKV, 2 * D)[..., ::2]),
        fa.InputError,
        r"v's last dim",
    ),
    "q_neg_view": (
        lambda: call(q=zeros(B, HQ, SQ, D, dtype=torch.complex64).conj().imag),
        fa.InputError,
        r"q",
    ),
    "scale_nan": (lambda: call(scale=float("nan")), fa.InputError, r"scale=nan must be finite"),
    "scale_of_heads": (
        lambda: call(scale=zeros(HQ)),
        fa.InputError,
        r"got a tensor \[4\].*score_mod: pass scale=1\.0 and return score \* scale\[h\]",
    ),
    "offset_list": (
        lambda: call(q_offset=[3]),
        fa.InputError,
        r"got list; make one: torch\.tensor\(q_offset, dtype=torch\.int32\)",
    ),
    "offset_of_one": (
        lambda: call(q_offset=torch.tensor([3])),
        fa.InputError,
        r"\[batch=2\], got \(1,\); for all requests pass torch\.full\(\(2,\), 3\)",
    ),
    "scale_text": (lambda: call(scale="1"), fa.InputError, r"scale must be a float"),
    "scale_bool": (lambda: call(scale=True), fa.InputError, r"scale must be a float"),
    "offset_text": (lambda: call(q_offset="start"), fa.InputError, r'"end", got .start'),
    "offset_float": (lambda: call(q_offset=1.5), fa.InputError, r"q_offset must be an int"),
    "offset_huge": (lambda: call(q_offset=2**40), fa.InputError, r"outside of"),
    "offset_shape": (
        lambda: call(q_offset=torch.zeros(3, dtype=torch.int64)),
        fa.InputError,
        r"q_offset must be \[batch=2\]",
    ),
    "offset_dtype": (lambda: call(q_offset=zeros(B)), fa.InputError, r"int32 or int64"),
    "kv_len_list": (
        lambda: call(kv_len=[3, 4]),
        fa.InputError,
        r"kv_len must be an int32 or int64 cpu tensor",
    ),
    "kv_len_int": (
        lambda: call(kv_len=3),
        fa.InputError,
        r"\[batch=2\], got the int 3; for all requests pass torch\.full\(\(2,\), 3\)",
    ),
    "kv_len_shape": (
        lambda: call(kv_len=torch.tensor([3])),
        fa.InputError,
        r"kv_len must be \[batch=2\]",
    ),
    "kv_len_long": (lambda: call(kv_len=torch.tensor([3, 13])), fa.InputError, r"kv_len\[1\]=13"),
    "kv_len_negative": (
        lambda: call(kv_len=torch.tensor([-1, 3])),
        fa.InputError,
        r"kv_len\[0\]=-1",
    ),
    "out_shape": (
        lambda: call(out=zeros(B, HQ, SQ, 8)),
        fa.InputError,
        r"out must be \[2, 4, 8, 16\]",
    ),
    "out_list": (lambda: call(out=[1]), fa.InputError, r"out must be a torch.Tensor, got list"),
    "out_dtype": (lambda: call(out=q(dtype=torch.bfloat16)), fa.InputError, r"out must be"),
    "out_expanded": (lambda: call(out=zeros(1).expand(B, HQ, SQ, D)), fa.InputError, r"out"),
    "out_last_stride": (
        lambda: call(out=zeros(B, HQ, D, SQ).transpose(2, 3)),
        fa.InputError,
        r"stride is 8; pass torch\.empty\(\[2, 4, 8, 16\], dtype=torch\.float32\), or leave",
    ),
    "out_is_q": (lambda: call(q=_SHARED_Q, out=_SHARED_Q), fa.InputError, r"out shares memory"),
    "out_overlaps": (
        lambda: call(
            q=_SHARED[: B * HQ * SQ * D].view(B, HQ, SQ, D),
            out=_SHARED[8 : 8 + B * HQ * SQ * D].view(B, HQ, SQ, D),
        ),
        fa.InputError,
        r"shares memory",
    ),
    "target": (lambda: call(target="cpu:mmx"), fa.TargetError, r"cpu:mmx"),
    "variant_int": (lambda: call(variant=3), fa.FlashAttnJitError, r"int"),
    "variant_class": (lambda: call(variant=fa.Causal), fa.FlashAttnJitError, r"Causal"),
    "variant_arity": (lambda: call(variant=lambda a, b, c: a), fa.FlashAttnJitError, r"3"),
    "param_missing": (lambda: call(variant=NEEDS, slopes=zeros(HQ)), fa.ParamError, r"table"),
    "param_unknown": (
        lambda: call(variant=NEEDS, **{**GOOD, "slope": zeros(HQ)}),
        fa.ParamError,
        r"slope",
    ),
    "param_without_params": (lambda: call(variant=fa.Causal(), window=3), fa.ParamError, r"window"),
    "param_shape": (
        lambda: call(variant=NEEDS, **{**GOOD, "slopes": zeros(3)}),
        fa.ParamError,
        r"num_q_heads",
    ),
    "param_rank": (
        lambda: call(variant=NEEDS, **{**GOOD, "slopes": zeros(HQ, 1)}),
        fa.ParamError,
        r"slopes",
    ),
    "param_dtype": (
        lambda: call(variant=NEEDS, **{**GOOD, "table": zeros(B, 3).half()}),
        fa.ParamError,
        r"float32",
    ),
    "param_complex": (
        lambda: call(variant=NEEDS, **{**GOOD, "slopes": zeros(HQ, dtype=torch.complex64)}),
        fa.ParamError,
        r"complex",
    ),
    "param_meta": (
        lambda: call(variant=NEEDS, **{**GOOD, "slopes": zeros(HQ, device="meta")}),
        fa.ParamError,
        r"meta",
    ),
    "param_number_for_tensor": (
        lambda: call(variant=NEEDS, **{**GOOD, "slopes": 1.0}),
        fa.ParamError,
        r"slopes",
    ),
    "param_tensor_for_number": (
        lambda: call(variant=NEEDS, **{**GOOD, "cap": zeros(1)}),
        fa.ParamError,
        r"cap",
    ),
    "param_float_for_int": (
        lambda: call(variant=NEEDS, **{**GOOD, "window": 1.5}),
        fa.ParamError,
        r"window",
    ),
    "param_text": (lambda: call(variant=NEEDS, **GOOD, cap="30"), fa.ParamError, r"cap"),
    "prefix_is_a_number": (
        lambda: call(variant=fa.PrefixLM(5)),
        fa.ParamError,
        r"int 5; pass torch\.full\(\(batch,\), 5\)",
    ),
    "sink_is_a_number": (
        lambda: call(variant=fa.Sink(0.0)),
        fa.ParamError,
        r"pass torch\.full\(\(num_q_heads,\), 0\.0\)",
    ),
    "bias_of_pairs": (
        lambda: call(variant=fa.AdditiveBias(zeros(SQ, SKV))),
        fa.ParamError,
        r"got shape \[8, 12\]; pass bias\[None, None\]",
    ),
    "bias_of_heads": (
        lambda: call(variant=fa.AdditiveBias(zeros(HQ, SQ, SKV))),
        fa.ParamError,
        r"; pass bias\[None\]",
    ),
    "slopes_of_requests": (
        lambda: call(variant=fa.ALiBi(zeros(B, HQ))),
        fa.ParamError,
        r"got shape \[2, 4\]; .* a score_mod that reads slopes\[b, h\]",
    ),
    "hook_item": (
        lambda: call(variant=score(lambda s, b, h, i, j: s + i.item())),
        fa.TraceError,
        r"item",
    ),
    "hook_if": (
        lambda: call(variant=score(lambda s, b, h, i, j: s if i > j else -s)),
        fa.TraceError,
        r"torch.where",
    ),
    "hook_and": (
        lambda: call(variant=mask(lambda b, h, i, j: i > j and i < 5)),
        fa.TraceError,
        r"&",
    ),
    "hook_none": (
        lambda: call(variant=score(lambda s, b, h, i, j: None)),
        fa.TraceError,
        r"return",
    ),
    "hook_float_mask": (
        lambda: call(variant=mask(lambda b, h, i, j: i * 0.5)),
        fa.TraceError,
        r"boolean",
    ),
    "hook_random": (
        lambda: call(variant=score(lambda s, b, h, i, j: s + torch.rand(()))),
        fa.TraceError,
        r"rand",
    ),
    "hook_sort": (
        lambda: call(variant=score(lambda s, b, h, i, j: torch.sort(s)[0])),
        fa.TraceError,
        r"sort",
    ),
    "hook_vector": (
        lambda: call(variant=score(lambda s, b, h, i, j: s + GOOD["slopes"])),
        fa.TraceError,
        r"shape|element",
    ),
    "hook_raises": (
        lambda: call(variant=score(lambda s, b, h, i, j: s + undefined)),  # noqa: F821
        fa.TraceError,
        r"undefined",
    ),
    "hook_meta_capture": (
        lambda: call(variant=_captures(zeros(HQ, device="meta"))),
        fa.FlashAttnJitError,
        r"meta|device",
    ),
    "lse_of_pointwise": (
        lambda: call(variant=fa.Sigmoid(), return_lse=True),
        fa.InputError,
        r"log-sum-exp",
    ),
}


def _captures(tensor: torch.Tensor) -> fa.Variant:
    return score(lambda s, b, h, i, j: s + tensor[h])


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    make, error, words = ATTENTION[name]
    with pytest.raises(error, match=words):
        arguments, keywords = make()
        fa.attention(*arguments, **keywords)


@pytest.mark.parametrize("which", range(3))
def test_strides_are_checked_where_the_shapes_are_known(which: int) -> None:
    tensors = [zeros(B, HQ, D, D) for _ in range(3)]
    dense_form(*tensors, direct=True)
    tensors[which] = tensors[which].transpose(2, 3)
    with pytest.raises(fa.InputError, match=f"{'qkv'[which]}'s last dim .*stride"):
        dense_form(*tensors, direct=True)


@pytest.mark.parametrize("which", ["q", "k", "v", "param", "capture"])
def test_an_input_that_requires_grad(which: str) -> None:
    tensors = {"q": q(), "k": kv(), "v": kv(), "param": zeros(HQ), "capture": zeros(HQ)}
    tensors[which].requires_grad_()
    variant = NEEDS & _captures(tensors["capture"])
    params = {"slopes": tensors["param"], "table": zeros(B, 3)}
    name = {"param": "the variant's tensor 'slopes'", "capture": "the variant's tensor 'tensor'"}
    with pytest.raises(fa.GradError, match=f"^{name.get(which, which)} requires grad"):
        fa.attention(tensors["q"], tensors["k"], tensors["v"], variant, **params)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, on first use
def test_an_input_with_a_tangent() -> None:
    tangent = torch.ones(B, HQ, SQ, D)
    with pytest.raises(fa.GradError, match="tangent"):
        torch.func.jvp(lambda x: fa.attention(x, kv(), kv()), (q(),), (tangent,))
    match = "q has a forward-mode tangent"
    with torch.autograd.forward_ad.dual_level(), pytest.raises(fa.GradError, match=match):
        fa.attention(torch.autograd.forward_ad.make_dual(q(), tangent), kv(), kv())
    with pytest.raises(fa.GradError, match="requires grad"):
        torch.func.grad(lambda x: fa.attention(x, kv(), kv()).sum())(q())


def packed(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "q": zeros(8, HQ, D),
        "k": zeros(12, HKV, D),
        "v": zeros(12, HKV, D),
        "q_indptr": torch.tensor([0, 3, 8]),
        "kv_indptr": torch.tensor([0, 5, 12]),
        "variant": None,
    }
    return {**arguments, **changes}


VARLEN: dict[str, tuple[dict[str, Any], str]] = {
    "q_4d": ({"q": q()}, r"q must be \[num_q_tokens"),
    "k_heads": ({"k": zeros(12, 3, D), "v": zeros(12, 3, D)}, r"num_kv_heads=3"),
    "v_tokens": ({"v": zeros(11, HKV, D)}, r"num_kv_tokens=11"),
    "k_head_dim": ({"k": zeros(12, HKV, 8)}, r"head_dim=8"),
    "indptr_list": ({"q_indptr": [0, 3, 8]}, r"q_indptr must be an int32 or int64 cpu tensor"),
    "indptr_float": ({"kv_indptr": torch.tensor([0.0, 5.0, 12.0])}, r"kv_indptr must be an int32"),
    "indptr_2d": (
        {"q_indptr": torch.tensor([[0, 3, 8]])},
        r"q_indptr must be a tensor \[num_requests \+ 1\]",
    ),
    "indptr_empty": ({"q_indptr": torch.tensor([], dtype=torch.int64)}, r"q_indptr has 0 entries"),
    "indptr_start": ({"q_indptr": torch.tensor([1, 3, 8])}, r"q_indptr\[0\]=1 must be 0"),
    "indptr_end": (
        {"kv_indptr": torch.tensor([0, 5, 11])},
        r"num_kv_tokens=12.*ends at 11",
    ),
    "indptr_descends": (
        {"q_indptr": torch.tensor([0, 9, 8])},
        r"descends at request 1",
    ),
    "indptr_counts": ({"kv_indptr": torch.tensor([0, 12])}, r"kv_indptr has 2 entries"),
    "indptr_meta": ({"q_indptr": torch.tensor([0, 3, 8], device="meta")}, r"meta"),
    "max_q_len": ({"max_q_len": 4}, r"max_q_len=4 is less than the length 5 of request 1"),
    "max_kv_len": ({"max_kv_len": 6}, r"max_kv_len=6"),
    "offset_text": ({"q_offset": "begin"}, r"q_offset"),
    "offset_bool": ({"q_offset": True}, r"q_offset"),
    "offset_shape": ({"q_offset": torch.tensor([1])}, r"q_offset has 1 entries for 2 requests"),
    "lse_of_pointwise": ({"variant": "sigmoid", "return_lse": True}, r"log-sum-exp"),
    "out_shape": ({"out": zeros(8, HQ, 8)}, r"out must be"),
    "out_list": ({"out": [1]}, r"out must be a torch.Tensor, got list"),
}


@pytest.mark.parametrize("name", VARLEN)
def test_varlen_attention(name: str) -> None:
    changes, words = VARLEN[name]
    arguments = packed(**changes)
    if arguments["variant"] == "sigmoid":
        arguments["variant"] = fa.Sigmoid()
    with pytest.raises(fa.InputError, match=words):
        fa.varlen_attention(**arguments)


def causal(b, h, i, j):
    return i >= j


def block_mask(q_len: int = SQ, kv_len: int = SKV, **options: Any) -> BlockMask:
    options = {"B": None, "H": None, "BLOCK_SIZE": 4, **options}
    return create_block_mask(causal, Q_LEN=q_len, KV_LEN=kv_len, device="cpu", **options)


def listing(counts: Any, indices: Any, full: tuple[Any, Any] = (None, None)) -> BlockMask:
    """A mask of two by three blocks that lists what is given."""

    def tensor(x: Any) -> torch.Tensor | None:
        return None if x is None else torch.tensor(x, dtype=torch.int32)

    return BlockMask.from_kv_blocks(
        tensor(counts), tensor(indices), *map(tensor, full), BLOCK_SIZE=4, mask_mod=causal,
        seq_lengths=(SQ, SKV), compute_q_blocks=False,
    )  # fmt: skip


FLEX: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "rank": (lambda: {"query": q()[0]}, r"4D tensors"),
    "embedding": (lambda: {"key": zeros(B, HQ, SKV, 8)}, r"same embedding dimension"),
    "heads": (lambda: {"key": kv(), "value": kv()}, r"same number of heads.*enable_gqa=True"),
    "gqa_divides": (
        lambda: {"key": zeros(B, 3, SKV, D), "value": zeros(B, 3, SKV, D), "enable_gqa": True},
        r"does not divide",
    ),
    "batch_without_mask": (
        lambda: {"key": zeros(1, HQ, SKV, D), "value": zeros(1, HQ, SKV, D)},
        r"same batch size",
    ),
    "batch_with_shared_mask": (
        lambda: {
            "key": zeros(1, HQ, SKV, D),
            "value": zeros(1, HQ, SKV, D),
            "block_mask": block_mask(),
        },
        r"same batch size",
    ),
    "batch_other": (
        lambda: {"key": zeros(3, HQ, SKV, D), "value": zeros(3, HQ, SKV, D)},
        r"batch=3",
    ),
    "score_mod_text": (lambda: {"score_mod": "alibi"}, r"score_mod must be a function"),
    "score_mod_variant": (lambda: {"score_mod": fa.Causal()}, r"fa.attention"),
    "mask_of_a_function": (lambda: {"block_mask": causal}, r"BlockMask, got function"),
    "mask_smaller": (lambda: {"block_mask": block_mask(4)}, r"created for a smaller length"),
    "mask_larger": (lambda: {"block_mask": block_mask(16)}, r"created for a larger length"),
    "mask_larger_keys": (
        lambda: {"block_mask": block_mask(SQ, 64)},
        r"created for a larger length",
    ),
    "mask_batch": (lambda: {"block_mask": block_mask(B=3)}, r"batch=3, but q has batch=2"),
    "mask_heads": (
        lambda: {"block_mask": block_mask(H=2)},
        r"num_q_heads=2, but q has num_q_heads=4",
    ),
    "mask_sliced": (lambda: {"block_mask": block_mask(B=2)[:1]}, r"sliced BlockMask"),
    "mask_block_out_of_range": (
        lambda: {"block_mask": listing([[[1, 1]]], [[[[0, 0, 0], [3, 0, 0]]]])},
        r"key block 3",
    ),
    "mask_block_negative": (
        lambda: {"block_mask": listing([[[1, 1]]], [[[[0, 0, 0], [-1, 0, 0]]]])},
        r"key block -1",
    ),
    "mask_block_twice": (
        lambda: {"block_mask": listing([[[2, 1]]], [[[[1, 1, 0], [0, 0, 0]]]])},
        r"twice",
    ),
    "mask_block_in_both": (
        lambda: {
            "block_mask": listing(
                [[[1, 1]]], [[[[1, 0, 0], [0, 0, 0]]]], ([[[1, 0]]], [[[[1, 0, 0], [0, 0, 0]]]])
            )
        },
        r"twice",
    ),
    "mask_count": (
        lambda: {"block_mask": listing([[[4, 1]]], [[[[0, 1, 2], [0, 0, 0]]]])},
        r"num_blocks must be in \[0, 3\]",
    ),
    "mask_rows": (
        lambda: {"block_mask": listing([[[1]]], [[[[0, 1, 2]]]])},
        r"lists 1 query blocks, but q_len takes 2",
    ),
    "nested": (
        lambda: {"query": torch.nested.nested_tensor([zeros(HQ, 3, D), zeros(HQ, 2, D)])},
        r"nested",
    ),
    "float64": (lambda: {"query": q(dtype=torch.float64)}, r"float64"),
}


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_flex_attention(name: str) -> None:
    make, words = FLEX[name]
    arguments = {"query": q(), "key": zeros(B, HQ, SKV, D), "value": zeros(B, HQ, SKV, D), **make()}
    with pytest.raises(fa.InputError, match=words):
        fa.flex_attention(**arguments)


def test_merge_states() -> None:
    out, lse = zeros(B, HQ, SQ, D), zeros(B, HQ, SQ)
    wrong: list[tuple[Any, Any, str]] = [
        ([], [], "empty"),
        (None, [lse], "outs must be a sequence of tensors, got NoneType"),
        ([out], 3, "lses must be a sequence of tensors, got int"),
        (torch.stack([out, out], 1), [lse, lse], r"outs must .* one a state.*outs.unbind\(1\)"),
        ([out, out], torch.stack([lse, lse]), r"lses must .* one a state.*lses.unbind\(0\)"),
        (torch.tensor(1.0), [lse], r"outs must .* one a state"),
        ([out, out], [lse], "lses has 1 states"),
        ([out, out[:1]], [lse, lse], r"outs\[1\] is"),
        ([out.half()], [lse], "float32"),
        ([out], [lse[:, :1]], r"lses\[0\] is"),
        ([out[0, 0]], [lse[0, 0]], "must be"),
        ([out, 3], [lse, lse], r"outs\[1\] must be a torch.Tensor"),
    ]
    for outs, lses, words in wrong:
        with pytest.raises(fa.InputError, match=words):
            fa.merge_states(outs, lses)
    with pytest.raises(fa.GradError):
        fa.merge_states([out.requires_grad_()], [lse])


def test_errors_are_of_the_kinds_that_python_and_torch_users_catch() -> None:
    with pytest.raises(ValueError):
        fa.attention(q(), kv()[:1], kv(), None)
    with pytest.raises(TypeError):
        fa.attention(q(), kv(), kv(), NEEDS)
    with pytest.raises(RuntimeError):
        fa.attention(q().requires_grad_(), kv(), kv())


def test_what_users_of_flex_attention_write() -> None:
    """Arguments and objects of torch's are named with what stands for them here."""
    q = torch.zeros(1, 2, 8, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu")
    for variant, given, wanted in (
        (None, {"block_mask": mask}, "fa.flex_attention takes a BlockMask"),
        (None, {"score_mod": abs}, r"fa.variant\(score_mod=..., mask_mod=...\)"),
        (fa.Causal(), {"enable_gqa": True}, "share keys need no option"),
        (mask, {}, r"got BlockMask; give it to fa.flex_attention\(..., block_mask=...\)"),
    ):
        with pytest.raises(fa.FlashAttnJitError, match=wanted):
            fa.attention(q, q, q, variant, **given)
    with pytest.raises(fa.ParamError, match=r"pass documents\[None\]"):
        fa.DocumentMask(torch.zeros(8, dtype=torch.int32))


def test_a_misspelt_param_beside_a_missing_one() -> None:
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(fa.ParamError, match=r"no param 'document'.*mean documents=\?"):
        fa.attention(q, q, q, fa.DocumentMask(), document=torch.zeros(1, 8).int())


def test_a_gpu_explains_no_fp32_tensors() -> None:
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(fa.InputError, match=r"take q, k and v of one dtype, torch\.bfloat16"):
        fa.Causal().explain(q, q, q, device="H100")
