"""The hooks of every case of the registry, bound to a call, and the values of their IR.

test_cpu_hooks.py and test_cuda_hooks.py compile the hooks of all cases as one source, so that the
compiler runs once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashattn_jit.variants.functions import TANH_APPROX_ERROR
from flashattn_jit.variants.ir.ir import VariantIR
from flashattn_jit.variants.lower.hooks import Backend, lower_hooks
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant
from tests.harness.abi import TensorParam
from tests.registry.cases import CASES, Case, Shape
from tests.variants.ir_eval import evaluate

ROW_HOOKS = ("query_mod", "key_mod", "value_mod", "output_mod")
ROW_DIMS = (64, 80, 20)  # whole warps and vectors, a tail, less than a warp
ROW_COUNT = 12
Q_STEP = 9
MAX_TENSORS, MAX_SCALARS = 16, 16

CALL_STRUCT = f"""
struct Call {{
  fajit_tensor tensors[{MAX_TENSORS}];
  uint64_t scalars[{MAX_SCALARS}];
  const int32_t *q_len, *kv_len, *q_offset, *q_token0, *kv_token0;
  const float* in;   // scores, or rows
  float* out;
  uint8_t* mask;
  float* sink;
  int32_t num_requests, num_heads, num_rows, q_step, num_keys, group;
}};
"""


class Call(ctypes.Structure):
    """`CALL_STRUCT`."""

    _fields_ = [
        ("tensors", TensorParam * MAX_TENSORS), ("scalars", ctypes.c_uint64 * MAX_SCALARS),
        *((n, ctypes.c_void_p) for n in ("q_len", "kv_len", "q_offset", "q_token0", "kv_token0")),
        *((n, ctypes.c_void_p) for n in ("in_", "out", "mask", "sink")),
        *((n, ctypes.c_int32) for n in
          ("num_requests", "num_heads", "num_rows", "q_step", "num_keys", "group")),
    ]  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A case bound to the params of a call on a shape."""

    case: Case
    shape: Shape
    ir: VariantIR
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]

    @property
    def id(self) -> str:
        return f"{self.case.name}-{self.shape.head_dim}"

    def value(self, hook: str, inputs, lengths) -> torch.Tensor:
        """The value of the hook's IR on inputs that broadcast."""
        graph = self.ir.hook(hook)
        assert graph is not None

        def builtin(op, args):
            b = args[0].long()
            if op in ("q_len", "kv_len"):
                return lengths[op][b]
            base = lengths["q_token0"][b] - lengths["q_offset"][b]
            return args[1] + (base if op == "q_row" else lengths["kv_token0"][b])

        return evaluate(graph, inputs, self.tensors, self.scalars, builtin)


def build(case: Case, shape: Shape) -> Built:
    """Binds a case to a shape."""
    variant, params = case.build(shape)
    call = as_variant(variant).bind(Dims(*shape), params)
    return Built(case, shape, call.ir, tuple(call.tensors), tuple(call.scalars))


def _has(ir: VariantIR, hooks) -> bool:
    return any(ir.hook(h) is not None for h in hooks)


_BUILT = [build(case, case.shape) for case in CASES]
PAIRED = [x for x in _BUILT if _has(x.ir, ("score_mod", "mask_mod", "pointwise", "sink"))]
ROWS = [
    build(x.case, x.shape._replace(head_dim=d, head_dim_v=d))
    for x in _BUILT
    if _has(x.ir, ROW_HOOKS)
    for d in ROW_DIMS
    if x.case.fits(x.shape._replace(head_dim=d, head_dim_v=d))
]


def unit_source(
    head: str, cases: Sequence[Built], functions: Callable[[int, Built], str], backend: Backend
) -> str:
    """One source with the hooks and `functions` of all cases, case n in namespace case_n."""
    parts = [head]
    for number, built in enumerate(cases):
        hooks = lower_hooks(built.ir, built.case.name, backend)
        parts.append(f"namespace fajit::case_{number} {{\n{hooks}}}\n{functions(number, built)}")
    return "\n".join(parts)


def lengths_of(shape: Shape) -> dict[str, torch.Tensor]:
    """Lengths and packed positions that differ between requests."""
    b = torch.arange(shape.batch, dtype=torch.int32)
    return {
        "q_len": shape.q_len - 3 * b, "kv_len": shape.kv_len - 5 * b,
        "q_offset": torch.zeros_like(b), "q_token0": b * shape.q_len,
        "kv_token0": b * shape.kv_len,
    }  # fmt: skip


