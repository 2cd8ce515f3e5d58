"""Runs one case of `verify`: kernel and reference on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.attention import attention
from ...ops.varlen import varlen_attention
from ...variants.params import Dims
from ...variants.reference import NO_ERRORS, Errors, attention_reference, varlen_reference
from ...variants.variant import Variant
from ...variants.variant import variant as variant_of
from .cases import Case
from .error import Comparison, compare, compare_lse, effect_of_errors
from .inputs import Inputs, make_inputs, masked_key, masked_row

_FLIPPED_ROWS = 0.05
"""Share of rows in which rounding may change which of several scores of 1e4 is the largest."""

Results = tuple[Tensor, ...]
_Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class MisfitError(Exception):
    """The variant's params or hooks do not fit a case's sizes."""


class KernelFailedError(Exception):
    """The kernel raised where the reference works."""


def _edges(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return ~(masked_row(q_idx) | masked_key(kv_idx))


_EDGES = variant_of(mask_mod=_edges, name="edges")


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs cases of one variant, target, seed and params."""

    variant: Variant
    target: str
    seed: int
    params: Mapping[str, Any]

    def params_for(self, dims: Dims) -> dict[str, Any]:
        """The params for these sizes; those that are functions are called with `dims`."""
        return {
            name: p(dims) if callable(p) and not isinstance(p, Tensor) else p
            for name, p in self.params.items()
        }

    def expected(
        self, case: Case, inputs: Inputs, params: Mapping[str, Any], dtype: torch.dtype
    ) -> tuple[Results, Results]:
        """(fp64, eager in `dtype`) results of the reference.

        Raises:
            MisfitError: the variant cannot be used with the case's sizes.
        """
        try:
            self._variant(case).bind(case.dims, params)
            wide, same = (self._reference(case, inputs, params, d) for d in (torch.float64, dtype))
        except Exception as error:  # hooks are the user's code: they may raise anything
            raise MisfitError(first_line(error)) from error
        return wide, same

    def compare(self, case: Case, dtype: torch.dtype) -> list[Comparison]:
        """Compare out and, for softmax variants, lse.

        Raises:
            MisfitError: as for `expected`.
            KernelFailedError: the kernel raised.
        """
        params = self.params_for(case.dims)
        inputs = make_inputs(case, dtype, torch.Generator("cpu").manual_seed(self.seed))
        wide, same = self.expected(case, inputs, params, dtype)
        try:
            got = self._kernel(case, inputs, params, with_lse=len(wide) > 1)
        except Exception as error:
            message = f"{type(error).__name__}: {first_line(error)}"
            raise KernelFailedError(message) from error
        trim = _FLIPPED_ROWS if case.extreme and self._moves_scores(case, params) else 0.0
        results = _compared(got, wide, same, dtype, trim, None)
        if any(r.problem for r in results):
            moved = effect_of_errors(
                wide, lambda errors: self._reference(case, inputs, params, torch.float64, errors)
            )
            results = _compared(got, wide, same, dtype, trim, moved)
        return results

    def _moves_scores(self, case: Case, params: Mapping[str, Any]) -> bool:
        """Whether the variant modifies q or k, whose rounding makes large scores inexact."""
        ir = self._variant(case).bind(case.dims, params).ir
        return ir.has("query_mod") or ir.has("key_mod")

    def _variant(self, case: Case) -> Variant:
        return self.variant & _EDGES if case.masked else self.variant

    def _reference(
        self,
        case: Case,
        inputs: Inputs,
        params: Mapping[str, Any],
        dtype: torch.dtype,
        errors: Errors = NO_ERRORS,
    ) -> Results:
        variant, tensors = self._variant(case), (inputs.q, inputs.clean_k, inputs.clean_v)
        if case.packed:
            return _as_dense(*varlen_reference(
                *_packed(case.dims, *tensors), variant, dtype=dtype, params=params,
                errors=errors,
            ))  # fmt: skip
        out, lse = attention_reference(
            *tensors, variant, q_offset=inputs.q_offset, kv_len=inputs.kv_len, dtype=dtype,
            params=params, errors=errors,
        )  # fmt: skip
        return (out,) if lse is None else (out, lse)

    def _kernel(
        self, case: Case, inputs: Inputs, params: Mapping[str, Any], with_lse: bool
    ) -> Results:
        variant, tensors = self._variant(case), (inputs.q, inputs.k, inputs.v)
        threads = torch.get_num_threads()
        torch.set_num_threads(case.threads or threads)
        try:
            with torch.no_grad():
                if case.packed:
                    result = varlen_attention(
                        *_packed(case.dims, *tensors), variant, return_lse=with_lse,
                        target=self.target, **params,
                    )  # fmt: skip
                    return _as_dense(*result) if isinstance(result, tuple) else _as_dense(result)
                result = attention(
                    *tensors, variant, q_offset=inputs.q_offset, kv_len=inputs.kv_len,
                    return_lse=with_lse, target=self.target, **params,
                )  # fmt: skip
        finally:
            torch.set_num_threads(threads)
        return result if isinstance(result, tuple) else (result,)


def _compared(
    got: Results, wide: Results, same: Results, dtype: torch.dtype, trim: float,
    moved: Results | None,
) -> list[Comparison]:  # fmt: skip
    out_moved, lse_moved = (moved[0], moved[-1]) if moved else (None, None)
    results = [compare(got[0], wide[0], same[0], trim=trim, moved=out_moved)]
    if len(wide) > 1:
        results.append(compare_lse(got[1], wide[1], same[1], dtype, trim, lse_moved))
    return results


def packed_lengths(dims: Dims) -> tuple[list[int], list[int]]:
    """(q_lens, kv_lens) of a packed case: long, one row, and no keys, in turn."""
    q_lens = (dims.q_len, 1, dims.q_len // 2)
    kv_lens = (dims.kv_len, dims.kv_len // 2 + 1, 0)
    return [q_lens[i % 3] for i in range(dims.batch)], [kv_lens[i % 3] for i in range(dims.batch)]


def _packed(dims: Dims, q: Tensor, k: Tensor, v: Tensor) -> _Packed:
    """The arguments of `varlen_attention` for a packed case: q, k, v, q_indptr, kv_indptr."""
    q_lens, kv_lens = packed_lengths(dims)
    tokens = _tokens(q, q_lens), _tokens(k, kv_lens), _tokens(v, kv_lens)
    return *tokens, _indptr(q_lens), _indptr(kv_lens)


def _as_dense(out: Tensor, lse: Tensor | None = None) -> Results:
    """Packed results [tokens, heads, ...] as a batch of one [1, heads, tokens, ...]."""
    results = (out,) if lse is None else (out, lse)
    return tuple(x.transpose(0, 1)[None] for x in results)


def _tokens(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The first rows of each request of [B, H, S, D], end to end: [sum(lengths), H, D]."""
    parts = [x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)]
    return torch.cat(parts) if parts else x.new_empty(0, x.shape[1], x.shape[3])


def _indptr(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cpu").cumsum(0)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type without a message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
