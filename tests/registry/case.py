"""An entry of the registry: a variant, its params, and what must hold for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch


class Shape(NamedTuple):
    """The sizes of one dense call: q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    head_dim_v: int

    @property
    def tokens(self) -> int:
        """The number of positions of queries and keys: the size of per-position tensors."""
        return max(self.q_len, self.kv_len)

    @property
    def id(self) -> str:
        """A name for pytest."""
        b, hq, hkv, sq, skv, d, dv = self
        return f"b{b}h{hq}x{hkv}s{sq}x{skv}d{d}" + ("" if d == dv else f"x{dv}")


DEFAULT_SHAPE = Shape(2, 4, 2, 100, 100, 64, 64)

Make = Callable[[Shape, torch.Generator], Any]
Params = Callable[[Shape, torch.Generator], Mapping[str, object]]


def no_params(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    """The params of variants whose params all have defaults or values."""
    return {}


def always(shape: Shape) -> bool:
    """Fits every shape."""
    return True


@dataclass(frozen=True, slots=True)
class Case:
    """One variant as tests and benchmarks use it.

    make_variant: (shape, generator) -> a Variant, or a bare score_mod or mask_mod whose captured
    tensors fit the shape. params: (shape, generator) -> the keyword params of the call.
    tags: which hooks the variant has (mask, score, row for query_mod, key_mod, value_mod and
    output_mod, normalizer), its kind (library, closure, composition, builtin for q_len etc.), and
    approximate where they use `fa.tanh_approx`.
    interval: for masks, whether the interval form finds exactly the empty and the full tiles of 16
    or more a side (exact), or only sound bounds (sound).
    causal_ok: `variant & Causal()` is valid and meaningful. fits: which shapes are valid.
    q_offset, scale: arguments of the call. reaches_nan: the mod gives NaN or inf for some finite
    score.
    """

    name: str
    make_variant: Make
    params: Params = no_params
    shape: Shape = DEFAULT_SHAPE
    tags: frozenset[str] = field(default_factory=frozenset)
    interval: Literal["exact", "sound", "none"] = "none"
    causal_ok: bool = True
    q_offset: int | Literal["end"] = 0
    scale: float | None = None
    fits: Callable[[Shape], bool] = always
    reaches_nan: bool = False

    def build(self, shape: Shape | None = None, seed: int = 0) -> tuple[Any, Mapping[str, object]]:
        """The variant (or bare mod) and its params for a shape; equal seeds give equal ones."""
        shape = self.shape if shape is None else shape
        generator = torch.Generator().manual_seed(seed)
        variant = self.make_variant(shape, generator)
        return variant, self.params(shape, generator)


def tags(text: str) -> frozenset[str]:
    """A set of tags from a line of words."""
    return frozenset(text.split())
