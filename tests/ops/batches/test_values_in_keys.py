"""v_in_k: values are the first columns of keys, over every storage, on CPU and CUDA targets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from flashattn_jit.variants.reference import attention_reference
from tests.harness import rotation
from tests.ops.cases import EPS, normal, rms

HEADS, PAGE = 8, 8
Q_LEN, KV_LEN = (1, 5, 20), (70, 33, 24)
TARGETS = ["cpu", *rotation.turn(1, ("emulated:sm_80", "emulated:sm_86", "emulated:sm_90"))]
HEAD_DIMS = ((576, 512), (320, 256), (48, 32), (24, 24))
SCALE = 0.07


def indptr(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def made(target: str, dims: tuple[int, int], kind: Any = fa.BatchAttention, **given: Any) -> Any:
    return kind(
        given.pop("variant", fa.Causal()), num_q_heads=HEADS, num_kv_heads=1, head_dim=dims[0],
        head_dim_v=dims[1], v_in_k=True, target=None if target == "cpu" else target,
        q_dtype=given.pop("q_dtype", torch.bfloat16), **given,
    )  # fmt: skip


def stored(head_dim: int, dtype: torch.dtype) -> tuple[Tensor, fa.Paged, list[Tensor]]:
    """Pages in random order, NaN where no key is; the rows of each request."""
    counts = [-(-n // PAGE) for n in KV_LEN]
    pages = torch.full((sum(counts) + 2, PAGE, 1, head_dim), float("nan"), dtype=dtype)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int() + 1
    rows = []
    for table, length, count in zip(order.split(counts), KV_LEN, counts, strict=True):
        own = normal(length, length, head_dim).to(dtype)
        padded = torch.full((count * PAGE, head_dim), float("nan"), dtype=dtype)
        padded[:length] = own
        pages[table.long()] = padded.view(count, PAGE, 1, head_dim)
        rows.append(own)
    last = torch.tensor([(n - 1) % PAGE + 1 for n in KV_LEN]).int()
    return pages, fa.Paged(indptr(tuple(counts)), order, last, page_size=PAGE), rows


def check(out: Tensor, q: Tensor, rows: list[Tensor], dim_v: int, variant: Any = None) -> None:
    """Each request against the fp64 reference, by the rule of docs/semantics.md."""
    for number, (own_q, own_out) in enumerate(zip(q.split(Q_LEN), out.split(Q_LEN), strict=True)):
        k = rows[number][None, None]
        given = own_q.transpose(0, 1)[None], k, k[..., :dim_v], variant or fa.Causal()
        exact, _ = attention_reference(*given, scale=SCALE, q_offset="end")
        eager, _ = attention_reference(*given, scale=SCALE, q_offset="end", dtype=q.dtype)
        error = rms(own_out.transpose(0, 1)[None].double() - exact)
        bound = 1.5 * rms(eager.double() - exact) + EPS[q.dtype] * rms(exact)
        assert error <= bound, f"request {number}: {error:.3g} above {bound:.3g}"


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dims", rotation.chosen(HEAD_DIMS, 2), ids=str)
@pytest.mark.parametrize("storage", rotation.turn(3, ["paged", "ragged"]))
def test_values_are_columns_of_keys(target: str, dims: tuple[int, int], storage: str) -> None:
    dtype = torch.float16 if target.endswith("86") else torch.bfloat16
    batch = made(target, dims, q_dtype=dtype)
    q = normal(3, sum(Q_LEN), HEADS, dims[0]).to(dtype)
    pages, paged, rows = stored(dims[0], dtype)
    if storage == "paged":
        batch.plan(indptr(Q_LEN), paged)
        out = batch.run(q, pages, scale=SCALE)
    else:
        batch.plan(indptr(Q_LEN), fa.Ragged(indptr(KV_LEN)))
        out = batch.run(q, torch.cat(rows)[:, None], scale=SCALE)
    check(out, q, rows, dims[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("code", rotation.turn(2, [("int8", 64), ("e4m3", None)]), ids=str)
def test_quantised_rows(target: str, code: tuple[str, int | None]) -> None:
    form = fa.kv.Format(code[0], group=code[1])
    batch = made(target, (320, 256), kv_format=form)
    keys = [form.quantize(normal(n, n, 1, 320)) for n in KV_LEN]
    joined = fa.kv.Stored(
        torch.cat([x.codes for x in keys]), torch.cat([x.scales for x in keys]), group=code[1]
    )
    q = normal(3, sum(Q_LEN), HEADS, 320).bfloat16()
    batch.plan(indptr(Q_LEN), fa.Ragged(indptr(KV_LEN)))
    out = batch.run(q, joined, scale=SCALE)
    check(out, q, [x.dequantize()[:, 0].bfloat16() for x in keys], 256)


@pytest.mark.parametrize("target", TARGETS)
def test_changed_rows_keep_their_values(target: str) -> None:
    """key_mod changes keys alone, and values are as stored."""
    variant = fa.RoPE() & fa.Causal()
    batch = made(target, (320, 256), variant=variant)
    q = normal(3, sum(Q_LEN), HEADS, 320).bfloat16()
    pages, paged, rows = stored(320, torch.bfloat16)
    batch.plan(indptr(Q_LEN), paged)
    check(batch.run(q, pages, scale=SCALE), q, rows, 256, variant)


@pytest.mark.parametrize("target", TARGETS)
def test_cascades_and_sparse_keys_equal_whole_ones(target: str) -> None:
    """A shared first page; the tokens of a request's last 16 keys and its first."""
    pages, paged, rows = stored(320, torch.bfloat16)
    indices = paged.page_indices.clone()
    firsts = paged.page_indptr[:-1].long()
    indices[firsts] = int(indices[0])
    rows = [torch.cat([rows[0][:PAGE], own[PAGE:]]) for own in rows]
    paged = fa.Paged(paged.page_indptr, indices, paged.last_page_len, page_size=PAGE)
    q = normal(3, sum(Q_LEN), HEADS, 320).bfloat16()
    cascade = made(target, (320, 256), fa.CascadeAttention)
    cascade.plan(fa.cascade_levels(indptr(Q_LEN), paged))
    check(cascade.run(q, pages, scale=SCALE), q, rows, 256)

    batch = made(target, (320, 256), variant=fa.Full())
    tokens = [[0, *range(n - 16, n)] for n in KV_LEN]
    sparse = fa.TokenSparse(torch.tensor(tokens).int())
    batch.plan(torch.arange(len(KV_LEN) + 1).int(), paged, sparsity=sparse)
    out = batch.run(q[: len(KV_LEN)], pages, scale=SCALE)
    for number, own in enumerate(tokens):
        k = rows[number][own][None, None]
        given = q[number][None, :, None], k, k[..., :256], fa.Full()
        exact, _ = attention_reference(*given, scale=SCALE)
        torch.testing.assert_close(out[number].double(), exact[0, :, 0], rtol=2e-2, atol=2e-2)


