"""Random sequences of appends, plans, runs, frees and wrong calls against a dense model.

The model is lists of key and value rows. The machine keeps a cache of pages as a serving engine
would, with free pages NaN; two variants share one workspace, and requests may begin with the pages
of another request. Wrong calls must raise and change nothing: no page, no plan.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import flashattn_jit as fa
from tests.batch.batches import indptr
from tests.batch.oracle import Math

HEADS, DIM, PAGES = (4, 2), 32, 48
MATHS = (Math(causal=True), Math(window=9, sink=True))
lengths = st.sampled_from([1, 2, 9, 16, 40, 1, 0])


@dataclass(eq=False)
class Request:
    """A request's pages and, in the model, its keys [kv_len, Hkv, D] and values."""

    pages: list[int] = field(default_factory=list)
    k: torch.Tensor = field(default_factory=lambda: torch.empty(0, HEADS[1], DIM))
    v: torch.Tensor = field(default_factory=lambda: torch.empty(0, HEADS[1], DIM))


@dataclass
class Planned:
    """What the model expects of run(): the plan's requests with their lengths."""

    which: int
    q_len: list[int]
    members: list[Request]
    kv_len: list[int]
    cascade: bool


class Serving(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([16, 4, 1]), limited=st.booleans())
    def begin(self, page_size: int, limited: bool) -> None:
        self.size = page_size
        self.generator = torch.Generator().manual_seed(page_size)
        self.k, self.v = (
            torch.full((PAGES, page_size, HEADS[1], DIM), torch.nan) for _ in range(2)
        )
        self.free, self.users = list(range(PAGES)), [0] * PAGES
        self.requests: list[Request] = []
        limits = fa.Limits(max_requests=8, max_q_tokens=256, max_kv_len=800, max_pages=400)
        options: dict[str, Any] = {
            "num_q_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_dim": DIM,
            "q_dtype": torch.float32, "workspace": torch.empty(1 << 22, dtype=torch.uint8),
            "limits": limits if limited else None,
        }  # fmt: skip
        self.limited = limited
        variants = [m.variant(HEADS[0]) for m in MATHS]
        self.flat = [fa.BatchAttention(x, **options) for x in variants]
        self.cascades = [fa.CascadeAttention(x, **{**options, "limits": None}) for x in variants]
        self.planned: list[Planned | None] = [None, None]

    # --- what a serving engine does -----------------------------------------------------------

    @precondition(lambda self: len(self.requests) < 6)
    @rule(prompt=st.integers(1, 60))
    def admit(self, prompt: int) -> None:
        self.requests.append(Request())
        self._append([0] * (len(self.requests) - 1) + [prompt])

    @precondition(lambda self: 0 < len(self.requests) < 6)
    @rule(data=st.data())
    def admit_with_the_prefix_of(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.requests))
        pages = len(parent.k) // self.size
        tokens = pages * self.size
        child = Request(parent.pages[:pages], parent.k[:tokens], parent.v[:tokens])
        for page in child.pages:
            self.users[page] += 1
        self.requests.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self._append([data.draw(lengths) for _ in self.requests])

    def _append(self, new: list[int]) -> None:
        needed = sum(self._pages(len(r.k) + n) - len(r.pages) for r, n in self._with(new))
        if needed > len(self.free):
            return
        k, v = (self._normal(sum(new), HEADS[1]) for _ in range(2))
        begin = 0
        for r, n in self._with(new):
            while len(r.pages) < self._pages(len(r.k) + n):
                page = self.free.pop()
                self.users[page] = 1
                r.pages.append(page)
            r.k = torch.cat([r.k, k[begin : begin + n]])
            r.v = torch.cat([r.v, v[begin : begin + n]])
            begin += n
        paged = self._paged(self.requests, [len(r.k) for r in self.requests])
        fa.append_paged_kv(k, v, self.k, self.v, indptr(new), paged)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.requests))
        self.requests.remove(gone)
        for page in gone.pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)
                self.k[page], self.v[page] = torch.nan, torch.nan
        # Plans that use the freed pages are no longer valid.
        for i, p in enumerate(self.planned):
            if p is not None and gone in p.members:
                self.planned[i] = None

    @rule()
    def plan_nothing(self) -> None:
        self.flat[0].plan(indptr([]), self._paged([], []))
        self.planned[0] = Planned(0, [], [], [], False)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), which=st.integers(0, 1), cascade=st.booleans())
    def plan(self, data: st.DataObject, which: int, cascade: bool) -> None:
        """Plans the requests, in any order, without one of them at times."""
        members = data.draw(st.permutations(self.requests))
        members = members[: max(0, len(members) - data.draw(st.sampled_from([0, 0, 0, 1])))]
        kv_len = [len(r.k) for r in members]
        q_len = [min(n, data.draw(lengths)) for n in kv_len]
        paged = self._paged(members, kv_len)
        if cascade:
            self.cascades[which].plan(fa.cascade_levels(indptr(q_len), paged))
        else:
            self.flat[which].plan(indptr(q_len), paged)
        self.planned[which] = Planned(which, q_len, members, kv_len, cascade)
        self.run()

    @precondition(lambda self: any(self.planned))
    @rule()
    def run(self) -> None:
        for p in self.planned:
            if p is None:
                continue
            q = self._normal(sum(p.q_len), HEADS[0])
            out, lse = self._engine(p).run(q, self.k, self.v, return_lse=True)
            expected, expected_lse = self._model(p, q)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)

    # --- wrong calls --------------------------------------------------------------------------

    @rule(data=st.data(), which=st.integers(0, 1))
    def plan_wrongly(self, data: st.DataObject, which: int) -> None:
        members = self.requests
        kv_len = [len(r.k) for r in members]
        q_indptr, paged = indptr([1] * len(members)), self._paged(members, kv_len)
        wrong = [
            lambda: (indptr([1] * (len(members) + 1)), paged),
            lambda: (q_indptr + 1, paged),
            lambda: (q_indptr.float(), paged),
            lambda: (torch.cat([q_indptr, q_indptr[-1:] - 1]), paged),
            lambda: (q_indptr, fa.Paged(paged.page_indptr, paged.page_indices - PAGES,
                                        paged.last_page_len, self.size)),
            lambda: (q_indptr, fa.Paged(paged.page_indptr, paged.page_indices,
                                        paged.last_page_len + self.size, self.size)),
            lambda: (q_indptr, "pages"),
        ]  # fmt: skip
        if self.limited:
            two = fa.Paged(indptr([1, 1]), torch.zeros(2).int(), torch.ones(2).long(), self.size)
            wrong.append(lambda: (indptr([200, 200]), two))
        call = data.draw(st.sampled_from(wrong))
        if not any(r.pages for r in members) and call in wrong[4:6]:
            return
        with pytest.raises(fa.InputError):
            self.flat[which].plan(*call())

    @precondition(lambda self: any(self.planned))
    @rule(data=st.data())
    def run_wrongly(self, data: st.DataObject) -> None:
        p = next(p for p in self.planned if p is not None)
        made = self._engine(p)
        q = self._normal(sum(p.q_len), HEADS[0])
        k, v = self.k, self.v
        calls = [
            lambda: made.run(torch.cat([q, q[:1], q.new_zeros(1, *q.shape[1:])]), k, v),
            lambda: made.run(q.double(), k, v),
            lambda: made.run(q[:, :2], k, v),
            lambda: made.run(q[..., :16], k, v),
            lambda: made.run(q, k[:, :, :1], v),
            lambda: made.run(q, k, v, window=3),
            lambda: made.run(q, k, v, nothing=3),
            lambda: made.run(q, k, v, out=torch.empty(1, 1, 1)),
        ]
        if self.size > 1:
            calls.append(lambda: made.run(q, k[:, 1:], v[:, 1:]))
        with pytest.raises(fa.FlashAttnJitError):
            data.draw(st.sampled_from(calls))()

    @precondition(lambda self: self.requests)
    @rule(extra=st.integers(1, 3))
    def append_wrongly(self, extra: int) -> None:
        kv_len = [len(r.k) for r in self.requests]
        new = [*kv_len[:-1], kv_len[-1] + extra]
        rows = self._normal(sum(new), HEADS[1])
        with pytest.raises(fa.InputError, match=r"new tokens|pages"):
            fa.append_paged_kv(
                rows, rows.clone(), self.k, self.v, indptr(new), self._paged(self.requests, kv_len)
            )

    @invariant()
    def pages_hold_what_the_model_has(self) -> None:
        if not hasattr(self, "requests"):
            return
        used = torch.zeros(PAGES, self.size, dtype=torch.bool)
        for r in self.requests:
            at = torch.arange(len(r.k))
            page, slot = torch.tensor(r.pages).long()[at // self.size], at % self.size
            assert torch.equal(self.k[page, slot], r.k) and torch.equal(self.v[page, slot], r.v)
            used[page, slot] = True
        assert torch.isnan(self.k[~used]).all() and torch.isnan(self.v[~used]).all()

    # --- helpers ------------------------------------------------------------------------------

    def _with(self, new: list[int]) -> list[tuple[Request, int]]:
        return list(zip(self.requests, new, strict=True))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _normal(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, DIM, generator=self.generator)

    def _paged(self, members: list[Request], kv_len: list[int]) -> fa.Paged:
        pages = [r.pages[: self._pages(n)] for r, n in zip(members, kv_len, strict=True)]
        last = [(n - 1) % self.size + 1 if n else 0 for n in kv_len]
        return fa.Paged(
            indptr([len(p) for p in pages]),
            torch.tensor(list(itertools.chain(*pages)), dtype=torch.int32),
            torch.tensor(last, dtype=torch.int64), self.size,
        )  # fmt: skip

    def _engine(self, p: Planned) -> Any:
        return (self.cascades if p.cascade else self.flat)[p.which]

    def _model(self, p: Planned, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(len(q), HEADS[0], DIM)
        lse = torch.empty(len(q), HEADS[0])
        what, begin, group = MATHS[p.which], 0, HEADS[0] // HEADS[1]
        for r, rows, keys in zip(p.members, p.q_len, p.kv_len, strict=True):
            i, end = torch.arange(rows) + keys - rows, begin + rows
            keep = what.keep(i, torch.arange(keys))
            for h in range(HEADS[1]):
                heads = torch.arange(h * group, (h + 1) * group)
                exact = what.attend(
                    q[begin:end][:, heads].double(), r.k[:keys, h].double(),
                    r.v[:keys, h].double(), heads, i, keep, HEADS[0],
                )  # fmt: skip
                out[begin:end, heads], lse[begin:end, heads] = (x.float() for x in exact)
            begin = end
        return out, lse


Serving.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestServing = Serving.TestCase
