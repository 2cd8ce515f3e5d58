"""`Variant.verify`: compares compiled kernels with the eager reference on difficult inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...codegen.spec import Q_DTYPES, cuda_dtypes, resolve_target
from ...codegen.targets import compiled_target, is_cuda
from ...errors import InputError, VerificationError
from ...ops.arguments.checks import check_int, shown
from ...planner.tiles import kernels_by_rows, tile_kind
from ...torch_modes import on_host
from ...variants.ir.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ...variants.ir.ir import VariantIR
from ...variants.params import Dims
from ...variants.variant import Variant
from ..dims import complete_dims, held_dims
from ..table import table
from .cases import Case, cases, extra_kernels, fallbacks
from .error import Comparison
from .inputs import make_inputs
from .run import KernelFailedError, MisfitError, Runner


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One case in one dtype. error and allowed are RMS; note: the error, or why it is skipped."""

    case: str
    dims: Dims
    dtype: str
    tile_kind: str
    status: Literal["pass", "FAIL", "skip"]
    error: float
    allowed: float
    note: str = ""

    @property
    def shape(self) -> str:
        """Such as ``B2 H4/2 77x131 D64``: batch, q heads over kv heads, rows x keys, head dims."""
        d = self.dims
        text = f"B{d.batch} H{d.num_q_heads}/{d.num_kv_heads} {d.q_len}x{d.kv_len} D{d.head_dim}"
        return text if d.head_dim_v == d.head_dim else f"{text}/{d.head_dim_v}"

    @property
    def cell(self) -> str:
        """The status, and the error as a share of what is allowed."""
        used = self.error / self.allowed if self.allowed else 0.0
        return self.status if self.status == "skip" or math.isnan(used) else (
            f"{self.status} {used:.0%}"
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The results of `Variant.verify`. `str()` gives a table and the notes of its rows."""

    variant: str
    target: str
    seed: int
    rows: tuple[VerifyRow, ...]

    @property
    def ok(self) -> bool:
        """Whether no case failed, and at least one ran."""
        return not self.failures and any(r.status == "pass" for r in self.rows)

    @property
    def failures(self) -> tuple[VerifyRow, ...]:
        """The rows that failed."""
        return tuple(r for r in self.rows if r.status == "FAIL")

    def __str__(self) -> str:
        counts = {s: sum(r.status == s for r in self.rows) for s in ("pass", "FAIL", "skip")}
        dtypes = list(dict.fromkeys(r.dtype for r in self.rows))
        cells: dict[tuple[str, str, str], dict[str, str]] = {}
        for r in self.rows:
            cells.setdefault((r.case, r.shape, r.tile_kind), {})[r.dtype] = r.cell
        lines = [[*case, *(c.get(d, "") for d in dtypes)] for case, c in cells.items()]
        notes = [
            f"{r.status} {r.case}, {r.dtype}, {r.shape}"
            + ("" if math.isnan(r.error) else f": RMS {r.error:.2e}, allowed {r.allowed:.2e}")
            + f": {r.note}"
            for r in self.rows
            if r.note
        ]
        return "\n".join([
            f"verify {self.variant} on {self.target}, seed {self.seed}: {counts['pass']} passed, "
            f"{counts['FAIL']} failed, {counts['skip']} do not fit the params",
            table(["case", "shape", "tile kind", *dtypes], lines),
            "figures: error in percent of what is allowed",
            *notes,
        ])  # fmt: skip


@on_host
def verify(
    variant: Variant,
    dims: Dims | Mapping[str, int] | Sequence[int] | None = None,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    target: str | None = None,
    seed: int = 0,
    raise_on_failure: bool = True,
    **params: object,
) -> VerifyReport:
    """Compare the compiled kernels of `variant` with its eager reference on about 40 inputs.

    Ragged tails, q_len and kv_len 0 and 1, every group size, kv_len tensors, q_offset, packed
    requests, scores of 1e4, rows without any key, NaN in masked-out values, strided views, splits
    of the keys, every tile kind, one and many threads. The RMS error against fp64 may be 1.5 times
    that of the eager reference in the same dtype plus half an ulp, and that of each row six times
    as much; to both is added the effect of two fp32 ulps in each score, which is large where
    scores of 1e4 tie.

    Args:
        variant: the variant to verify.
        dims: the sizes that params fit, as a `Dims`, a mapping of its names or a sequence in its
            order; sizes left out are those of the variant's tensors (a `fa.tensor("num_q_heads")`
            of 12 entries means 12 heads), else defaults. Cases use other sizes too where the params
            fit them.
        dtypes: the dtypes of q, k and v, a sequence of float32, bfloat16, float16; by default all
            that the target takes.
        target: the kernels' target; by default that of calls on CPU tensors. ``"emulated:sm_80"``
            verifies CUDA kernels without a GPU, in a minute or two.
        seed: of the random inputs, an int of 64 bits.
        raise_on_failure: raise `VerificationError`, which holds the report, when a case fails.
        **params: the variant's params; a function of `Dims` gives each case its own.

    Raises:
        VerificationError: a case failed, or none fits the params.
        ParamError, TraceError: the variant cannot be used with `dims` and `params` at all, or its
            tensors have different sizes for one name.
        InputError: `dims` is invalid or contradicts the size of a tensor of the variant; `dtypes`
            is not a sequence, is empty or holds another dtype; `seed` is not an int.

    Example:
        >>> print(fa.SlidingWindow(64).verify())
        >>> MyVariant().verify({"num_q_heads": 12}, slopes=torch.rand(12))
    """
    seed = check_int("seed", seed, -(2**63), 2**64 - 1)
    if dtypes is not None:
        _check_dtypes(dtypes)
    base = complete_dims(dims, held_dims(variant, params))
    runner = Runner(variant, resolve_target(target), seed, params)
    dtypes = _dtypes_of(runner.target) if dtypes is None else dtypes
    _check_fit(runner, base, dtypes)
    rows: list[VerifyRow] = []
    for i, dtype in enumerate(dtypes):
        tile = _largest_tile(runner.target, base, DTYPE_NAMES[dtype])
        rows += [_row(runner, case, base, dtype) for case in cases(base, *tile)]
        if i == 0:
            rows += [_row(runner, case, base, dtype) for case in extra_kernels(base, *tile)]
    report = VerifyReport(variant.name, runner.target, seed, tuple(rows))
    if raise_on_failure and not report.ok:
        raise VerificationError(f"{_headline(report)}\n{report}", report)
    return report


def _check_dtypes(dtypes: object) -> None:
    names = ", ".join(Q_DTYPES)
    remedy = f"pass a sequence of {names}, such as dtypes=(torch.float32,), or leave dtypes out"
    if not isinstance(dtypes, Sequence) or isinstance(dtypes, str | bytes | bytearray | memoryview):
        got = dtypes if isinstance(dtypes, torch.dtype) else type(dtypes).__name__
        raise InputError(f"dtypes must be a sequence of dtypes, got {got}; {remedy}")
    if not dtypes:
        raise InputError(f"dtypes is empty, so that nothing would be verified; {remedy}")
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype) or DTYPE_NAMES.get(dtype) not in Q_DTYPES:
            raise InputError(f"dtypes may hold {names}; got {shown(dtype)}")


def _headline(report: VerifyReport) -> str:
    if report.failures:
        return "the kernel disagrees with its reference"
    return (
        "no case ran, so that nothing is verified: the params fit none of them (each row's note "
        "says why); give dims that they fit, or functions of `Dims` as params"
    )


def _dtypes_of(target: str) -> tuple[torch.dtype, ...]:
    """The dtypes of q, k and v that a target takes."""
    names = cuda_dtypes(target) if is_cuda(compiled_target(target)) else Q_DTYPES
    return tuple(TORCH_DTYPES[name] for name in names)


def _check_fit(runner: Runner, base: Dims, dtypes: Sequence[torch.dtype]) -> None:
    """Raises the error of the given sizes and params: only cases with other sizes are skipped."""
    params = runner.params_for(base)
    runner.variant.bind(base, params)
    case = Case("as given", base)
    generator = torch.Generator("cpu").manual_seed(runner.seed)
    for dtype in dtypes[:1]:
        try:
            runner.expected(case, make_inputs(case, dtype, generator), params, dtype)
        except MisfitError as misfit:
            raise misfit.__cause__ or misfit from None


def _largest_tile(target: str, dims: Dims, dtype: str) -> tuple[int, int]:
    """(tile_q, tile_kv) of the prefill kernel of plain attention, for the sizes of cases."""
    kernels = kernels_by_rows(VariantIR(()), (dims.head_dim, dims.head_dim_v), (dtype,) * 3, target)
    largest = max(kernels, key=lambda spec: spec.tile_q)
    return largest.tile_q, largest.tile_kv


def _row(runner: Runner, case: Case, base: Dims, dtype: torch.dtype) -> VerifyRow:
    """The row of a case, or of the most similar case that the params fit."""
    reason, name = "", DTYPE_NAMES[dtype]
    for attempt in dict.fromkeys(fallbacks(case, base)):
        d = attempt.dims
        kind = tile_kind(d.q_len * d.group_size, runner.target, name)
        try:
            results = runner.compare(attempt, dtype)
        except MisfitError as misfit:
            reason = reason or str(misfit)
        except KernelFailedError as error:
            note = str(error)
            return VerifyRow(case.name, d, name, kind, "FAIL", math.nan, math.nan, note)
        else:
            return _judged(case.name, d, name, kind, results)
    d = case.dims
    return VerifyRow(case.name, d, name, "", "skip", math.nan, math.nan, reason)


def _judged(
    name: str, dims: Dims, dtype: str, kind: str, results: Sequence[Comparison]
) -> VerifyRow:
    """The row of a case that ran, with the wrong result, or out if both are right."""
    shown = next((r for r in results if r.problem), results[0])
    status: Literal["pass", "FAIL"] = "FAIL" if shown.problem else "pass"
    return VerifyRow(name, dims, dtype, kind, status, shown.error, shown.allowed, shown.problem)
