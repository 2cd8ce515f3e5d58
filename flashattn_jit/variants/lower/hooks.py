"""Lowers a variant's IR to the C++ `struct Hooks`, a template argument of the kernel headers.

On CPUs, scalar hooks (score, mask, sink, pointwise) are emitted once and instantiated for both
lane orientations: query rows on lanes with a uniform key, or keys on lanes with a uniform query
row. Arithmetic is overloaded on scalars and vectors (`fajit/hook_ops.h`), so that uniform
sub-expressions stay scalar. Row hooks are emitted as loops over one row (`row`).

On CUDA, the same hooks compute one value per thread (`fajit/cuda/hooks/hook_ops.h`), and one warp
executes a row hook.
"""

from __future__ import annotations

import re
from typing import Literal

from ..interval.cpp import lower_classify
from ..ir.ir import HOOK_INPUTS, ROW_HOOKS, Graph, VariantIR
from . import pair, row
from .block import straight_line
from .channels import channel_numbers, lower_channels
from .expressions import TAG, Uniforms, arguments, literal
from .row_numbers import lower_numbers, row_numbers

_FLAGS = {
    "kScore": "score_mod",
    "kMask": "mask_mod",
    "kQueryMod": "query_mod",
    "kKeyMod": "key_mod",
    "kValueMod": "value_mod",
    "kOutputMod": "output_mod",
    "kSink": "sink",
    "kPointwise": "pointwise",
    "kPointwiseScale": "pointwise_scale",
}
_DECODED = {"KeyNumbers": "key_mod", "ValueNumbers": "value_mod"}

Backend = Literal["cpu", "cuda"]
_DECLARE = {"cpu": "static", "cuda": "FAJIT_FN static"}


def lower_hooks(
    variant: VariantIR, name: str = "variant", backend: Backend = "cpu", codes: bool = True
) -> str:
    """The text of ``struct Hooks`` for `variant`; `name` appears in the names of ``#line``.

    codes: whether the kernel may read rows where they are stored, by the numbers of their hooks. On
    CUDA those over codes do.
    """
    declare = _DECLARE[backend]
    flags = [
        f"  static constexpr bool {flag} = {literal(variant.has(hook), 'bool')};"
        for flag, hook in _FLAGS.items()
    ]
    uniforms = Uniforms() if backend == "cuda" else None
    rows = _row_hooks(variant, uniforms)
    if backend == "cuda":
        scratch = max((n for _, n in rows), default=0)
        flags.append(f"  static constexpr int kRowTemps = {scratch};  // floats a warp")
    parts = ["\n".join(flags)]
    for hook, text in variant.cpp:
        parts.append(_cpp_function(variant, hook, text, name, uniforms))
    parts += [pair.lower(variant, declare, uniforms)]
    for hook in ("pointwise", "pointwise_scale", "sink"):
        parts.append(_scalar_hook(variant, hook, declare, uniforms))
    parts += [text for text, _ in rows]
    for struct, hook in _DECODED.items() if codes else ():
        graph, tensors = variant.hook(hook), variant.tensors
        channels = channel_numbers(graph, tensors) if backend == "cpu" else None
        if channels is not None:
            parts.append(lower_channels(struct, channels, tensors))
        else:
            parts.append(lower_numbers(struct, row_numbers(graph, tensors), tensors, uniforms))
    parts.append(_classify(variant, declare))
    if uniforms is not None:  # all that the host computes are known
        parts.insert(1, uniforms.text())
    body = "\n\n".join(p for p in parts if p)
    return f"struct Hooks {{\n{body}\n}};\n"


def _row_hooks(variant: VariantIR, uniforms: Uniforms | None) -> list[tuple[str, int]]:
    """The functions of the row hooks, and how many floats of scratch each uses."""
    out = []
    for hook in ROW_HOOKS:
        graph = variant.hook(hook)
        if graph is None:
            continue
        if uniforms is None:
            out.append((row.lower(hook, graph, variant.tensors), 0))
        else:
            out.append(row.lower_cuda(hook, graph, variant.tensors, uniforms))
    return out


