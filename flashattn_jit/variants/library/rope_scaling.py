"""Frequencies of rotary embeddings: plain, and scaled for longer contexts than trained for.

Each scaling is a frozen value with the same three members: `inv_freq` (radians per position of
every rotated pair), `attention_factor` (multiplies cos and sin) and `effective_length` (one length
for all that have the same frequencies, so that they share tables). Everything is computed in
float64 on the host; the formulas are those of the papers and of `ROPE_INIT_FUNCTIONS` in Hugging
Face transformers, which computes them in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flashattn_jit.errors import VariantError

Frequencies = npt.NDArray[np.float64]


def base_inv_freq(dim: int, theta: float) -> Frequencies:
    """The unscaled frequencies ``theta ** (-2 i / dim)``: float64 ``[dim // 2]``.

    Su et al. 2021, RoFormer, section 3.2.2.
    """
    return np.asarray(float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim))


class RopeScaling(Protocol):
    """The interface of scalings for `RoPE`. Instances are hashable values."""

    __slots__ = ()

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin, so its square multiplies the rotated part of every score."""
        return 1.0

    def effective_length(self, length: int) -> int:
        """One length for all that have the frequencies of `length`, itself one of them; 0 where all
        lengths have the same frequencies."""
        return 0

    def inv_freq(self, dim: int, theta: float, length: int) -> Frequencies:
        """Radians per position, float64 ``[dim // 2]``, for a context of `length` positions."""


@dataclass(frozen=True, slots=True)
class NoScaling(RopeScaling):
    """The frequencies as trained: ``theta ** (-2 i / dim)``. Llama 2, Mistral, Qwen, Gemma."""

    def inv_freq(self, dim: int, theta: float, length: int) -> Frequencies:
        """``theta ** (-2 i / dim)``."""
        return base_inv_freq(dim, theta)


@dataclass(frozen=True, slots=True)
class LinearScaling(RopeScaling):
    """Position interpolation: every frequency divided by `factor`.

    Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation". Gemma 3 (global layers, factor 8), Vicuna 16k, DeepSeek-Coder.
    """

    factor: float

    def inv_freq(self, dim: int, theta: float, length: int) -> Frequencies:
        """``theta ** (-2 i / dim) / factor``."""
        return base_inv_freq(dim, theta) / self.factor


@dataclass(frozen=True, slots=True)
class DynamicNTKScaling(RopeScaling):
    """NTK-aware scaling whose base grows with the context: with L the context's length and L0 the
    trained one, ``theta' = theta * (factor * L / L0 - (factor - 1)) ** (dim / (dim - 2))`` where
    L > L0, and theta as trained below.

    Published by "emozilla" as Dynamic NTK scaling (2023). InternLM 2, Qwen 1 (own form), Nomic.
    """

    factor: float
    original_max_position: int

    def effective_length(self, length: int) -> int:
        """Every length beyond the trained one has its own frequencies."""
        return max(length, self.original_max_position)

    def inv_freq(self, dim: int, theta: float, length: int) -> Frequencies:
        """``theta' ** (-2 i / dim)``; `dim` must be over 2."""
        if dim <= 2:
            raise VariantError(f"DynamicNTKScaling needs a rotary dim over 2, got {dim}")
        stretch = self.effective_length(length) / self.original_max_position
        growth = self.factor * stretch - (self.factor - 1.0)
        return base_inv_freq(dim, theta * growth ** (dim / (dim - 2)))


@dataclass(frozen=True, slots=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's scaling by wavelength: with ``w = 2 pi / f``, L0 the trained length, and
    ``s = (L0 / w - low) / (high - low)``: f where ``w < L0 / high``, f / factor where
    ``w > L0 / low``, else ``(1 - s) f / factor + s f``.

    Llama 3.1, 3.2 and 3.3 (factor 8 or 32, low 1, high 4, L0 8192); `apply_scaling` of
    meta-llama/llama-models.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inv_freq(self, dim: int, theta: float, length: int) -> Frequencies:
        """The piecewise frequencies of the class's formula."""
        freq = base_inv_freq(dim, theta)
        turns = self.original_max_position * freq / (2.0 * math.pi)  # over the trained length
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return np.asarray((1.0 - smooth) * freq / self.factor + smooth * freq)


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class YarnScaling(RopeScaling):
    """YaRN: between dims ``low`` and ``high``, a ramp from the trained frequency to the
    interpolated one: ``f_i' = (1 - r_i) f_i + r_i f_i / factor``, ``r_i = clip((i - low) /
    (high - low), 0, 1)``; low and high are where a pair makes `beta_fast` and `beta_slow` turns
    over the trained length, ``dim ln(L0 / (2 pi beta)) / (2 ln theta)``, rounded outwards if
    `truncate`. cos and sin are multiplied by `attention` if given, else by ``m(mscale) /
    m(mscale_all_dim)`` when both are given and non-zero, else by ``m(1)``, ``m(x) = 0.1 x
    ln(factor) + 1``.

    Peng et al. 2023, "YaRN", section 3. Qwen 2.5 long, gpt-oss (factor 32, truncate False),
    DeepSeek V2, V3 and Kimi K2 (which also multiply the softmax scale by m(mscale_all_dim)
    squared: pass `scale`).
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention: float | None = None
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by; see the class."""
        if self.attention is not None:
            return self.attention
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return _yarn_mscale(self.factor)

    def inv_freq(self, dim: int, theta: float, length: int) -> Frequencies:
        """The ramped frequencies of the class's formula."""

        def turning_dim(turns: float) -> float:
            per_turn = self.original_max_position / (turns * 2.0 * math.pi)
            return dim * math.log(per_turn) / (2.0 * math.log(theta))

        low, high = turning_dim(self.beta_fast), turning_dim(self.beta_slow)
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, dim - 1.0)
        if low == high:
            high += 0.001  # as transformers does: a step, not a division by zero
        ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
        freq = base_inv_freq(dim, theta)
        return np.asarray((1.0 - ramp) * freq + ramp * freq / self.factor)


@dataclass(frozen=True, slots=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE: ``f_i / short_factor[i]`` for contexts up to the trained length L0, and
    ``f_i / long_factor[i]`` beyond it. cos and sin are multiplied by `attention` if given, else by
    ``sqrt(1 + ln(factor) / ln(L0))``, `factor` being the longest context over L0 (1 if under 1).

    Ding et al. 2024, "LongRoPE". Phi-3, 3.5 and 4-mini, PhiMoE, MiniCPM 4. A call's whole context
    takes one list: the long one once its kv_len is over L0.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    factor: float = 1.0
    attention: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "short_factor", tuple(float(f) for f in self.short_factor))
        object.__setattr__(self, "long_factor", tuple(float(f) for f in self.long_factor))

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by; see the class."""
        if self.attention is not None:
            return self.attention
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_position))

    def effective_length(self, length: int) -> int:
        """L0 for every length up to it, L0 + 1 for every longer one."""
        return min(max(length, self.original_max_position), self.original_max_position + 1)

    def inv_freq(self, dim: int, theta: float, length: int) -> Frequencies:
        """The frequencies over the factors of the list that `length` selects."""
        beyond = length > self.original_max_position
        factors = np.array(self.long_factor if beyond else self.short_factor, dtype=np.float64)
        if factors.shape != (dim // 2,):
            name = "long_factor" if beyond else "short_factor"
            raise VariantError(
                f"LongRopeScaling.{name} needs one factor for each of the {dim // 2} rotated "
                f"pairs, got {len(factors)}"
            )
        return np.asarray(base_inv_freq(dim, theta) / factors)


def rope_scaling_from_config(
    config: Any, max_position_embeddings: int | None = None
) -> RopeScaling:
    """The scaling that a Hugging Face config names.

    config: a config of transformers, its dict (of ``config.json``), or its ``rope_parameters`` (or
    ``rope_scaling``): a mapping whose ``rope_type`` (or ``type``) is default, linear, dynamic,
    llama3, yarn or longrope; the other entries are the config's own. max_position_embeddings: the
    config's by default; it is to be given with a ``rope_parameters`` that needs it.
    Raises `VariantError` for another type, a missing entry, or parameters for each type of layer.

    >>> rope_scaling_from_config({"rope_type": "linear", "factor": 8.0})
    LinearScaling(factor=8.0)
    >>> fa.RoPE(500000.0, scaling=rope_scaling_from_config(model.config))
    """
    rope_parameters, longest, original = _read_config(config)
    if max_position_embeddings is not None:
        longest = max_position_embeddings
    return _scaling(rope_parameters, longest, original)


_LONGEST, _TRAINED = "max_position_embeddings", "original_max_position_embeddings"
_OF_CONFIG = ("rope_parameters", "rope_scaling")


def _read_config(config: Any) -> tuple[Mapping[str, Any], int | None, int | None]:
    """The rope_parameters of a config, and its lengths: the longest and the trained one."""
    if isinstance(config, Mapping):
        config = config.get("text_config", config)  # of a model of images and text
        read, in_config = config.get, [name for name in _OF_CONFIG if name in config]
    else:
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        read = partial(getattr, config)
        in_config = [name for name in _OF_CONFIG if hasattr(config, name)]
    found: Any = config
    if in_config:
        found = next((x for name in in_config if (x := read(name, None)) is not None), {})
    if not isinstance(found, Mapping):
        raise VariantError(
            "expected a config of transformers, its dict, or its rope_parameters, got "
            f"{type(config).__name__} without a mapping as its rope_parameters or rope_scaling"
        )
    if found and all(isinstance(x, Mapping) for x in found.values()):
        raise VariantError(
            f"rope_parameters has an entry for each type of layer, {', '.join(found)}; pass one of "
            f"them, such as config.rope_parameters[{next(iter(found))!r}], and "
            "max_position_embeddings="
        )
    return found, read(_LONGEST, None), read(_TRAINED, None)


def _scaling(
    rope_parameters: Mapping[str, Any], longest: int | None, trained: int | None
) -> RopeScaling:
    kind = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    given = {k: v for k, v in rope_parameters.items() if v is not None}
    for name, length in ((_LONGEST, longest), (_TRAINED, trained)):
        if length is not None:
            given.setdefault(name, length)

    def original() -> int:
        return int(given[_TRAINED if _TRAINED in given else _LONGEST])

    def factor() -> float:
        if "factor" in given:
            return float(given["factor"])
        return float(given[_LONGEST] / original())

    try:
        if kind == "default":
            return NoScaling()
        if kind == "linear":
            return LinearScaling(float(given["factor"]))
        if kind == "dynamic":
            return DynamicNTKScaling(float(given["factor"]), original())
        if kind == "llama3":
            return Llama3Scaling(
                float(given["factor"]),
                float(given["low_freq_factor"]),
                float(given["high_freq_factor"]),
                int(given[_TRAINED]),
            )
        if kind == "yarn":
            return YarnScaling(
                factor(),
                original(),
                float(given.get("beta_fast", 32.0)),
                float(given.get("beta_slow", 1.0)),
                given.get("mscale"),
                given.get("mscale_all_dim"),
                given.get("attention_factor"),
                bool(given.get("truncate", True)),
            )
        if kind == "longrope":
            return LongRopeScaling(
                tuple(given["short_factor"]),
                tuple(given["long_factor"]),
                original(),
                factor(),
                given.get("attention_factor"),
            )
    except KeyError as missing:
        name = missing.args[0]
        remedy = "; pass the whole config, or max_position_embeddings=" if name == _LONGEST else ""
        raise VariantError(
            f"rope_parameters of type {kind!r} need the entry {name!r}, got {sorted(given)}{remedy}"
        ) from None
    raise VariantError(
        f"rope_type is {kind!r}; known: default, linear, dynamic, llama3, yarn, longrope"
    )
