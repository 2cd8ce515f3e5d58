"""Rotary position embeddings of queries and keys, applied as their rows are loaded."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashattn_jit.errors import InputError, VariantError
from flashattn_jit.torch_modes import remembered
from flashattn_jit.variants.library.made_classes import made_class
from flashattn_jit.variants.library.rope_scaling import (
    DynamicNTKScaling,
    NoScaling,
    RopeScaling,
)
from flashattn_jit.variants.variant import Dims, Variant, scalar, tensor


def rotate(
    row: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, start: int = 0
) -> Tensor:
    """One row with ``2 * len(cos)`` of its elements rotated in pairs, from `start` on.

    Pair p is elements (p, p + len(cos)) of that part, or (2 p, 2 p + 1) if interleaved; (x, y)
    becomes ``(x cos_p - y sin_p, y cos_p + x sin_p)``. row: ``[head_dim]``; usable in row hooks.
    """
    pairs = cos.shape[0]
    end = start + 2 * pairs
    if interleaved:
        x, y = row[start:end:2], row[start + 1 : end : 2]
    else:
        x, y = row[start : start + pairs], row[start + pairs : end]
    turned = (x * cos - y * sin, y * cos + x * sin)
    middle = torch.stack(turned, dim=-1).reshape(2 * pairs) if interleaved else torch.cat(turned)
    parts = [middle]
    if start > 0:
        parts.insert(0, row[:start])
    if end < row.shape[0]:
        parts.append(row[end:])
    return torch.cat(parts) if len(parts) > 1 else middle


class TableRope(Variant):
    """Rotation by tables of cos and sin, float ``[positions, pairs]``; `RoPE` makes it.

    A query at position -p takes row p of the tables, with the sine negated. Positions past the end
    of the tables take their last row, which `RoPE` fills with NaN, so that errors show in the
    output.
    """

    cos: Tensor = tensor("positions", "pairs")
    sin: Tensor = tensor("positions", "pairs")
    interleaved: bool = scalar(False)
    start: int = scalar(0)

    def query_mod(self, row: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The rotated query row."""
        # Queries alone may have negative positions. Sines are odd, cosines even.
        position = torch.abs(q_idx)
        sin = self.sin[position] * torch.where(q_idx < 0, -1.0, 1.0)
        return rotate(row, self.cos[position], sin, self.interleaved, self.start)

    def key_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The rotated key row."""
        return rotate(row, self.cos[kv_idx], self.sin[kv_idx], self.interleaved, self.start)


class ComputedRope(Variant):
    """Rotation by angles computed in the kernel; `RoPE` makes it.

    turns: float64 ``[pairs]``, turns per position: the whole turns are taken off in float64, so
    that every position is exact to float32. attention_factor: runtime float.
    """

    turns: Tensor = tensor("pairs", dtype=torch.float64)
    attention_factor: float = scalar(1.0)
    interleaved: bool = scalar(False)
    start: int = scalar(0)

    def query_mod(self, row: Tensor, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
        """The rotated query row."""
        return self._turned(row, q_idx)

    def key_mod(self, row: Tensor, b: Tensor, kv_h: Tensor, kv_idx: Tensor) -> Tensor:
        """The rotated key row."""
        return self._turned(row, kv_idx)

    def _turned(self, row: Tensor, position: Tensor) -> Tensor:
        turns = self.turns * position
        angle = ((turns - torch.floor(turns)) * (2.0 * math.pi)).float()
        cos, sin = torch.cos(angle), torch.sin(angle)
        factor = self.attention_factor
        return rotate(row, cos * factor, sin * factor, self.interleaved, self.start)


@dataclass(frozen=True, slots=True)
class _Config:
    """The parameters of the default tables of a `RoPE`."""

    theta: float
    scaling: RopeScaling
    partial: float
    max_position: int | None

    def rotary_dim(self, head_dim: int) -> int:
        dim = int(head_dim * self.partial)
        if dim < 2 or dim % 2:
            raise VariantError(
                f"RoPE rotates an even number of elements, got {dim} of head_dim={head_dim} "
                f"(partial={self.partial}); choose `partial` so that head_dim * partial is even"
            )
        return dim

    def positions(self, q_len: int, kv_len: int) -> int:
        longest = max(q_len, kv_len)
        if self.max_position is None:
            # A power of two, so that a growing context rarely needs new tables.
            return max(4096, 1 << max(longest - 1, 0).bit_length())
        if longest > self.max_position:
            raise InputError(
                f"RoPE was made for positions below max_position={self.max_position}, got "
                f"q_len={q_len}, kv_len={kv_len}; make it with a larger max_position"
            )
        return self.max_position


def rope_tables(
    dim: int,
    positions: int,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair, times the attention factor: float32
    ``[positions, dim // 2]`` each, on the CPU, from float64 angles.

    length: the context's length for scalings that depend on it (default: positions).
    """
    chosen = NoScaling() if scaling is None else scaling
    freq = chosen.inv_freq(dim, theta, positions if length is None else length)
    angles = np.arange(positions, dtype=np.float64)[:, None] * freq
    cos, sin = (f(angles) * chosen.attention_factor for f in (np.cos, np.sin))
    return torch.from_numpy(cos.astype(np.float32)), torch.from_numpy(sin.astype(np.float32))


