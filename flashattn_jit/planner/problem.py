"""A problem: shapes and lengths of one call before planning, and where it lies on the roofline."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.target import DTYPE_BYTES
from .costs import Hardware
from .devices import Device


@dataclass(frozen=True, slots=True)
class Problem:
    """Lengths are per request; a dense batch repeats one. Dtypes are torch's names."""

    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    q_dtype: str
    k_dtype: str
    v_dtype: str

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def packed_rows(self) -> int:
        """The most query rows that share one K and V: q_len x group_size of the longest request."""
        return max(self.q_len, default=0) * self.group_size

    def flops(self, density: float = 1.0) -> float:
        """Multiply-adds of both products, counted as two, over the share of pairs kept."""
        pairs = sum(q * k for q, k in zip(self.q_len, self.kv_len, strict=True))
        return 2.0 * pairs * self.num_q_heads * (self.head_dim + self.head_dim_v) * density

    def bytes(self, density: float = 1.0) -> float:
        """Bytes that must move at least once: q, out, and the keys and values that are read."""
        q_rows, kv_rows = sum(self.q_len), sum(self.kv_len)
        q_item = DTYPE_BYTES[self.q_dtype]
        ends = q_rows * self.num_q_heads * (self.head_dim + self.head_dim_v) * q_item
        row = (
            self.head_dim * DTYPE_BYTES[self.k_dtype] + self.head_dim_v * DTYPE_BYTES[self.v_dtype]
        )
        return ends + kv_rows * self.num_kv_heads * row * density

    def intensity(self) -> float:
        """Operational intensity in FLOP per byte; the mask's density cancels but for q and out."""
        return self.flops() / max(1.0, self.bytes())


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """Where a problem lies: `bound` is ``"compute"`` or ``"memory"``."""

    intensity: float
    ridge: float
    attainable_flops: float
    bound: str


def roofline(problem: Problem, hardware: Hardware | Device, matrix_dtype: str) -> RooflinePoint:
    """The roofline model (Williams et al., 2009) for one problem on one machine."""
    peak = hardware.flops(matrix_dtype)
    ridge = peak / hardware.read_bytes_per_s
    intensity = problem.intensity()
    attainable = min(peak, intensity * hardware.read_bytes_per_s)
    return RooflinePoint(
        intensity, ridge, attainable, "compute" if intensity >= ridge else "memory"
    )
