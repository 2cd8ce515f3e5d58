"""Latent attention (MLA) on this CPU: decode over rows of 512 + 64, its bounds and its peers.

    python -m benchmarks.kv.latent [--only decode codes prefill] [--vllm FOLDER] [--save]

bf16, pages of 16, 4,096 keys a request, random data. Three caches take turns between all engines,
so that none finds its own in L2.
Peers of decode: the same absorbed products in eager torch; the expansion of all keys and values at
every step, which transformers does, and SDPA over them; vLLM's kernel, from the folder of its
unpacked wheel (`benchmarks.peers`). Results are compared first. All parts take three
minutes, with AVX2 ten.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.engines import vllm
from benchmarks.engines.case import NotAvailable
from benchmarks.parts.batch_work import indptr, page_table
from benchmarks.parts.measure import Row, Run, interleave, median, ratio, run_parts
from benchmarks.parts.progress import say
from benchmarks.peak import peak
from flashattn_jit.codegen.spec import default_target

_RANK, _ROPE, _NOPE, _V = 512, 64, 128, 128
_WIDTH = _RANK + _ROPE
_SCALE = (_NOPE + _ROPE) ** -0.5
_PAGE, _KEYS, _CACHES = 16, 4096, 3
_BF16 = torch.bfloat16
_ATOL = 6e-2  # eager torch rounds scores up to 8 to bf16, so that weights are wrong by 3 %


def _batch(heads: int, kv_format: fa.kv.Format | None = None) -> fa.BatchAttention:
    return fa.BatchAttention(
        fa.Causal(), num_q_heads=heads, num_kv_heads=1, head_dim=_WIDTH, head_dim_v=_RANK,
        v_in_k=True, q_dtype=_BF16, kv_format=kv_format,
    )  # fmt: skip


def _rows(requests: int) -> Tensor:
    return torch.randn(requests * _KEYS // _PAGE, _PAGE, 1, _WIDTH).to(_BF16)


class _Decode:
    """One step of some requests: every engine's run over the same caches, each in its turn."""

    def __init__(self, requests: int, heads: int, folder: Path | None) -> None:
        self.q = torch.randn(requests, heads, _WIDTH).to(_BF16)
        self.caches = [_rows(requests) for _ in range(_CACHES)]
        self._turn = itertools.cycle(self.caches)
        self.requests, self.heads = requests, heads
        self.runs: dict[str, Run] = {"ours": self._ours(), "eager torch": self._turns(self._eager)}
        try:
            self.runs["vLLM"] = self._vllm(folder)
        except NotAvailable as reason:
            say(f"  vLLM cannot run: {reason}")
        for (name, run), pages in zip(self.runs.items(), itertools.cycle(self.caches)):
            out = run()
            assert isinstance(out, Tensor)
            wanted = self._reference(pages)
            torch.testing.assert_close(out.double(), wanted, atol=_ATOL, rtol=0, msg=name)

    def _turns(self, attend: Callable[[Tensor], Tensor]) -> Run:
        return lambda: attend(next(self._turn))

    def _ours(self) -> Run:
        batch, out = _batch(self.heads), self.q.new_empty(self.requests, self.heads, _RANK)
        batch.plan(indptr([1] * self.requests), page_table([_KEYS] * self.requests, _PAGE))
        return self._turns(lambda pages: batch.run(self.q, pages, scale=_SCALE, out=out))

    def _reference(self, pages: Tensor) -> Tensor:
        rows = pages.view(self.requests, _KEYS, _WIDTH).double()
        return (self.q.double() @ rows.mT * _SCALE).softmax(-1) @ rows[..., :_RANK]

    def _eager(self, pages: Tensor) -> Tensor:
        rows = pages.view(self.requests, _KEYS, _WIDTH)
        weights = (self.q @ rows.mT * _SCALE).softmax(-1, dtype=torch.float32).to(_BF16)
        return weights @ rows[..., :_RANK]

    def _vllm(self, folder: Path | None) -> Run:
        vllm.source(folder).open()
        table = page_table([_KEYS] * self.requests, _PAGE)
        blocks = table.page_indices.int().view(self.requests, -1)
        lengths = torch.full((self.requests,), _KEYS, dtype=torch.int32)
        out = self.q.new_empty(self.requests, self.heads, _RANK)

        def attend(pages: Tensor) -> Tensor:
            torch.ops._C.mla_decode_kvcache(
                out, self.q, pages.view(-1, _PAGE, _WIDTH), _SCALE, blocks, lengths
            )
            return out

        return self._turns(attend)


