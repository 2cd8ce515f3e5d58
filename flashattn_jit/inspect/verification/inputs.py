"""Random tensors for `verify`'s cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.arguments.calls import Offset
from ..dims import shapes
from .cases import Case, Layout

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Inputs:
    """q, k, v of the kernel; `clean_k` and `clean_v` are k and v without NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    clean_k: Tensor
    clean_v: Tensor
    kv_len: Tensor | None
    q_offset: Offset


def masked_row(q_idx: Tensor) -> Tensor:
    """Whether a `masked` case masks out a row."""
    return q_idx % 3 == 1


def masked_key(kv_idx: Tensor) -> Tensor:
    """Whether a `masked` case masks out a key."""
    return kv_idx % 5 == 2


def make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """The tensors of a case."""
    d = case.dims
    values = [_values(s, generator, case.extreme and i < 2) for i, s in enumerate(shapes(d))]
    q, k, v = (_laid_out(x.to(dtype), case.layout) for x in values)
    if case.layout == "expanded":
        k, v = (x[:1].expand_as(x) for x in (k, v))
    clean_k, clean_v = k, v
    kv_len = None
    if case.lengths == "ragged":
        kv_len = torch.tensor(
            [d.kv_len, 0, d.kv_len // 2 + 1][: d.batch], dtype=torch.int32, device="cpu"
        )
        kv_len = torch.cat([kv_len, kv_len.new_full((d.batch - len(kv_len),), d.kv_len)])
        past = torch.arange(d.kv_len, device="cpu") >= kv_len[:, None]
        k, v = (_poisoned(x, past[:, None, :, None]) for x in (k, v))
    if case.masked:
        k = _poisoned(k, masked_key(torch.arange(d.kv_len, device="cpu"))[:, None])
    return Inputs(q, k, v, clean_k, clean_v, kv_len, _offset(case))


def _offset(case: Case) -> Offset:
    if case.offset == "tensor":
        return torch.arange(case.dims.batch, dtype=torch.int64, device="cpu") * 5
    return "end" if case.offset == "end" else 37 if case.offset == "int" else 0


def _values(shape: tuple[int, ...], generator: torch.Generator, extreme: bool) -> Tensor:
    if not extreme:
        return torch.randn(shape, generator=generator, device="cpu")
    # Dot products are exact in fp32, and scores of up to about 1e4 differ by 0 or by hundreds: a
    # row with one largest key is well conditioned, a row with a tie is not (see `error`).
    steps = torch.randint(-1, 2, shape, generator=generator, device="cpu").float()
    return steps * 2.0**7


def _laid_out(x: Tensor, layout: Layout) -> Tensor:
    """The same values in the strides of `layout`; the last dim stays contiguous."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        roomy = x.new_full((*x.shape[:2], x.shape[2] + 1, x.shape[3] + 3), NAN)
        view = roomy[:, :, 1:, 1:-2]
        view.copy_(x)
        return view
    return x


def _poisoned(x: Tensor, where: Tensor) -> Tensor:
    return x.clone().masked_fill_(where, NAN)
