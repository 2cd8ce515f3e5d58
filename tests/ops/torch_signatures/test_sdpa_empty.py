"""`fa.scaled_dot_product_attention` where a length, the batch or a leading dim is 0, as torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashattn_jit as fa
from flashattn_jit.errors import GradError, InputError

D, DV = 8, 12
LEADS = [(), (2,), (0,), (2, 3), (0, 3), (2, 0), (2, 3, 2), (1, 0, 2)]
HEADS: list[tuple[int, int] | None] = [(2, 2), (4, 2), None]  # None: q, k and v have two dims


def qkv(
    lead: tuple[int, ...], heads: tuple[int, int] | None, q_len: int, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_dims, kv_dims = ((), ()) if heads is None else ((heads[0],), (heads[1],))
    return (
        torch.randn(*lead, *q_dims, q_len, D),
        torch.randn(*lead, *kv_dims, kv_len, D),
        torch.randn(*lead, *kv_dims, kv_len, DV),
    )


def masks(full: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Masks of every shape that can be broadcast to `full`, bool and float."""
    sizes = {tuple(1 if one else n for one, n in zip(ones, full, strict=True))
             for ones in itertools.product((False, True), repeat=len(full))}  # fmt: skip
    sizes |= {full[i:] for i in range(len(full) - 1)}
    for size in sorted(sizes):
        yield torch.rand(size) < 0.6
        yield torch.randn(size)


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted.nan_to_num(), rtol=1e-5, atol=1e-5)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("lead", "heads"), [(x, h) for x in LEADS for h in HEADS if h is not None or not x], ids=str
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 7), (0, 7), (5, 0), (0, 0)])
def test_every_mask(
    lead: tuple[int, ...], heads: tuple[int, int] | None, q_len: int, kv_len: int
) -> None:
    q, k, v = qkv(lead, heads, q_len, kv_len)
    options = {"enable_gqa": heads == (4, 2)}
    check(
        fa.scaled_dot_product_attention(q, k, v, **options),
        F.scaled_dot_product_attention(q, k, v, **options),
    )
    for mask in masks((*q.shape[:-1], kv_len)):
        check(
            fa.scaled_dot_product_attention(q, k, v, mask, **options),
            F.scaled_dot_product_attention(q, k, v, mask, **options),
        )


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 7), (5, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(2, 3), (0, 3), (2, 0)], ids=str)
def test_leading_dims_of_1_are_broadcast(lead: tuple[int, int], q_len: int, kv_len: int) -> None:
    q, k, v = qkv(lead, (2, 2), q_len, kv_len)
    # Not q: without elements torch does not broadcast its leading dims.
    k = k[:, :1] if lead[1] else k[:1]
    got, wanted = (f(q, k, v) for f in (fa.scaled_dot_product_attention,
                                        F.scaled_dot_product_attention))  # fmt: skip
    check(got, wanted)


NO_HEADS = [((), 0), ((2,), 0), ((0,), 0), ((2, 3), 0), ((2,), 1), ((), 1)]  # num_kv_heads


@pytest.mark.parametrize(("lead", "kv_heads"), NO_HEADS, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 7), (0, 7), (5, 0)])
def test_no_query_heads(lead: tuple[int, ...], kv_heads: int, q_len: int, kv_len: int) -> None:
    q, k, v = qkv(lead, (0, kv_heads), q_len, kv_len)
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.randn(q_len, kv_len)},
                    {"enable_gqa": True}):  # fmt: skip
        if "enable_gqa" in options and torch.__version__ < (2, 12):
            continue  # torch divides by the number of heads, and the process dies
        got, wanted = (f(q, k, v, **options) for f in (fa.scaled_dot_product_attention,
                                                       F.scaled_dot_product_attention))  # fmt: skip
        check(got, wanted)
        assert got.numel() == 0


def test_no_query_heads_of_grouped_keys() -> None:
    q, k, v = qkv((2,), (0, 3), 5, 7)
    assert fa.scaled_dot_product_attention(q, k, v, enable_gqa=True).shape == (2, 0, 5, DV)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda q, k, v: (q, k[..., :-1], v), "head_dim"),
        (lambda q, k, v: (q, k[..., :-1, :], v), "kv_len"),
        (lambda q, k, v: (q, k, v.double()), "dtype"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "dtype"),
        (lambda q, k, v: (q, k.new_zeros(2, 3, 7, D), v.new_zeros(2, 3, 7, DV)), "num_q_heads=0"),
        (lambda q, k, v: (q.new_zeros(2, 3, 5, D), k, v), "num_q_heads=3"),
    ],
)
def test_no_heads_are_checked_like_others(bad: Callable[..., Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fa.scaled_dot_product_attention(*bad(*qkv((2,), (0, 0), 5, 7)))


def test_no_query_heads_that_require_grad() -> None:
    q, k, v = qkv((2,), (0, 0), 5, 7)
    with pytest.raises(GradError):
        fa.scaled_dot_product_attention(q.requires_grad_(), k, v)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("lead", "heads", "q_len", "kv_len"),
    [((2, 3), (4, 2), 0, 7), ((2, 3), (2, 2), 5, 0), ((2, 0), (2, 2), 5, 7), ((), (2, 2), 0, 7),
     ((), None, 0, 7), ((0,), (2, 2), 5, 7), ((2,), (0, 0), 5, 7), ((), (0, 0), 5, 7)],
    ids=str,
)  # fmt: skip
def test_compiled(
    lead: tuple[int, ...], heads: tuple[int, int] | None, q_len: int, kv_len: int, dynamic: bool
) -> None:
    q, k, v = qkv(lead, heads, q_len, kv_len)
    gqa = heads == (4, 2)
    keep = torch.rand(*q.shape[:-1], kv_len) < 0.6
    torch._dynamo.reset()
    run = torch.compile(
        lambda q, k, v, mask: fa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa) * 2,
        backend="aot_eager", fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    for mask in (keep, None):
        check(run(q, k, v, mask), 2 * F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa))