def _expanded(requests: int, heads: int) -> Run:
    """What transformers does in a step: all keys and values of all heads from latents, then SDPA.

    The projections of the query and of the output, which absorption adds, are those of `_absorbed`.
    """
    weight = torch.randn(heads * (_NOPE + _V), _RANK).div(_RANK**0.5).to(_BF16)
    caches = [torch.randn(requests, _KEYS, _WIDTH).to(_BF16) for _ in range(_CACHES)]
    turn = itertools.cycle(caches)
    q = torch.randn(requests, heads, 1, _NOPE + _ROPE).to(_BF16)

    def run() -> Tensor:
        rows = next(turn)
        both = torch.nn.functional.linear(rows[..., :_RANK], weight)
        nope, v = both.view(requests, _KEYS, heads, -1).transpose(1, 2).split([_NOPE, _V], -1)
        rope = rows[:, None, :, _RANK:].expand(-1, heads, -1, -1)
        k = torch.cat([nope, rope], -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=_SCALE)

    return run


def _absorbed(requests: int, heads: int, ours: Run) -> Run:
    """The step of this package with the products of `fa.absorb_mla` on both sides."""
    weight = torch.randn(heads * (_NOPE + _V), _RANK).div(_RANK**0.5).to(_BF16)
    w = fa.absorb_mla(weight, heads, _NOPE, _V)
    nope, rope = (torch.randn(requests, heads, dim).to(_BF16) for dim in (_NOPE, _ROPE))

    def run() -> Tensor:
        w.query(nope, rope)
        out = ours()
        assert isinstance(out, Tensor)
        return w.output(out)

    return run


def _prefill_run() -> tuple[Run, float]:
    """Full attention of 2,048 tokens at head_dim 128, and its floating-point operations."""
    heads, tokens, dim = 8, 2048, 128
    q, k, v = (torch.randn(1, heads, tokens, dim).to(_BF16) for _ in range(3))
    return partial(fa.attention, q, k, v), 4.0 * heads * tokens * tokens * dim


def decode_rows(options: argparse.Namespace) -> list[Row]:
    """Shares of the bounds, and peers, at 8 to 128 heads."""
    rows, machine = [], peak(torch.get_num_threads())
    for requests, heads, goal in ((8, 8, None), (8, 16, 0.7), (8, 64, None), (4, 128, None)):
        decode = _Decode(requests, heads, options.vllm)
        prefill, prefill_flops = _prefill_run()
        memory = torch.randn(64 << 20)
        times = interleave(
            decode.runs | {"prefill": prefill, "read": partial(machine.read, memory)}, options.pairs
        ) | interleave(
            # Not among the others: it writes gigabytes, after which keys come from memory.
            {
                "absorbed": _absorbed(requests, heads, decode.runs["ours"]),
                "expanded": _expanded(requests, heads),
            },
            options.pairs,
        )
        case = f"decode B{requests} {heads} heads"
        flops = 2.0 * requests * heads * _KEYS * (_WIDTH + _RANK)
        nbytes = decode.caches[0].nbytes
        bounds = [
            max(nbytes / memory.nbytes * read, flops / prefill_flops * full)
            for read, full in zip(times["read"], times["prefill"], strict=True)
        ]
        value, spread = ratio(bounds, times["ours"])
        detail = (
            f"{median(times['ours']) * 1e3:.2f} ms; reading {nbytes >> 20} MiB takes "
            f"{nbytes / memory.nbytes * median(times['read']) * 1e3:.2f} ms, as many operations in "
            f"a prefill {flops / prefill_flops * median(times['prefill']) * 1e3:.2f} ms"
        )
        claim = f"{case}: share of the smaller of read bandwidth and prefill rate"
        rows.append(Row(claim, goal, value, "x", spread=spread, detail=detail))
        for name, ours, least in (
            ("eager torch", "ours", 1.5), ("vLLM", "ours", None), ("expanded", "absorbed", 10.0),
        ):  # fmt: skip
            if name in times:
                value, spread = ratio(times[name], times[ours])
                detail = f"{name} {median(times[name]) * 1e3:.2f} ms"
                wanted = least if heads == 16 else None
                words = "expansion at every step" if name == "expanded" else name
                rows.append(
                    Row(f"{case}: {words} over ours", wanted, value, "x", spread=spread,
                        detail=detail)
                )  # fmt: skip
    return rows


