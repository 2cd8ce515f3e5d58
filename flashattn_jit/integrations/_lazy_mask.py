"""The attention mask of Hugging Face models as a function instead of a matrix.

transformers builds masks out of functions ``(b, h, q_idx, kv_idx) -> bool``. `LazyMask` keeps the
function, the sizes and the padding; attention layers convert it to a variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flashattn_jit.errors import InputError
from flashattn_jit.torch_modes import is_unknown
from flashattn_jit.variants.variant import Variant, variant

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskTakenApartError(InputError, AttributeError):
    """A model computes with its mask as if it were a tensor."""


class LazyMask(BlockMask):
    """A mask of shape [batch, 1, q_len, kv_len] that is not computed.

    It derives from `BlockMask` only because models and ``generate`` pass those on unchanged, while
    they would slice or convert another object; it has no blocks.

    mask_function: of logical positions. q_offset, kv_offset: the positions of the first query row
    and of the first key. padding: bool [batch, positions], True for real tokens, or None; positions
    past its end are padding. config: the model's, or None. positions: those of padding, or None.
    """

    def __init__(
        self,
        batch: int,
        q_len: int,
        kv_len: int,
        q_offset: int,
        kv_offset: int,
        mask_function: MaskFunction,
        padding: Tensor | None,
        config: Any = None,
    ) -> None:
        self._sizes = (batch, 1, q_len, kv_len)
        self.config = config
        self.positions = None if padding is None else padding.shape[1]
        self.mask_function = mask_function
        self.kv_offset = kv_offset
        # Kernels number keys from the first one that the layer holds; `_positions` adds kv_offset.
        self.q_offset = q_offset - kv_offset
        self.key_len, self.keep = _split_padding(padding, batch, kv_len, kv_offset)
        self._mask_mod = _with_padding(_positions(mask_function, kv_offset), self.keep)
        self._variants: dict[object, Variant] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, 1, q_len, kv_len)."""
        return self._sizes

    @property
    def ndim(self) -> int:
        """4, like a dense mask."""
        return len(self._sizes)

    def variant(self, extend: Callable[[Variant], Variant], key: object) -> Variant:
        """The mask as a variant passed through `extend`, cached by `key` for all layers."""
        made = self._variants.get(key)
        if made is None:
            made = self._variants[key] = extend(variant(mask_mod=self._mask_mod))
        return made

    def is_shared(self, batch: int, q_len: int) -> bool:
        """Whether one row, or the padding of one request, is broadcast to several of the call."""
        padded = self.key_len is not None or self.keep is not None
        return self.shape[2] == 1 < q_len or (padded and self.shape[0] == 1 < batch)

    def to_dense(self, device: torch.device | str = "cpu") -> Tensor:
        """The mask as a bool tensor [batch, 1, q_len, kv_len]."""
        batch, _, q_len, kv_len = self._sizes
        keys = torch.arange(kv_len, device=device)
        mask = self.mask_function(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device),
            (torch.arange(q_len, device=device) + self.q_offset + self.kv_offset)[:, None],
            keys + self.kv_offset,
        )
        mask = mask.to(device).expand(self._sizes)
        if self.key_len is not None:
            mask = mask & (keys < self.key_len.to(device)[:, None, None, None])
        return mask if self.keep is None else mask & self.keep.to(device)[:, None, None, :kv_len]

    def to(self, *args: object, **kwargs: object) -> LazyMask:
        """Returns itself: there are no values to move, convert or copy. Layers check devices."""
        return self

    contiguous = clone = to

    def numel(self) -> int:
        """The number of entries that a dense mask would have."""
        batch, heads, q_len, kv_len = self._sizes
        return batch * heads * q_len * kv_len

    def __getitem__(self, index: object) -> NoReturn:
        raise InputError(
            f"this model slices its attention mask ({index!r}), which is a formula here and no "
            "tensor; use attn_implementation='eager' for it"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise MaskTakenApartError(
            f"this model asks its attention mask for {name!r}, which a formula does not have; use "
            "attn_implementation='eager' for it"
        )

    def _refuse(self, *_: object) -> NoReturn:
        raise MaskTakenApartError(
            "this model computes with its attention mask, which is a formula here and no tensor; "
            "use attn_implementation='eager' for it"
        )

    @classmethod
    def __torch_function__(cls, function: object, *_: object, **__: object) -> NoReturn:
        raise MaskTakenApartError(
            f"this model gives its attention mask to {getattr(function, '__name__', function)}, "
            "which takes tensors, and the mask is a formula here; use "
            "attn_implementation='eager' for it"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __float__ = __int__ = __iter__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __rmatmul__ = _refuse
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if other is not None and not isinstance(other, LazyMask):
            self._refuse()
        return self is other

    def as_tuple(self, flatten: bool = True) -> NoReturn:
        """Raises `InputError`: there are no blocks."""
        raise InputError("this mask is a formula without blocks; use to_dense() to see it")

    def sparsity(self) -> NoReturn:
        """Raises `InputError`: there are no blocks."""
        self.as_tuple()

    def __repr__(self) -> str:
        parts = [f"shape={self._sizes}", f"q_offset={self.q_offset + self.kv_offset}"]
        parts += [f"kv_offset={self.kv_offset}"] if self.kv_offset else []
        parts += ["padding"] if self.keep is not None or self.key_len is not None else []
        return f"LazyMask({', '.join(parts)})"

    __str__ = __repr__


class UnmergedMask(LazyMask):
    """A mask with `ndim` 0, as Falcon adds its ALiBi to masks of four dimensions."""

    @property
    def ndim(self) -> int:
        """0: the mask has no entries to add to."""
        return 0


def _split_padding(
    padding: Tensor | None, batch: int, kv_len: int, kv_offset: int
) -> tuple[Tensor | None, Tensor | None]:
    """Padding as (lengths [batch], keep [batch, kv_len]), each None where it masks nothing.

    Padding after the last real token becomes a length, which costs a kernel nothing; only padding
    before or between real tokens needs a mask, and padding whose values a tracer does not know.
    """
    if padding is None:
        return None, None
    keep = padding[:, kv_offset : kv_offset + kv_len]
    if keep.shape[0] != batch:
        keep = keep.expand(batch, -1)
    lengths = None
    if not is_unknown(keep):
        counts = keep.sum(-1)
        ends = torch.arange(1, keep.shape[1] + 1, device=keep.device)
        lengths = (keep * ends).amax(-1) if keep.shape[1] else counts
        if bool((counts == lengths).all()):
            if keep.shape[1] == kv_len and bool((lengths == kv_len).all()):
                return None, None
            return lengths, None
    if keep.shape[1] < kv_len:
        keep = torch.nn.functional.pad(keep, (0, kv_len - keep.shape[1]))
    return lengths, keep.contiguous()


def _positions(mask_function: MaskFunction, kv_offset: int) -> MaskFunction:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(b, h, q_idx + kv_offset, kv_idx + kv_offset)

    return mask_mod


def _with_padding(inner: MaskFunction, keep: Tensor | None) -> MaskFunction:
    if keep is None:
        return inner

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return inner(b, h, q_idx, kv_idx) & keep[b, kv_idx]

    return mask_mod
