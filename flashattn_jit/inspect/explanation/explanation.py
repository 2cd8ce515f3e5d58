"""`Variant.explain`: the kernel, tiles and schedule of a variant for one problem, with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from textwrap import indent
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...codegen.render import render
from ...codegen.spec import KernelSpec, check_matrix_dtypes, matrix_dtype
from ...codegen.targets import is_cuda
from ...env import format_bytes
from ...errors import CompileError, InputError
from ...jit.cache.entry import KernelKey
from ...jit.compilation.toolchain import key_of
from ...jit.module import find_kernel
from ...ops.arguments.calls import dense_lengths, read_lengths
from ...ops.arguments.checks import check_dense, check_dtype, check_head_dims, check_sizes
from ...planner.devices import Device
from ...planner.roofline import Hardware, RooflinePoint, roofline
from ...planner.tiles import Problem, TileChoice, build_request, candidates, choose
from ...variants.ir.dtypes import row_dim
from ...variants.ir.ir import VariantIR, format_graph
from ...variants.params import Dims
from ...variants.variant import Bound, Variant
from ..dims import complete_dims
from ..table import si, table
from .device_plan import DevicePlan, device_plan, machine, split_words
from .plan import Layout, Schedule, plan
from .plots import draw, require_matplotlib
from .tiles import Tiles, analyse

if TYPE_CHECKING:
    from ..machine_code.report import MachineCode

_SHOWN_ENTRIES = 6


@dataclass(frozen=True)
class PlannerChoice:
    """The plan of a problem on a CPU. `str()` gives the candidates and the schedule.

    call: the schedule, with predicted nanoseconds; None where the kernel does not compile, and then
    `error` holds the reason.
    """

    candidates: tuple[TileChoice, ...]
    spec: KernelSpec
    key: KernelKey
    call: Schedule | None
    error: CompileError | None
    num_threads: int

    @property
    def artifact(self) -> str | None:
        """The path of the kernel's artifact; None where it does not compile."""
        module = find_kernel(self.spec.document())
        return None if module is None else module.path

    @property
    def balance(self) -> float:
        """The cost of the most loaded thread over the mean; 0.0 without work."""
        if self.call is None or not self.call.total_ns:
            return 0.0
        return self.call.critical_ns * self.num_threads / self.call.total_ns

    def __str__(self) -> str:
        header = ["", "tile kind", "tile", "scratch", "for or against"]
        rows = [
            ["->" if c.chosen else "", c.spec.tile_kind, f"{c.spec.tile_q} x {c.spec.tile_kv}",
             format_bytes(c.scratch_bytes), c.reason]
            for c in self.candidates
        ]  # fmt: skip
        lines = [table(header, rows, "  ")]
        if self.call is None:
            lines.append(f"  no schedule, since the kernel does not compile: {self.error}")
        else:
            lines.append(
                f"  schedule: {self.call.num_work} items on {self.num_threads} threads, "
                f"{split_words(self.call.most_splits)}, workspace "
                f"{format_bytes(self.call.workspace_bytes)}, balance {self.balance:.2f} "
                "(critical / mean)"
            )
        lines.append(f"  kernel {self.key.hex}")
        lines.append(f"  artifact {self.artifact}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Roofline:
    """The problem on the roofline of a machine, whose rates are estimates."""

    point: RooflinePoint
    hardware: Hardware | Device
    matrix_dtype: str
    flops: float
    bytes: float

    @property
    def attainable_s(self) -> float:
        """The lower bound of the time by the roofline."""
        return self.flops / max(1.0, self.point.attainable_flops)

    def __str__(self) -> str:
        p, h = self.point, self.hardware
        return (
            f"  {si(self.flops, 'FLOP')} over {si(self.bytes, 'B')}, in the tiles visited\n"
            f"  intensity {p.intensity:.3g} FLOP/B, ridge {p.ridge:.3g}: {p.bound} bound\n"
            f"  attainable {si(p.attainable_flops, 'FLOP/s')} of {h.rates} "
            f"{si(h.flops(self.matrix_dtype), 'FLOP/s')} ({self.matrix_dtype}) and "
            f"{si(h.read_bytes_per_s, 'B/s')}: at least {self.attainable_s * 1e3:.3g} ms"
            + (f"\n  {h.note}" if h.note else "")
        )


@dataclass(frozen=True)
class Explanation:
    """The kernel and the plan of a variant for one problem. `str()` gives all but the source.

    ir: hooks and params. values: the params' values. specialised: captured values that are compiled
    in. tiles: which tiles the mask leaves. plan: tile kind, tile, schedule and kernel. roofline:
    the bound of the time. source: the rendered C++ or CUDA text.
    """

    name: str
    ir: VariantIR
    problem: Problem
    target: str
    tiles: Tiles
    plan: PlannerChoice | DevicePlan
    roofline: Roofline
    values: tuple[tuple[str, str], ...]
    specialised: tuple[tuple[str, str], ...]

    @cached_property
    def source(self) -> str:
        """The rendered source of the kernel."""
        return render(self.plan.spec)

    @cached_property
    def cycles(self) -> MachineCode:
        """What a model of the GPU predicts for the loops of the kernel's machine code.

        Needs nvcc and nvdisasm but no GPU, and compiles the kernel if no cache layer has it. It is
        a simulation (`flashattn_jit/inspect/machine_code`), not a measurement.

        Raises:
            InputError: the target is a CPU's, the model has no figures for it, or nvdisasm is
                missing.
            CompileError: the kernel does not compile.
        """
        from ..machine_code.report import machine_code

        if not isinstance(self.plan, DevicePlan):
            raise InputError(
                f"machine code is modelled for GPUs, not for {self.target}: pass device='H100'"
            )
        return machine_code(self.plan.spec, self.plan.device)

    def __str__(self) -> str:
        p = self.problem
        shape = (
            f"{len(p.q_len)} requests, q_len {_lengths(p.q_len)}, kv_len {_lengths(p.kv_len)}, "
            f"heads {p.num_q_heads} over {p.num_kv_heads}, head_dim {p.head_dim}, "
            f"head_dim_v {p.head_dim_v}, {p.q_dtype} q, {p.k_dtype} k, {p.v_dtype} v"
        )
        hooks = [f"{name}:\n" + "\n".join(f"  {line}" for line in format_graph(graph))
                 for name, graph in self.ir.hooks]  # fmt: skip
        hooks += [f"{name}: C++ text\n{indent(text, '  ')}" for name, text in self.ir.cpp]
        sections = {
            f"variant {self.name} on {self.target}": f"  {shape}",
            f"hooks (normaliser: {self.ir.normalizer})": indent("\n".join(hooks) or "none", "  "),
            "params (read at run time; a new value needs no new kernel)": _values(self.values),
            "specialised (compiled in; a new value needs a new kernel)": _values(self.specialised),
            "tiles": indent(str(self.tiles), "  "),
            "roofline": str(self.roofline),
            "plan": str(self.plan),
        }
        return "\n\n".join(f"{title}\n{body}" for title, body in sections.items())


def explain(
    variant: Variant,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    dims: Dims | Mapping[str, int] | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    q_offset: int | Tensor | str = 0,
    kv_len: Tensor | None = None,
    plot: str | PathLike[str] | None = None,
    target: str | None = None,
    device: str | int | None = None,
    **params: object,
) -> Explanation:
    """Explain the kernel and the plan of `variant` for q, k, v, or for `dims` and `dtype`.

    On a CPU, compiles the kernel if the cache lacks it, since the scheduler asks the kernel for the
    costs of the mask. For a GPU nothing is compiled, and neither a GPU nor a compiler is needed.

    Args:
        variant: the variant to explain.
        q, k, v: as for `attention`; their values are not read.
        dims: sizes instead of tensors: a `Dims`, a mapping of its names or a sequence in its order.
        dtype: of q, k and v when `dims` is given.
        q_offset, kv_len: as for `attention`.
        target: a target; the device's, or that of calls on CPU tensors, by default.
        device: a GPU by name (``"H100"``), which this machine need not have, or by ordinal
            (``"cuda:0"``). A CUDA target without a device stands for a typical one.
        plot: a file to draw the roofline and the tile map to, such as ``"out.png"``.
        **params: the variant's params.

    Raises:
        InputError: neither tensors nor dims, both, or unfit ones, such as fp32 and a GPU;
            an unknown device, or one of another target; matplotlib is missing for `plot`.
        ParamError, TraceError: as for `attention`.

    Example:
        >>> print(fa.SlidingWindow(4096).explain(dims={"q_len": 65536, "kv_len": 65536}))
        >>> print(fa.Causal().explain(dims={"q_len": 4096}, dtype=torch.bfloat16, device="H100"))
    """
    if plot is not None:
        require_matplotlib()
    if device is None and target is None and q is not None and q.is_cuda:
        device = q.device.index
    target, hardware = machine(target, device)
    layout = _layout(q, k, v, dims, dtype, q_offset, kv_len)
    if is_cuda(target):
        check_matrix_dtypes(layout.dtypes, target)
    bound = variant.bind(layout.dims, params)
    problem = layout.problem()
    spec = choose(bound.ir, problem, target, (), variant.name)
    tiles = _tiles(layout, bound, spec)
    matrix = matrix_dtype(target, problem.q_dtype)
    share = tiles.counts.visited_share
    explanation = Explanation(
        variant.name,
        bound.ir,
        problem,
        target,
        tiles,
        _plan(layout, bound, variant.name, problem, spec, hardware),
        Roofline(
            roofline(problem, hardware, matrix), hardware, matrix, problem.flops(share),
            problem.bytes(share),
        ),
        _param_values(bound),
        tuple((name, repr(value)) for name, value in bound.specialised),
    )  # fmt: skip
    if plot is not None:
        draw(plot, variant.name, explanation.roofline.point, hardware, matrix, tiles)
    return explanation


def _plan(
    layout: Layout,
    bound: Bound,
    name: str,
    problem: Problem,
    spec: KernelSpec,
    hardware: Hardware | Device,
) -> PlannerChoice | DevicePlan:
    options = candidates(problem, spec.target, bound.ir)
    key = key_of(build_request(spec))
    if isinstance(hardware, Device):
        return device_plan(options, spec, key, hardware, problem)
    call = error = None
    try:
        call = plan(layout, bound, name, spec.target)
    except CompileError as failure:
        error = failure
    return PlannerChoice(options, spec, key, call, error, torch.get_num_threads())


def _layout(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    dims: Dims | Mapping[str, int] | Sequence[int] | None,
    dtype: torch.dtype,
    q_offset: int | Tensor | str,
    kv_len: Tensor | None,
) -> Layout:
    given = [x is not None for x in (q, k, v)]
    if dims is not None and any(given) or dims is None and not all(given):
        raise InputError("explain needs q, k and v, or dims=; give one or the other")
    if q is None or k is None or v is None:
        d, dtypes = complete_dims(dims), (dtype, dtype, dtype)
        check_dtype("q", dtype)
        check_head_dims(d.head_dim, d.head_dim, d.head_dim_v)
        check_sizes(d.batch, d.num_q_heads, d.num_kv_heads, d.q_len, d.kv_len)
    else:
        check_dense(q, k, v)
        batch, heads, q_len, head_dim = q.shape
        d = Dims(batch, heads, k.shape[1], q_len, k.shape[2], head_dim, row_dim(v))
        dtypes = (q.dtype, k.dtype, v.dtype)
    read = read_lengths(d.batch, d.q_len, d.kv_len, kv_len, q_offset)
    return Layout(d, dtypes, dense_lengths(d.batch, d.q_len, d.kv_len, *read))


def _tiles(layout: Layout, bound: Bound, spec: KernelSpec) -> Tiles:
    mask = bound.ir.hook("mask_mod")
    opaque = bound.ir.cpp_hook("mask_mod") is not None
    # A tile packs the heads of a group, so it has fewer query positions than rows.
    tile_q = max(1, spec.tile_q // layout.dims.group_size)
    params = layout.mask_params(bound)
    return analyse(mask, params, layout.dims.num_q_heads, tile_q, spec.tile_kv, opaque)


def _param_values(bound: Bound) -> tuple[tuple[str, str], ...]:
    values = [
        (p.name, f"{p.dtype} {list(t.shape)} = {_entries(t)}")
        for p, t in zip(bound.ir.tensors, bound.tensors, strict=True)
    ]
    values += [
        (s.name, f"{s.dtype} = {value!r}")
        for s, value in zip(bound.ir.scalars, bound.scalars, strict=True)
    ]
    return tuple(values)


def _entries(tensor: Tensor) -> str:
    shown = tensor.detach().flatten()[:_SHOWN_ENTRIES].tolist()
    text = ", ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in shown)
    return f"[{text}{', ...' if tensor.numel() > len(shown) else ''}]"


def _lengths(lengths: Sequence[int]) -> str:
    low, high = min(lengths, default=0), max(lengths, default=0)
    return f"{low}" if low == high else f"{low} to {high}"


def _values(values: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"  {name}: {text}" for name, text in values) or "  none"