def _cpp_function(
    variant: VariantIR, hook: str, text: str, name: str, uniforms: Uniforms | None
) -> str:
    """A user's C++ text as a function; compilers name its lines `hook:<variant>.<hook>`."""
    result = "bool" if hook == "mask_mod" else "float"
    declare = "static inline" if uniforms is None else _DECLARE["cuda"]
    return (
        f"  {declare} {result} {hook}_text([[maybe_unused]] const Context& c, "
        f"{arguments(hook)}) {{\n"
        f"{_cpp_params(variant, hook, text, uniforms)}"
        f'#line 1 "hook:{name}.{hook}"\n{text}\n#line 1 "hooks"\n  }}'
    )


def _cpp_params(variant: VariantIR, hook: str, text: str, uniforms: Uniforms | None) -> str:
    """Local names for the params that the text uses: scalars are values, tensors functions."""
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    lines = []
    for slot, scalar in enumerate(variant.scalars):
        if scalar.name in words:
            kind, getter = (
                ("int64_t", "scalar_i64") if scalar.dtype == "int64" else ("float", "scalar_f64")
            )
            value = f"{kind}(c.{getter}({slot}))"
            if uniforms is not None:
                field = f"{hook}_{scalar.name}"
                uniforms.compute(field, value)
                value = uniforms.read(field, kind)
            lines.append(f"const {kind} {scalar.name} = {value};")
    for slot, tensor in enumerate(variant.tensors):
        if tensor.name in words:
            indices = ", ".join(f"int64_t i{d}" for d in range(tensor.rank))
            offset = f"ops::offset<false>(c.tensor({slot}), "
            total = " + ".join(f"{offset}{d}, i{d})" for d in range(tensor.rank)) or "INT64_C(0)"
            lines.append(
                f"const auto {tensor.name} = [&]({indices}) "
                f"{{ return ops::load<{TAG[tensor.dtype]}>(c.tensor({slot}), {total}); }};"
            )
    return "".join(f"    {line}\n" for line in lines)


def _scalar_hook(variant: VariantIR, hook: str, declare: str, uniforms: Uniforms | None) -> str:
    """`pointwise`, `pointwise_scale` and `sink`: functions without the row/key split."""
    result, listed = "float", arguments(hook)
    head = f"{declare} float"
    if hook == "pointwise":
        result, listed = "S", "[[maybe_unused]] S s"
        head = f"template <class S>\n  {declare} S"
    opening = f"  {head} {hook}([[maybe_unused]] const Context& c, {listed}) {{\n"
    graph = variant.hook(hook)
    if variant.cpp_hook(hook) is not None:
        call = (
            f"ops::each_lane([&](float x) {{ return {hook}_text(c, x); }}, s)"
            if hook == "pointwise"
            else f"{hook}_text(c, {', '.join(HOOK_INPUTS[hook])})"
        )
        return f"{opening}    return {call};\n  }}"
    if graph is None:
        neutral = "s" if hook == "pointwise" else ("1.0f" if hook == "pointwise_scale" else "0.0f")
        return f"{opening}    return {neutral};\n  }}"
    prefix = f"{hook[0]}_" if uniforms is None else f"{hook}_"  # unique in `Uniforms`
    lines, value = straight_line(graph, variant.tensors, prefix, uniforms)
    body = "".join(f"    {line}\n" for line in lines)
    return f"{opening}{body}    return ops::widen<{result}>({value});\n  }}"


def _classify(variant: VariantIR, declare: str) -> str:
    """The interval form of the mask. A mask given as C++ text has none: every tile is partial."""
    opening = (
        f"  {declare} int classify([[maybe_unused]] const Context& c, [[maybe_unused]] Interval b, "
        "[[maybe_unused]] Interval h,\n                      [[maybe_unused]] Interval q, "
        "[[maybe_unused]] Interval k) {\n"
    )
    graph: Graph | None = variant.hook("mask_mod")
    if graph is not None:
        return f"{opening}{lower_classify(graph, variant.tensors)}\n  }}"
    state = "PARTIAL" if variant.has("mask_mod") else "FULL"
    return f"{opening}    return FAJIT_TILE_{state};\n  }}"