# The tables of a config are cached with its class, so that calls do not hash the config.


@functools.lru_cache(maxsize=256)
def _table_rope(config: _Config) -> type[TableRope]:
    @remembered(8)
    def made(
        head_dim: int, length: int, positions: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        dim = config.rotary_dim(head_dim)
        cos, sin = rope_tables(dim, positions, config.theta, config.scaling, length)
        # One more row, of NaN, for positions past the tables.
        guard = functools.partial(torch.nn.functional.pad, pad=(0, 0, 0, 1), value=math.nan)
        return guard(cos).to(device), guard(sin).to(device)

    def tables(dims: Dims) -> tuple[Tensor, Tensor]:
        kv_len = dims.kv_len
        length, positions = config.scaling.effective_length(kv_len), config.positions
        return made(dims.head_dim, length, positions(dims.q_len, kv_len), dims.device)

    class RoPE(TableRope):
        __doc__ = TableRope.__doc__
        cos: Tensor = tensor("positions", "pairs", default=lambda dims: tables(dims)[0])
        sin: Tensor = tensor("positions", "pairs", default=lambda dims: tables(dims)[1])

    RoPE.__fajit_made_by__ = (_table_rope, config)
    return RoPE


@functools.lru_cache(maxsize=256)
def _computed_rope(config: _Config) -> type[ComputedRope]:
    def made(dims: Dims) -> Tensor:
        dim = config.rotary_dim(dims.head_dim)
        length = config.scaling.effective_length(dims.kv_len)
        freq = config.scaling.inv_freq(dim, config.theta, length)
        return torch.from_numpy(freq / (2.0 * math.pi)).to(dims.device)

    class RoPE(ComputedRope):
        __doc__ = ComputedRope.__doc__
        turns: Tensor = tensor("pairs", dtype=torch.float64, default=made)

    RoPE.__fajit_made_by__ = (_computed_rope, config)
    return RoPE


def RoPE(
    theta: float = 10000.0,
    *,
    interleaved: bool = False,
    partial: float = 1.0,
    start: int = 0,
    scaling: RopeScaling | None = None,
    max_position: int | None = None,
    tables: bool | None = None,
) -> Variant:
    """Queries rotated at ``q_idx`` and keys at ``kv_idx``: pair p of a row turned by the angle
    ``position * f_p``, with ``f_p = theta ** (-2 p / rotary_dim)`` or as `scaling` says.

    interleaved: pairs are elements (2 p, 2 p + 1) rather than (p, p + rotary_dim / 2). partial:
    rotary_dim is ``int(head_dim * partial)``. start: the first rotated element. scaling: a
    `LinearScaling`, `DynamicNTKScaling`, `Llama3Scaling`, `YarnScaling` or `LongRopeScaling`, or
    `rope_scaling_from_config(...)`; those that depend on the context's length take the call's
    longest kv_len, as transformers does.

    tables True (default, but not for DynamicNTKScaling): cos and sin are read from float32 tables
    made once on the host from float64 angles; they hold `max_position` positions if given, else at
    least the call's. A longer call than `max_position` raises `InputError`; a position past the
    tables, by an explicit q_offset, gives NaN, never a wrong angle. A query before the first key
    (position -p) is turned back, by the angles of position p: ``p <= positions - 1`` as well. The
    tables are the params ``cos`` and ``sin``, so that a call may give its own: ``[positions,
    rotary_dim / 2]``. tables False: angles are computed in the kernel, with no limit of positions
    on either side, from the param ``turns``.

    NeoX pairs: Llama, Mistral, Qwen, Gemma, gpt-oss. Interleaved: GPT-J, Cohere, GLM-4, Llama 4,
    DeepSeek. Partial: GPT-NeoX and Pythia (0.25), Phi, StableLM, GLM. Su et al. 2021, RoFormer.

    >>> fa.RoPE(500000.0, scaling=fa.Llama3Scaling()) & fa.Causal()
    """
    chosen = NoScaling() if scaling is None else scaling
    if not theta > 1.0 or not 0.0 < partial <= 1.0 or start < 0:
        raise VariantError(
            "expected theta over 1, partial in (0, 1] and start of 0 or more, got "
            f"theta={theta}, partial={partial}, start={start}"
        )
    if tables is None:
        tables = not isinstance(chosen, DynamicNTKScaling)
    made = made_class("RoPE", _rope, tables, float(theta), scaling, float(partial), max_position)
    if tables:
        return made(interleaved=interleaved, start=start)
    factor = chosen.attention_factor
    return made(attention_factor=factor, interleaved=interleaved, start=start)


def _rope(
    tables: bool,
    theta: float,
    scaling: RopeScaling | None,
    partial: float,
    max_position: int | None,
) -> type[Variant]:
    config = _Config(theta, NoScaling() if scaling is None else scaling, partial, max_position)
    return _table_rope(config) if tables else _computed_rope(config)
