"""Words about the kernels of calls: tile, registers, spills; and the rates that are predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence

import flashattn_jit as fa
from benchmarks.parts.measure import RESULTS, Run
from benchmarks.parts.peer_code import FLASH_ATTENTION_2, LENGTHS
from benchmarks.parts.planned_otherwise import clear_plans
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.inspect.explanation.batch import launches_of
from flashattn_jit.jit.module import default
from flashattn_jit.planner.tiles import build_request

_KERNEL = "fajit_attention_kernel"


def kernel_words(spec: KernelSpec) -> str:
    """Tile, stages, registers and spilled bytes of a kernel that this process has loaded."""
    text = f"{spec.tile_q} x {spec.tile_kv} s{spec.num_stages}"
    module = default.find(build_request(spec).spec)
    report = None if module is None else default.resources(module)
    if report is None:
        return text
    kernel = report.kernel(_KERNEL)
    spilled = f"{kernel.spill_store_bytes}/{kernel.spill_load_bytes} B spilled"
    return f"{text}, {kernel.registers} registers, {spilled}"


def last_kernel() -> str:
    """Words about the kernel of the latest dense or packed call that was planned."""
    from flashattn_jit.ops.launching import launches

    plan, _ = list(launches._launches.values())[-1]
    return "; ".join(kernel_words(k.spec) for k in plan.kernels if k is not None)


def called(run: Run) -> str:
    """Makes a call that is not planned yet; words about its kernel."""
    clear_plans()
    run()
    return last_kernel()


def plan_kernels(engine: fa.BatchAttention) -> str:
    """Words about the kernels that a planned batch runs."""
    planned = engine._planned
    assert planned is not None
    return "; ".join(kernel_words(work.kernel.spec) for work in launches_of(planned.first))


def predicted_tflops(variant: str, head_dim: int, length: int) -> float | None:
    """The predicted rate of a call on an H100; None where benchmarks.sass saved none.

    Other devices of sm_90 have the same multiprocessors and clocks under load that differ.
    """
    saved = json.loads((RESULTS / "machine-code-h100.json").read_text())
    rates = [
        r["call_tflops"] for r in saved if (r["variant"], r["head_dim"]) == (variant, head_dim)
    ]
    return _at(rates[0] if rates else None, length)


def predicted_peer_tflops(head_dim: int, causal: bool, length: int) -> float | None:
    """The same for FlashAttention 2's kernels."""
    found = next(
        p for p in FLASH_ATTENTION_2.read() if (p.head_dim, p.causal) == (head_dim, causal)
    )
    return _at(found.call_tflops, length)


def quotient(rate: float | None, over: float | None) -> float | None:
    """A predicted ratio; None if one of the rates is not predicted."""
    return rate / over if rate and over else None


def _at(rates: Sequence[float] | None, length: int) -> float | None:
    return float(rates[LENGTHS.index(length)]) if rates and length in LENGTHS else None
