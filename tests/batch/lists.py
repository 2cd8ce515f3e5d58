"""Parameter lists of batches, taken from FlashInfer's own tests.

Each function names its file under tests/attention of FlashInfer 0.6.18. Every value of a list
appears, in combinations that cover the lists rather than in their full product (tests/full has more
of those). Some references of FlashInfer are kernels of its own; here all are dense and eager. Head
dims above 256, which the engine does not take, are left out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.batch.batches import LAYOUTS, Batch
from tests.batch.oracle import Math

DTYPES = {64: torch.float32, 128: torch.bfloat16, 256: torch.float32}
"""The dtype used with a head dim on CPUs, so that few kernels are compiled."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch with one variant. heads: (num_q_heads, num_kv_heads); page_size 0: packed keys."""

    name: str
    what: Math
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    heads: tuple[int, int]
    dim: int
    page_size: int = 16
    layout: str = "pages"
    dtype: torch.dtype | None = None

    def batch(self, device: str = "cpu") -> Batch:
        """The entry's tensors."""
        return Batch(
            self.q_len, self.kv_len, self.heads, self.dim, self.dtype or DTYPES[self.dim],
            self.page_size, self.layout, device=device,
        )  # fmt: skip

    def half(self, dtype: torch.dtype = torch.bfloat16) -> Entry:
        """The entry in half precision, for GPUs."""
        return replace(self, dtype=dtype)

    def reduced(self, dtype: torch.dtype = torch.bfloat16) -> Entry:
        """A small batch of the same kind, for the emulator: three requests, the last ones among
        them, two kv heads at most, the same group, page size and kind of lengths."""
        some = sorted({0, len(self.q_len) // 2, len(self.q_len) - 1})
        group = self.heads[0] // self.heads[1]
        kv_heads = 1 if group > 4 else min(self.heads[1], 2)
        most_q = max(1, 36 // group)
        q_len = tuple(min(self.q_len[b], most_q + 3 * i) for i, b in enumerate(some))
        kv_len = tuple(min(self.kv_len[b], 90 + 41 * i) for i, b in enumerate(some))
        what = replace(self.what, window=min(self.what.window, 40))
        return replace(
            self, what=what, q_len=q_len, kv_len=kv_len, heads=(group * kv_heads, kv_heads), dim=64,
            dtype=dtype,
        )  # fmt: skip


def _cover(**lists: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """As many combinations as the longest list has values, with every value of every list."""
    for i in range(max(len(values) for values in lists.values())):
        yield {name: values[i % len(values)] for name, values in lists.items()}


def _uniform(
    name: str, what: Math, count: int, q_len: int, kv_len: int, heads: tuple[int, int], dim: int,
    page_size: int = 16, layout: str = "pages",
) -> Entry:  # fmt: skip
    title = f"{name} b{count} q{q_len} kv{kv_len} h{heads[0]}x{heads[1]} d{dim} p{page_size}"
    title += f" w{what.window}" if what.window else ""
    lengths = ((q_len,) * count, (kv_len,) * count)
    return Entry(title, what, *lengths, heads, dim, page_size, layout)


def sliding_window() -> Iterator[Entry]:
    """test_sliding_window.py. Its window does not count the row's own key."""
    for c in _cover(
        kv=(1, 3, 19, 99, 199, 1177, 1999), window=(3, 13, 23, 37, 43), kv_heads=(1, 4),
        q_heads=(4, 8), dim=(64, 128, 256),
    ):  # fmt: skip
        heads = (c["q_heads"], c["kv_heads"])
        what = Math(window=c["window"] + 1)
        yield _uniform("window decode", what, 1, 1, c["kv"], heads, c["dim"], 0)
    for c in _cover(
        count=(1, 3, 13, 32, 32), kv=(1, 3, 99, 199, 1999), window=(33, 533), page=(1, 16),
        dim=(64, 128),
    ):  # fmt: skip
        what = Math(window=c["window"] + 1)
        yield _uniform("window decode", what, c["count"], 1, c["kv"], (8, 4), c["dim"], c["page"])
    for kv, window, page in ((99, 43, 0), (199, 233, 0), (1999, 43, 0), (1999, 233, 16)):
        what = Math(window=window + 1)
        yield _uniform("window prefill", what, 1, kv, kv, (8, 1), 64, page)
    for c in _cover(
        count=(12, 17, 30), kv=(54, 397, 1177), q=(47, 37, 1), window=(13, 33, 111), page=(1, 16),
    ):  # fmt: skip
        what = Math(window=c["window"] + 1)
        yield _uniform("window append", what, c["count"], c["q"], c["kv"], (8, 4), 128, c["page"])
    for count, kv, q, window in ((12, 54, 37, 13), (17, 397, 47, 111), (17, 1177, 37, 33)):
        yield _uniform("window ragged", Math(window=window + 1), count, q, kv, (8, 4), 64, 0)


def prefill() -> Iterator[Entry]:
    """test_batch_prefill_kernels.py, with rows of K and V laid out in every way."""
    rows = (
        (12, 54, 37, 1, (4, 4), 64, Math(rope=True)),
        (17, 97, 17, 5, (32, 4), 128, Math(causal=True)),
        (128, 512, 127, 16, (4, 4), 64, Math(causal=True, rope=True)),
        (12, 2048, 577, 1, (4, 4), 256, Math(causal=True)),
        (17, 512, 577, 5, (32, 4), 128, Math(causal=True)),
        (128, 54, 17, 16, (32, 4), 256, Math()),
        (12, 97, 127, 1, (4, 4), 64, Math(causal=True, rope=True)),
        (128, 2048, 37, 5, (4, 4), 64, Math(causal=True)),
        (17, 97, 577, 1, (4, 4), 64, Math()),
        (12, 2048, 127, 16, (32, 4), 128, Math()),
    )
    for i, (count, kv, q, page, heads, dim, what) in enumerate(rows):
        yield _uniform("prefill", what, count, q, kv, heads, dim, page, LAYOUTS[i % len(LAYOUTS)])


def sinks() -> Iterator[Entry]:
    """test_attention_sink.py: plain, step by step, in chunks of a history, and its ragged lists."""
    for c in _cover(count=(1, 4, 16), seq=(1, 4, 16, 128), kv_heads=(8, 32), window=(0, 128)):
        what = Math(causal=True, sink=True, window=c["window"])
        heads = (32, c["kv_heads"])
        yield _uniform("sink", what, c["count"], c["seq"], c["seq"], heads, 64, 16)
    for first, steps, kv_heads in ((32, 1, 8), (128, 2, 32), (32, 4, 32)):
        what = Math(causal=True, sink=True, window=128)
        for step in range(1, steps + 1):
            yield _uniform("sink step", what, 4, 1, first + step, (32, kv_heads), 64, 16)
    for c in _cover(chunk=(128, 256), history=(256, 512), window=(128, 0)):
        what = Math(causal=True, sink=True, window=c["window"])
        kv = c["chunk"] + c["history"]
        yield _uniform("sink chunk", what, 1, c["chunk"], kv, (32, 8), 64, 1)
    for q, kv in (
        ((0, 32, 64, 128, 256), (0, 128, 256, 512, 1024)),
        ((0, 1, 2, 3, 4), (0, 128, 256, 384, 512)),
        ((0, 50, 150, 200), (0, 200, 600, 800)),
        ((0, 100, 200, 400, 600, 1000), (0, 300, 600, 1200, 1800, 3000)),
        ((0, 16, 32, 96, 128), (0, 64, 128, 384, 512)),
    ):
        q_len, kv_len = (tuple(b - a for a, b in itertools.pairwise(x)) for x in (q, kv))
        what = Math(causal=True, sink=True, window=128 if len(q_len) == 3 else 0)
        yield Entry(f"sink ragged {kv[-1]}", what, q_len, kv_len, (32, 8), 64, 0)


def mixed() -> Iterator[Entry]:
    """test_batch_attention.py: prefill, append and decode in one batch, (kv_len, q_len) each."""
    generator = random.Random(42)
    anything = [
        (generator.randint(1000, 8192), 1)
        if generator.random() < 0.5
        else (n := generator.randint(1, 512), generator.randint(1, n))
        for _ in range(256)
    ]
    lists: tuple[list[tuple[int, int]], ...] = (
        [(146, 146)], [(67, 67)], [(8190, 7939)], [(2048, 1)] * 77, [(4099, 129)] * 2,
        [(600, 1)] * 132 * 2 + [(5000, 3)] * 128, [(1024, 1)] * 100 + [(8192, 17)] * 8,
        [(766, 2)] * 99 + [(1024, 512)], [(2, 235), (1, 13353)], [(235, 2), (13353, 1)], anything,
    )  # fmt: skip
    for i, c in enumerate(
        _cover(
            lengths=lists, page=(1, 8, 16), kv_heads=(1, 4, 1, 4, 4, 1, 1, 4, 1, 1),
            group=(1, 4, 7, 8, 1, 4, 8, 7, 1, 8), dim=(64, 256, 128, 128, 64, 64, 64, 128, 64, 64),
            cap=(0.0, 50.0, 0.0, 0.0, 50.0),
        )
    ):  # fmt: skip
        kv_len, q_len = zip(*c["lengths"], strict=True)
        heads = (c["kv_heads"] * c["group"], c["kv_heads"])
        # FlashInfer is causal here; rows before the first key then see none.
        what = Math(causal=i not in (3, 6), cap=c["cap"])
        name = f"mixed {i} h{heads[0]}x{heads[1]} d{c['dim']} p{c['page']}"
        yield Entry(name, what, q_len, kv_len, heads, c["dim"], c["page"], LAYOUTS[i % 5])


def modular() -> Iterator[Entry]:
    """test_modular_fmha_prefill.py: its sizes, its ragged lists and its sliding windows."""
    sizes = (
        (1, 64, 64), (1, 128, 128), (1, 177, 977), (2, 256, 256), (9, 1, 1), (9, 64, 1),
        (9, 177, 1), (9, 177, 64), (9, 177, 128), (9, 177, 129), (9, 256, 17), (9, 256, 256),
        (9, 177, 544),
    )  # fmt: skip
    for i, (count, q, kv) in enumerate(sizes):
        what = (Math(), Math(causal=True), Math(causal=True, sink=True), Math(cap=20.0))[i % 4]
        yield _uniform("modular", what, count, q, kv, (8, (1, 8)[i % 2]), 128, (0, 16)[i % 2])
    for ends in ((0, 7), (0, 1284), (0, 1298, 2638), (0, 1350, 2667, 4003, 5347, 6631, 7919, 9208,
                                                      10524)):  # fmt: skip
        lengths = tuple(b - a for a, b in itertools.pairwise(ends))
        yield Entry(
            f"modular ragged {ends[-1]}", Math(causal=True), lengths, lengths, (4, 2), 128, 0
        )
    for count, q, kv, left in (
        (1, 256, 256, 0), (1, 256, 256, 64), (1, 512, 512, 128), (9, 256, 256, 100),
        (1, 128, 512, 100), (1, 256, 300, 64),
    ):  # fmt: skip
        yield _uniform("modular window", Math(window=left + 1), count, q, kv, (8, 8), 128, 0)


LISTS = {
    "sliding_window": tuple(sliding_window()),
    "prefill": tuple(prefill()),
    "sinks": tuple(sinks()),
    "mixed": tuple(mixed()),
    "modular": tuple(modular()),
}
ENTRIES = tuple(entry for entries in LISTS.values() for entry in entries)
