"""Traces all hooks of a variant and puts them together as one `VariantIR` with canonical slots."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashattn_jit.errors import ParamError, TraceError
from flashattn_jit.variants import ir
from flashattn_jit.variants.captures import Walk
from flashattn_jit.variants.extract import Finish, Source, stride_pattern
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.promotion import DTYPE_NAMES
from flashattn_jit.variants.trace import ROW_HOOKS, Tracer
from flashattn_jit.variants.trace_errors import Where
from flashattn_jit.variants.trace_host import HostTensor
from flashattn_jit.variants.trace_values import Captured, Number

if TYPE_CHECKING:
    from flashattn_jit.variants.class_form import Variant

_ROW_DIM = {"query_mod": "head_dim", "key_mod": "head_dim", "value_mod": "head_dim_v",
            "output_mod": "head_dim_v"}  # fmt: skip


class Traced(NamedTuple):
    """The IR, how captures become slots, and what the trace depended on besides its key.

    mask_params: declared params that `mask_mod` depends on.
    """

    ir: ir.VariantIR
    finish: Finish | None
    pins: Mapping[Source, None]
    mask_params: frozenset[str] = frozenset()


class TracedHook(NamedTuple):
    """One hook's graph, with the tensors and numbers of its slots."""

    graph: ir.Graph
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]


def trace_hook(kind: str, fn: Callable[..., Any], row_length: int = 0) -> TracedHook:
    """Trace one function as the hook `kind` (of `ir.HOOKS`), without a variant around it.

    row_length: elements of the row, for row hooks. Raises TraceError as `Variant.bind` does. For
    tools and tests: `Variant.bind` keeps what it has traced, this does not.

    >>> trace_hook("mask_mod", lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).graph
    """
    walk = Walk(fn)
    where = Where(getattr(fn, "__name__", ""), walk.codes)
    tracer = Tracer(walk.tensors, walk.tensor_names, walk.numbers, walk.number_names, where=where)
    graph = tracer.trace(kind, walk.build(tracer.captured, tracer.numbers), row_length)
    made = _assemble(tracer, [(kind, graph)], (), ())
    tensors, numbers = tuple(walk.tensors), tuple(walk.numbers)
    if made.finish is not None:
        tensors, numbers = made.finish(tensors, numbers)
    return TracedHook(made.ir.hooks[0][1], tensors, numbers)


def trace_variant(variant: Variant, walk: Walk, dims: Dims) -> Traced:
    """Trace every hook; numbers are runtime params unless the hooks cannot work that way."""
    try:
        return _trace(variant, walk, dims, numbers=True)
    except TraceError as error:
        if not walk.numbers or not isinstance(error.__cause__, TypeError):
            raise
    # Something in the hook takes nothing but a real number: all of them are specialised.
    return _trace(variant, walk, dims, numbers=False)


def _trace(variant: Variant, walk: Walk, dims: Dims, *, numbers: bool) -> Traced:
    where = Where(variant.name, walk.codes)
    tracer = Tracer(
        walk.tensors, walk.tensor_names, walk.numbers, walk.number_names, dims.device, where
    )
    if not numbers:
        tracer.specialise(s for n in tracer.numbers for s in n.sources)
    view = walk.build(tracer.captured, tracer.numbers if numbers else walk.numbers)
    graphs: list[tuple[str, ir.Graph]] = []
    texts: list[tuple[str, str]] = []
    with tracer:
        hooks = view.hooks()
    for kind in ir.HOOKS:
        hook = hooks.get(kind)
        if hook is None:
            continue
        if getattr(hook, "text", None) is not None:
            texts.append((kind, hook.text))
            continue
        length = 0
        if kind in ROW_HOOKS:
            length = getattr(dims, _ROW_DIM[kind])
            if length < 1:
                raise ParamError(
                    f"{variant.name} has a {kind}, so the dims must say {_ROW_DIM[kind]}"
                )
            tracer.specialise([("dim", _ROW_DIM[kind])])
        graphs.append((kind, tracer.trace(kind, hook, length)))
    declared = _named_in_texts(variant, texts, view, tracer)
    mask_params = _mask_params(variant, walk, tracer, dict(graphs), dict(texts))
    return _assemble(tracer, graphs, texts, declared)._replace(mask_params=mask_params)


