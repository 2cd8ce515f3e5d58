"""Params that hooks read at a row and a key: by squares where their keys are adjacent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.variants.lower.hooks import lower_hooks
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import attention_reference
from tests.harness import rotation
from tests.ops.cases import HOST_TARGETS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)


@pytest.fixture(params=HOST_TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FLASHATTN_JIT_TARGET", request.param)
    return str(request.param)


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).gt(0.3) if dtype == torch.bool else (torch.randn(shape) * 2).to(dtype)


def check(mod: object, q_len: int, kv_len: int, heads: tuple[int, int] = (4, 2)) -> None:
    q = torch.randn(2, heads[0], q_len, 16)
    k, v = (torch.randn(2, heads[1], kv_len, 16) for _ in "kv")
    out = fa.attention(q, k, v, mod)
    expected, _ = attention_reference(q.double(), k.double(), v.double(), mod)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("dtype", "kv_len"),
    rotation.chosen([(t, n) for t in DTYPES for n in (1, 7, 16, 33, 301)], 3, lambda case: case[0]),
    ids=str,
)
def test_biases_and_masks_of_every_dtype(target: str, dtype: torch.dtype, kv_len: int) -> None:
    t = param(40, kv_len, dtype=dtype)
    if dtype == torch.bool:
        check(fa.variant(mask_mod=lambda b, h, i, j: t[i, j]), 40, kv_len)
    check(fa.variant(score_mod=lambda s, b, h, i, j: s + t[i, j]), 40, kv_len)


def test_indices_that_are_not_the_position_of_the_key(target: str) -> None:
    t = param(4, 40, 100)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Clamped at both ends, the same entry for several keys, backwards, wrapping.
        return s + t[h, i, j + 60] + t[h, i, j // 3] + t[h, i, 99 - j] * t[h, -1 - i, j - 100]

    check(fa.variant(score_mod=score), 40, 97)


@pytest.mark.parametrize("shape", [(0, 100), (40, 0)], ids=str)
def test_params_without_entries_are_zero(target: str, shape: tuple[int, ...]) -> None:
    t = torch.empty(shape)
    mod = fa.variant(score_mod=lambda s, b, h, i, j: s + t[i, j])
    q, k, v = (torch.randn(1, 2, n, 16) for n in (40, 100, 100))
    torch.testing.assert_close(fa.attention(q, k, v, mod), fa.attention(q, k, v))


@pytest.mark.parametrize(
    ("index", "by_squares"),
    [
        (lambda j, off: j, True),
        (lambda j, off: off.int() + j, True),
        (lambda j, off: j + 3, True),
        (lambda j, off: off + j - 2, True),
        (lambda j, off: 99 - j, False),
        (lambda j, off: j * 7 % 100, False),
        (lambda j, off: j + j, False),
    ],
    ids=["j", "off.int() + j", "j + 3", "off + j - 2", "99 - j", "j * 7 % 100", "j + j"],
)
def test_fp32_params_are_read_by_squares_where_keys_go_up(
    index: Callable[[Tensor, Tensor], Tensor], by_squares: bool
) -> None:
    t, off = param(4, 40, 100), torch.tensor([5])
    mod = fa.variant(score_mod=lambda s, b, h, i, j: s + t[h, i, index(j, off[b])])
    bound = mod.bind(Dims(1, 4, 4, 40, 100, 16, 16))
    assert ("ops::load_pair" in lower_hooks(bound.ir)) == by_squares


def test_more_params_than_squares_in_both_hooks(target: str) -> None:
    a, b_, c = (param(4, 70, 130) for _ in range(3))
    seen = param(2, 70, 130, dtype=torch.bool) | torch.eye(70, 130, dtype=torch.bool)
    other = param(70, 130, dtype=torch.int32)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * c[h, i, j] + a[h, i, j] - b_[h, i, j]

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[b, i, j] | (other[i, j] > a[h, i, j])

    check(fa.variant(score_mod=score, mask_mod=mask), 70, 130)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("layout", ["transposed", "expanded", "slice", "last rows"])
def test_layouts(target: str, layout: str) -> None:
    if layout == "transposed":  # the rows are adjacent, not the keys
        t = param(50, 60).mT
    elif layout == "expanded":
        t = param(60, 1).expand(60, 50)
    elif layout == "slice":
        t = param(90, 80)[20:80, 13:63]
    else:  # ends with its memory
        t = param(60 * 50).view(60, 50)
    check(fa.variant(score_mod=lambda s, b, h, i, j: s + t[i, j]), 60, 50)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kind", ["ragged", "paged", "token lists"])
def test_batches(target: str, kind: str) -> None:
    """Rows of several requests share a tile, and keys of lists do not follow each other."""
    torch.manual_seed(3)
    bias = torch.randn(3, 96, 96)
    q_lens, kv_lens = [40, 1, 17], [96, 5, 48]
    q_indptr, kv_indptr = (torch.tensor([0, *torch.tensor(n).cumsum(0)]) for n in (q_lens, kv_lens))
    q = torch.randn(sum(q_lens), 4, 16)
    k, v = (torch.randn(sum(kv_lens), 2, 16) for _ in "kv")
    storage: fa.Ragged | fa.Paged = fa.Ragged(kv_indptr)
    pages = [k, v]
    if kind != "ragged":
        counts = [-(-n // 8) for n in kv_lens]
        order = torch.randperm(sum(counts))
        ends = torch.tensor([0, *torch.tensor(counts).cumsum(0)])
        storage = fa.Paged(ends, order.int(), torch.tensor([(n - 1) % 8 + 1 for n in kv_lens]), 8)
        for i, rows in enumerate((k, v)):
            parts = [
                torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % 8))
                for x in rows.split(kv_lens)
            ]
            pages[i] = torch.zeros(sum(counts), 8, 2, 16)
            pages[i][order] = torch.cat(parts).view(-1, 8, 2, 16)
    sparsity = None
    if kind == "token lists":
        sparsity = fa.TokenSparse(torch.stack([torch.randperm(5)[:4] for _ in range(sum(q_lens))]))
    batch = fa.BatchAttention(
        fa.variant(score_mod=lambda s, b, h, i, j: s + bias[b, i, j]),
        num_q_heads=4, num_kv_heads=2, head_dim=16, q_dtype=torch.float32,
    )  # fmt: skip
    batch.plan(q_indptr, storage, sparsity=sparsity)
    out = batch.run(q, *pages)
    for b, (n, m) in enumerate(zip(q_lens, kv_lens, strict=True)):
        rows = slice(int(q_indptr[b]), int(q_indptr[b + 1]))

        of_request = [x[kv_indptr[b] : kv_indptr[b + 1]] for x in (k, v)]
        expected = torch.empty(n, 4, 16, dtype=torch.float64)
        for r in range(n):
            keys = torch.arange(m) if sparsity is None else sparsity.indices[rows.start + r]
            of_row = fa.variant(
                score_mod=lambda s, _, h, i, j, b=b, i0=m - n + r, keys=keys: (
                    s + bias[b, i0, keys[j]]
                )
            )
            listed = [x[keys].transpose(0, 1)[None].double() for x in of_request]
            row = q[rows][r][None, :, None].double()
            expected[r] = attention_reference(row, *listed, of_row)[0][0, :, 0]
        torch.testing.assert_close(out[rows].double(), expected, rtol=2e-5, atol=2e-5)
