"""Hooks between stored codes and values: `decoded` for attention, `encoded` for appends.

Scales, zero points and codebooks are params of variants that are composed with the caller's own:
masks, batches, cascades and manifests treat them like any other variant. Kernels recognise hooks
that multiply rows by numbers, and read such rows where they are (variants/lower/row_numbers.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .formats import Codes, Decoding, Format, Formats, Stored, hadamard
from .variants.builtins import kv_slot
from .variants.compose import ComposedVariant, present_hooks
from .variants.library.made_classes import made_class
from .variants.variant import Variant, scalar, tensor

Decodings = tuple[Decoding | None, Decoding | None]
"""Of keys and of values; None where they are stored as they are."""


class _Numbers(Variant):
    """What is known of the numbers when a class is made; see `Decoding`.

    The numbers of slot s are those of block ``s >> shift``. dense: of `fa.attention`.
    """

    dense = blocks = zeros = codebook = rotated = scales = False

    def _at(self, shift: Any, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> tuple[Tensor, ...]:
        slot = kv_idx if self.dense else kv_slot(b, kv_idx)
        slot = slot >> shift if self.blocks else slot
        return (b, kv_h, slot) if self.dense else (slot, kv_h)

    def _decoded(self, row: Tensor, scale: Tensor, zero: Any, codebook: Any) -> Tensor:
        """``scale * (value of the code - zero)``, rotated back."""
        if self.codebook:
            row = codebook[(row + 8.0).to(torch.int32)]
        if self.zeros:
            row = row - _per_channel(zero, row)
        row = row * _per_channel(scale, row)
        return hadamard(row) if self.rotated else row

    def _encoded(self, row: Tensor, scale: Any, zero: Any) -> Tensor:
        """What is rounded to a code: the rotated row, over given scales 0 where these are 0."""
        row = hadamard(row) if self.rotated else row
        if not self.scales:
            return row
        scale = _per_channel(scale, row)
        row = torch.where(scale == 0, 0.0, row / scale)
        return row + _per_channel(zero, row) if self.zeros else row


def _per_channel(numbers: Tensor, row: Tensor) -> Tensor:
    """Numbers of groups of channels, one a channel."""
    groups, channels = numbers.shape[-1], row.shape[-1]
    if groups == 1:
        return numbers[0]
    return numbers.unsqueeze(-1).expand(groups, channels // groups).reshape(channels)


class _KeyScale(_Numbers):
    """``k_scale * (value of the code - k_zero)``."""

    def key_mod(self: Any, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        at = self._at(self.k_shift if self.blocks else 0, b, kv_h, kv_idx)
        zero = self.k_zero[at] if self.zeros else None
        book = self.k_codebook if self.codebook else None
        return self._decoded(row, self.k_scale[at], zero, book)  # type: ignore[no-any-return]


class _ValueScale(_Numbers):
    """``v_scale * (value of the code - v_zero)``."""

    def value_mod(self: Any, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        at = self._at(self.v_shift if self.blocks else 0, b, kv_h, kv_idx)
        zero = self.v_zero[at] if self.zeros else None
        book = self.v_codebook if self.codebook else None
        return self._decoded(row, self.v_scale[at], zero, book)  # type: ignore[no-any-return]


class _KeyCode(_Numbers):
    """``k / k_scale + k_zero``, for keys on their way into pages."""

    def key_mod(self: Any, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        if not self.scales:
            return self._encoded(row, None, None)  # type: ignore[no-any-return]
        at = self._at(self.k_shift if self.blocks else 0, b, kv_h, kv_idx)
        zero = self.k_zero[at] if self.zeros else None
        return self._encoded(row, self.k_scale[at], zero)  # type: ignore[no-any-return]


class _ValueCode(_Numbers):
    """``v / v_scale + v_zero``, for values on their way into pages."""

    def value_mod(self: Any, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        if not self.scales:
            return self._encoded(row, None, None)  # type: ignore[no-any-return]
        at = self._at(self.v_shift if self.blocks else 0, b, kv_h, kv_idx)
        zero = self.v_zero[at] if self.zeros else None
        return self._encoded(row, self.v_scale[at], zero)  # type: ignore[no-any-return]


_BASES: dict[str, tuple[str, type[_Numbers]]] = {
    "KeyScale": ("k", _KeyScale), "ValueScale": ("v", _ValueScale),
    "KeyCode": ("k", _KeyCode), "ValueCode": ("v", _ValueCode),
}  # fmt: skip


@lru_cache(maxsize=256)
def _with_params(name: str, dense: bool, scales: bool, *fields: Any) -> type[Variant]:
    """A class of `_BASES` with the params that a `Decoding` of these fields has.

    scales: whether it has any.
    """
    decoding = Decoding(*fields)
    side, base = _BASES[name]
    slots = ("batch", "num_kv_heads", f"num_{side}_blocks")
    shape = (*(slots if dense else (slots[2], slots[1])), decoding.groups)
    params: dict[str, Any] = {}
    if scales:
        params[f"{side}_scale"] = tensor(*shape, dtype=decoding.scale_dtype)
        if decoding.zeros:
            params[f"{side}_zero"] = tensor(*shape, dtype=decoding.scale_dtype)
        if decoding.codebook and "Scale" in name:
            params[f"{side}_codebook"] = tensor(16, dtype=torch.float32)
        if decoding.blocks:
            params[f"{side}_shift"] = scalar(0)
    flags = {
        "dense": dense, "blocks": decoding.blocks, "zeros": decoding.zeros,
        "codebook": decoding.codebook, "rotated": decoding.rotated, "scales": scales,
    }  # fmt: skip
    annotations = {key: int if key.endswith("shift") else Tensor for key in params}
    body = {"__annotations__": annotations, "__doc__": base.__doc__, **params, **flags}
    made: type[Variant] = type(name, (base,), body)
    made.__fajit_made_by__ = (_with_params, name, dense, scales, *fields)
    return made


class RotatedQuery(Variant):
    """Queries for keys that are rotated: (H q) . (H k) = q . k."""

    def query_mod(self, row: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The formula of the class."""
        return hadamard(row)