def _mask_params(
    variant: Variant,
    walk: Walk,
    tracer: Tracer,
    graphs: Mapping[str, ir.Graph],
    texts: Mapping[str, str],
) -> frozenset[str]:
    """The declared params that decide what the mask keeps, or which code there is at all."""
    tensors, numbers = set[int](), set[int]()
    sources: set[Source] = {pin for pin in tracer.pins if pin[0] == "number"}
    scalars = list(tracer.scalar_slots.values())
    mask = graphs.get("mask_mod")
    for node in () if mask is None else mask.nodes:
        if node.op == "scalar":
            sources |= scalars[node.int_attr("slot")].sources
        elif node.op in ("gather", "searchsorted"):
            read = tracer.program.reads(tracer.tensor_slots[node.int_attr("slot")][0])
            tensors |= read[0]
            numbers |= read[1]
    tensors |= {int(s[1]) for s in sources if s[0] == "size"}
    numbers |= {int(s[1]) for s in sources if s[0] == "number"}
    words = set(re.findall(r"[A-Za-z_]\w*", texts.get("mask_mod", "")))
    return frozenset(
        {walk.param_tensors[i] for i in tensors & walk.param_tensors.keys()}
        | {walk.param_numbers[i] for i in numbers & walk.param_numbers.keys()}
        | {d.name for d in variant._declared if d.param.kind == "static" or d.name in words}
    )


def _named_in_texts(
    variant: Variant, texts: Sequence[tuple[str, str]], view: Any, tracer: Tracer
) -> list[tuple[str, Captured | Number]]:
    """The declared params that C++ texts name: they get slots too."""
    words = {w for _, text in texts for w in re.findall(r"[A-Za-z_]\w*", text)}
    if not words:
        return []
    views = _leaf_views(variant, view)
    found: list[tuple[str, Captured | Number]] = []
    for d in variant._declared:
        value: Any = getattr(views[id(d.owner)], d.param.name, None)
        if d.name in words and type(value) in (Captured, Number):
            found.append((d.name, value))
    return found


def _leaf_views(variant: Any, view: Any) -> dict[int, Any]:
    views = {id(variant): view}
    for part, part_view in zip(
        getattr(variant, "_parts", ()), getattr(view, "_parts", ()), strict=True
    ):
        views.update(_leaf_views(part, part_view))
    return views


def _assemble(
    tracer: Tracer,
    graphs: Sequence[tuple[str, ir.Graph]],
    texts: Sequence[tuple[str, str]],
    declared: Sequence[tuple[str, Captured | Number]],
) -> Traced:
    tensors: dict[int, int] = {}
    scalars: dict[int, int] = {}
    for _, graph in graphs:
        for node in graph.nodes:
            if node.op == "scalar":
                scalars.setdefault(node.int_attr("slot"), len(scalars))
            elif node.op in ("gather", "searchsorted"):
                tensors.setdefault(node.int_attr("slot"), len(tensors))
    for _, value in declared:
        if type(value) is Captured:
            tensors.setdefault(tracer.tensor_slot(value.host, {}), len(tensors))
        elif type(value) is Number:
            scalars.setdefault(tracer.scalar_slot(value), len(scalars))
    hosts = [tracer.tensor_slots[slot] for slot in tensors]
    numbers = [list(tracer.scalar_slots.values())[slot] for slot in scalars]
    names = _Names()
    made = ir.VariantIR(
        tuple((kind, ir.remap_slots(g, tensors, scalars)) for kind, g in graphs),
        tuple(_tensor_param(host, sizes, names) for host, sizes in hosts),
        tuple(_scalar_param(n, tracer.number_names, names) for n in numbers),
        tuple(texts),
    )
    finish = tracer.program.finish(
        len(tracer.hosts), len(tracer.numbers), [h for h, _ in hosts], [n.node for n in numbers]
    )
    return Traced(made, finish, tracer.pins)


class _Names:
    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unique(self, name: str) -> str:
        candidate, i = name, 1
        while candidate in self._taken:
            i += 1
            candidate = f"{name}_{i}"
        self._taken.add(candidate)
        return candidate


def _tensor_param(host: HostTensor, sizes: Mapping[int, int], names: _Names) -> ir.TensorParam:
    t = host.tensor
    return ir.TensorParam(
        names.unique(host.name),
        DTYPE_NAMES[t.dtype],
        t.dim(),
        stride_pattern(t),
        tuple(sizes.get(d, -1) for d in range(t.dim())),
    )


def _scalar_param(number: Number, number_names: Sequence[str], names: _Names) -> ir.ScalarParam:
    kinds = sorted(number.sources)
    name = "size" if kinds and kinds[0][0] == "size" else "number"
    if kinds and kinds[0][0] == "number":
        name = number_names[int(kinds[0][1])]
    return ir.ScalarParam(
        names.unique(name), "float64" if isinstance(number.value, float) else "int64"
    )
