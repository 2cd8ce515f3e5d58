"""A case that several engines compute, its random data, and what an engine is to the command.

The data are packed, one row a token: each engine copies them to its own layout before the timing,
and its result is compared in the packed layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.parts.measure import Run


@dataclass(frozen=True)
class Case:
    """One batch: request b has the last q_lens[b] of kv_lens[b] positions as its queries.

    heads: of q and of k and v. paged: keys lie in pages of a cache; else requests are equally long
    and the tensors dense. Masks are causal unless `causal` is False; `window` counts a row's own
    key. fp8: keys and values are stored as e4m3 with a scale of 1.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    paged: bool = False
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    fp8: bool = False

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def variant(self) -> fa.Variant | None:
        """This package's form of the case; a causal mask over one row of a dense call is none."""
        made: fa.Variant | None = None
        if self.window is not None:
            made = fa.SlidingWindow(self.window)
        elif self.causal and (self.paged or self.q_lens[0] > 1):
            made = fa.Causal()
        if self.softcap is not None:
            made = _both(fa.SoftCap(self.softcap), made)
        return _both(fa.ALiBi(), made) if self.alibi else made


def _both(score: fa.Variant, mask: fa.Variant | None) -> fa.Variant:
    return score if mask is None else score & mask


@dataclass(frozen=True)
class Inputs:
    """q [tokens, q heads, dim], k and v [keys, kv heads, dim]; requests one after the other."""

    q: Tensor
    k: Tensor
    v: Tensor


def random_inputs(case: Case) -> Inputs:
    """Standard normal values."""
    tokens, keys = sum(case.q_lens), sum(case.kv_lens)
    q = torch.randn(tokens, case.heads[0], case.head_dim).to(case.dtype)
    k, v = (torch.randn(keys, case.heads[1], case.head_dim).to(case.dtype) for _ in range(2))
    return Inputs(q, k, v)


def dense(packed: Tensor, batch: int) -> Tensor:
    """[batch, heads, rows, dim], contiguous, of packed rows of equally long requests."""
    return packed.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()


def packed(out: Tensor) -> Tensor:
    """The reverse of `dense`."""
    return out.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be timed, and its result as packed rows [tokens, q heads, dim].

    kept: tensors that the call reads without owning their memory.
    """

    run: Run
    result: Callable[[], Tensor]
    kept: object = None


class NotSupported(Exception):
    """An engine has no form of a case; the message states why."""


class NotAvailable(Exception):
    """An engine cannot run here; the message states why."""


@dataclass(frozen=True)
class Engine:
    """An engine that runs here.

    paged: whether it takes the paged cases, else the dense ones. make: its forms of a case, by
    name; raises `NotSupported`.
    """

    version: str
    make: Callable[[Case, Inputs], Mapping[str, Prepared]]
    paged: bool = False


@dataclass(frozen=True)
class Source:
    """Where an engine comes from.

    open: raises `NotAvailable`. get: how it is got. held: whether `--target` holds it to a CPU
    target; one that chooses its kernels by the machine alone is compared on the machine's own.
    """

    open: Callable[[], Engine]
    get: str
    held: bool = True
