"""How keys and values are quantised: `Format`, the codes and scales of one tensor, and `Stored`.

A stored value is ``scale * (value of the code - zero)`` in fp32, before `key_mod` and `value_mod`.
`stored_hooks` has the hooks that compute it in kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import InputError
from .torch_modes import is_direct
from .variants.ir.dtypes import CODES4, per_element, row_dim, row_width, unpacked

SCALES = ("tensor", "head", "token_head", "page_head", "channel")
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHANNEL_BLOCK = 64
"""Slots that share the scale of a channel."""

_CHECKED = 1024
"""Scales that `Stored` reads at most: those of a tensor or of heads, in a few microseconds."""


class _Code(NamedTuple):
    """least, largest: the values that `Format.quantize` uses. book: those of the codes 0 to 15."""

    dtype: torch.dtype
    least: float
    largest: float
    book: tuple[float, ...] = ()


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# QLoRA, Dettmers et al. 2023, arXiv 2305.14314, appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

CODES: Mapping[str, _Code] = {
    "int8": _Code(torch.int8, -127.0, 127.0),
    "e4m3": _Code(torch.float8_e4m3fn, -448.0, 448.0),
    "e5m2": _Code(torch.float8_e5m2, -57344.0, 57344.0),
    "int4": _Code(CODES4, -7.0, 7.0),
    "nf4": _Code(CODES4, -1.0, 1.0, _NF4),
    "e2m1": _Code(CODES4, -6.0, 6.0, _E2M1 + tuple(-x for x in _E2M1)),
}
"""Codes by name."""


class Decoding(NamedTuple):
    """What kernels know of a format: which numbers there are, and not their values.

    groups: of channels. blocks: whether several slots share a scale. zeros, codebook: whether there
    are any. rotated: whether rows are. scale_dtype: of scales and zero points.
    """

    groups: int
    blocks: bool
    zeros: bool
    codebook: bool
    rotated: bool
    scale_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Format:
    """How keys or values are quantised: what a code is, and what shares a scale.

    Args:
        code: "int8" (-127 to 127), "e4m3" (float8_e4m3fn) or "e5m2" (float8_e5m2); of 4 bits "int4"
            (-7 to 7), "nf4", "e2m1", or 16 numbers: the values of the codes 0 to 15. Codes of 4
            bits need an even head_dim.
        scale: "tensor" for one scale, "head" for one per KV head, "token_head" for one per token
            and KV head, "page_head" for one per page (of 2**n slots) and KV head, "channel" for one
            per channel, KV head and 64 slots (KIVI, Liu et al. 2024, arXiv 2402.02750).
        scale_dtype: float32, float16 or bfloat16; also of zero points.
        group: channels that share a scale, a divisor of head_dim; all of them by default. Goes with
            "token_head" and "page_head".
        zero: whether each scale has a zero point: codes then span the least to the largest value
            instead of being symmetric. Goes with "int8" (-128 to 127) and "int4" (-8 to 7).
        rotate: whether rows are multiplied by a Hadamard matrix before they are quantised, which
            spreads outliers over channels (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).

    Raises InputError for anything else.

    Example:
        >>> int8 = fa.kv.Format("int8")
        >>> batch = fa.BatchAttention(fa.Causal(), ..., kv_format=int8)
        >>> batch.run(q, int8.quantize(k_pages), int8.quantize(v_pages))
    """

    code: str | Sequence[float]
    scale: str = "token_head"
    scale_dtype: torch.dtype = torch.float32
    group: int | None = None
    zero: bool = False
    rotate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.code, str):
            object.__setattr__(self, "code", _codebook(self.code))
        elif self.code not in CODES:
            known = ", ".join(CODES)
            raise InputError(f"code={self.code!r:.60} must be one of {known}, or 16 numbers")
        for name, value, known_values in (
            ("scale", self.scale, SCALES),
            ("scale_dtype", self.scale_dtype, SCALE_DTYPES),
            ("zero", self.zero, (False, True)),
            ("rotate", self.rotate, (False, True)),
        ):
            if not any(value is x or (isinstance(value, str) and value == x) for x in known_values):
                known = ", ".join(map(str, known_values))
                raise InputError(f"{name}={value!r:.60} must be one of {known}")
        if self.zero and self.code not in ("int8", "int4"):
            raise InputError(f"zero=True goes with int8 and int4, not with {self.name}")
        if self.group is None:
            return
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 1:
            raise InputError(f"group={self.group!r:.60} must be a number of channels, or None")
        if self.scale not in ("token_head", "page_head"):
            raise InputError(
                f"group={self.group} goes with scale='token_head' or 'page_head', not with "
                f"{self.scale!r}"
            )

    @property
    def name(self) -> str:
        """The name of the code; "codebook" for 16 numbers."""
        return self.code if isinstance(self.code, str) else "codebook"

    @property
    def values(self) -> _Code:
        """The dtype and the values of codes."""
        if not isinstance(self.code, str):
            most = max(abs(x) for x in self.code)
            return _Code(CODES4, -most, most, tuple(self.code))
        code = CODES[self.code]
        return code._replace(least=code.least - 1) if self.zero else code

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of codes; those of 4 bits are pairs, bits4x2."""
        return self.values.dtype

    @property
    def channels(self) -> int | None:
        """Channels that share a scale; None for all of a row."""
        return 1 if self.scale == "channel" else self.group

    def decoding(self, head_dim: int) -> Decoding:
        """What kernels must know of rows of `head_dim`."""
        groups = 1 if self.channels is None else max(1, head_dim // self.channels)
        blocks, codebook = self.scale in ("page_head", "channel"), bool(self.values.book)
        return Decoding(groups, blocks, self.zero, codebook, self.rotate, self.scale_dtype)

    def check_head_dim(self, name: str, head_dim: int) -> None:
        """Raises InputError for a head dim, called `name`, that the format cannot have."""
        if self.dtype is CODES4 and head_dim % 2:
            raise InputError(f"{name}={head_dim} is odd, but {self.name} stores pairs of channels")
        if self.group is not None and head_dim % self.group:
            raise InputError(f"group={self.group} does not divide {name}={head_dim}")

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row of `head_dim` codes, with its own scales and zero points if it has any;
        with its share, rounded up, of those of channels."""
        codes = head_dim // per_element(self.dtype)
        if self.scale not in ("token_head", "channel"):
            return codes
        numbers = head_dim // (self.channels or head_dim) * (2 if self.zero else 1)
        slots = CHANNEL_BLOCK if self.scale == "channel" else 1
        return codes + -(-numbers * self.scale_dtype.itemsize // slots)

    def quantize(self, x: Tensor, *, heads_dim: int = -2) -> Stored:
        """The codes of `x` and their scales, the least at which no code is beyond the largest.

        Codes are the nearest to ``x / scale`` in fp32; ties go to even, in a codebook to the lower
        value. The scale is the largest magnitude over that of a code, rounded to scale_dtype and
        from there up if need be: 0 where all values are 0, infinite where scale_dtype ends. NaN or
        infinite values make it NaN, and the values that share it. With zero points the scale is the
        span of the values over that of codes, or a 1,024th of their magnitude if that is more, so
        that zero points, ``least code - least value / scale`` rounded to scale_dtype, keep within
        1,300. Values at the ends are clamped by what that rounding moves, four steps in bfloat16.

        Args:
            x: floating tensor [..., head_dim] on any device, such as pages [num_pages, page_size,
                num_kv_heads, head_dim] or packed rows [num_tokens, num_kv_heads, head_dim].
            heads_dim: the dim of x that counts KV heads: -2 in pages and packed rows, 1 in dense
                tensors [batch, num_kv_heads, kv_len, head_dim].

        Raises:
            InputError: x is no floating tensor of at least two dims, or does not fit the format; or
                a scale of a tensor or of heads is not finite, on a CPU.

        Example:
            >>> stored = fa.kv.Format("e4m3", scale="head").quantize(k, heads_dim=1)
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
            raise InputError("x must be a floating tensor [..., num_kv_heads, ..., head_dim]")
        slots, heads = _slots_dim(x.dim(), heads_dim), heads_dim % x.dim()
        self.check_head_dim("head_dim", x.shape[-1])
        x = x.detach().float()
        x = hadamard(x) if self.rotate else x
        block = self._block(x, slots)
        group = self.channels or max(1, x.shape[-1])
        # [..., blocks, slots of a block, ..., groups, channels of a group]
        parts = (*x.shape[:slots], x.shape[slots] // block, block, *x.shape[slots + 1 : -1])
        y = x.reshape(*parts, x.shape[-1] // group, group)
        shared = {
            "tensor": [*range(y.dim())],
            "head": [d for d in range(y.dim()) if d != heads + (heads > slots)],
        }.get(self.scale, [slots + 1, y.dim() - 1])
        scales, zeros = self._scales(y, shared)
        scaled = y / scales.float()
        if zeros is not None:
            scaled = scaled + zeros.float()
        code = self.values
        scaled = scaled.nan_to_num(0.0).clamp(code.least, code.largest).view(x.shape)
        book = torch.tensor(code.book, dtype=torch.float32, device=x.device) if code.book else None

        def of_blocks(numbers: Tensor) -> Tensor:
            numbers = numbers.squeeze(-1).squeeze(slots + 1)
            return numbers.squeeze(-1) if self.channels is None else numbers

        return Stored(
            _encoded(scaled, code.dtype, book), of_blocks(scales),
            None if zeros is None else of_blocks(zeros), book,
            group=self.channels, block=block, rotated=self.rotate,
        )  # fmt: skip

    def _block(self, x: Tensor, slots: int) -> int:
        """The slots of x that share a scale. Raises InputError where they do not fit x."""
        pages = x.dim() == 4 and slots == 1
        if self.scale == "page_head" and not pages:
            raise InputError(
                "scale='page_head' is of pages [num_pages, page_size, num_kv_heads, head_dim], not "
                f"of {list(x.shape)}"
            )
        size = x.shape[slots]
        block = {"page_head": max(1, size), "channel": CHANNEL_BLOCK}.get(self.scale, 1)
        if size % block:
            raise InputError(
                f"scale={self.scale!r} needs multiples of {block} slots, but x has {size}; keep "
                "the last ones as they are, in a level of their own"
            )
        if block & (block - 1):
            raise InputError(f"scale='page_head' needs pages of 2**n slots, not of {block}")
        return block

    def _scales(self, y: Tensor, shared: list[int]) -> tuple[Tensor, Tensor | None]:
        code = self.values
        if not self.zero:
            return _least_scales(_extreme(y.abs(), shared), code.largest, self.scale_dtype), None
        least, most = -_extreme(-y, shared), _extreme(y, shared)
        steps = code.largest - code.least
        magnitude = torch.maximum(most.abs(), least.abs())
        span = torch.maximum(most - least, magnitude * (steps / 1024.0))
        scales = _least_scales(span, steps, self.scale_dtype)
        zeros = (code.least - least / scales.float()).nan_to_num(0.0, posinf=0.0, neginf=0.0)
        return scales, zeros.to(self.scale_dtype)


def _codebook(numbers: object) -> tuple[float, ...]:
    """16 finite numbers, rounded to fp32. Raises InputError for anything else."""
    if isinstance(numbers, Tensor):
        numbers = numbers.tolist() if numbers.dim() == 1 and numbers.is_cpu else [numbers]
    many = isinstance(numbers, Sequence) and not isinstance(numbers, bytes)
    if not many or len(numbers) != 16:  # type: ignore[arg-type]
        got = f"{len(numbers)} of them" if many else type(numbers).__name__  # type: ignore[arg-type]
        raise InputError(f"a codebook is 16 numbers, the values of the codes 0 to 15; got {got}")
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers):  # type: ignore[attr-defined]
        raise InputError(f"a codebook is 16 numbers; got {numbers!r:.80}")
    numbers = [max(-1e39, min(x, 1e39)) for x in numbers]  # type: ignore[attr-defined]
    book = tuple(torch.tensor(numbers, dtype=torch.float32, device="cpu").tolist())
    if not all(map(math.isfinite, book)) or not any(book):
        raise InputError("the numbers of a codebook must be finite, and not all 0")
    return book


def _slots_dim(rank: int, heads_dim: int) -> int:
    """The dim that counts slots: before the heads in pages and packed rows, behind dense ones."""
    if heads_dim not in range(-rank, rank) or heads_dim % rank == rank - 1:
        raise InputError(f"heads_dim={heads_dim!r:.60} is no dim before the last of {rank}")
    heads = heads_dim % rank
    return max(heads - 1, 0) if heads == rank - 2 else rank - 2


def _extreme(y: Tensor, shared: list[int]) -> Tensor:
    """The largest values over the dims `shared`, which are kept."""
    if y.numel():
        return y.amax(shared, keepdim=True)
    return y.new_zeros([1 if d in shared else n for d, n in enumerate(y.shape)])


def _least_scales(magnitude: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """The least scales at which `magnitude` is at most the largest code; NaN unless finite."""
    magnitude = torch.where(magnitude.isfinite(), magnitude, torch.nan)
    scales = (magnitude / largest).to(dtype)
    bits = scales.view(torch.int32 if dtype == torch.float32 else torch.int16)
    return (bits + (scales.float() * largest < magnitude)).to(bits.dtype).view(dtype)


def _encoded(values: Tensor, dtype: torch.dtype, book: Tensor | None) -> Tensor:
    """The codes nearest to `values`, which the codes' least and largest bound."""
    if dtype is not CODES4:
        return (values.round() if dtype == torch.int8 else values).to(dtype)
    if book is None:
        codes = values.round() + 8.0
    else:
        ordered, order = torch.sort(book, stable=True)
        codes = order[torch.bucketize(values.contiguous(), (ordered[1:] + ordered[:-1]) * 0.5)]
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return (low | (high << 4)).view(CODES4)


def hadamard(rows: Tensor) -> Tensor:
    """Rows times the orthogonal Hadamard matrix of their length, in blocks of the largest power of
    two that divides it; symmetric, so that it undoes itself. Also a row of a hook."""
    n = rows.shape[-1]
    block = n & -n if n else 1
    shape = rows.shape
    x = rows.reshape(*shape[:-1], n // block, block)
    for _ in range(block.bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = torch.cat([even + odd, even - odd], -1)
    return (x * (1.0 / math.sqrt(block))).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Stored:
    """Quantised keys or values: ``scales * (values of codes - zeros)``.

    Args:
        codes: int8, float8_e4m3fn or float8_e5m2, of any layout that keys or values have; or
            bits4x2 or uint8, whose last dim is head_dim / 2: byte i has the code of channel i, an
            integer plus 8 or an index of the codebook, in its low bits, and that of channel
            i + head_dim / 2 in its high bits.
        scales: float32, float16 or bfloat16, broadcastable to codes.shape[:-1]: [] for one scale,
            [num_kv_heads] per head of pages or packed rows ([num_kv_heads, 1] dense), or one per
            row. Those of all slots below kv_len must be finite. Where several slots share them and
            there are at most 1,024, on a CPU, they are checked here, and never in a run.
        zeros: zero points, of the shape and dtype of scales; none by default.
        codebook: fp32 [16], the values of codes of 4 bits; those of integers by default.
        group: channels that share a scale; scales then have one more dim, of head_dim / group.
        block: slots that share a scale; the dim of slots of scales then counts blocks. Whole ones:
            a page has a multiple of it.
        rotated: whether rows were multiplied by a Hadamard matrix, which `dequantize` undoes.

    Raises InputError for other dtypes, for shapes that do not fit, and for NaN and infinite values
    among scales that are checked, their zero points and the codebook.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    codebook: Tensor | None = None
    group: int | None = None
    block: int = 1
    rotated: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.codes, Tensor) and self.codes.dtype == torch.uint8:
            object.__setattr__(self, "codes", self.codes.view(CODES4))
        known = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, CODES4)
        _check_tensor("codes", self.codes, known)
        numbers = {"scales": self.scales} if self.zeros is None else {
            "scales": self.scales, "zeros": self.zeros,
        }  # fmt: skip
        for name, value in numbers.items():
            _check_tensor(name, value, SCALE_DTYPES)
            if value.device != self.codes.device:
                raise InputError(f"codes are on {self.codes.device}, but {name} on {value.device}")
            if value.shape != self.scales.shape or value.dtype != self.scales.dtype:
                raise InputError(
                    f"zeros are {value.dtype} {list(value.shape)}, but scales {self.scales.dtype} "
                    f"{list(self.scales.shape)}"
                )
        self._check_codebook()
        for name, least in (("group", self.group), ("block", self.block)):
            if least is not None and (type(least) is not int or least < 1):
                raise InputError(f"{name}={least!r:.60} must be at least 1")
        if self.block & (self.block - 1):
            raise InputError(f"block={self.block} must be a power of two")
        dim = row_dim(self.codes)
        if self.group is not None and dim % self.group:
            raise InputError(f"group={self.group} does not divide head_dim={dim}")
        shapes = [self._numbers_shape(dense) for dense in (False, True)]
        if not any(_broadcasts(self.scales.shape, shape) for shape in shapes):
            groups = f", with groups of {self.group} channels" if self.group else ""
            blocks = f", in blocks of {self.block} slots" if self.block > 1 else ""
            raise InputError(
                f"scales {list(self.scales.shape)} do not broadcast to the rows "
                f"{list(self.codes.shape[:-1])} of codes{groups}{blocks}"
            )
        if _has_values(self.codes, *numbers.values()):
            rows = self.codes.numel() // max(1, self.codes.shape[-1])
            groups_of_row = 1 if self.group is None else dim // self.group
            if self.block == 1 and self.scales.numel() <= min(_CHECKED, (rows - 1) * groups_of_row):
                for name, value in numbers.items():
                    _check_finite(name, value)

    def __reduce__(self) -> Any:
        codes = self.codes.view(torch.uint8) if self.codes.dtype is CODES4 else self.codes
        return Stored, (codes, *(getattr(self, f.name) for f in fields(self)[1:]))  # torch's pickle

    def __repr__(self) -> str:
        shapes = f"{self.codes.dtype} {list(self.codes.shape)}, {self.scales.dtype}"
        return f"Stored({shapes} {list(self.scales.shape)}, {self.decoding})"

    def _check_codebook(self) -> None:
        book = self.codebook
        if book is None:
            return
        if self.codes.dtype is not CODES4:
            raise InputError(f"a codebook is for codes of 4 bits, not of {self.codes.dtype}")
        _check_tensor("codebook", book, (torch.float32,))
        object.__setattr__(self, "codebook", book.contiguous())  # appends read it without strides
        if tuple(book.shape) != (16,) or book.device != self.codes.device:
            raise InputError(
                f"codebook must be [16] on {self.codes.device}, got {list(book.shape)} on "
                f"{book.device}"
            )
        if _has_values(book):
            _check_finite("codebook", book)

    def _numbers_shape(self, dense: bool) -> tuple[int, ...] | None:
        """The shape of one scale a block of slots and group of channels; None where blocks are not
        whole."""
        rows = list(self.codes.shape[:-1])
        if self.block > 1:
            at = len(rows) - (1 if dense else 2)
            if at < 0 or rows[at] % self.block:
                return None
            rows[at] //= self.block
        return (*rows, *(() if self.group is None else (row_dim(self.codes) // self.group,)))

    @property
    def decoding(self) -> Decoding:
        """What kernels must know of it."""
        # Dynamo makes classes of constants alone, and what is computed of a dim may be a symbol.
        groups = 1 if self.group is None else max(1, row_dim(self.codes) // self.group)
        return Decoding(
            groups, self.block > 1, self.zeros is not None, self.codebook is not None,
            bool(self.rotated), self.scales.dtype,
        )  # fmt: skip

    def dequantize(self, *, heads_dim: int = -2) -> Tensor:
        """The values, fp32, in the layout of codes. heads_dim: as for `Format.quantize`."""
        dense = _slots_dim(self.codes.dim(), heads_dim) == self.codes.dim() - 2
        values = _values(self.codes, self.codebook)
        if self.zeros is not None:
            values = values - self._of_channels(self.zeros, dense)
        values = values * self._of_channels(self.scales, dense)
        return hadamard(values) if self.rotated else values

    def _of_channels(self, numbers: Tensor, dense: bool) -> Tensor:
        """One number a channel of scales or zeros."""
        numbers = self._of_blocks(numbers, dense).float()
        if self.block > 1:
            numbers = numbers.repeat_interleave(self.block, self.codes.dim() - (2 if dense else 3))
        if self.group is None:
            return numbers.unsqueeze(-1)
        return numbers.repeat_interleave(self.group, -1)

    def _of_blocks(self, numbers: Tensor, dense: bool) -> Tensor:
        shape = self._numbers_shape(dense)
        if numbers.shape == shape:
            return numbers
        if shape is None or not _broadcasts(numbers.shape, shape):
            layout = "dense" if dense else "paged or packed"
            raise InputError(
                f"scales {list(numbers.shape)} of {layout} codes {list(self.codes.shape)} must "
                f"broadcast to one a block of {self.block} slots"
            )
        return numbers.expand(shape)

    @property
    def has_own_scales(self) -> bool:
        """Whether each row has scales of its own, which an append computes and stores."""
        return self.block == 1 and self.scales.shape == self._numbers_shape(False)

    def numbers(self, name: str, dense: bool, decodes: bool = True) -> dict[str, Tensor | int]:
        """The params, by name, of the hooks that decode k or v: scales, zeros, the codebook. Hooks
        that encode (decodes=False) have no codebook.

        Scales are views [num_slots / block, num_kv_heads, groups], or [batch, num_kv_heads,
        kv_len / block, groups] where dense. Raises InputError where slots have several strides.
        """
        found: dict[str, Tensor | int] = {}
        for what, value in (("scale", self.scales), ("zero", self.zeros)):
            if value is None:
                continue
            value = self._of_blocks(value, dense)
            if dense:
                value = value.unsqueeze(-1) if self.group is None else value
            else:
                value = self._of_slots(f"{what}s", name, value)
            found[f"{name}_{what}"] = value
        if self.codebook is not None and decodes:
            found[f"{name}_codebook"] = self.codebook
        if self.block > 1:
            found[f"{name}_shift"] = self.block.bit_length() - 1
        return found

    def _of_slots(self, what: str, name: str, numbers: Tensor) -> Tensor:
        """[slots, num_kv_heads, groups] of one number a block of slots and group of channels."""
        heads = -1 if self.group is None else -2
        if numbers.dim() < 1 - heads:
            raise InputError(
                f"codes of {name} must be pages or packed rows, not {self.codes.dim()}-d"
            )
        shape = (numbers.shape[heads], 1 if self.group is None else numbers.shape[-1])
        try:
            return numbers.view(-1, *shape) if numbers.numel() else numbers.reshape(0, *shape)
        except RuntimeError:
            whole = "" if numbers is getattr(self, what) else f".expand({list(numbers.shape)})"
            raise InputError(
                f"{what} of {name} have strides {list(numbers.stride())}: slots must follow each "
                f"other at one stride, over pages too; pass {what}{whole}.contiguous(), in memory "
                f"[num_pages, page_size, num_kv_heads{'' if self.group is None else ', groups'}]"
            ) from None


def _check_tensor(name: str, value: object, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        has = value.dtype if isinstance(value, Tensor) else type(value).__name__
        known = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise InputError(f"{name} must be a tensor of {known}; got {has}")


def _has_values(*numbers: Tensor) -> bool:
    """Whether they can be read without waiting for a device or changing a graph."""
    compiling = torch.compiler.is_dynamo_compiling()
    return not compiling and all(x.is_cpu for x in numbers) and is_direct(*numbers)


def _check_finite(name: str, numbers: Tensor) -> None:
    if not numbers.isfinite().all():
        at = (~numbers.isfinite()).nonzero()[0].tolist()
        raise InputError(
            f"{name}{at if at else ''} is {float(numbers[tuple(at)])}, which many slots share: "
            "compute it from finite values, or give each token a scale, scale='token_head'"
        )


def _broadcasts(shape: Sequence[int], wanted: Sequence[int] | None) -> bool:
    if wanted is None or len(shape) > len(wanted):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(wanted), strict=False))


def _values(codes: Tensor, book: Tensor | None) -> Tensor:
    """The values of codes, fp32: pairs become two channels each."""
    if codes.dtype is not CODES4:
        return codes.float()
    indices = unpacked(codes)
    return indices.float() - 8.0 if book is None else book[indices.long()]


Codes = Tensor | Stored
"""Keys or values: a tensor, or a quantised one."""

Formats = tuple[Format | None, Format | None]
"""The formats of keys and of values; None for values as they are."""

KvFormat = Format | Formats
"""One format of keys and values both, or one of each."""


def kv_bytes(
    formats: Formats, dtypes: tuple[torch.dtype, torch.dtype], num_kv_heads: int, head_dim: int,
    head_dim_v: int,
) -> tuple[int, int]:  # fmt: skip
    """Bytes of a token's keys and of its values, with scales and zero points of their own; dtypes:
    of those that have no format."""
    keys, values = (
        num_kv_heads
        * (row_width(dim, dtype) * dtype.itemsize if form is None else form.row_bytes(dim))
        for form, dtype, dim in zip(formats, dtypes, (head_dim, head_dim_v), strict=True)
    )
    return keys, values


def read_formats(kv_format: object) -> Formats:
    """The formats of keys and of values. Raises InputError."""
    pair = kv_format if isinstance(kv_format, tuple) else (kv_format, kv_format)
    if len(pair) != 2 or not all(f is None or isinstance(f, Format) for f in pair):
        raise InputError(
            "kv_format must be an fa.kv.Format, or a pair of one for k and one for v, None for "
            f"values that are not quantised; got {kv_format!r:.80}"
        )
    return pair
