"""The kernel spec: everything that decides the code of one artifact, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ..variants.ir import VariantIR, canonical_json, variant_to_json
from .target import is_cuda

SCHEMA = 2
"""Version of the spec document; part of every cache key."""

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
