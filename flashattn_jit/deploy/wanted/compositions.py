"""The variants that calls make of a variant: with bits of masks, for row maxima, for appends, and
over quantised keys and values.

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
from ...formats import Formats
from ...ops.flex import sharpened
from ...ops.keys.mask_bits import BlockBits, FlatBits, TreeBits
from ...planner.reachable import COMPOSED, FORMATS
from ...stored_hooks import decoded, decodings, encoded
from ...torch_modes import outside_modes, remembered
from ...variants.compose import present_hooks
from ...variants.ir.ir import KV_HOOKS
from ...variants.library import Full
from ...variants.variant import FULL, CppHook, FunctionVariant, Variant, variant


class Composition(NamedTuple):
    """A variant as some calls have it.

    params: stand-ins for the params that its bits and scales read. formats: whose calls these are.
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
    if "append" in formats and present_hooks(chosen) & {*KV_HOOKS}:
        yield Composition(chosen.only(*KV_HOOKS), {}, ("append",))


_NO_CODES = ("block_mask", "max_scores")
"""Formats whose calls take no `Stored` keys and values."""


def over_codes(
    chosen: Variant, stored: Formats, head_dims: tuple[int, int], formats: Sequence[str] = FORMATS
) -> Iterator[Composition]:
    """What calls on keys and values of some `Format`s make of the variant.

    Scales have the strides that `Format.quantize` and `fa.kv.Cache` give them. Raises InputError
    where a format of calls is unknown, or one of keys does not fit the head dims.
    """
    sides = decodings(stored, *head_dims)
    k_given, v_given = (f is not None and f.scale != "token_head" for f in stored)
    numbers = _numbers(stored, head_dims)
    kinds = [f for f in formats if f not in (*_NO_CODES, "dense", "append")]
    if "dense" in formats:
        if not any(f is not None and f.scale == "page_head" for f in stored):
            for batch in (1, 2):  # shared scales are expanded over more than one
                dense = _numbers(stored, head_dims, batch)
                yield Composition(decoded(chosen, sides, True), dense, ("dense",))
        yield Composition(decoded(chosen, sides), numbers, ("dense",))  # of varlen_attention
    for made in compositions(decoded(chosen, sides), kinds):
        yield made._replace(params=numbers | made.params)
    if "cascade" in formats and sides[1] is not None and sides[1].rotated:
        # Beside levels whose values are not rotated.
        back = decoded(chosen, sides, rotate_back=True)
        yield Composition(back, numbers, ("cascade",))
    if "append" in formats:
        beside = _numbers(stored, head_dims, decodes=False)
        own = chosen.only(*KV_HOOKS) if present_hooks(chosen) & {*KV_HOOKS} else FULL
        for transform in dict.fromkeys((own, FULL)):
            yield Composition(encoded(transform, sides, (k_given, v_given)), beside, ("append",))


class OfHeads(NamedTuple):
    """A stand-in whose size is the number of KV heads that a variant is bound for."""

    stored: Formats
    head_dims: tuple[int, int]
    name: str
    batch: int
    decodes: bool

    def value(self, num_kv_heads: int) -> Any:
        """The stand-in."""
        found = _made_numbers(self.stored, self.head_dims, self.batch, self.decodes, num_kv_heads)
        return found[self.name]


def _numbers(
    stored: Formats, head_dims: tuple[int, int], batch: int = 0, decodes: bool = True
) -> dict[str, Any]:
    """Stand-ins for scales, zero points and codebooks. batch: of dense tensors; 0 for pages."""
    names = _made_numbers(stored, head_dims, batch, decodes, 2)
    return {name: OfHeads(stored, head_dims, name, batch, decodes) for name in names}


@remembered(64)
def _made_numbers(
    stored: Formats, head_dims: tuple[int, int], batch: int, decodes: bool, heads: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with outside_modes():
        for name, form, dim in zip("kv", stored, head_dims, strict=True):
            if form is not None and (decodes or form.scale != "token_head"):
                shape = (batch, heads, 64, dim) if batch else (2, 64, heads, dim)
                x = form.quantize(torch.ones(shape, device="cpu"), heads_dim=1 if batch else -2)
                found |= x.numbers(name, batch > 0, decodes)
    return found


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
