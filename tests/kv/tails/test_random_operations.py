"""Random operations over groups with tails, against lists of full-precision rows.

The reference keeps the rows of each sequence and quantises its full pages with `Format.quantize`.
After every step attention is compared with the fp64 reference over these values, and after every
operation the codes and the tail of some sequence are compared with them bit for bit.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.variants.reference import varlen_reference
from tests.batch.batches import indptr
from tests.harness.rotation import some, turn
from tests.kv.engine import prefixes
from tests.kv.machine import Items, Machine
from tests.ops.cases import assert_close

HEADS, DIM, DIM_V, MAX_LEN = 2, 32, 64, 400
Format = fa.kv.Format
KIVI = Format("int4", "channel", zero=True), Format("int4", group=32, rotate=True)
KEYS = Format("int8", "channel", torch.bfloat16), None
CAUSAL, WINDOW, NEAR = fa.Causal(), fa.SlidingWindow(90), fa.SlidingWindow(20)
FORMATS: list[Any] = [KIVI, KEYS, (None, None)]
VARIANTS = [CAUSAL, WINDOW, NEAR]
ATOL = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def table(layer: int, part: int) -> Tensor:
    """Rows by the hash of a prefix: the keys of a token depend on all tokens up to it."""
    generator = torch.Generator().manual_seed(10 * layer + part)
    return torch.randn(997, HEADS, (DIM, DIM_V)[part], generator=generator)


class Tails(Machine):
    """Groups with and without quantised pages, whose tails hold rows."""

    weights: ClassVar = {
        "open": 4, "step": 14, "fork": 2, "trim": 4, "close": 2, "suspend": 1, "resume": 2,
        "fail": 2, "clear": 0.2,
    }  # fmt: skip
    sizes, max_len, most = (0, 1, 1, 1, 2, 31, 63, 64, 65, 130, 200), MAX_LEN, 6

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.size = (64, 64, 128)[seed % 3]
        self.dtype = (torch.float32, torch.bfloat16)[seed % 2]
        groups = [
            fa.kv.Group((0, 3), HEADS, DIM, DIM_V, 2 * HEADS, CAUSAL, kv_format=KIVI),
            fa.kv.Group((1,), HEADS, DIM, DIM_V, 2 * HEADS, WINDOW, kv_format=KEYS),
            fa.kv.Group((2,), HEADS, DIM, DIM_V, 2 * HEADS, NEAR),
        ]
        pages = 4000 // self.size
        self.cache = fa.kv.Cache(
            fa.kv.Spec(tuple(groups), self.size, self.dtype),
            [pages, pages, pages, self.random.choice([8, 16]), 16], max_kv_len=MAX_LEN,
            lookback=self.random.choice([0, 0, 9, 70]), layout=("page", "layer")[seed % 2],
        )  # fmt: skip
        self.attentions = [
            fa.CascadeAttention(
                g.variant, num_q_heads=2 * HEADS, num_kv_heads=HEADS, head_dim=DIM,
                head_dim_v=DIM_V, q_dtype=self.dtype,
            )
            for g in groups
        ]  # fmt: skip
        self.tables = {
            (layer, part): table(layer, part).to(self.dtype)
            for layer in range(4)
            for part in (0, 1)
        }
        self.log = [f"page_size {self.size}, {self.dtype}, lookback {self.cache.lookback}"]
        self.outs: list[list[tuple[Tensor, ...]]] = [[] for _ in range(4)]
        self.filled = 0

    # --- the reference ----------------------------------------------------------------------------

    def rows(self, layer: int, part: int, tokens: list[int]) -> Tensor:
        return self.tables[layer, part][[x % 997 for x in prefixes(tokens)]]

    def full(self, layer: int, part: int, tokens: list[int]) -> Tensor | fa.kv.Stored:
        """The full pages, quantised."""
        x = self.rows(layer, part, tokens)
        pages = x[: len(x) // self.size * self.size].unflatten(0, (-1, self.size))
        form = FORMATS[self.cache.group_of(layer)][part]
        return pages if form is None else form.quantize(pages)

    def values(self, layer: int, part: int, tokens: list[int]) -> Tensor:
        """What attention reads, fp32."""
        full, rows = self.full(layer, part, tokens), self.rows(layer, part, tokens).float()
        pages = full.float() if isinstance(full, Tensor) else full.dequantize()
        return torch.cat([pages.flatten(0, 1), rows[len(pages) * self.size :]])

    def verify(self, seq: fa.kv.Sequence) -> None:
        """Codes of full pages and rows of the tail, bit for bit."""
        tokens, cache = self.tokens[seq.number], self.cache
        assert seq.token_ids.tolist() == tokens
        for layer in (0, 1, 3):
            group = cache.group_of(layer)
            pages, own = seq.pages(group), seq.tables[len(cache.spec.groups) + group].view
            count, rest = divmod(len(tokens), self.size)
            there = np.flatnonzero(pages[:count])
            assert group == 1 or len(there) == count
            for part in (0, 1):
                held, wanted = cache.tensors(layer)[part], self.full(layer, part, tokens)
                for x, y in zip(_parts(held), _parts(wanted), strict=True):
                    assert torch.equal(x[torch.from_numpy(pages[there].astype(int))], y[there])
                if rest:
                    x = cache.tails(layer)[part][own[-1], :rest]
                    assert torch.equal(x, self.rows(layer, part, tokens)[-rest:])

    # --- operations -------------------------------------------------------------------------------

    def open(self) -> None:
        if len(self.cache.sequences) > self.most:
            return
        known = list(self.tokens.values())
        prompt = list(self.random.choice(known)) if known and self.random.random() < 0.8 else []
        cut = self.random.choice([len(prompt), self.random.randrange(len(prompt) + 1)])
        prompt = [*prompt[: min(cut, MAX_LEN - 1)], 1]
        seq = self.cache.open(prompt)
        assert seq.num_cached % self.size == 0
        self.tokens[seq.number] = prompt[: seq.num_cached]
        self.longest[seq.number] = seq.num_cached

    def write(self, step: fa.kv.Step, items: Items) -> None:
        for group, attention in enumerate(self.attentions):
            step.plan(attention, group)
        both = [(self.tokens[s.number] + new, len(new)) for s, new in items]
        ends = indptr([count for _, count in both])
        for layer in range(4):
            group = self.cache.group_of(layer)
            new = [
                [self.rows(layer, part, all_)[len(all_) - n :] for all_, n in both]
                for part in (0, 1)
            ]
            k, v = (torch.cat([self.tables[layer, i][:0], *x]) for i, x in enumerate(new))
            step.append(layer, k, v)
            q = torch.randn(len(k), 2 * HEADS, DIM, generator=torch.Generator().manual_seed(layer))
            q = q.to(self.dtype)
            out = self.attentions[group].run(q, *step.tensors(layer))
            if not len(q):
                continue
            k, v = (torch.cat([self.values(layer, i, all_) for all_, _ in both]) for i in (0, 1))
            lens = indptr([len(all_) for all_, _ in both])
            exact, eager = (
                varlen_reference(q, k, v, ends, lens, VARIANTS[group], dtype=dtype)[0]
                for dtype in (torch.float64, self.dtype)
            )
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=ATOL[self.dtype])
            self.outs[layer].append((out, exact, eager))
        self.filled += sum(len(a) // self.size > (len(a) - n) // self.size for a, n in both)

    def backs(self, seq: fa.kv.Sequence) -> list[int]:
        return [0, 1, 3, self.cache.lookback, 40, seq.kv_len % self.size, 100, 170]

    def kept(self, seq: fa.kv.Sequence) -> int:
        return max(super().kept(seq), seq.num_cached)


def _parts(x: Tensor | fa.kv.Stored) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    codes = x.codes.view(torch.uint8) if x.codes.element_size() == 1 else x.codes
    return [codes, x.scales, *([] if x.zeros is None else [x.zeros])]


SEEDS = [seed for parity in turn(0, (0, 1)) for seed in range(parity, 6, 2)]
"""Of one dtype by turns: the runs share kernels."""


@pytest.mark.parametrize("seed", some(SEEDS, 2))
def test_random_operations(seed: int) -> None:
    machine = Tails(seed)
    machine.run(100)
    assert machine.refused and machine.filled > 5 and machine.cache.stats().hit_tokens
    for outs in machine.outs:  # one row of a decoding step is too few for a bound of the RMS error
        assert_close(*(torch.cat(x) for x in zip(*outs, strict=True)))
