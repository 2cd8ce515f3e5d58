"""A planned batch over pages, and tensors of its runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.ops.launching import batch_run
from flashattn_jit.variants.reference import varlen_reference

HEADS, DIM, PAGE = (4, 2), 32, 16
Q_LENS, KV_LENS = (1, 3, 1), (70, 20, 300)
NUM_PAGES = 32


def indptr(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


class Case:
    """A planned batch over pages, and new random tensors of any layer."""

    def __init__(self, variant: Any = None, **options: Any) -> None:
        self.variant = fa.Causal() if variant is None else variant
        self.batch = fa.BatchAttention(
            self.variant, num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM,
            q_dtype=torch.float32, **options,
        )  # fmt: skip
        self.replan()

    def replan(self) -> None:
        pages = [-(-n // PAGE) for n in KV_LENS]
        self.indices = torch.randperm(NUM_PAGES)[: sum(pages)].to(torch.int32)
        self.page_indptr = indptr(tuple(pages))
        last = torch.tensor([n - (p - 1) * PAGE for n, p in zip(KV_LENS, pages, strict=True)])
        paged = fa.Paged(self.page_indptr, self.indices, last.to(torch.int32), PAGE)
        self.batch.plan(indptr(Q_LENS), paged)

    def repeats(self) -> dict[Any, Any]:
        """What later runs of the plan are recognised by."""
        planned = self.batch.in_force()
        assert isinstance(planned, batch_run.Planned)
        return planned.repeats

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = torch.randn(sum(Q_LENS), HEADS[0], DIM)
        k, v = torch.randn(2, NUM_PAGES, PAGE, HEADS[1], DIM)
        return q, k, v

    def expected(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any = None) -> Any:
        rows = []
        for x in (k, v):
            found = [
                x[self.indices[a:b].long()].flatten(0, 1)[:n]
                for a, b, n in zip(self.page_indptr, self.page_indptr[1:], KV_LENS, strict=False)
            ]
            rows.append(torch.cat(found).double())
        out, _ = varlen_reference(
            q.double(), *rows, indptr(Q_LENS), indptr(KV_LENS), self.variant, q_offset="end",
            scale=scale,
        )  # fmt: skip
        return out

    def check(self, out: torch.Tensor, *given: Any) -> None:
        torch.testing.assert_close(out.double(), self.expected(*given), atol=2e-5, rtol=2e-5)


FORMATS = [
    "int8", "e4m3", "e5m2", "int4", "nf4", ("int8", "token_head"), ("int4", "token_head"),
    ("e4m3", "tensor"),
]  # fmt: skip


def calls_of(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[object]:
    """Grows by the arguments of each call of a function."""
    found: list[object] = []
    called = getattr(module, name)

    def counted(*arguments: Any) -> Any:
        found.append(arguments)
        return called(*arguments)

    patch.setattr(module, name, counted)
    return found
