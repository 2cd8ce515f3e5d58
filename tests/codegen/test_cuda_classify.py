"""The interval form compiled to PTX and run in the emulator gives the states that `_C` gives.

Device code has its own functions for integer division, tensor scans and 64-bit products.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from flashattn_jit.variants.interval.cpp import lower_classify
from tests.codegen.cuda_unit import Unit, nvcc
from tests.harness.abi import TensorParam
from tests.harness.toolkit import needs_nvcc
from tests.variants.interval.bounds_oracle import Mask, read_values, traced
from tests.variants.interval.bounds_random import RandomMask
from tests.variants.interval.test_bounds_lower import (
    SHAPE,
    assert_agree,
    captured_masks,
    random_boxes,
    registry_masks,
)

pytestmark = needs_nvcc

MAX_TENSORS, MAX_SCALARS = 18, 16

_HEAD = f"""
#include <fajit/interval.h>
using namespace fajit;
struct Call {{
  fajit_tensor tensors[{MAX_TENSORS}];
  uint64_t scalars[{MAX_SCALARS}];
  const int32_t* lengths;
  const int64_t* boxes;
  uint8_t* states;
  int32_t num_tensors, num_requests, count;
}};
template <class F>
__device__ __forceinline__ void each_box(const Call& p, F classify) {{
  fajit_args args{{}};
  args.num_tensors = p.num_tensors;
  args.num_requests = p.num_requests;
  args.q_len = p.lengths;
  args.kv_len = p.lengths + p.num_requests;
  args.q_offset = p.lengths + 2 * p.num_requests;
  args.q_token0 = p.lengths + 3 * p.num_requests;
  args.kv_token0 = p.lengths + 4 * p.num_requests;
  const Context c(&args, p.tensors, p.scalars);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const int64_t* x = p.boxes + 8 * i;
  p.states[i] = classify(c, Interval{{x[0], x[1]}}, Interval{{x[2], x[3]}}, Interval{{x[4], x[5]}},
                         Interval{{x[6], x[7]}});
}}
"""


class _Call(ctypes.Structure):
    _fields_ = [
        ("tensors", TensorParam * MAX_TENSORS), ("scalars", ctypes.c_uint64 * MAX_SCALARS),
        ("lengths", ctypes.c_void_p), ("boxes", ctypes.c_void_p), ("states", ctypes.c_void_p),
        ("num_tensors", ctypes.c_int32), ("num_requests", ctypes.c_int32),
        ("count", ctypes.c_int32),
    ]  # fmt: skip


def source(masks: Sequence[Mask]) -> str:
    parts = [_HEAD]
    for i, mask in enumerate(masks):
        parts.append(f"""
struct Mask{i} {{
  FAJIT_FN int operator()(const Context& c, Interval b, Interval h, Interval q, Interval k) const {{
{lower_classify(mask.graph, mask.tensors)}
  }}
}};
extern "C" __global__ void classify_{i}(const __grid_constant__ Call p) {{
  each_box(p, Mask{i}());
}}
""")
    return "\n".join(parts)


class Emulated:
    """The interval forms of several masks as kernels, with the interface of the oracle."""

    def __init__(self, masks: Sequence[Mask], folder: Path) -> None:
        self.unit = Unit(source(masks), folder)

    def states(self, which: int, mask: Mask, boxes: np.ndarray, tables: bool = True) -> np.ndarray:
        """uint8 states of `boxes`, int64 [N, 8]: b, h, q, k as lo, hi."""
        tensors, scalars, lengths, count = read_values(mask, tables)
        corners = torch.from_numpy(np.ascontiguousarray(boxes, np.int64))
        states = torch.zeros(len(boxes), dtype=torch.uint8)
        call = _Call(num_tensors=len(tensors), num_requests=count, count=len(boxes))
        memory = {"lengths": torch.from_numpy(lengths), "boxes": corners, "states": states}
        for name, tensor in memory.items():
            setattr(call, name, tensor.data_ptr())
        for i, t in enumerate(tensors):
            memory[f"param{i}"] = t
            call.tensors[i].describe(t)
        call.scalars[: len(scalars)] = scalars.tolist()
        blocks = (-(-len(boxes) // 64), 1, 1)
        self.unit.run(f"classify_{which}", bytes(call), memory, ("states",), blocks=blocks,
                      threads=64)  # fmt: skip
        return states.numpy()


def test_registry_masks(tmp_path: Path) -> None:
    names, masks = registry_masks()
    emulated = Emulated(masks, tmp_path)
    end = SHAPE.q_len - 1
    tiles = random_boxes(60, ((0, 1, 1), (0, 3, 1), (0, end, 129), (0, end, 129)), 1)
    large = random_boxes(60, ((0, 1, 2), (0, 3, 4), (-40, end, 1500), (0, end, 1500)), 2)
    odd = random_boxes(40, ((0, 1, 1), (0, 3, 1), (-50, 5000, 3000), (0, 5000, 3000)), 3)
    odd[:5, 5] = odd[:5, 4] - 1  # no query
    odd[5:10, 6:8] += 2**31  # beyond any position
    for i, (name, mask) in enumerate(zip(names, masks, strict=True)):
        assert_agree(emulated, i, mask, np.concatenate([tiles, large, odd]), name)


def test_random_masks(tmp_path: Path) -> None:
    seeds = range(70)
    masks = [RandomMask(random.Random(s).randrange, s).finish(2 + s % 3) for s in seeds]
    emulated = Emulated(masks, tmp_path)
    near = random_boxes(60, ((0, 2, 2), (0, 4, 3), (-30, 80, 40), (0, 80, 40)), 4)
    far = random_boxes(30, ((0, 2, 2), (0, 4, 3), (-(2**31), 2**31, 2**31), (0, 2**31, 99)), 5)
    for i, (seed, mask) in enumerate(zip(seeds, masks, strict=True)):
        assert_agree(emulated, i, mask, np.concatenate([near, far]), f"seed {seed}")


def test_captured_tensors(tmp_path: Path) -> None:
    names, functions = zip(*captured_masks(), strict=True)
    masks = [traced(f) for f in functions]
    emulated = Emulated(masks, tmp_path)
    boxes = np.concatenate([
        random_boxes(40, ((0, 1, 1), (0, 3, 1), (0, 1499, 129), (0, 1499, 129)), 5),
        random_boxes(20, ((0, 1, 2), (0, 3, 2), (0, 1499, 1500), (0, 1499, 1500)), 6),
        random_boxes(30, ((0, 1, 1), (0, 3, 1), (0, 1499, 9), (0, 1499, 700)), 7),
    ])  # fmt: skip
    for i, (name, mask) in enumerate(zip(names, masks, strict=True)):
        assert_agree(emulated, i, mask, boxes, name)


def test_it_keeps_to_registers(tmp_path: Path) -> None:
    _, masks = registry_masks()
    (tmp_path / "unit.cu").write_text(source(masks))
    words = nvcc(tmp_path / "unit.cu", "-cubin", "--ptxas-options=-v", "-o", "unit.cubin")
    # The kernel's fajit_args and index arrays are all held in registers.
    assert words.count("0 bytes stack frame, 0 bytes spill stores") == len(masks)