def codes_rows(options: argparse.Namespace) -> list[Row]:
    """Rows of e4m3 with a scale for 64 channels, over bf16."""
    rows = []
    kv_format = fa.kv.Format("e4m3", group=64)
    for requests, heads, goal in ((8, 8, 1.3), (4, 128, 1 / 1.05)):
        q = torch.randn(requests, heads, _WIDTH).to(_BF16)
        out = q.new_empty(requests, heads, _RANK)
        caches = [_rows(requests) for _ in range(_CACHES)]
        runs: dict[str, Run] = {}
        for name, stored in (("bf16", None), ("e4m3", kv_format)):
            batch = _batch(heads, stored)
            batch.plan(indptr([1] * requests), page_table([_KEYS] * requests, _PAGE))
            kept = caches if stored is None else [stored.quantize(pages) for pages in caches]
            turn: Iterator[object] = itertools.cycle(kept)
            runs[name] = lambda batch=batch, turn=turn, q=q, out=out: batch.run(  # type: ignore[misc]
                q, next(turn), scale=_SCALE, out=out
            )
        times = interleave(runs, options.pairs)
        value, spread = ratio(times["bf16"], times["e4m3"])
        detail = ", ".join(f"{name} {median(t) * 1e3:.2f} ms" for name, t in times.items())
        claim = f"decode B{requests} {heads} heads: bf16 over e4m3"
        rows.append(Row(claim, goal, value, "x", spread=spread, detail=detail))
    return rows


def prefill_rows(options: argparse.Namespace) -> list[Row]:
    """A causal prompt of 2,048 tokens in the expanded form over the absorbed one."""
    tokens, heads = 2048, 16
    weight = torch.randn(heads * (_NOPE + _V), _RANK).div(_RANK**0.5).to(_BF16)
    w = fa.absorb_mla(weight, heads, _NOPE, _V)
    rows = torch.randn(tokens, 1, _WIDTH).to(_BF16)
    nope, rope = (torch.randn(tokens, heads, dim).to(_BF16) for dim in (_NOPE, _ROPE))
    ends = torch.tensor([0, tokens])
    batch = _batch(heads)
    batch.plan(ends, fa.Ragged(ends))

    def absorbed() -> Tensor:
        return w.output(batch.run(w.query(nope, rope), rows, scale=_SCALE))

    def expanded() -> Tensor:
        k, v = w.expand(rows[:, 0, :_RANK], rows[:, 0, _RANK:])
        q = torch.cat([nope, rope], -1)
        return fa.varlen_attention(q, k, v, ends, ends, variant=fa.Causal(), scale=_SCALE)

    torch.testing.assert_close(absorbed(), expanded(), atol=5e-2, rtol=5e-2)
    times = interleave({"absorbed": absorbed, "expanded": expanded}, options.pairs)
    value, spread = ratio(times["absorbed"], times["expanded"])
    detail = ", ".join(f"{name} {median(t) * 1e3:.1f} ms" for name, t in times.items())
    chosen = "absorbed" if w.prefers_absorbed(tokens, tokens, _ROPE) else "expanded"
    claim = f"prefill S2048 16 heads on {default_target()}: absorbed over expanded"
    return [Row(claim, 1.0, value, "x", spread=spread, detail=f"{detail}; chosen: {chosen}")]


def main() -> None:
    """Measure and report."""
    run_parts(
        "latent",
        __doc__,
        {"decode": decode_rows, "codes": codes_rows, "prefill": prefill_rows},
        lambda parser: parser.add_argument("--vllm", type=Path, metavar="FOLDER"),
    )


if __name__ == "__main__":
    main()
