"""The variants that calls make of a variant: with bits of masks, for row maxima, for appends.

`fa.Tree`, `fa.Bits` and the bits of `fa.BlockSparse` become part of the mask, and flex_attention's
max_scores is a second pass with another score; appends apply the hooks of keys and values alone.
Their kernels are those of other variants than the user's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import InputError, VariantError
from ...ops.flex import sharpened
from ...ops.keys.mask_bits import BlockBits, FlatBits, TreeBits
from ...planner.reachable import CHANGED, COMPOSED, FORMATS
from ...torch_modes import outside_modes
from ...variants.compose import present_hooks
from ...variants.library import Full
from ...variants.variant import FULL, CppHook, FunctionVariant, Variant, variant


class Composition(NamedTuple):
    """A variant as some calls have it.

    params: stand-ins for the params that its bits read. formats: whose calls these are.
    head_dim_v: other than that of the user's calls, else None.
    """

    variant: Variant
    params: dict[str, Any]
    formats: tuple[str, ...]
    head_dim_v: int | None = None


def compositions(chosen: Variant, formats: Sequence[str] = FORMATS) -> Iterator[Composition]:
    """The variant itself, then what calls in some formats make of it.

    Raises InputError where a format is unknown.
    """
    for wanted in formats:
        if wanted not in FORMATS:
            raise InputError(f"unknown format {wanted!r}; formats are {', '.join(FORMATS)}")
    own = tuple(f for f in formats if f not in COMPOSED)
    if own:
        yield Composition(chosen, {}, own)
    for name, bits in (("tree", TreeBits), ("bits", FlatBits), ("block_bits", BlockBits)):
        if name in formats:
            # A mask that is C++ text goes with no other: then there are no such calls either.
            with contextlib.suppress(VariantError):
                yield Composition(chosen & bits(), _stand_ins(name), (name,))
    # What flex_attention makes without hooks is what fa.Full is.
    chosen = FULL if type(chosen) is Full else chosen
    if "max_scores" in formats and _of_flex(chosen):
        sharp = chosen
        if hasattr(chosen, "score_mod"):
            mask = getattr(chosen, "mask_mod", None)
            sharp = variant(score_mod=sharpened(chosen.score_mod), mask_mod=mask)
        yield Composition(sharp, {}, ("max_scores",), 1)
    if "append" in formats and present_hooks(chosen) & {*CHANGED}:
        yield Composition(chosen.only(*CHANGED), {}, ("append",))


def _stand_ins(name: str) -> dict[str, Any]:
    with outside_modes():
        bits = {"sparsity_bits": torch.empty(2, 2, 2, dtype=torch.int64, device="cpu")}
        if name == "tree":
            return bits
        if name == "bits":
            names = ("sparsity_first", "sparsity_bits")
            return {n: torch.empty(2, dtype=torch.int64, device="cpu") for n in names}
        return {
            "sparsity_row": torch.empty(2, 2, dtype=torch.int32, device="cpu"),
            "sparsity_map": torch.empty(2, 2, 2, dtype=torch.int32, device="cpu"),
            "sparsity_key_block": 64,
            "sparsity_heads": 2,
            **bits,
        }


def _of_flex(chosen: Variant) -> bool:
    """Whether flex_attention may have made the variant: of a score_mod and a mask_mod alone."""
    hooks = {name: fn for name, fn in vars(chosen).items() if not name.startswith("_")}
    return (
        isinstance(chosen, FunctionVariant)
        and hooks.keys() <= {"score_mod", "mask_mod"}
        and not any(isinstance(fn, CppHook) for fn in hooks.values())
    )
