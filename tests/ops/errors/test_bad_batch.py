"""Wrong calls of plan() and run(): messages name the request and say what to do.

A refused call changes nothing: the plan before it still runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import GradError, InputError, ParamError, TargetError
from tests.ops.errors.batch_calls import (
    KV_INDPTR,
    LIMITS,
    OPTIONS,
    PAGED,
    Q_INDPTR,
    batch,
    packed,
    pages,
    refused,
)

# --- the object -----------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [fa.BatchAttention, fa.CascadeAttention])
def test_wrong_arguments_of_the_constructor_name_the_class(made: Any) -> None:
    name = made.__name__
    with pytest.raises(InputError, match=rf"{name}\(\) takes one .*, got 2; give a workspace as"):
        made(torch.empty(8, dtype=torch.uint8), "NHD")
    with pytest.raises(InputError, match=rf"{name}\(\) needs num_q_heads=, .* q_dtype=$"):
        made(fa.Causal())
    with pytest.raises(InputError, match=rf"{name}\(\) has no option pages; its options are"):
        made(fa.Causal(), **OPTIONS, pages=16)
    text = rf"{name}\(\) has no option kv_data_type, window_left; kv_data_type: pass kv_dtype=; .*S"
    with pytest.raises(InputError, match=text + r"lidingWindow\(.*; its options are"):
        made(fa.Causal(), **OPTIONS, kv_data_type=torch.float32, window_left=7)


def test_arguments_of_flashinfer_s_plan() -> None:
    made = batch(fa.Causal())
    with pytest.raises(InputError, match=r"plan\(\) needs q_indptr; qo_indptr: pass q_indptr="):
        made.plan(qo_indptr=Q_INDPTR, storage=PAGED)
    with pytest.raises(InputError, match=r"plan\(\) needs storage; page_size: pass fa.Paged\("):
        made.plan(Q_INDPTR, page_size=4)
    with pytest.raises(ParamError, match=r"no argument 'sm_scale': pass scale=, of a batch to run"):
        made.plan(Q_INDPTR, PAGED, sm_scale=1.0)
    made.plan(Q_INDPTR, PAGED)
    with pytest.raises(ParamError, match=r"no argument 'sm_scale': pass scale=, of a batch to run"):
        made.run(*pages(), sm_scale=1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3, which does not divide num_q_heads=4"),
        ({"num_q_heads": 4.0}, "num_q_heads must be an int, got float"),
        ({"head_dim": 600}, "head_dim=600 is not supported; it must be 1 to 576"),
        ({"q_dtype": torch.float64}, "q_dtype=torch.float64 is not supported; supported: float32"),
        ({"kv_dtype": torch.int32}, "kv_dtype=torch.int32 is not supported"),
        ({"device": "meta"}, "kernels run on cpu and cuda"),
        ({"device": "nowhere"}, "device='nowhere' is unknown"),
        ({"cuda_graph": True}, "cuda_graph=True needs limits=fa.Limits"),
        ({"limits": (1, 2, 3, 4)}, "limits must be an fa.Limits, got tuple"),
        (
            {"workspace": torch.empty(64)},
            "workspace must be a uint8 tensor .bytes., got torch.float",
        ),
        ({"workspace": torch.empty(4, 4, dtype=torch.uint8)}, "workspace must be a contiguous"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        batch(**options)


def test_a_target_that_does_not_exist_or_does_not_take_the_dtype() -> None:
    with pytest.raises(TargetError, match="unknown target 'cpu:mmx'"):
        batch(target="cpu:mmx")
    with pytest.raises(InputError, match=r"CUDA kernels of sm_80 take .* got q torch.float32"):
        batch(target="emulated:sm_80")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_requests", 0, "max_requests=0 must be 1 to"),
        ("max_q_tokens", -1, "max_q_tokens=-1 must be"),
        ("max_kv_len", 2**31, "max_kv_len=2147483648 must be"),
        ("max_pages", 1.5, "max_pages must be an int, got float"),
    ],
)
def test_limits_out_of_range(field: str, value: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        replace(LIMITS, **{field: value})


# --- plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_indptr", "kv_indptr", "text"),
    [
        ([0, 1, 0, 4, 6], [0, 10, 14, 14, 40], "q_indptr descends at request 1, from 1 to 0"),
        ([0, 1, 4, 4, 6], [0, 10, 9, 14, 40], "kv_indptr descends at request 1, from 10 to 9"),
        ([1, 2, 4, 4, 6], [0, 10, 14, 14, 40], r"q_indptr\[0\]=1 must be 0"),
        ([0, 1, 4, 4, 6], [0, 10, 14, 40], "kv_indptr has 4 entries; q_indptr has 4 requests"),
        ([], [0], "q_indptr has 0 entries"),
        ([0, 1, 4, 4, 2**33], [0, 10, 14, 14, 40], "q_indptr reaches .* at request 3"),
    ],
)
def test_lengths_that_cannot_be(q_indptr: list[int], kv_indptr: list[int], text: str) -> None:
    rows = torch.tensor(q_indptr, dtype=torch.int64)
    refused(InputError, text, batch(), rows, fa.Ragged(torch.tensor(kv_indptr)))


@pytest.mark.parametrize(
    ("q_indptr", "text"),
    [
        ([0, 1], "q_indptr must be an int32 or int64 cpu tensor, got list"),
        (
            torch.tensor([0.0, 1.0]),
            "q_indptr must be an int32 or int64 cpu tensor, got torch.float",
        ),
        (torch.tensor([[0, 1]]), r"q_indptr must be a tensor \[n\], got \[1, 2\]"),
        (torch.empty(2, device="meta", dtype=torch.int32), "got torch.int32 on meta; batches are"),
    ],
)
def test_an_indptr_of_another_kind(q_indptr: Any, text: str) -> None:
    refused(InputError, text, batch(), q_indptr, fa.Ragged(torch.tensor([0, 1])))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"last_page_len": torch.tensor([2, 5, 0, 2])}, r"last_page_len\[1\]=5: request 1 has 1 p"),
        ({"last_page_len": torch.tensor([2, 0, 0, 2])}, r"last_page_len\[1\]=0: request 1 has 1 p"),
        ({"last_page_len": torch.tensor([2, 4, 0])}, "last_page_len has 3 entries for 4 requests"),
        ({"page_indptr": torch.tensor([0, 3, 2, 4, 11])}, "page_indptr descends at request 1"),
        ({"page_indptr": torch.tensor([0, 3, 4, 4, 12])}, "page_indptr ends at 12, but page_indi"),
        ({"page_indptr": torch.tensor([0, 3, 4, 11])}, "page_indptr has 4 entries"),
        ({"page_size": 0}, "page_size=0 must be an int of at least 1"),
        ({"page_size": True}, "page_size=True must be an int"),
        (
            {"page_indices": torch.arange(11.0)},
            r"page_indices must be an int32 or int64 tensor \[number of pages in use\], got torch",
        ),
        (
            {"page_indices": [0, 1]},
            r"tensor \[number of pages in use\], got list; make one: torch\.tensor\(page_indices, ",
        ),
        ({"page_indices": torch.arange(12).view(3, 4)}, "page_indices must be a tensor .number of"),
        ({"page_indices": torch.arange(11) - 4}, r"page_indices\[0\]=-4, a page of request 0,"),
        (
            {"page_indices": torch.arange(11) + 2**32 - 3},
            r"page_indices\[0\]=4294967293, a page of "
            "request 0, does not fit 32 bits",
        ),
        ({"page_size": 2**31}, "page_size=2147483648 must be an int .* that fits 32 bits"),
    ],
)
def test_pages_that_cannot_be(changes: dict[str, Any], text: str) -> None:
    refused(InputError, text, batch(), Q_INDPTR, replace(PAGED, **changes))


def test_storage_and_sparsity_of_another_kind() -> None:
    refused(InputError, "storage must be an fa.Paged or an fa.Ragged, got Tensor", batch(),
            Q_INDPTR, KV_INDPTR)  # fmt: skip
    refused(InputError, "sparsity must be an fa.BlockSparse, an fa.TokenSparse, an fa.Tree or an",
            batch(), Q_INDPTR, PAGED, sparsity=torch.ones(3))  # fmt: skip


@pytest.mark.parametrize(
    ("q_offset", "text"),
    [
        ("begin", 'q_offset must be an int, a tensor .num_requests. or "end", got'),
        (2**31, "q_offset=2147483648 is outside of"),
        (torch.tensor([0, 0, 0, -(2**31)]), r"q_offset\[3\]=-2147483648 is outside of"),
        (torch.tensor([0, 1]), "q_offset has 2 entries for 4 requests"),
        (1.5, "q_offset must be .* got float"),
    ],
)
def test_positions_that_cannot_be(q_offset: Any, text: str) -> None:
    refused(InputError, text, batch(), Q_INDPTR, PAGED, q_offset=q_offset)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_requests", 3, "4.*3"),
        ("max_q_tokens", 5, "6.*5"),
        ("max_kv_len", 25, "26.*25"),
        ("max_pages", 10, "11.*10"),
    ],
)
def test_a_batch_beyond_the_limits(field: str, value: int, text: str) -> None:
    made = batch(limits=replace(LIMITS, **{field: value}))
    q, k, v = pages()
    made.plan(Q_INDPTR[:4], replace(PAGED, page_indptr=PAGED.page_indptr[:4],
                                    last_page_len=PAGED.last_page_len[:3]))  # fmt: skip
    before = made.run(q[:4], k, v)
    with pytest.raises(InputError, match=text) as caught:
        made.plan(Q_INDPTR, PAGED)
    assert field in str(caught.value) and "request 3" in str(caught.value)
    assert torch.equal(made.run(q[:4], k, v), before)


def test_a_workspace_that_is_too_small_states_both_sizes() -> None:
    q_indptr, kv_indptr = torch.tensor([0, 1]), torch.tensor([0, 60000])
    one = {"num_q_heads": 1, "num_kv_heads": 1}
    needed = batch(**one).plan(q_indptr, fa.Ragged(kv_indptr)).workspace_bytes
    if not needed:
        pytest.skip("one thread needs no workspace")
    small = torch.empty(needed - 1 + 128, dtype=torch.uint8)
    small = small[-small.data_ptr() % 128 :][: needed - 1]
    made = batch(workspace=small, **one)
    made.plan(q_indptr, fa.Ragged(torch.tensor([0, 40])))
    inputs = torch.randn(1, 1, 16), torch.randn(40, 1, 16), torch.randn(40, 1, 16)
    before = made.run(*inputs)
    with pytest.raises(InputError, match=f"a workspace of {needed} bytes.* has {needed - 1}"):
        made.plan(q_indptr, fa.Ragged(kv_indptr))
    assert torch.equal(made.run(*inputs), before)


# --- plans that a captured run cannot replay ------------------------------------------------------


def test_a_plan_that_cannot_be_replayed_names_what_changed() -> None:
    made = batch(fa.SlidingWindow(50), limits=LIMITS, cuda_graph=True)
    made.plan(Q_INDPTR, PAGED)
    with pytest.raises(InputError, match="the mask reads: window was 50, is now 20; make another"):
        made.plan(Q_INDPTR, PAGED, window=20)


# --- params ---------------------------------------------------------------------------------------


class Biased(fa.Variant):
    """A mask with one param, a score with another."""

    width: torch.Tensor = fa.tensor("batch")
    slopes: torch.Tensor = fa.tensor("num_q_heads")

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.slopes[h] * (kv_idx - q_idx)

    def mask_mod(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < self.width[b]


class Steep(fa.Variant):
    """A number that only a score multiplies with positions."""

    n: int = fa.scalar(5)

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - (q_idx - kv_idx).abs() * self.n


WIDTH, SLOPES = torch.tensor([4, 5, 6, 7]), torch.ones(4)


def test_params_of_the_mask_belong_to_plan_and_others_to_run() -> None:
    made = batch(Biased())
    with pytest.raises(ParamError, match=r"the mask of Biased reads .* 'width'; pass width=... to"):
        made.plan(Q_INDPTR, PAGED)
    with pytest.raises(
        ParamError, match="param 'slopes' of Biased is not read by its mask; give it"
    ):
        made.plan(Q_INDPTR, PAGED, width=WIDTH, slopes=SLOPES)
    with pytest.raises(
        ParamError, match="Biased has no param 'wide'; its params are width, slopes"
    ):
        made.plan(Q_INDPTR, PAGED, width=WIDTH, wide=1)
    with pytest.raises(ParamError, match=r"param 'width' expects \[batch\] with batch=4 at dim 0"):
        made.plan(Q_INDPTR, PAGED, width=WIDTH[:3])
    made.plan(Q_INDPTR, PAGED, width=WIDTH)
    pages_ = pages()
    expected = made.run(*pages_, slopes=SLOPES)
    with pytest.raises(ParamError, match=r"read by its mask.*give it to plan\(width=...\) instead"):
        made.run(*pages_, slopes=SLOPES, width=WIDTH)
    with pytest.raises(ParamError, match="Biased needs the param 'slopes'"):
        made.run(*pages_)
    with pytest.raises(ParamError, match=r"param 'slopes' expects \[num_q_heads\]"):
        made.run(*pages_, slopes=SLOPES[:2])
    assert torch.equal(made.run(*pages_, slopes=SLOPES), expected)


def test_numbers_of_scores_belong_to_run() -> None:
    made, pages_ = batch(Steep()), pages()
    made.plan(Q_INDPTR, PAGED)
    for n in (5, 6, 70_000, 2**40, 5):
        other = batch(fa.variant(score_mod=lambda s, b, h, i, j: s - (i - j).abs() * n))  # noqa: B023
        other.plan(Q_INDPTR, PAGED)
        assert torch.equal(made.run(*pages_, n=n), other.run(*pages_))


def test_a_param_that_is_compiled_in_belongs_to_plan() -> None:
    made = batch(fa.SoftCap(30.0))
    made.plan(Q_INDPTR, PAGED, approximate=True)
    text = r"'approximate' of SoftCap is compiled in; .* or to plan\(approximate=...\) instead"
    with pytest.raises(ParamError, match=text):
        made.run(*pages(), approximate=True)


def test_a_param_of_a_longer_name_is_hinted_at() -> None:
    with pytest.raises(ParamError, match=r"no param 'logits_soft_cap'; .* did you mean cap="):
        batch(fa.SoftCap(30.0)).plan(Q_INDPTR, PAGED, logits_soft_cap=20.0)


class Rotated(fa.Variant):
    """Rows of a tensor whose sizes only a run knows."""

    cos: torch.Tensor = fa.tensor("positions", "pairs")

    def query_mod(self, row: Any, b: Any, h: Any, q_idx: Any) -> Any:
        return row * self.cos[q_idx]


def test_rows_of_a_param_that_a_plan_cannot_trace() -> None:
    made = batch(Rotated())
    with pytest.raises(ParamError, match=r"does not know the values of cos, which come with run"):
        made.plan(Q_INDPTR, PAGED)
    batch(Rotated(cos=torch.ones(30, 16))).plan(Q_INDPTR, PAGED)


# --- run ------------------------------------------------------------------------------------------


def test_run_before_plan() -> None:
    with pytest.raises(InputError, match=r"run\(\) before plan\(\): nothing is planned; call plan"):
        batch().run(*packed())


def test_pages_whose_heads_come_first() -> None:
    made = batch()
    made.plan(Q_INDPTR, PAGED)
    q, k, v = pages()
    text = r"k has num_kv_heads=4, .* make another batch for it; if k is .* k.transpose\(1, 2\)"
    with pytest.raises(InputError, match=text):
        made.run(q, k.transpose(1, 2), v.transpose(1, 2))
    with pytest.raises(InputError, match=r"make another batch for it$"):
        made.run(q, k[:, :, :1], v)


def test_keys_and_values_in_one_tensor() -> None:
    made = batch()
    made.plan(Q_INDPTR, PAGED)
    with pytest.raises(InputError, match=r"v is missing: pass .* cache\[:, 0\], cache\[:, 1\]"):
        made.run(pages()[0], torch.stack(pages()[1:], 1))  # type: ignore[arg-type]


def change(index: int, value: Any) -> Any:
    return lambda tensors: [value(t) if i == index else t for i, t in enumerate(tensors)]


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (change(0, torch.Tensor.half), "q is float16, but the batch was made for q_dtype=float32"),
        (change(1, torch.Tensor.half), "k is float16, but the batch was made for kv_dtype=float32"),
        (change(0, lambda q: q[:, :2]), "q has num_q_heads=2, but the batch was made with num_q_"),
        (change(2, lambda v: v[:, :1]), "v has num_kv_heads=1, but the batch was made with num_kv"),
        (change(1, lambda k: k[..., :8]), "k has head_dim=8, but the batch was made with head_dim"),
        (change(2, lambda v: v[..., :8]), "v has head_dim_v=8, but the batch was made with head_d"),
        (change(0, lambda q: q[:5]), "q has num_q_tokens=5, but the plan's q_indptr ends at 6"),
        (
            change(1, lambda k: k[:39]),
            "k has num_kv_tokens=39, but the plan's kv_indptr ends at 40",
        ),
        (
            change(2, lambda v: v[:39]),
            "v has num_kv_tokens=39, but the plan's kv_indptr ends at 40",
        ),
        (
            change(0, lambda q: q[0]),
            r"q must be \[num_q_tokens, num_q_heads, head_dim\], got 2 dims",
        ),
        (change(0, lambda q: q.mT.contiguous().mT), "q's last dim .head_dim. must be contiguous"),
        (
            change(1, lambda k: k[None]),
            "k is .* but the batch is planned over ragged keys, where k",
        ),
        (
            change(0, lambda q: q.to("meta")),
            "q is on meta, but the batch was made for cpu; move it with q.to",
        ),
        (change(0, torch.Tensor.to_sparse), "q has layout torch.sparse_coo; pass a strided"),
        (change(1, lambda k: k.numpy()), "k must be a torch.Tensor, got ndarray"),
        (change(1, lambda k: None), "k must be a torch.Tensor, got NoneType"),
    ],
)
def test_tensors_that_do_not_fit(broken: Any, text: str) -> None:
    made = batch()
    made.plan(Q_INDPTR, fa.Ragged(KV_INDPTR))
    inputs = packed()
    before = made.run(*inputs)
    with pytest.raises(InputError, match=text):
        made.run(*broken(inputs))
    assert torch.equal(made.run(*inputs), before)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (change(1, lambda k: k[:, :3]), "k has page_size=3, but the plan's storage has page_size"),
        (change(2, lambda v: v[:10]), "v has num_pages=10, but k has num_pages=11"),
        (lambda t: [t[0], t[1][:9], t[2][:9]],
         r"page_indices\[9\]=9, a page of request 3, is outside of num_pages=9 of k and v"),
        (change(1, lambda k: k[:, 0]), "k is .* but the batch is planned over pages, where k is"),
    ],
)  # fmt: skip
def test_pages_that_do_not_fit(broken: Any, text: str) -> None:
    made = batch()
    made.plan(Q_INDPTR, PAGED)
    inputs = pages()
    before = made.run(*inputs)
    with pytest.raises(InputError, match=text):
        made.run(*broken(inputs))
    assert torch.equal(made.run(*inputs), before)


def test_results_and_scale_that_do_not_fit() -> None:
    made = batch()
    made.plan(Q_INDPTR, fa.Ragged(KV_INDPTR))
    q, k, v = packed()
    for out, text in (
        (
            torch.empty(6, 4, 8),
            r"out must be \[6, 4, 16\] of torch.float32 on cpu, got \[6, 4, 8\]",
        ),
        (torch.empty(6, 4, 16, dtype=torch.half), "out must be .* got .* of torch.float16"),
        (q, "out shares memory with an input"),
        ([q], "out must be a torch.Tensor, got list"),
        (torch.empty(1, 4, 16).expand(6, 4, 16), "out is an expanded tensor"),
    ):
        with pytest.raises(InputError, match=text):
            made.run(q, k, v, out=out)
    with pytest.raises(InputError, match="scale=nan must be finite"):
        made.run(q, k, v, scale=float("nan"))


def test_results_that_overlap_after_runs_that_did_not() -> None:
    memory = torch.ones(6 * 4 * 16 + 4)
    factors, whole = memory[380:384], memory[:384].view(6, 4, 16)
    made = batch(fa.variant(score_mod=lambda score, b, h, i, j: score * factors[h]))
    made.plan(Q_INDPTR, fa.Ragged(KV_INDPTR))
    q, k, v = packed()
    apart = torch.empty(6, 4, 16)
    made.run(q, k, v, out=apart)
    before = apart.clone()
    for out, inputs in (
        (q, (q, k, v)), (whole, (q, k, v)), (k.view(-1)[:384].view(6, 4, 16), (q, k, v)),
        (apart, (apart, k, v)), (v.view(-1)[-384:].view(6, 4, 16), (q, k, v)),
    ):  # fmt: skip
        with pytest.raises(InputError, match="out shares memory with an input"):
            made.run(*inputs, out=out)
    made.run(q, k, v, out=apart.zero_())
    assert torch.equal(apart, before) and bool((memory == 1).all())


def test_gradients_and_states_that_do_not_exist() -> None:
    made = batch(fa.Sigmoid())
    made.plan(Q_INDPTR, fa.Ragged(KV_INDPTR))
    q, k, v = packed()
    with pytest.raises(InputError, match="return_lse: a pointwise normaliser has no log-sum-exp"):
        made.run(q, k, v, return_lse=True)
    with pytest.raises(GradError, match="inference only"):
        made.run(q.requires_grad_(), k, v)


def test_a_param_that_needs_a_dtype_is_named_with_its_declaration() -> None:
    class Choice(fa.Variant):
        chosen: torch.Tensor = fa.tensor("num_q_heads", 16)

        def output_mod(self, row, lse, b, h, q_idx):
            return torch.where(self.chosen[h], row, 0.0)

    class Table(fa.Variant):
        table: torch.Tensor = fa.tensor(4)
        column: torch.Tensor = fa.tensor("num_q_heads")

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.table[self.column[h]]

    for variant, words in (
        (Choice(), r"dtype of chosen: fa.tensor\('num_q_heads', 16, dtype=torch.bool\)"),
        (Table(), r"dtype of column: fa.tensor\('num_q_heads', dtype=torch.int64\)"),
    ):
        batch = fa.BatchAttention(variant, num_q_heads=2, num_kv_heads=2, head_dim=16,
                                  q_dtype=torch.float32)  # fmt: skip
        with pytest.raises(ParamError, match=words):
            batch.plan(torch.tensor([0, 4]), fa.Ragged(torch.tensor([0, 4])))