def test_errors() -> None:
    form = fa.kv.Format("int4")
    for given, message in (
        ({"dims": (64, 72)}, "head_dim_v=72 exceeds head_dim=64"),
        ({"dims": (64, 32), "kv_format": (None, fa.kv.Format("int8"))}, "give one kv_format"),
        ({"dims": (64, 32), "kv_format": form}, "int4 packs channels"),
        ({"dims": (64, 32), "kv_format": fa.kv.Format("int8", rotate=True)}, "rotate=True"),
        ({"dims": (64, 32), "kv_format": fa.kv.Format("int8", group=64)}, "group=64 does not"),
    ):
        with pytest.raises(InputError, match=message):
            made("cpu", **given)  # type: ignore[arg-type]
    batch = made("cpu", (64, 32))
    batch.plan(indptr((2,)), fa.Ragged(indptr((5,))))
    q, k = normal(0, 2, HEADS, 64).bfloat16(), normal(1, 5, 1, 64).bfloat16()
    with pytest.raises(InputError, match="scale has no default"):
        batch.run(q, k)
    with pytest.raises(InputError, match="give no v"):
        batch.run(q, k, k[..., :32], scale=SCALE)
    with pytest.raises(InputError, match="of 32 columns or more"):
        batch.run(q, k[..., :20], scale=SCALE)
    plain = fa.BatchAttention(num_q_heads=8, num_kv_heads=1, head_dim=64, q_dtype=torch.bfloat16)
    plain.plan(indptr((2,)), fa.Ragged(indptr((5,))))
    with pytest.raises(InputError, match="v is missing: pass keys and values apart"):
        plain.run(q, k)


def test_copies_and_explanations_know_it() -> None:
    batch = copy.deepcopy(made("cpu", (64, 32)))
    assert batch.options.v_in_k
    text = batch.plan(indptr((2,)), fa.Ragged(indptr((5,)))).explain()
    assert "a token has 128 bytes of keys" in text
    assert "whose first 32 columns are the values" in text
