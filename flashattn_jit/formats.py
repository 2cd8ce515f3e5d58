"""How keys and values are quantised: `Format`, the codes and scales of one tensor, and `Stored`.

A stored value is ``scale * code`` in fp32, before `key_mod` and `value_mod`. Scales reach kernels
as params of two variants, `KeyScale` and `ValueScale`, which are composed with the caller's own:
masks, batches, cascades and manifests treat them like any other variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InputError
from .variants.builtins import kv_slot
from .variants.variant import Variant, tensor

SCALES = ("tensor", "head", "token_head")
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Code(NamedTuple):
    dtype: torch.dtype
    largest: float


CODES: Mapping[str, _Code] = {
    "int8": _Code(torch.int8, 127.0),
    "e4m3": _Code(torch.float8_e4m3fn, 448.0),
    "e5m2": _Code(torch.float8_e5m2, 57344.0),
}
"""Codes by name, with the largest that `Format.quantize` uses."""


@dataclass(frozen=True, slots=True)
class Format:
    """How keys or values are quantised: what a code is, and what shares a scale.

    Args:
        code: "int8" (-127 to 127), "e4m3" (float8_e4m3fn) or "e5m2" (float8_e5m2).
        scale: "tensor" for one scale, "head" for one per KV head, "token_head" for one per token
            and KV head.
        scale_dtype: float32, float16 or bfloat16.

    Raises InputError for anything else.

    Example:
        >>> int8 = fa.kv.Format("int8")
        >>> batch = fa.BatchAttention(fa.Causal(), ..., kv_format=int8)
        >>> batch.run(q, int8.quantize(k_pages), int8.quantize(v_pages))
    """

    code: str
    scale: str = "token_head"
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, value, known in (
            ("code", self.code, tuple(CODES)),
            ("scale", self.scale, SCALES),
            ("scale_dtype", self.scale_dtype, SCALE_DTYPES),
        ):
            if not any(value is k or (isinstance(value, str) and value == k) for k in known):
                raise InputError(
                    f"{name}={value!r:.60} must be one of {', '.join(map(str, known))}"
                )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of codes."""
        return CODES[self.code].dtype

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one row of `head_dim` codes with its own scale, if it has one."""
        own = self.scale_dtype.itemsize if self.scale == "token_head" else 0
        return head_dim * self.dtype.itemsize + own

    def quantize(self, x: Tensor, *, heads_dim: int = -2) -> Stored:
        """The codes of `x` and their scales, the least at which no code is beyond the largest.

        Codes are ``x / scale`` in fp32, rounded to nearest, ties to even. The scale is the largest
        magnitude over the largest code, rounded to scale_dtype and from there up if need be: 0
        where all values are 0, infinite where scale_dtype ends. NaN or infinite values make it NaN,
        and the values that share it.

        Args:
            x: floating tensor [..., head_dim] on any device, such as pages [num_pages, page_size,
                num_kv_heads, head_dim] or packed rows [num_tokens, num_kv_heads, head_dim].
            heads_dim: the dim of x that counts KV heads: -2 in pages and packed rows, 1 in dense
                tensors [batch, num_kv_heads, kv_len, head_dim].

        Raises:
            InputError: x is no floating tensor of at least two dims.

        Example:
            >>> stored = fa.kv.Format("e4m3", scale="head").quantize(k, heads_dim=1)
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
            raise InputError("x must be a floating tensor [..., num_kv_heads, ..., head_dim]")
        if not -x.dim() <= heads_dim < x.dim() or heads_dim % x.dim() == x.dim() - 1:
            raise InputError(f"heads_dim={heads_dim} is no dim of x before its last one")
        code = CODES[self.code]
        x = x.detach().float()
        shared = {
            "tensor": [*range(x.dim())],
            "head": [d for d in range(x.dim()) if d != heads_dim % x.dim()],
            "token_head": [x.dim() - 1],
        }[self.scale]
        if x.numel():
            magnitude = x.abs().amax(shared, keepdim=True)
        else:
            magnitude = x.new_zeros([1 if d in shared else n for d, n in enumerate(x.shape)])
        scales = _least_scales(magnitude, code.largest, self.scale_dtype)
        scaled = (x / scales.float()).nan_to_num(0.0).clamp(-code.largest, code.largest)
        codes = scaled.round() if code.dtype == torch.int8 else scaled
        return Stored(codes.to(code.dtype), scales.squeeze(-1))


