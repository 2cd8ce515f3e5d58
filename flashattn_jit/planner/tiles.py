"""Which kernel serves a problem: tile kind and tile, from a class of packed rows.

A choice depends on the variant, dtypes, head dims, target and class of packed rows alone, never on
lengths, head counts or the machine, so the kernels that a variant can ever need are a short list.
The tables are in `cpu_tiles` and `cuda_tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..codegen.spec import KernelSpec, TileKind
from ..codegen.target import compiled_target, is_cuda
from ..variants.ir import VariantIR
from . import cpu_tiles, cuda_tiles
from .cpu_tiles import item_rows
from .problem import Problem


@dataclass(frozen=True, slots=True)
class TileChoice:
    """A kernel that could serve a problem, with what speaks for or against it.

    scratch_bytes: what its tile takes of the L2 (CPU) or of shared memory (CUDA).
    """

    spec: KernelSpec
    scratch_bytes: int
    chosen: bool
    reason: str

    @property
    def tile_kind(self) -> TileKind:
        """Of the spec."""
        return self.spec.tile_kind

    @property
    def tile_q(self) -> int:
        """Of the spec."""
        return self.spec.tile_q

    @property
    def tile_kv(self) -> int:
        """Of the spec."""
        return self.spec.tile_kv


def tile_kind(packed_rows: int, target: str, q_dtype: str) -> TileKind:
    """The tile kind that a number of packed rows of a dtype gets on a target."""
    return "few_row" if packed_rows <= few_rows(target, q_dtype) else "prefill"


def few_rows(target: str, q_dtype: str) -> int:
    """Most packed rows of a request that the few-row kernels of a target serve."""
    cuda = is_cuda(compiled_target(target))
    return cuda_tiles.ROW_CLASSES[0] if cuda else cpu_tiles.few_rows(target, q_dtype)


ALL_ROWS = 2**30
"""Packed rows that get the prefill tile of the largest class."""


def choose_rows(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    packed_rows: int,
    features: tuple[str, ...] = (),
    name: str = "variant",
) -> KernelSpec:
    """The kernel for requests of up to `packed_rows` packed rows; always one of `reachable`.

    head_dims: (head_dim, head_dim_v). dtypes: of q, k and v.
    """
    return _placed(_blank(variant, head_dims, dtypes, target, features, name), packed_rows)


def choose(
    variant: VariantIR,
    problem: Problem,
    target: str,
    features: tuple[str, ...] = (),
    name: str = "variant",
) -> KernelSpec:
    """The kernel for a problem; always one of `reachable`. Its target is the compiled one."""
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    dims = (problem.head_dim, problem.head_dim_v)
    return _placed(_blank(variant, dims, dtypes, target, features, name), problem.packed_rows)


def placed(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    features: Sequence[tuple[str, ...]] = ((),),
    name: str = "variant",
) -> tuple[KernelSpec, ...]:
    """Every kernel that `choose` and `choose_rows` can return for these sets of features.

    Most rows first. `reachable` knows which features there are.
    """
    cuda = is_cuda(compiled_target(target))
    few = few_rows(target, dtypes[0])
    rows = cuda_tiles.ROW_CLASSES if cuda else (few, few + 1)
    specs = [
        _placed(_blank(variant, head_dims, dtypes, target, feature, name), n)
        for n in reversed(rows)
        for feature in features
    ]
    return tuple(dict.fromkeys(specs))


def fallbacks(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The kernels that replace `spec`, in order, when it spills. Only CUDA kernels have any."""
    return cuda_tiles.step_down(spec) if is_cuda(spec.target) else ()


def candidates(
    problem: Problem, target: str, variant: VariantIR | None = None
) -> tuple[TileChoice, ...]:
    """The kernels considered, each with the reason for or against it, for `explain`.

    variant: decides between tiles on CUDA; plain attention by default.
    """
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    dims = (problem.head_dim, problem.head_dim_v)
    blank = _blank(variant or VariantIR(()), dims, dtypes, target, (), "variant")
    if is_cuda(blank.target):
        return tuple(TileChoice(*c) for c in cuda_tiles.considered(blank, problem.packed_rows))
    return tuple(TileChoice(*c) for c in cpu_tiles.considered(blank, problem.packed_rows))


def _blank(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    features: tuple[str, ...],
    name: str,
) -> KernelSpec:
    """A spec whose tile is still to be placed."""
    return KernelSpec(
        variant, *dtypes, *head_dims, compiled_target(target), "prefill", 0, 0, features, name
    )


def _placed(blank: KernelSpec, packed_rows: int) -> KernelSpec:
    if is_cuda(blank.target):
        return cuda_tiles.place(blank, cuda_tiles.row_class(packed_rows))
    return cpu_tiles.place(blank, tile_kind(packed_rows, blank.target, blank.q_dtype))


__all__ = [
    "ALL_ROWS",
    "TileChoice",
    "candidates",
    "choose",
    "choose_rows",
    "fallbacks",
    "few_rows",
    "item_rows",
    "placed",
    "tile_kind",
]
