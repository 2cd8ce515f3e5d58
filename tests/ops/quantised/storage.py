"""Formats of every kind, and pages of codes, for the tests of this folder."""

from __future__ import annotations

import itertools

import torch

import flashattn_jit as fa

Format, Stored = fa.kv.Format, fa.kv.Stored
F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
LLOYD = (-2.6, -1.9, -1.5, -1.2, -0.9, -0.65, -0.4, -0.13, 0.13, 0.4, 0.65, 0.9, 1.2, 1.5, 1.9, 2.6)
EIGHTS = [
    Format(code, scale, (F32, B16, F16)[i % 3])
    for i, (code, scale) in enumerate(
        itertools.product(("int8", "e4m3", "e5m2"), ("tensor", "head", "token_head"))
    )
]  # fmt: skip
FOURS = [
    Format("int4"), Format("int4", scale_dtype=B16, group=8), Format("int4", "head", F16),
    Format("int4", zero=True, group=8), Format("nf4", scale_dtype=F16, group=8), Format("nf4"),
    Format("e2m1", "tensor"), Format(LLOYD, scale_dtype=B16), Format("int4", rotate=True),
]  # fmt: skip
MORE = [
    Format("int8", zero=True, scale_dtype=F16), Format("int8", group=8),
    Format("e4m3", rotate=True), Format("nf4", rotate=True, group=8),
]  # fmt: skip
FORMATS = [*EIGHTS, *FOURS, *MORE]
"""They fit any head dim that is a multiple of 8."""

OF_PAGES = [
    Format("int8", "page_head"), Format("int4", "page_head", F16, group=8),
    Format("int4", "page_head", zero=True),
]  # fmt: skip
CHANNELS = [Format("int4", "channel", zero=True), Format("int8", "channel", B16)]
"""Over pages of multiples of 64 slots."""


def named(kv_format: fa.kv.Format) -> str:
    parts = [kv_format.name, kv_format.scale, str(kv_format.scale_dtype)[6:]]
    parts += [f"g{kv_format.group}"] if kv_format.group else []
    parts += [name for name in ("zero", "rotate") if getattr(kv_format, name)]
    return "-".join(parts)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def rows_of(pages: fa.kv.Stored, slots: torch.Tensor) -> fa.kv.Stored:
    """The rows in these slots of pages, packed."""
    size = pages.codes.shape[1]
    at = (slots // size, slots % size)

    def numbers(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        groups = () if pages.group is None else (x.shape[-1],)
        full = x.expand(*pages.codes.shape[:1], -1, pages.codes.shape[2], *groups)
        full = full.repeat_interleave(size // full.shape[1], 1)
        return full[at]

    codes = bits(pages.codes)[at].view(pages.codes.dtype)
    scales = numbers(pages.scales)
    assert scales is not None
    return Stored(
        codes, scales, numbers(pages.zeros), pages.codebook, group=pages.group,
        rotated=pages.rotated,
    )  # fmt: skip
