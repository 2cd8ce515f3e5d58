"""A call of each kind of kernel, with its results in fp64 and in torch's eager arithmetic.

The first call of the benchmark runs each in a process of its own; tests/gpu/test_sanitizer.py runs
all under compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.gpu import mods
from benchmarks.gpu.machine import Machine
from flashattn_jit.inspect.verification.error import compare, effect_of_errors
from flashattn_jit.variants.reference import attention_reference, varlen_reference

BF16 = torch.bfloat16
_PAGE = 16


@dataclass(frozen=True)
class Result:
    """A result [..., dim], and what it should be: in fp64, and as torch computes it in bf16.

    moved: the change of `exact` by the errors that hooks may have.
    """

    got: Tensor
    exact: Tensor
    eager: Tensor
    moved: Tensor | None = None

    @property
    def share(self) -> float:
        """The RMS error as a share of what docs/semantics.md allows; inf if a value is wrong."""
        rows = (1, 1, -1, self.got.shape[-1])
        got, exact, eager = (t.cpu().reshape(rows) for t in (self.got, self.exact, self.eager))
        moved = None if self.moved is None else self.moved.reshape(rows)
        found = compare(got, exact, eager, moved=moved)
        if found.problem and not found.error > found.allowed:
            return float("inf")
        return found.error / found.allowed


def _random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _dense(
    machine: Machine,
    shape: tuple[int, int, int, int, int, int],
    variant: Any = None,
    reference: Any = None,
) -> Iterator[Result]:
    """fa.attention of a shape (batch, heads, kv heads, queries, keys, head_dim)."""
    batch, heads, kv_heads, q_len, kv_len, head_dim = shape
    q = _random(batch, heads, q_len, head_dim)
    k, v = (_random(batch, kv_heads, kv_len, head_dim, seed=i) for i in (1, 2))
    placed = (t.to(machine.device) for t in (q, k, v))
    got = fa.attention(*placed, variant, q_offset="end", target=machine.target)
    given = (q, k, v, reference or variant)
    exact, _ = attention_reference(*given, q_offset="end")
    eager, _ = attention_reference(*given, q_offset="end", dtype=BF16)
    (moved,) = effect_of_errors(
        (exact,), lambda errors: attention_reference(*given, q_offset="end", errors=errors)[:1]
    )
    yield Result(got, exact, eager, moved)


def _prefill_64(machine: Machine) -> Iterator[Result]:
    return _dense(machine, (1, 4, 2, 150, 333, 64), fa.Causal() & fa.ALiBi())


def _prefill_128(machine: Machine) -> Iterator[Result]:
    return _dense(machine, (1, 2, 2, 150, 333, 128))


def _prefill_256(machine: Machine) -> Iterator[Result]:
    return _dense(machine, (1, 2, 1, 90, 200, 256), fa.SlidingWindow(64))


def _some_rows(machine: Machine) -> Iterator[Result]:
    return _dense(machine, (1, 4, 1, 12, 200, 128), fa.Causal())


def _few_rows(machine: Machine) -> Iterator[Result]:
    return _dense(machine, (2, 8, 2, 1, 200, 64), fa.ALiBi())


def _split(machine: Machine) -> Iterator[Result]:
    return _dense(machine, (1, 8, 2, 1, machine.pick(20000, 1500), 128))


def _soft_cap(machine: Machine) -> Iterator[Result]:
    return _dense(machine, (1, 2, 2, 150, 333, 128), fa.SoftCap(30.0))


def _approximate(machine: Machine) -> Iterator[Result]:
    return _dense(machine, (1, 2, 2, 150, 333, 128), fa.SoftCap(30.0, approximate=True))


def _documents(machine: Machine) -> Iterator[Result]:
    ids = torch.tensor([0] * 90 + [1] * 70 + [2] * 173)
    mine, theirs = mods.document(ids.to(machine.device)), mods.document(ids)
    return _dense(machine, (1, 2, 2, 333, 333, 64), mine, theirs)


def _pages(machine: Machine) -> Iterator[Result]:
    """Keys appended to poisoned pages, then a batch over them: decoding and a prompt."""
    q_len, kv_len = (1, 70, 3), (200, 70, 45)
    q_indptr, kv_indptr = (torch.tensor([0, *n]).cumsum(0) for n in (q_len, kv_len))
    q, k, v = _random(74, 4, 64), _random(315, 2, 64, seed=1), _random(315, 2, 64, seed=2)
    counts = [-(-n // _PAGE) for n in kv_len]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).int()
    paged = fa.Paged(
        torch.tensor([0, *counts]).cumsum(0), order.to(machine.device),
        torch.tensor([(n - 1) % _PAGE + 1 for n in kv_len]), _PAGE,
    )  # fmt: skip
    shape = (sum(counts), _PAGE, 2, 64)
    pages = [torch.full(shape, torch.nan, dtype=BF16, device=machine.device) for _ in range(2)]
    fa.append_paged_kv(
        k.to(machine.device), v.to(machine.device), *pages, kv_indptr, paged, target=machine.target
    )
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype=BF16, **machine.options()
    )
    batch.plan(q_indptr, paged)
    got = batch.run(q.to(machine.device), *pages)
    given = (q, k, v, q_indptr, kv_indptr, fa.Causal())
    exact, eager = varlen_reference(*given)[0], varlen_reference(*given, dtype=BF16)[0]
    yield Result(got, exact, eager)


def _cascade(machine: Machine) -> Iterator[Result]:
    """Six requests that share 96 keys and have 32 of their own, in pages."""
    shared, own, count = 96, 32, 6
    q = _random(count, 4, 128)
    k, v = (_random(shared + count * own, 1, 128, seed=i) for i in (1, 2))
    order = torch.arange((shared + count * own) // _PAGE).int().to(machine.device)
    first, last = shared // _PAGE, torch.full((count,), _PAGE)
    each = own // _PAGE * torch.arange(count + 1)
    common = fa.Paged(torch.tensor([0, first]), order[:first], last[:1], _PAGE)
    levels = [
        fa.CascadeLevel(torch.tensor([0, count]), common),
        fa.CascadeLevel(torch.arange(count + 1), fa.Paged(each, order[first:], last, _PAGE)),
    ]
    cascade = fa.CascadeAttention(
        None, num_q_heads=4, num_kv_heads=1, head_dim=128, q_dtype=BF16, **machine.options()
    )
    cascade.plan(levels)
    pages = [t.view(-1, _PAGE, 1, 128).to(machine.device) for t in (k, v)]
    got = cascade.run(q.to(machine.device), *pages)
    keys, values = (
        torch.cat([torch.cat([t[:shared], t[shared + own * i :][:own]]) for i in range(count)])
        for t in (k, v)
    )
    indptr = (shared + own) * torch.arange(count + 1)
    given = (q, keys, values, torch.arange(count + 1), indptr)
    exact, eager = varlen_reference(*given)[0], varlen_reference(*given, dtype=BF16)[0]
    yield Result(got, exact, eager)


def _merged(machine: Machine) -> Iterator[Result]:
    """The states of two halves of the keys, merged."""
    q = _random(1, 2, 40, 64)
    k, v = (_random(1, 2, 120, 64, seed=i) for i in (1, 2))
    states = [
        fa.attention(
            *(t.to(machine.device) for t in (q, k[:, :, half], v[:, :, half])), partial=True,
            target=machine.target,
        )
        for half in (slice(0, 60), slice(60, 120))
    ]  # fmt: skip
    got, _ = fa.merge_states(
        [out for out, _ in states], [lse for _, lse in states], target=machine.target
    )
    exact, eager = (attention_reference(q, k, v, dtype=d)[0] for d in (torch.float64, BF16))
    yield Result(got.to(BF16), exact, eager)


SMOKE: dict[str, Callable[[Machine], Iterator[Result]]] = {
    "prefill D64, causal ALiBi": _prefill_64,
    "prefill D128": _prefill_128,
    "prefill D256, window": _prefill_256,
    "48 packed rows": _some_rows,
    "few rows": _few_rows,
    "few rows, split and merged": _split,
    "soft cap": _soft_cap,
    "soft cap, approximate": _approximate,
    "document mask": _documents,
    "appended pages, a batch": _pages,
    "cascade": _cascade,
    "merged states": _merged,
}
"""The kernels that are tried before anything is measured."""


def smoke(machine: Machine, names: list[str]) -> float:
    """Runs calls; returns the largest share of the allowed error, inf if a value is wrong."""
    shares = [result.share for name in names for result in SMOKE[name](machine)]
    machine.synchronize()
    return max(shares)