def call_of(built: Built, lengths, **fields) -> tuple[Call, dict[str, torch.Tensor]]:
    """The `Call` of a compiled case, and the tensors that it points to."""
    call = Call(
        num_requests=built.shape.batch, **{k: v for k, v in fields.items() if type(v) is int}
    )
    memory = {**lengths, **{k: v for k, v in fields.items() if type(v) is not int}}
    for name, t in memory.items():
        setattr(call, name, t.data_ptr())
    for i, t in enumerate(built.tensors):
        memory[f"param{i}"] = t
        call.tensors[i].describe(t)
    for i, (param, value) in enumerate(zip(built.ir.scalars, built.scalars, strict=True)):
        kind = ctypes.c_int64 if param.dtype == "int64" else ctypes.c_double
        call.scalars[i] = ctypes.c_uint64.from_buffer_copy(
            kind(int(value) if param.dtype == "int64" else value)
        ).value
    return call, memory


class Pairs:
    """Random scores of a case, [batch, heads, every Q_STEP-th row, keys], and its results."""

    def __init__(self, built: Built, seed: int) -> None:
        shape = built.shape
        self.built, self.lengths = built, lengths_of(shape)
        self.rows = -(-shape.q_len // Q_STEP)
        size = self.size = (shape.batch, shape.num_q_heads, self.rows, shape.kv_len)
        self.scores = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
        # Values that no kernel writes: elements that were not written differ.
        self.out, self.sink = torch.full(size, -77.0), torch.full(size[:3], -77.0)
        self.mask = torch.full(size, 7, dtype=torch.uint8)
        self.call, self.memory = call_of(
            built, self.lengths, in_=self.scores, out=self.out, mask=self.mask, sink=self.sink,
            q_step=Q_STEP, num_keys=shape.kv_len, num_heads=shape.num_q_heads, num_rows=self.rows,
            group=shape.num_q_heads // shape.num_kv_heads,
        )  # fmt: skip

    def check(self, atol: float = 3e-6) -> None:
        """Compare what was written with the IR's values."""
        built, size = self.built, self.size

        def index(n: int, dim: int, step: int = 1) -> torch.Tensor:
            view = [1, 1, 1, 1]
            view[dim] = n
            return (torch.arange(n, dtype=torch.int32) * step).view(view)

        inputs = {"b": index(size[0], 0), "h": index(size[1], 1),
                  "q_idx": index(self.rows, 2, Q_STEP), "kv_idx": index(size[3], 3),
                  "score": self.scores}  # fmt: skip

        def value(hook: str, default: torch.Tensor) -> torch.Tensor:
            graph = built.ir.hook(hook)
            return default if graph is None else built.value(hook, inputs, self.lengths)

        inputs["score"] = value("score_mod", self.scores).float()
        expected = value("pointwise", inputs["score"]).float().expand(size)
        approximate = "approximate" in built.case.tags  # whose result is a multiple of tanh_approx
        rtol = 3e-6 + TANH_APPROX_ERROR * approximate
        torch.testing.assert_close(self.out, expected, rtol=rtol, atol=atol, equal_nan=True)
        keep = value("mask_mod", torch.tensor(True)).expand(size)
        assert torch.equal(self.mask, keep.to(torch.uint8))
        total = value("sink", torch.tensor(0.0)) + value("pointwise_scale", torch.tensor(1.0))
        expected = total.float().expand(*size[:3], 1)[..., 0]
        torch.testing.assert_close(self.sink, expected, rtol=3e-6, atol=3e-6)


class Rows:
    """Random rows of a case's row hook, [batch, heads, ROW_COUNT, head_dim], and its results."""

    def __init__(self, built: Built, hook: str, seed: int) -> None:
        shape = built.shape
        self.built, self.hook, self.lengths = built, hook, lengths_of(shape)
        self.of_keys = hook in ("key_mod", "value_mod")
        self.heads = shape.num_kv_heads if self.of_keys else shape.num_q_heads
        self.size = (shape.batch, self.heads, ROW_COUNT, shape.head_dim)
        self.rows = torch.randn(self.size, generator=torch.Generator().manual_seed(seed))
        self.out = torch.full(self.size, -77.0)
        self.call, self.memory = call_of(
            built, self.lengths, in_=self.rows, out=self.out, num_heads=self.heads,
            num_rows=ROW_COUNT,
        )  # fmt: skip

    def check(self) -> None:
        """Compare what was written with the IR's values; lse is 0.25 x position."""
        position = torch.arange(ROW_COUNT, dtype=torch.int32).view(1, 1, -1)
        inputs = {
            "b": torch.arange(self.size[0], dtype=torch.int32).view(-1, 1, 1),
            "kv_h" if self.of_keys else "h": torch.arange(
                self.heads, dtype=torch.int32).view(1, -1, 1),
            "kv_idx" if self.of_keys else "q_idx": position, "row": self.rows,
            "lse": 0.25 * position.float(),
        }  # fmt: skip
        expected = self.built.value(self.hook, inputs, self.lengths)
        if expected.ndim == 3:
            expected = expected[..., None]
        expected = expected.float().expand(self.size)
        torch.testing.assert_close(self.out, expected, rtol=1e-5, atol=1e-5)
