"""Overheads: import, compile, a hit on disk, a call, and what the in-process caches save.

    python -m benchmarks.cpu_startup [--save]

Import, compile and hits on disk are medians over new processes.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

import torch

import flashattn_jit as fa
from benchmarks.parts.cache_folder import fresh_cache, words_of
from benchmarks.parts.measure import Row, arguments, median, report, time_row
from benchmarks.parts.progress import steps
from flashattn_jit.jit.module import default
from flashattn_jit.ops.arguments import calls
from flashattn_jit.ops.launching import launches
from flashattn_jit.ops.launching.repeats import forget_calls
from flashattn_jit.variants import binding

_IMPORT = """
import time
import torch
begin = time.perf_counter()
import flashattn_jit
print(time.perf_counter() - begin)
"""

# A variant as a user writes one. The power is compiled in, so each power has a kernel.
_FIRST_CALL = """
import time
import torch
import flashattn_jit as fa

class Decayed(fa.Variant):
    rate: float = fa.scalar(0.5)
    slopes: torch.Tensor = fa.tensor("num_q_heads")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * (q_idx - kv_idx) * self.rate ** {power}

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 100 + {power})

torch.manual_seed(0)
q, k, v = (torch.randn(1, 8, 64, 64) for _ in range(3))
slopes = torch.rand(8)
begin = time.perf_counter()
fa.attention(q, k, v, Decayed(), slopes=slopes)
print(time.perf_counter() - begin, fa.last_kernel_source())
"""


def startup_rows(processes: int) -> list[Row]:
    """Import, cold compile and first call from a warm disk cache, each in new processes."""
    imports: list[float] = []
    colds: list[float] = []
    warms: list[float] = []
    for i in steps("import, compile, first call", range(processes)):
        with fresh_cache():
            imports.append(float(words_of(_IMPORT)[0]))
            code = _FIRST_CALL.format(power=i + 2)
            for times, expected in ((colds, "compiler"), (warms, "disk")):
                seconds, source = words_of(code)
                assert source == expected, f"the kernel came from {source}, not from {expected}"
                times.append(float(seconds))
    return [
        time_row("cold compile of a new variant, trace included", 3.0, colds, "s"),
        time_row("first call from a warm disk cache, new process", 30.0, warms, "ms"),
        time_row("import of the package beyond torch's", 150.0, imports, "ms"),
    ]


def overhead_rows(repeats: int) -> list[Row]:
    """Time of a whole call at B1 H1 S1 D64: one key, so nearly all of it is overhead."""
    q, k, v = (torch.randn(1, 1, 1, 64) for _ in range(3))
    causal, alibi = fa.Causal(), fa.ALiBi()
    slopes = torch.rand(1)
    runs = {
        "causal": (20.0, lambda: fa.attention(q, k, v, causal)),
        "no variant": (20.0, lambda: fa.attention(q, k, v)),
        "ALiBi with a tensor": (20.0, lambda: fa.attention(q, k, v, alibi, slopes=slopes)),
        "for comparison, torch SDPA": (
            None,
            lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _, run in runs.values():
        timeit.timeit(run, number=500)
    for _ in steps("a call's overhead", range(repeats)):
        for name, (_, run) in runs.items():
            times[name].append(timeit.timeit(run, number=1000) / 1000)
    return [
        time_row(f"a call at B1 H1 S1 D64, {name}", goal, times[name], "us")
        for name, (goal, _) in runs.items()
    ]


REPEATED = "calls like earlier ones"


def memory_rows(repeats: int) -> list[Row]:
    """What each in-process cache saves: a call after clearing it, less a call with all of them.

    What C repeats reads no other memory, so those save what they save of other calls.
    """
    q, k, v = (torch.randn(1, 1, 1, 64) for _ in range(3))
    causal = fa.Causal()
    _, _, forms = calls.dense_form.args
    memories = {
        REPEATED: (),
        "plans of variants": (binding.clear,),
        "forms": (forms.clear,),
        "requests": (calls._requests.clear,),
        "launches": (launches.forget_launches,),
        "launches and kernels": (launches.forget_launches, launches._kernels.clear),
        "launches, kernels and modules": (
            launches.forget_launches, launches._kernels.clear, default.forget,
        ),
    }  # fmt: skip
    rounds: dict[str, tuple[Callable[[], object], ...]] = {
        "none": (), **{name: (forget_calls, *given) for name, given in memories.items()},
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for i in steps("what caches save", range(20 * repeats)):
        for name, forgotten in rounds.items():
            for _ in range(3):
                fa.attention(q, k, v, causal)  # fills all of them
            for forget in forgotten:
                forget()
            begin = time.perf_counter()
            fa.attention(q, k, v, causal)
            if i >= repeats:
                times[name].append(time.perf_counter() - begin)

    def saved(name: str) -> list[float]:
        usual = median(times["none" if name == REPEATED else REPEATED])
        return [t - usual for t in times[name]]

    return [time_row(f"saved by memory: {name}", None, saved(name), "us") for name in memories]


def main() -> None:
    """Measure and report."""
    options = arguments(
        __doc__,
        lambda parser: parser.add_argument(
            "--processes", type=int, default=7, help="new processes per figure (%(default)s)"
        ),
    )
    with torch.no_grad():
        rows = startup_rows(options.processes) + overhead_rows(options.pairs)
        rows += memory_rows(options.pairs)
    report("cpu_startup", rows, options)


if __name__ == "__main__":
    main()