def _least_scales(magnitude: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """The least scales at which `magnitude` is at most the largest code; NaN unless finite."""
    magnitude = torch.where(magnitude.isfinite(), magnitude, torch.nan)
    scales = (magnitude / largest).to(dtype)
    bits = scales.view(torch.int32 if dtype == torch.float32 else torch.int16)
    return (bits + (scales.float() * largest < magnitude)).to(bits.dtype).view(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Quantised keys or values: ``scales * codes``.

    Args:
        codes: int8, float8_e4m3fn or float8_e5m2, of any layout that keys or values have.
        scales: float32, float16 or bfloat16, broadcastable to codes.shape[:-1]: [] for one scale,
            [num_kv_heads] per head of pages or packed rows ([num_kv_heads, 1] dense), or one per
            row. Those of all slots below kv_len must be finite.

    Raises InputError for other dtypes and for shapes that do not fit.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        for name, value, dtypes in (
            ("codes", self.codes, tuple(c.dtype for c in CODES.values())),
            ("scales", self.scales, SCALE_DTYPES),
        ):
            if not isinstance(value, Tensor) or value.dtype not in dtypes:
                has = value.dtype if isinstance(value, Tensor) else type(value).__name__
                known = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
                raise InputError(f"{name} must be a tensor of {known}; got {has}")
        if self.codes.device != self.scales.device:
            raise InputError(
                f"codes are on {self.codes.device}, but scales on {self.scales.device}"
            )
        rows, shape = tuple(self.codes.shape[:-1]), tuple(self.scales.shape)
        sizes = zip(reversed(shape), reversed(rows), strict=False)
        if len(shape) > len(rows) or any(have not in (1, want) for have, want in sizes):
            raise InputError(
                f"scales {list(shape)} do not broadcast to the rows {list(rows)} of codes"
            )

    def dequantize(self) -> Tensor:
        """The values, fp32, in the layout of codes."""
        return self.codes.float() * self.scales.float().unsqueeze(-1)

    @property
    def has_own_scales(self) -> bool:
        """Whether each row has a scale of its own, which an append computes and stores."""
        return self.scales.shape == self.codes.shape[:-1]

    def of_rows(self) -> Tensor:
        """Scales as a view of the shape of the rows, codes.shape[:-1]."""
        return self.scales.expand(self.codes.shape[:-1])

    def of_slots(self, name: str) -> Tensor:
        """Scales as a view [num_slots, num_kv_heads]; codes are pages or packed rows.

        Raises InputError, which calls the tensor `name`, where pages do not follow each other.
        """
        rows = self.of_rows()
        if rows.dim() < 2:
            raise InputError(
                f"codes of {name} must be pages or packed rows, not {rows.dim() + 1}-d"
            )
        try:
            return (
                rows.view(-1, rows.shape[-1]) if rows.numel() else rows.reshape(0, rows.shape[-1])
            )
        except RuntimeError:
            raise InputError(
                f"scales of {name} have strides {list(rows.stride())}: slots must follow each "
                "other at one stride, over pages too; store them as [num_pages, page_size, "
                "num_kv_heads]"
            ) from None


Codes = Tensor | Stored
"""Keys or values: a tensor, or a quantised one."""

Formats = tuple[Format | None, Format | None]
"""The formats of keys and of values; None for values as they are."""

KvFormat = Format | Formats
"""One format of keys and values both, or one of each."""


def read_formats(kv_format: object) -> Formats:
    """The formats of keys and of values. Raises InputError."""
    pair = kv_format if isinstance(kv_format, tuple) else (kv_format, kv_format)
    if len(pair) != 2 or not all(f is None or isinstance(f, Format) for f in pair):
        raise InputError(
            "kv_format must be an fa.kv.Format, or a pair of one for k and one for v, None for "
            f"values that are not quantised; got {kv_format!r:.80}"
        )
    return pair


class KeyScale(Variant):
    """``k * k_scale[slot, kv_h]``, for keys in pages or packed."""

    k_scale: Tensor = tensor("num_k_slots", "num_kv_heads")

    def key_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        return row * self.k_scale[kv_slot(b, kv_idx), kv_h]


class ValueScale(Variant):
    """``v * v_scale[slot, kv_h]``, for values in pages or packed."""

    v_scale: Tensor = tensor("num_v_slots", "num_kv_heads")

    def value_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        return row * self.v_scale[kv_slot(b, kv_idx), kv_h]


class DenseKeyScale(Variant):
    """``k * k_scale[b, kv_h, kv_idx]``, for dense keys."""

    k_scale: Tensor = tensor("batch", "num_kv_heads", "kv_len")

    def key_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        return row * self.k_scale[b, kv_h, kv_idx]


class DenseValueScale(Variant):
    """``v * v_scale[b, kv_h, kv_idx]``, for dense values."""

    v_scale: Tensor = tensor("batch", "num_kv_heads", "kv_len")

    def value_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        return row * self.v_scale[b, kv_h, kv_idx]


class KeyCode(Variant):
    """``k / k_scale[slot, kv_h]``, for keys on their way into pages; 0 where the scale is 0."""

    k_scale: Tensor = tensor("num_k_slots", "num_kv_heads")

    def key_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        scale = self.k_scale[kv_slot(b, kv_idx), kv_h]
        return torch.where(scale == 0, 0.0, row / scale)


class ValueCode(Variant):
    """``v / v_scale[slot, kv_h]``, for values on their way into pages; 0 where the scale is 0."""

    v_scale: Tensor = tensor("num_v_slots", "num_kv_heads")

    def value_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        scale = self.v_scale[kv_slot(b, kv_idx), kv_h]
        return torch.where(scale == 0, 0.0, row / scale)


_SLOTS: tuple[type[Variant], type[Variant]] = (KeyScale, ValueScale)
_DENSE: tuple[type[Variant], type[Variant]] = (DenseKeyScale, DenseValueScale)


def scaled(variant: Variant, keys: bool, values: bool, dense: bool = False) -> Variant:
    """`variant` over quantised keys and values: its hooks see scaled rows."""
    for chosen, scale in zip((values, keys), reversed(_DENSE if dense else _SLOTS), strict=True):
        variant = scale() & variant if chosen else variant
    return variant


def codes_of(name: str, x: object, own: Format | None, params: dict[str, object]) -> Tensor:
    """The codes of k or v, whose scales are added to params; other tensors as they are.

    own: what the object that runs was made with. Raises InputError.
    """
    if own is None and isinstance(x, Stored):
        raise InputError(f"{name} is an fa.kv.Stored, but no kv_format was given for {name}")
    if own is not None and not isinstance(x, Stored):
        raise InputError(f"{name} must be an fa.kv.Stored of {own}, got {type(x).__name__}")
    if own is None or not isinstance(x, Stored):
        return x  # type: ignore[return-value]  # what it is, the call checks
    if x.codes.dtype != own.dtype:
        raise InputError(f"{name} has codes of {x.codes.dtype}, but its format is {own}")
    put_scale(name, x, params)
    return x.codes


def put_scale(name: str, x: Stored, params: dict[str, object], dense: bool = False) -> None:
    """Adds the scales of k or v to params. Raises InputError."""
    if f"{name}_scale" in params:
        raise InputError(f"{name}_scale is given, but {name} is an fa.kv.Stored, which has scales")
    params[f"{name}_scale"] = x.of_rows() if dense else x.of_slots(name)


def unwrap(
    k: Codes, v: Codes, variant: Variant, params: dict[str, object], dense: bool
) -> tuple[Tensor, Tensor, Variant]:
    """A call on `Stored` keys or values as one on codes: its k, v and variant. Scales are added to
    params. Raises InputError."""
    variant = scaled(variant, isinstance(k, Stored), isinstance(v, Stored), dense)
    codes = []
    for name, x in (("k", k), ("v", v)):
        if isinstance(x, Stored):
            put_scale(name, x, params, dense)
        codes.append(x.codes if isinstance(x, Stored) else x)
    return codes[0], codes[1], variant


def divided(variant: Variant, keys: bool, values: bool) -> Variant:
    """`variant` on new rows, then divided by scales that are given."""
    for chosen, code in ((keys, KeyCode), (values, ValueCode)):
        variant = variant & code() if chosen else variant
    return variant
