"""Neighborhood attention (NATTEN) over sequences and images laid out row by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.library.limits import limited
from flashattn_jit.variants.variant import Variant

_SIZE = "give the number of tokens of the axis"
_RADIUS = "0 keeps the token's own key; for a kernel of k keys it is k // 2"


class Natten1D(Variant):
    """Keep ``|clamp(i, r, length - 1 - r) - j| <= r``: the `2 r + 1` keys nearest to i, shifted
    inwards at the borders so that every row has as many.

    length (at least 2 r + 1), radius r: runtime ints. See `Natten`.
    """

    length: int = limited(1, _SIZE)
    radius: int = limited(0, _RADIUS)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The formula of the class."""
        return _near(q_idx, kv_idx, self.length, self.radius)


class Natten2D(Variant):
    """Natten1D on both axes of an image whose pixels are laid out row by row: with
    ``y = i // width`` and ``x = i % width``.

    height, width, radius_y, radius_x: runtime ints. See `Natten`.
    """

    height: int = limited(1, _SIZE)
    width: int = limited(1, _SIZE)
    radius_y: int = limited(0, _RADIUS)
    radius_x: int = limited(0, _RADIUS)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Near on both axes."""
        rows = _near(q_idx // self.width, kv_idx // self.width, self.height, self.radius_y)
        columns = _near(q_idx % self.width, kv_idx % self.width, self.width, self.radius_x)
        return rows & columns


def _near(q: Tensor, kv: Tensor, length: int, radius: int) -> Tensor:
    # minimum after maximum: a radius too large for `length` clamps to length - 1 - radius.
    center = torch.clamp(torch.clamp(q, min=radius), max=length - 1 - radius)
    return (center - kv <= radius) & (kv - center <= radius)


def Natten(shape: int | Sequence[int], kernel: int | Sequence[int]) -> Variant:
    """Neighborhood attention: every token sees the `kernel` tokens around it on every axis; at
    borders the window is shifted inwards, not cut.

    shape: the tokens' layout, ``length`` or ``(height, width)``. kernel: odd sizes, one for all
    axes or one for each, none larger than its axis. Both are runtime values. Returns a `Natten1D`
    or a `Natten2D`; raises `VariantError` for other sizes.
    Hassani et al. 2023, "Neighborhood Attention Transformer"; NAT, DiNAT, Hourglass Diffusion.

    >>> fa.Natten((32, 32), kernel=7)
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    kernels = (kernel,) * len(sizes) if isinstance(kernel, int) else tuple(kernel)
    if len(sizes) not in (1, 2) or len(kernels) != len(sizes):
        raise VariantError(
            f"Natten takes a shape of 1 or 2 axes and a kernel size for each, got shape {sizes} "
            f"and kernel {kernels}"
        )
    for size, k in zip(sizes, kernels, strict=True):
        if k < 1 or k % 2 == 0 or k > size:
            raise VariantError(
                f"Natten's kernel sizes are odd and at most their axis, got kernel {kernels} for "
                f"shape {sizes}"
            )
    radii = tuple(k // 2 for k in kernels)
    if len(sizes) == 1:
        return Natten1D(length=sizes[0], radius=radii[0])
    return Natten2D(height=sizes[0], width=sizes[1], radius_y=radii[0], radius_x=radii[1])
