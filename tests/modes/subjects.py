"""Every op and class as a function of tensors: what the tests of modes call.

A subject makes its tensors on the CPU by name, whatever the default device is, and calls the
engine on them. What it returns in a plain process is what it must return under every mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashattn_jit as fa

HEADS, KV_HEADS, D = 4, 2, 32


class Subject(NamedTuple):
    """One call. tensors: q, k, v and other values. host: tensors of lengths, which stay on
    the host. call: (tensors, host) -> tensors."""

    name: str
    tensors: tuple[Tensor, ...]
    host: tuple[Tensor, ...]
    call: Callable[..., Any]
    traits: frozenset[str] = frozenset()

    def prepare(self) -> None:
        """Sets the call up; called outside of every mode."""
        if isinstance(self.call, _Prepared):
            self.call.prepare()

    def run(self, *tensors: Tensor) -> Any:
        """The call on other tensors, or on its own."""
        return self.call(*(tensors or self.tensors), *self.host)


class _Prepared:
    """A call with a set-up that runs neither while tests are collected nor under a mode."""

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make
        self._made: Callable[..., Any] | None = None

    def prepare(self) -> None:
        self._made = self._made or self._make()

    def __call__(self, *tensors: Tensor) -> Any:
        assert self._made is not None, "its subject was not prepared"
        return self._made(*tensors)


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu")


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def _dense(q_len: int = 24, kv_len: int = 40, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q = _random(batch, HEADS, q_len, D, seed=1)
    keys = (batch, KV_HEADS, kv_len, D)
    return q, _random(*keys, seed=2), _random(*keys, seed=3)


def _packed(tokens: int = 20, keys: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    q = _random(tokens, HEADS, D, seed=4)
    return q, _random(keys, KV_HEADS, D, seed=5), _random(keys, KV_HEADS, D, seed=6)


def _pages(tokens: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    q = _random(tokens, HEADS, D, seed=7)
    return q, _random(8, 8, KV_HEADS, D, seed=8), _random(8, 8, KV_HEADS, D, seed=9)


Q_INDPTR, KV_INDPTR = (0, 7, 20), (0, 20, 50)
PAGES = ((0, 3, 7), (5, 1, 0, 2, 7, 3, 6), (4, 6))


def _ones(heads: int) -> Tensor:
    return (torch.full((heads, 3), 1.001) @ torch.full((3, 1), 1 / 3.0)).flatten().float()


class Gated(fa.Variant):
    """Every kind of param and hook: declared tensors and numbers, a prelude, a normaliser."""

    slopes: Tensor = fa.tensor("num_q_heads", default=fa.alibi_slopes)
    ones: Tensor = fa.tensor("num_q_heads", default=lambda dims: _ones(dims.num_q_heads))
    cap: float = fa.scalar(20.0)
    window: int = fa.scalar(18)

    normalizer = fa.Softmax(sink="ones")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        steepness = torch.arange(1, 5, dtype=torch.float32)  # what a hook makes is host work
        # Autocast changes products of matrices, a default dtype what `full` makes.
        mixed = torch.full((1, 1), 1.001) @ torch.reshape(self.slopes * steepness, (1, 4))
        bias = mixed[0, h] * (kv_idx - q_idx)
        return self.cap * torch.tanh(score / self.cap) + bias

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (kv_idx - q_idx < self.window) & (q_idx - kv_idx < self.window)

    def output_mod(self, row, lse, b, h, q_idx):
        return row * torch.sigmoid(self.slopes[h] * 2.0)


def _attention(variant: Any, **options: Any) -> Callable[..., Any]:
    return lambda q, k, v: fa.attention(q, k, v, variant, **options)


def _closure(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    weight = 0.75
    return fa.attention(q, k, v, lambda s, b, h, i, j: s + weight * bias[h, j])


def _approximate(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20.0 * fa.tanh_approx(score / 20.0)


def _lengths(q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor, q_offset: Tensor) -> Any:
    return fa.attention(
        q, k, v, _CAUSAL, kv_len=kv_len, q_offset=q_offset, return_lse=True, scale=0.3
    )


def _out(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out = torch.empty_like(q)
    fa.attention(q, k, v, _CAUSAL, out=out)
    return out


def _varlen(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, kv_indptr: Tensor) -> Any:
    return fa.varlen_attention(
        q, k, v, q_indptr, kv_indptr, _CAUSAL_CAP, max_q_len=13, return_lse=True
    )


def _varlen_offset(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, kv_indptr: Tensor) -> Any:
    return fa.varlen_attention(q, k, v, q_indptr, kv_indptr, _GATED, q_offset=3, window=9)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return fa.flex_attention(q, k, v, _relative, enable_gqa=True, return_lse=True)


def _relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + 0.1 * (kv_idx - q_idx)


def _causal_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _flex_blocks() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask  # takes a second

    mask = create_block_mask(_causal_mod, None, None, 24, 40, device="cpu", BLOCK_SIZE=16)
    return lambda q, k, v: fa.flex_attention(q, k, v, None, mask, enable_gqa=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    return fa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, scale=0.25)


def _sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return fa.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _merge(q: Tensor, k: Tensor, v: Tensor) -> Any:
    halves = [fa.attention(q, k[:, :, s], v[:, :, s], partial=True) for s in (_FIRST, _REST)]
    return fa.merge_states([out for out, _ in halves], [lse for _, lse in halves])


_FIRST, _REST = slice(0, 17), slice(17, None)


def _append(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, q_indptr: Tensor, *tables: Tensor
) -> Any:
    k_pages, v_pages = k_pages.clone(), v_pages.clone()
    fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, fa.Paged(*tables, 8))
    return k_pages, v_pages


def _batch(variant: Any = None, kind: type = fa.BatchAttention) -> Any:
    return kind(
        variant, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D, q_dtype=torch.float32
    )


def _ragged(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, kv_indptr: Tensor) -> Any:
    batch = _batch(_GATED)
    batch.plan(q_indptr, fa.Ragged(kv_indptr), window=11)
    return batch.run(q, k, v, return_lse=True, cap=7.0)


def _paged(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, *tables: Tensor) -> Any:
    batch = _batch(fa.Causal())
    batch.plan(q_indptr, fa.Paged(*tables, 8))
    return batch.run(q, k, v)


def _offsets(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, *tables: Tensor) -> Any:
    batch = _batch(fa.Causal())
    batch.plan(q_indptr, fa.Paged(*tables, 8), q_offset=5)
    return batch.run(q, k, v)


def _tokens(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, *rest: Tensor) -> Any:
    *tables, indices = rest
    batch = _batch()
    batch.plan(q_indptr, fa.Paged(*tables, 8), sparsity=fa.TokenSparse(indices))
    return batch.run(q, k, v)


def _blocks(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, *rest: Tensor) -> Any:
    *tables, indptr, indices = rest
    sparsity = fa.BlockSparse(indptr, indices, (8, 8))
    batch = _batch()
    batch.plan(q_indptr, fa.Paged(*tables, 8), sparsity=sparsity)
    return batch.run(q, k, v)


def _tree(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, *rest: Tensor) -> Any:
    *tables, small, large = rest
    batch = _batch()
    batch.plan(q_indptr, fa.Paged(*tables, 8), sparsity=fa.Tree([small, large]))
    return batch.run(q, k, v)


def _cascade(q: Tensor, k: Tensor, v: Tensor, q_indptr: Tensor, *tables: Tensor) -> Any:
    cascade = _batch(fa.Causal(), fa.CascadeAttention)
    cascade.plan(fa.cascade_levels(q_indptr, fa.Paged(*tables, 8)))
    return cascade.run(q, k, v)


def _planned(kind: str) -> Callable[..., Any]:
    """run() alone, of a batch that was planned before any mode was on."""
    batch = _batch(_GATED)
    batch.plan(_ints(*Q_INDPTR), fa.Ragged(_ints(*KV_INDPTR)), window=12)
    if kind == "run":
        return lambda q, k, v: batch.run(q, k, v, cap=9.0)

    def into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        batch.run(q, k, v, out=out, return_lse=True)
        return out

    return into


def _helpers(x: Tensor, parents: Tensor) -> Any:
    made = (
        fa.alibi_slopes(12),
        fa.tree_bits(parents),
        fa.document_ids([3, 0, 5]),
        fa.t5_buckets(_ints(-9, 0, 40)),
        *fa.rope_tables(16, 10),
    )
    return (x * 2.0, *made)


def _reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _GATED.reference(q, k, v, return_lse=True)


_CAUSAL, _GATED, _CAUSAL_CAP = fa.Causal(), Gated(), fa.Causal() & fa.SoftCap(15.0)

# Calls that tracers may refuse: those that plan inside, and those that compute on the host alone.
PLANS, HOST = (frozenset({name}) for name in ("plans", "host"))


@functools.cache
def subjects() -> list[Subject]:
    """All subjects: the same objects each time."""
    dense, packed, paged = _dense(), _packed(), _pages()
    indptrs = (_ints(*Q_INDPTR), _ints(*KV_INDPTR))
    tables = (_ints(*Q_INDPTR), *(_ints(*x) for x in PAGES))
    shared = (_ints(*Q_INDPTR), _ints(0, 4, 8), _ints(5, 1, 0, 2, 5, 1, 6, 4), _ints(4, 6))
    trees = [torch.ones(n, n, dtype=torch.bool, device="cpu").tril() for n in (7, 13)]
    spread = torch.arange(20 * 6, dtype=torch.int32, device="cpu").reshape(20, 6) % 19
    return [
        Subject("attention", dense, (), _attention(None)),
        Subject("attention gated", dense, (), _attention(_GATED, window=14, q_offset=-3)),
        Subject("attention rope", dense, (), _attention(fa.RoPE() & fa.Causal(), q_offset="end")),
        Subject("attention t5", (*dense, _random(32, HEADS)), (), _t5),
        Subject("attention closure", (*dense, _random(HEADS, 40)), (), _closure),
        Subject("attention approximate", dense, (), _attention(_approximate)),
        Subject("attention lengths", dense, (_ints(33, 0), _ints(9, 2)), _lengths),
        Subject("attention out", dense, (), _out),
        Subject("varlen", packed, indptrs, _varlen),
        Subject("varlen offset", packed, indptrs, _varlen_offset),
        Subject("flex", dense, (), _flex),
        Subject("flex block mask", dense, (), _Prepared(_flex_blocks)),
        Subject("sdpa mask", (*dense, _random(2, 1, 24, 40)), (), _sdpa),
        Subject("sdpa causal", dense, (), _sdpa_causal),
        Subject("merge states", dense, (), _merge),
        Subject("append", (*packed[1:], *paged[1:]), (indptrs[1], *tables[1:]), _append),
        Subject("batch ragged", packed, indptrs, _ragged, PLANS),
        Subject("batch paged", paged, tables, _paged, PLANS),
        Subject("batch offset", paged, tables, _offsets, PLANS),
        Subject("batch tokens", paged, (*tables, spread), _tokens, PLANS),
        Subject("batch blocks", paged, (*tables, _ints(0, 2, 3, 4), _ints(0, 2, 1, 3)), _blocks,
                PLANS),
        Subject("batch tree", paged, (*tables, *trees), _tree, PLANS),
        Subject("cascade", paged, shared, _cascade, PLANS),
        Subject("run", packed, (), _Prepared(lambda: _planned("run"))),
        Subject("run out", packed, (), _Prepared(lambda: _planned("out"))),
        Subject("reference", dense, (), _reference, HOST),
        Subject("helpers", (_random(3),), (_ints(-1, 0, 0, 1),), _helpers, HOST),
    ]  # fmt: skip


def by_name(name: str) -> Subject:
    """The subject of a name."""
    return next(s for s in subjects() if s.name == name)


def _t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
    return fa.attention(q, k, v, _T5, table=table)


_T5 = fa.RelativeBias()
