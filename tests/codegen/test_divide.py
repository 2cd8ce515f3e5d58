"""Divisors that the host prepares (fajit/divide.h): exact quotients on the host and on devices."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch

from flashattn_jit.env import include_dir
from tests.codegen.cuda_unit import Unit, pointers
from tests.harness.toolkit import needs_nvcc

MOST = 2**31 - 1  # the largest divisor, page size and position

_HOST = """
#include <fajit/divide.h>
#include <initializer_list>
extern "C" int64_t wrong(int32_t count, const int32_t* divisors, int32_t more, const uint32_t* n) {
  int64_t found = 0;
  for (int32_t i = 0; i < count; ++i) {
    const fajit::Divisor divisor(divisors[i]);
    const uint64_t d = divisors[i], last = (uint64_t(1) << 31) / d;
    const auto check = [&](uint64_t n) {
      if (n <= uint64_t(1) << 31) found += divisor.divide(uint32_t(n)) != uint32_t(n / d);
    };
    for (int32_t j = 0; j < more; ++j) check(n[j]);
    // A quotient can only be wrong next to a multiple of the divisor.
    for (const uint64_t q : {uint64_t(1), uint64_t(2), last / 3, last / 2, last - 1, last}) {
      check(q * d - 1);
      check(q * d);
      check(q * d + 1);
    }
  }
  return found;
}
"""

_DEVICE = """
#include <cstdint>
#include <fajit/divide.h>
struct Pointers {
  const fajit::Divisor* divisors;
  const uint32_t* n;
  uint32_t* out;
};
extern "C" __global__ void divide(Pointers p) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  p.out[i] = p.divisors[blockIdx.x].divide(p.n[i]);
}
"""


def divisors(count: int) -> torch.Tensor:
    """The small ones, those next to powers of two, the largest, and `count` others of any size."""
    powers = torch.tensor([2**i + d for i in range(1, 31) for d in (-1, 0, 1)] + [MOST, MOST - 1])
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 32, (count,), generator=generator)
    others = (torch.rand(count, generator=generator, dtype=torch.float64) * 2.0**sizes).long() + 1
    return torch.cat([torch.arange(1, 2 * count), powers, others.clamp(max=MOST)]).int()


def test_quotients_are_exact_for_every_kind_of_divisor(tmp_path: Path) -> None:
    source = tmp_path / "unit.cpp"
    source.write_text(_HOST)
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{include_dir()}", str(source)]
    subprocess.run([*command, "-o", str(tmp_path / "unit.so")], check=True)
    library = ctypes.CDLL(str(tmp_path / "unit.so"))
    library.wrong.restype = ctypes.c_int64
    by, n = divisors(20000), torch.cat([divisors(500), torch.tensor([0, MOST])]).int()
    found = library.wrong(
        len(by), ctypes.c_void_p(by.data_ptr()), len(n), ctypes.c_void_p(n.data_ptr())
    )
    assert found == 0


@needs_nvcc
def test_devices_compute_the_same_quotients(tmp_path: Path) -> None:
    by = divisors(100)
    size = torch.where(by > 1, (by.double() - 0.5).log2().ceil().long(), 0)
    shift = (size - 1).clamp(min=0)
    magic = torch.where(by > 1, ((1 << (32 + shift)) + by - 1) // by, 0)
    packed = torch.stack([by.long(), magic, shift], 1).to(torch.uint32)
    q = MOST // by.long()
    n = torch.stack([0 * q, q * by - 1, q * by, q // 2 * by, q // 2 * by + by - 1, 0 * q + MOST], 1)
    n = torch.cat([n, torch.randint(0, MOST, (len(by), 26))], 1).clamp(0, MOST).contiguous()
    inputs, out = n.to(torch.uint32), torch.zeros(n.shape, dtype=torch.uint32)
    Unit(_DEVICE, tmp_path).run(
        "divide", pointers(packed, inputs, out), {"by": packed, "n": inputs, "out": out}, ("out",),
        blocks=(len(by), 1, 1),
    )  # fmt: skip
    assert torch.equal(out.long(), n // by.long()[:, None])
