"""fa.kv on this CPU: bookkeeping, appends, plans of shared prefixes, layouts, windows, swaps.

    python -m benchmarks.kv [--only control append plans layouts windows swap] [--save]

bf16, random data. All parts take three minutes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.parts.measure import Row, interleave, median, ratio, run_parts, time_row
from flashattn_jit.kv.copies import copy_pages

_PAGE, _DIM, _BF16 = 16, 128, torch.bfloat16
_VOCABULARY = 50_000


def _tokens(count: int) -> np.ndarray:
    return torch.randint(0, _VOCABULARY, (count,)).numpy()


def _cache(
    groups: Sequence[fa.kv.Group], num_pages: int | Sequence[int], layout: str = "page"
) -> fa.kv.Cache:
    spec = fa.kv.Spec(tuple(groups), _PAGE, _BF16)
    return fa.kv.Cache(spec, num_pages, max_kv_len=1 << 17, layout=layout)  # type: ignore[arg-type]


def _fill(cache: fa.kv.Cache, seq: fa.kv.Sequence, tokens: np.ndarray) -> None:
    with cache.step([(seq, tokens)]) as step:
        step.commit()


def control_rows(options: argparse.Namespace) -> list[Row]:
    """Opening a cached prompt, and the bookkeeping of a step of decoding sequences."""
    rows = []
    small = {"num_kv_heads": 1, "head_dim": 8}
    cache = _cache([fa.kv.Group((0,), **small)], 4100)
    prompt = _tokens(32769)
    _fill(cache, cache.open(prompt), prompt)

    def reopen() -> None:
        seq = cache.open(prompt)
        assert seq.num_cached == 32768
        seq.close()

    times = interleave({"open": reopen}, options.pairs)
    rows.append(time_row("open() and close() of 32k cached tokens", 1.5, times["open"], "ms"))
    for name, variant in (("causal", fa.Causal()), ("window 1024", fa.SlidingWindow(1024))):
        cache = _cache([fa.kv.Group((0,), **small, variant=variant)], 70_000)
        seqs = [cache.open([]) for _ in range(256)]
        for i, seq in enumerate(seqs):
            _fill(cache, seq, _tokens(4000 + i % _PAGE))

        def step(cache: fa.kv.Cache = cache, seqs: list[fa.kv.Sequence] = seqs) -> None:
            made = cache.step([(seq, [7]) for seq in seqs])
            made.paged()
            made.commit()

        times = interleave({"step": step}, 3 * options.pairs)
        claim = f"step(), paged() and commit() of 256 sequences at 4k, {name}"
        rows.append(time_row(claim, 1.0, times["step"], "ms"))
    return rows


def append_rows(options: argparse.Namespace) -> list[Row]:
    """Writing the new rows of a layer, after the plan, beside torch's index_put."""
    rows = []
    for count in (1, 64, 512):
        requests = min(count, 64)
        pages = requests * 32
        order = torch.randperm(pages).int()
        paged = fa.Paged(
            torch.arange(0, pages + 1, 32), order, torch.full((requests,), _PAGE), _PAGE
        )
        k_pages, v_pages = torch.randn(2, pages, _PAGE, 8, _DIM).to(_BF16)
        k, v = torch.randn(2, count, 8, _DIM).to(_BF16)
        indptr = torch.arange(0, count + 1, count // requests)
        plan = fa.plan_append(indptr, paged)
        new = count // requests
        key = torch.arange(512 - new, 512).repeat(requests)
        page = order[torch.arange(requests).repeat_interleave(new) * 32 + key // _PAGE].long()
        slot = key % _PAGE

        def index_put(
            to: Sequence[Tensor] = (k_pages, v_pages), rows: Sequence[Tensor] = (k, v),
            page: Tensor = page, slot: Tensor = slot,
        ) -> None:  # fmt: skip
            for pages, new in zip(to, rows, strict=True):
                pages[page, slot] = new

        runs = {"plan": partial(plan.run, k, v, k_pages, v_pages), "index_put": index_put}
        times = interleave(runs, 10 * options.pairs)
        goal = 20.0 if count == 64 else None
        detail = f"index_put {median(times['index_put']) * 1e6:.1f} us"
        claim = f"append a layer, {count} tokens of 8 heads x 128, after its plan"
        rows.append(time_row(claim, goal, times["plan"], "us", detail))
        rows.append(_rotated_row(options, indptr, paged, key, (k, v, k_pages, v_pages)))
    return rows


def _rotated_row(
    options: argparse.Namespace,
    indptr: Tensor,
    paged: fa.Paged,
    key: Tensor,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Row:
    """Appending keys that are rotated on the way, beside torch's rotation before the append."""
    k, v, k_pages, v_pages = given
    plain = fa.plan_append(indptr, paged)
    rotating = fa.plan_append(indptr, paged, transform=fa.RoPE())
    cos, sin = (torch.randn(len(key), 1, _DIM // 2).to(_BF16) for _ in range(2))

    def torch_first() -> None:
        x, y = k.chunk(2, -1)
        rotated = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
        plain.run(rotated, v, k_pages, v_pages)

    runs = {"transform": partial(rotating.run, k, v, k_pages, v_pages), "torch": torch_first}
    times = interleave(runs, 10 * options.pairs)
    value, spread = ratio(times["torch"], times["transform"])
    detail = f"{median(times['transform']) * 1e6:.0f} us"
    claim = f"append a layer with RoPE, {len(key)} tokens: torch's rotation first over transform"
    return Row(claim, None, value, "x", "higher", spread, detail)


def _decoding(
    count: int, prefix: int, own: int, group: fa.kv.Group, layout: str = "page"
) -> tuple[fa.kv.Cache, fa.kv.Step]:
    """A step of `count` sequences that share `prefix` tokens, over random keys."""
    pages = (prefix + count * (own + 2 * _PAGE)) // _PAGE + count + 2
    cache = _cache([group], pages, layout)
    for pool in cache.pools:
        for tensor in pool.memory:
            tensor[1:].normal_()
    shared, seqs = _tokens(prefix), []
    for _ in range(count):
        tokens = np.concatenate([shared, _tokens(own)])
        seq = cache.open(tokens)
        _fill(cache, seq, tokens[seq.num_cached :])
        seqs.append(seq)
    return cache, cache.step([(seq, [7]) for seq in seqs])


def plan_rows(options: argparse.Namespace) -> list[Row]:
    """`Step.plan` against the better of the flat and the cascade plan, over a grid."""
    rows, heads = [], (32, 8)
    group = fa.kv.Group((0,), heads[1], _DIM, num_q_heads=heads[0], variant=fa.Causal())
    made = {
        "num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": _DIM, "q_dtype": _BF16
    }  # fmt: skip
    for count in (2, 8, 32):
        for prefix in (64, 512, 2048, 8192):
            cache, step = _decoding(count, prefix, 256, group)
            q = torch.randn(count, heads[0], _DIM).to(_BF16)
            flat = fa.BatchAttention(fa.Causal(), **made)
            cascade, chosen = (fa.CascadeAttention(fa.Causal(), **made) for _ in range(2))
            flat.plan(step.q_indptr, step.paged())
            cascade.plan(step.levels())
            step.plan(chosen)
            tensors = cache.tensors(0)
            runs = {
                name: partial(attention.run, q, *tensors, out=torch.empty_like(q))
                for name, attention in (("flat", flat), ("cascade", cascade), ("chosen", chosen))
            }
            times = interleave(runs, 2 * options.pairs)
            better = min(("flat", "cascade"), key=lambda name: median(times[name]))
            value, spread = ratio(times["chosen"], times[better])
            detail = ", ".join(f"{n} {median(t) * 1e3:.2f} ms" for n, t in times.items())
            claim = f"{count} requests share {prefix} keys, 256 own: step.plan over the better plan"
            rows.append(Row(claim, 1.03, value, "x", "lower", spread, detail))
    return rows


def layout_rows(options: argparse.Namespace) -> list[Row]:
    """Decoding over pages that hold all layers, against pages of one layer."""
    rows, heads, layers = [], (32, 8), 8
    group = fa.kv.Group(range(layers), heads[1], _DIM, num_q_heads=heads[0], variant=fa.Causal())
    runs = {}
    for layout in ("page", "layer"):
        cache, step = _decoding(8, 0, 4096, group, layout)
        attention = fa.BatchAttention(
            fa.Causal(), num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=_DIM, q_dtype=_BF16
        )
        step.plan(attention)
        q = torch.randn(8, heads[0], _DIM).to(_BF16)

        def all_layers(
            cache: fa.kv.Cache = cache, attention: fa.BatchAttention = attention, q: Tensor = q
        ) -> None:
            for layer in range(layers):
                attention.run(q, *cache.tensors(layer))

        runs[layout] = all_layers
    times = interleave(runs, options.pairs)
    value, spread = ratio(times["page"], times["layer"])
    detail = f"layer {median(times['layer']) / layers * 1e3:.2f} ms a layer"
    claim = f"decode B8 32/8 kv4096, {layers} layers: layers inside of pages over apart"
    rows.append(Row(claim, 1.05, value, "x", "lower", spread, detail))
    return rows


def window_rows(options: argparse.Namespace) -> list[Row]:
    """Pages that windows hold; counted, not timed."""
    rows = []
    small = {"num_kv_heads": 1, "head_dim": 8}
    cache = _cache([fa.kv.Group((0,), **small, variant=fa.SlidingWindow(4096))], 4500)
    seq, length = cache.open([]), 65_536
    for _ in range(length // 256):
        _fill(cache, seq, _tokens(256))
    held = cache.stats().groups[0].used / (length // _PAGE)
    rows.append(Row("window 4096 at 65,536: pages held, of full", 0.07, held, "x", "lower"))
    local = fa.kv.Group((0, 1, 2, 3, 4), **small, variant=fa.SlidingWindow(1024))
    cache = _cache([local, fa.kv.Group((5,), **small, variant=fa.Causal())], [2100, 2100])
    seq, length = cache.open([]), 32_768
    for _ in range(length // 256):
        _fill(cache, seq, _tokens(256))
    used = sum(g.used_bytes for g in cache.stats().groups)
    full = length // _PAGE * sum(cache.spec.page_bytes(g) for g in (0, 1))
    claim = "5 of 6 layers with a window of 1024, at 32k: bytes held, of full"
    rows.append(Row(claim, 1 / 4.5, used / full, "x", "lower"))
    return rows


def swap_rows(options: argparse.Namespace) -> list[Row]:
    """Pages moved: layers inside of them, against pieces layer by layer, one by one and batched."""
    rows, layers, pages = [], 32, 64
    for piece in (2048, 8192, 32768):
        heads = piece // (_PAGE * 64 * 2)
        group = fa.kv.Group(range(layers), heads, 64)
        inside, apart = (_cache([group], 2 * pages, layout) for layout in ("page", "layer"))
        for cache in (inside, apart):
            for tensor in cache.pools[0].memory:
                tensor.normal_()
        order = torch.randperm(2 * pages).numpy() + 1
        begin, end = order[:pages], order[pages:]

        def one_by_one(
            memory: Sequence[Tensor] = apart.pools[0].memory, begin: np.ndarray = begin,
            end: np.ndarray = end,
        ) -> None:  # fmt: skip
            for tensor in memory:
                for source, destination in zip(begin.tolist(), end.tolist(), strict=True):
                    tensor[destination].copy_(tensor[source])

        runs: dict[str, Callable[[], object]] = {
            "pieces one by one": one_by_one,
            "pieces batched": partial(copy_pages, apart.pools[0].memory, begin, end),
            "pages": partial(copy_pages, inside.pools[0].memory, begin, end),
        }
        times = interleave(runs, options.pairs)
        total = pages * layers * 2 * piece
        detail = ", ".join(f"{n} {total / median(t) / 1e9:.2f} GB/s" for n, t in times.items())
        claim = f"{pages} pages of {layers} layers, pieces of {piece // 1024} KB"
        goal = 3.0 if piece <= 8192 else None
        value, spread = ratio(times["pieces one by one"], times["pages"])
        rows.append(Row(f"{claim}, in memory: one by one over pages", goal, value, "x", "higher",
                        spread, detail))  # fmt: skip
        value, spread = ratio(times["pieces batched"], times["pages"])
        rows.append(Row(f"{claim}, in memory: batched over pages", None, value, "x", "higher",
                        spread))  # fmt: skip
        rows += _file_rows(options, claim, piece, inside, apart, begin)
    return rows


def _file_rows(
    options: argparse.Namespace, claim: str, piece: int, inside: fa.kv.Cache, apart: fa.kv.Cache,
    pages: np.ndarray,
) -> list[Row]:  # fmt: skip
    """The same pages written to a file in memory, and past the page cache (O_DIRECT)."""
    direct = getattr(os, "O_DIRECT", None)
    goal = 2.0 if piece <= 32768 else None
    rows = []
    for kind, parent, flags, wanted in (
        ("tmpfs file", Path("/dev/shm"), 0, None), ("O_DIRECT file", Path.cwd(), direct, goal)
    ):  # fmt: skip
        try:
            if flags is None:
                raise OSError("the system has no O_DIRECT")
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                path = Path(folder) / "pages"
                times, total = _written(options, path, flags, inside, apart, pages)
        except OSError as error:
            rows.append(Row(f"{claim}, {kind}: not measured", None, 0.0, "x", detail=str(error)))
            continue
        value, spread = ratio(times["pieces"], times["pages"])
        detail = ", ".join(f"{n} {total / median(t) / 1e9:.2f} GB/s" for n, t in times.items())
        rows.append(
            Row(f"{claim}, {kind}: pieces over pages", wanted, value, "x", "higher", spread, detail)
        )
    return rows


def _written(
    options: argparse.Namespace, path: Path, flags: int, inside: fa.kv.Cache, apart: fa.kv.Cache,
    pages: np.ndarray,
) -> tuple[dict[str, list[float]], int]:  # fmt: skip
    """Times of writing all pages to a file, and their bytes. Raises OSError."""
    total = len(pages) * sum(t.shape[1] * 2 for t in apart.pools[0].memory)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    try:
        os.ftruncate(file, total)

        def write(cache: fa.kv.Cache) -> None:
            at = 0
            for tensor in cache.pools[0].memory:
                step = tensor.shape[1] * 2
                aligned = _aligned(tensor)
                for page in pages.tolist():
                    os.pwrite(file, aligned[page * step : (page + 1) * step], at)
                    at += step

        runs = {"pieces": partial(write, apart), "pages": partial(write, inside)}
        return interleave(runs, max(3, options.pairs // 4)), total
    finally:
        os.close(file)


_aligned_memory: dict[int, memoryview] = {}


def _aligned(tensor: Tensor) -> memoryview:
    """The tensor's bytes at a multiple of 4096, as O_DIRECT wants them; copied once."""
    found = _aligned_memory.get(tensor.data_ptr())
    if found is None:
        raw = tensor.contiguous().view(torch.uint8).flatten().numpy()
        room = np.empty(len(raw) + 4096, np.uint8)
        begin = -room.ctypes.data % 4096
        room[begin : begin + len(raw)] = raw
        found = _aligned_memory[tensor.data_ptr()] = memoryview(room)[begin : begin + len(raw)]
    return found


PARTS = {
    "control": control_rows, "append": append_rows, "plans": plan_rows, "layouts": layout_rows,
    "windows": window_rows, "swap": swap_rows,
}  # fmt: skip

if __name__ == "__main__":
    run_parts("kv", __doc__, PARTS)