class RotatedOutput(Variant):
    """The output over values that are rotated: H (sum of p H v) = sum of p v."""

    def output_mod(self, row: Tensor, lse: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The formula of the class."""
        return hadamard(row)


def decodings(formats: Formats, head_dim: int, head_dim_v: int) -> Decodings:
    """Those of formats of keys and of values. Raises InputError for head dims that do not fit."""
    found = []
    for form, name, dim in zip(
        formats, ("head_dim", "head_dim_v"), (head_dim, head_dim_v), strict=True
    ):
        if form is not None:
            form.check_head_dim(name, dim)
        found.append(None if form is None else form.decoding(dim))
    return found[0], found[1]


def decoded(
    variant: Variant, sides: Decodings, dense: bool = False, rotate_back: bool = False
) -> Variant:
    """`variant` over quantised keys and values: its hooks see values.

    Rows are rotated back where the variant changes them, and those of values with rotate_back; else
    queries are rotated too, and the output is rotated back. Scales go with any variant: what `&`
    checks took 70 us of each call (by hand).
    """
    changed, (keys, values) = present_hooks(variant), sides
    if values is not None:
        if values.rotated and "value_mod" not in changed and not rotate_back:
            variant, values = RotatedOutput() & variant, values._replace(rotated=False)
        variant = ComposedVariant("and", (_made("ValueScale", values, dense, True)(), variant))
    if keys is not None:
        if keys.rotated and "key_mod" not in changed:
            variant, keys = variant & RotatedQuery(), keys._replace(rotated=False)
        variant = ComposedVariant("and", (_made("KeyScale", keys, dense, True)(), variant))
    return variant


def encoded(variant: Variant, sides: Decodings, given: tuple[bool, bool]) -> Variant:
    """`variant` on new rows on their way to codes: then rotated, and divided by given scales."""
    for decoding, scales, name in zip(sides, given, ("KeyCode", "ValueCode"), strict=True):
        if decoding is not None and (decoding.rotated or scales):
            variant = variant & _made(name, decoding, False, scales)()
    return variant


def _made(name: str, decoding: Decoding, dense: bool, scales: bool) -> type[Variant]:
    return made_class(name, _class_of, name, dense, scales, *decoding)


def _class_of(*arguments: Any) -> type[Variant]:
    """`_with_params`, as a function and of constants: Dynamo passes no others."""
    return _with_params(*arguments)


def codes_of(
    name: str, x: object, own: Format | None, decoding: Decoding | None, params: dict[str, object]
) -> Tensor:
    """The codes of k or v, whose numbers are added to params; other tensors as they are.

    own: what the object that runs was made with, and its decoding. Raises InputError.
    """
    if own is None and isinstance(x, Stored):
        raise InputError(f"{name} is an fa.kv.Stored, but no kv_format was given for {name}")
    if own is not None and not isinstance(x, Stored):
        raise InputError(f"{name} must be an fa.kv.Stored of {own}, got {type(x).__name__}")
    if own is None or decoding is None or not isinstance(x, Stored):
        return x  # type: ignore[return-value]  # what it is, the call checks
    if wrong := _difference(x, own, decoding):
        raise InputError(f"{name} {wrong}, but its format is {own}")
    put_numbers(name, x, params)
    return x.codes


def _difference(x: Stored, own: Format, decoding: Decoding) -> str:
    """What x has that a format has not, in words; empty if it fits."""
    if x.codes.dtype is not own.dtype:
        return f"has codes of {x.codes.dtype}"
    has = x.decoding
    if has != decoding:
        for name, one, other in zip(Decoding._fields, has, decoding, strict=True):
            if one != other and not (name == "blocks" and other):  # blocks may be of one slot
                return f"has {name}={one}"
    return ""


def put_numbers(
    name: str, x: Stored, params: dict[str, object], dense: bool = False, decodes: bool = True
) -> None:
    """Adds `Stored.numbers` of k or v to params. Raises InputError."""
    for key, value in x.numbers(name, dense, decodes).items():
        if key in params:
            raise InputError(f"{key} is given, but {name} is an fa.kv.Stored, which has its own")
        params[key] = value


def unwrap(
    k: Codes, v: Codes, variant: Variant, params: dict[str, object], dense: bool, partial: bool
) -> tuple[Tensor, Tensor, Variant]:
    """A call on `Stored` keys or values as one on codes: its k, v and variant. Numbers are added to
    params. Raises InputError."""
    both = [x.decoding if isinstance(x, Stored) else None for x in (k, v)]
    check_partial(both[1], variant, partial)
    variant = decoded(variant, (both[0], both[1]), dense)
    codes = []
    for name, x in (("k", k), ("v", v)):
        if isinstance(x, Stored):
            put_numbers(name, x, params, dense)
        codes.append(x.codes if isinstance(x, Stored) else x)
    return codes[0], codes[1], variant


def check_partial(values: Decoding | None, variant: Variant, partial: bool) -> None:
    """Raises InputError for a partial state over rotated values, which nothing rotates back."""
    rotated = values is not None and values.rotated
    if partial and rotated and "value_mod" not in present_hooks(variant):
        raise InputError(
            "partial=True gives states before output_mod, which rotates them back where values are "
            "stored rotated; store values with rotate=False, or merge finished outputs"
        )
