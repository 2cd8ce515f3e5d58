"""Kernel specs: everything that decides the code of one artifact, and nothing else.

First the spec of an attention kernel, then that of the CUDA kernels that are no attention (merging
states, writing to pages), then what people call either, and what the cache is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..variants.ir import VariantIR, canonical_json, fitting_name, variant_to_json
from .target import SHORT_DTYPES, is_cuda

SCHEMA = 2
"""Version of an attention kernel's document; part of its cache keys."""

UTILITY_SCHEMA = 1
"""The same of other kernels."""

TileKind = Literal["prefill", "few_row"]
FEATURES = ("block_mask", "paged", "mixed_rows", "sparse", "unaligned", "indirect")
"""block_mask: a byte map decides which tiles are visited. paged: key rows are found through a page
table. mixed_rows: rows of several requests share an item's keys. sparse: items go through lists of
key blocks. unaligned: rows of q, k, v or out do not all start at multiples of 16 bytes (CUDA).
indirect: paged, mixed_rows and sparse in one kernel, told apart at run time (CPU)."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Names one artifact: variant IR x dtypes x head dims x target x tile kind x features.

    Dtypes are torch's names without the prefix. `tile_q` counts packed query rows, `tile_kv` keys.
    `num_warps` and `num_stages` (buffers of the copy pipeline) are of CUDA kernels, else 0.
    """

    variant: VariantIR
    q_dtype: str
    k_dtype: str
    v_dtype: str
    head_dim: int
    head_dim_v: int
    target: str
    tile_kind: TileKind
    tile_q: int
    tile_kv: int
    features: tuple[str, ...] = ()
    name: str = field(default="variant", compare=False)  # for logical #line names only
    num_warps: int = 0
    num_stages: int = 0

    @property
    def template(self) -> str:
        """The template that renders this spec, below templates/."""
        return "cuda/attention.cu.j2" if is_cuda(self.target) else "cpu/attention.cpp.j2"

    def document(self) -> str:
        """The canonical JSON that identifies the spec: equal specs, equal text, on any machine."""
        return canonical_json(
            {
                "schema": SCHEMA,
                "variant": self._variant_document(),
                "dtypes": [self.q_dtype, self.k_dtype, self.v_dtype],
                "head_dims": [self.head_dim, self.head_dim_v],
                "target": self.target,
                "tile": [self.tile_kind, self.tile_q, self.tile_kv],
                "warps": [self.num_warps, self.num_stages],
                "features": sorted(self.features),
            }
        )

    def _variant_document(self) -> dict[str, object]:
        """The variant without its params' names, which do not reach the code."""
        if self.variant.cpp:
            # Hooks given as text name their params, and their compiler messages the variant.
            return {**variant_to_json(self.variant), "name": self.name}
        nameless = replace(
            self.variant,
            tensors=tuple(replace(p, name="") for p in self.variant.tensors),
            scalars=tuple(replace(p, name="") for p in self.variant.scalars),
        )
        return variant_to_json(nameless)


@dataclass(frozen=True, slots=True)
class UtilitySpec:
    """Names one artifact with one kernel that is no attention.

    append_paged_kv copies rows in units of `unit_bytes`: 1, 2, 4, 8 or 16. merge_states has none.
    """

    kernel: Literal["merge_states", "append_paged_kv"]
    target: str
    unit_bytes: int = 0

    @property
    def template(self) -> str:
        """The template that renders this spec, below templates/."""
        return f"cuda/{self.kernel}.cu.j2"

    def document(self) -> str:
        """The canonical JSON that identifies the spec."""
        return canonical_json(
            {
                "utility_schema": UTILITY_SCHEMA,
                "kernel": self.kernel,
                "target": self.target,
                "unit_bytes": self.unit_bytes,
            }
        )


AnySpec = KernelSpec | UtilitySpec
"""Whatever names one artifact."""


def name_of(spec: AnySpec) -> str:
    """What people call the spec: its variant's name as manifests spell it, a utility's kernel."""
    return spec.kernel if isinstance(spec, UtilitySpec) else fitting_name(spec.name)


def tile_words(
    tile: Sequence[object], head_dims: Sequence[int], dtypes: Sequence[str], features: Iterable[str]
) -> str:
    """An attention kernel in a few words, from a spec's fields or from its document's.

    >>> tile_words(("prefill", 96, 96), (64, 64), ("float32",) * 3, ("block_mask",))
    'prefill 96x96 d64 fp32 block_mask'
    """
    kind, tile_q, tile_kv = tile
    q, k, v = (SHORT_DTYPES.get(name, name) for name in dtypes)
    short = q if q == k == v else f"{q}/{k}" if k == v else f"{q}/{k}/{v}"
    head_dim, head_dim_v = head_dims
    dims = f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}/{head_dim_v}"
    return " ".join([str(kind), f"{tile_q}x{tile_kv}", dims, short, *features])


@dataclass(frozen=True, slots=True)
class Request:
    """One kernel that is wanted.

    spec: the canonical JSON of its spec, target included. template: its root template's name below
    templates/. render: makes the source, on a miss. name: of the variant, for people; no key
    depends on it. A request may go to another process: its renderer is picklable.
    """

    spec: str
    template: str
    target: str
    render: Callable[[], str]
    name: str = "variant"
