"""A case of the registry through every format: storages, sparsities, trees, cascades.

The batch has the requests and lengths of the case's shape, for which the tensors of a case are
made. The reference is the eager one, with one more mask for the pairs that the sparsity leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import flashattn_jit as fa
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import varlen_reference
from flashattn_jit.variants.variant import as_variant
from tests.batch.batches import Batch, indptr, share_prefix
from tests.batch.sparse import Visited, blocks, flat_bits, tokens, trees
from tests.ops.cases import EPS, assert_close, effect_of_approximations, largest
from tests.registry.case import Case, Shape

SHARED = 32
"""Keys that all requests of a cascade share, where they have so many."""


class Format(NamedTuple):
    """page_size 0: packed. visited: makes the sparsity of a batch. end: needs q_offset="end"."""

    page_size: int
    visited: Callable[[Batch], Visited] | None = None
    cascade: bool = False
    end: bool = False


FORMATS = {
    "ragged": Format(0),
    "paged": Format(8),
    "block_sparse": Format(8, lambda b: blocks(b, (16, 8), 0.5)),
    "block_sparse_bits": Format(0, lambda b: blocks(b, (16, 16), 0.5, True, bits=True)),
    "token_sparse": Format(8, lambda b: tokens(b, 40, per_head=True)),
    "tree": Format(16, trees, end=True),
    "bits": Format(16, flat_bits),
    "cascade": Format(16, cascade=True),
}


def run_format(
    case: Case, shape: Shape, name: str, dtype: torch.dtype = torch.float32,
    target: str | None = None, device: str = "cpu",
) -> None:  # fmt: skip
    """Runs a case in a format and holds it to the bound of docs/semantics.md."""
    how = FORMATS[name]
    variant, params = case.build(shape)
    variant = as_variant(variant)
    bound = variant.bind(Dims(*shape), params)
    batch = Batch(
        (shape.q_len,) * shape.batch, (shape.kv_len,) * shape.batch,
        (shape.num_q_heads, shape.num_kv_heads), shape.head_dim, dtype, how.page_size,
        dim_v=shape.head_dim_v, device=device,
    )  # fmt: skip
    offset: Any = "end" if how.end else case.q_offset
    placed = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in params.items()}
    planned = {n: v for n, v in placed.items() if n in bound.mask_params}
    given = {n: v for n, v in placed.items() if n not in bound.mask_params}
    visited = how.visited(batch) if how.visited else None
    options = {**batch.options(), "target": target}
    if how.cascade:
        share_prefix(batch, min(SHARED, shape.kv_len // how.page_size * how.page_size))
        offset = "end"
        made: Any = fa.CascadeAttention(variant, **options)
        made.plan(fa.cascade_levels(batch.q_indptr, batch.storage), **planned)
    else:
        made = fa.BatchAttention(variant, **options)
        if visited is not None:
            planned["sparsity"] = visited.on(device)
        if offset != "end":
            offset = torch.full((shape.batch,), int(offset))
        made.plan(batch.q_indptr, batch.storage, q_offset=offset, **planned)
    pointwise = bound.ir.normalizer == "pointwise"
    got = made.run(
        batch.q, batch.k, batch.v, scale=case.scale, return_lse=not pointwise, **given
    )  # fmt: skip
    out, lse = (got, None) if pointwise else got
    reference = variant if visited is None else variant & _leaving_out(visited, batch)
    k, v = (x.cpu() for x in batch.packed_keys())
    call = (batch.q.cpu(), k, v, batch.q_indptr, indptr(batch.kv_len), reference)
    options = {"scale": case.scale, "q_offset": offset, "params": params}
    exact, exact_lse = varlen_reference(*call, **options)
    eager, _ = varlen_reference(*call, dtype=dtype, **options)
    moved = effect_of_approximations(
        case, [x for x in (exact, exact_lse) if x is not None],
        lambda errors: varlen_reference(*call, errors=errors, **options),
    )  # fmt: skip
    assert_close(out.cpu(), exact, eager, moved[0])
    if lse is not None:
        rounded = dtype != torch.float32 and "row" in case.tags
        tolerance = 16 * EPS[dtype] if rounded else 2e-5
        torch.testing.assert_close(
            lse.cpu().double(), exact_lse.double(), rtol=tolerance, equal_nan=True,
            atol=tolerance + 1.5 * largest(moved[1]),
        )  # fmt: skip


def _leaving_out(visited: Visited, batch: Batch) -> fa.Variant:
    """A mask that keeps what the sparsity visits."""
    group = batch.heads[0] // batch.heads[1]
    lists = len(visited.pairs[0]) if visited.pairs else 1
    kept = torch.cat([p.transpose(0, 1) for p in visited.pairs])  # [rows, lists, keys]

    def visits(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kept[fa.q_row(b, q_idx), torch.clamp(h // group, max=lists - 1), kv_idx]

    return fa.variant(mask_mod=visits)
