"""`bench`: times a variant's kernel, torch's attention and the eager reference on this machine.

Candidates run in turn, so that other load on the machine affects all of them alike. Inputs are
normally distributed, roughly as in trained models. The figures are a first estimate; the benchmarks
of the repository are more careful.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.attention import attention
from ..variants.library import Causal, Full
from ..variants.params import Dims
from ..variants.variant import Variant
from .dims import complete_dims, shapes
from .explanation.explanation import explain
from .table import si, table

_REFERENCE_ROUNDS = 3
_REFERENCE_BYTES = 2**30
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 1000
_INPUT_BYTES = 2**33


@dataclass(frozen=True, slots=True)
class Timing:
    """One candidate's wall times, in seconds; `note` says what it computes."""

    name: str
    note: str
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median."""
        return statistics.median(self.times_s)

    @property
    def spread_s(self) -> tuple[float, float]:
        """The range of the middle half."""
        if len(self.times_s) < 2:
            return self.times_s[0], self.times_s[0]
        low, _, high = statistics.quantiles(self.times_s, n=4)
        return low, high


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Timings of one problem. `str()` gives a table.

    attainable_s: the lower bound by the roofline of the machine (whose rates are estimates) for the
    tiles that are visited; bound: "compute" or "memory". skipped: candidates that did not run, and
    why.
    """

    variant: str
    target: str
    dims: Dims
    dtype: str
    timings: tuple[Timing, ...]
    skipped: tuple[tuple[str, str], ...]
    attainable_s: float
    bound: str
    visited_share: float

    def roofline_share(self, timing: Timing) -> float:
        """Attainable over measured time: 1.0 is the roofline."""
        return self.attainable_s / timing.median_s

    def __str__(self) -> str:
        d, own = self.dims, self.timings[0].median_s
        cells = []
        for timing in self.timings:
            low, high = timing.spread_s
            ratio = timing.median_s / own
            cells.append([
                timing.name, si(timing.median_s, "s"),
                f"{si(low, 's')} .. {si(high, 's')}", f"{self.roofline_share(timing):.0%}",
                f"{ratio:.2f}x", str(len(timing.times_s)), timing.note,
            ])  # fmt: skip
        head = (
            f"variant {self.variant} on {self.target}: batch {d.batch}, heads {d.num_q_heads} over "
            f"{d.num_kv_heads}, q_len {d.q_len}, kv_len {d.kv_len}, head_dim {d.head_dim}, "
            f"head_dim_v {d.head_dim_v}, {self.dtype}"
        )
        body = table(
            ["", "median", "middle half", "of roofline", "time", "rounds", ""], cells, "  "
        )
        tail = [
            f"  {self.bound} bound, {self.visited_share:.0%} of the tiles visited, at least "
            f"{si(self.attainable_s, 's')}",
            *(f"  {name} did not run: {why}" for name, why in self.skipped),
        ]
        return "\n".join([head, body, *tail])


def bench(
    variant: Variant,
    *,
    dims: Dims | Mapping[str, int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seconds: float = 3.0,
    params: Mapping[str, object] | None = None,
    progress: Callable[[str], object] | None = None,
) -> BenchReport:
    """Time `variant` on random tensors of `dims` on `device`.

    seconds: the approximate time to measure, without compilation and the reference.
    progress: called between measurements with the name of the current step.
    Raises InputError for tensors of more than 8 GiB or an unavailable device, and the errors of
    `fa.attention`.
    """
    given = dict(params or {})
    shape = complete_dims(dims)
    if device != "cpu" and not (device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        raise InputError(
            f"device {device!r} is not there: bench runs on cpu, or on cuda:0 and so on"
        )
    size = sum(map(math.prod, shapes(shape))) * dtype.itemsize
    if size > _INPUT_BYTES:
        raise InputError(f"q, k and v take {si(size, 'B')} of memory; bench takes up to 8.6 GB")
    gpu = None if device == "cpu" else device
    explanation = explain(variant, dims=shape, dtype=dtype, device=gpu, **given)  # type: ignore[arg-type]
    q, k, v = _inputs(shape, dtype, device)
    candidates, skipped = _candidates(variant, q, k, v, given)
    finish = torch.cuda.synchronize if device != "cpu" else lambda: None
    times = _interleave(candidates, seconds, finish, progress or (lambda text: None))
    share = explanation.tiles.counts.visited_share
    return BenchReport(
        variant.name, explanation.target, shape, str(dtype).removeprefix("torch."),
        tuple(Timing(name, note, tuple(times[name])) for name, (note, _) in candidates.items()),
        tuple(skipped), explanation.roofline.attainable_s, explanation.roofline.point.bound, share,
    )  # fmt: skip


def _inputs(d: Dims, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v = (
        torch.randn(s, generator=generator, device="cpu").to(device, dtype) for s in shapes(d)
    )
    return q, k, v


def _candidates(
    variant: Variant, q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any]
) -> tuple[dict[str, tuple[str, Callable[[], object]]], list[tuple[str, str]]]:
    """Candidates by name, each (what it computes, function); (name, reason) of skipped ones."""
    causal, plain = isinstance(variant, Causal), isinstance(variant, Full)
    sdpa_note = "the same" if plain or causal else "full attention, without the variant's hooks"

    def sdpa() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    found: dict[str, tuple[str, Callable[[], object]]] = {
        "compiled": ("this variant", lambda: attention(q, k, v, variant, **params)),
        "torch SDPA": (sdpa_note, sdpa),
    }
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if 8 * pairs > _REFERENCE_BYTES:
        return found, [("eager reference", "its score matrix would take more than 1 GiB")]
    found["eager reference"] = (
        "this variant, float32",
        lambda: variant.reference(q, k, v, dtype=torch.float32, **params),
    )
    return found, []


def _interleave(
    candidates: Mapping[str, tuple[str, Callable[[], object]]],
    seconds: float,
    finish: Callable[[], object],
    progress: Callable[[str], object],
) -> dict[str, list[float]]:
    """Wall times of each candidate in rounds; the slow reference runs only in the first few."""
    quick = [name for name in candidates if name != "eager reference"]
    for name in candidates:  # compiles, and warms up caches
        progress(f"first call: {name}")
        _time(candidates[name][1], finish)
    once = sum(_time(candidates[name][1], finish) for name in quick)
    rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(seconds / max(once, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name in candidates if number < _REFERENCE_ROUNDS else quick:
            times[name].append(_time(candidates[name][1], finish))
    return times


def _time(run: Callable[[], object], finish: Callable[[], object]) -> float:
    finish()
    begin = time.perf_counter()
    run()
    finish()
    return time.perf_counter() - begin
