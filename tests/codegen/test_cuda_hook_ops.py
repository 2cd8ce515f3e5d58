"""Every operation of hooks that are rendered for CUDA, against torch.

Each operation runs in the emulator, as a kernel of its own, and compiled for the host, which needs
no CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest
import torch

from flashattn_jit.env import include_dir
from flashattn_jit.variants.ir.ir import Node
from flashattn_jit.variants.lower.expressions import TAG, map_op
from tests.codegen.cuda_unit import Unit, pointers
from tests.codegen.test_hook_ops import CASES, COMPARISONS, COUNT, DIVISIONS, check, inputs
from tests.harness.toolkit import needs_nvcc

_HEAD = """
#include <fajit/abi.h>
#include <fajit/cuda/hooks/hook_ops.h>
using namespace fajit;
struct Operands { const void* a; const void* b; void* out; };
template <class D, class T> FAJIT_FN void keep(void* out, int64_t i, T x) {
  using S = typename ops::storage<D>::type;
  static_cast<S*>(out)[i] = static_cast<S>(x);
}
"""


def _body(op: str, dtype: str, arity: int) -> str:
    """Statements that compute element `i` of the operands `p`."""
    result = "bool" if op in (*COMPARISONS, "isnan", "isinf") else dtype
    node = Node(op, tuple(range(arity)), result)
    load = f"ops::load_scalar<{TAG[dtype]}>"
    return (
        f"fajit_tensor ta{{}}, tb{{}}; ta.ptr = p.a; tb.ptr = p.b; "
        f"const auto a = {load}(ta, i); [[maybe_unused]] const auto b = {load}(tb, i); "
        f"keep<{TAG[result]}>(p.out, i, {map_op(node, ['a', 'b'][:arity], [dtype] * arity)});"
    )


def _kernels() -> str:
    return _HEAD + "\n".join(
        f'extern "C" __global__ void op_{n}(const __grid_constant__ Operands p) '
        f"{{ const int i = blockIdx.x * blockDim.x + threadIdx.x; {_body(*case)} }}"
        for n, case in enumerate(CASES)
    )


def _functions() -> str:
    return _HEAD + "\n".join(
        f'extern "C" void op_{n}(const Operands* operands) {{ const Operands p = *operands; '
        f"for (int i = 0; i < {COUNT}; ++i) {{ {_body(*case)} }} }}"
        for n, case in enumerate(CASES)
    )


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host_ops")
    (folder / "ops.cpp").write_text(_functions())
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    command += [f"-I{include_dir()}", str(folder / "ops.cpp"), "-o", str(folder / "ops.so")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "ops.so"))

    def run(index: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        getattr(library, f"op_{index}")(ctypes.create_string_buffer(pointers(a, b, out)))

    return run


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    unit = Unit(_kernels(), tmp_path_factory.mktemp("device_ops"))

    def run(index: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        tensors = {"a": a, "b": b, "out": out}
        unit.run(f"op_{index}", pointers(a, b, out), tensors, ("out",), threads=COUNT)

    return run


@pytest.fixture(params=["host", pytest.param("emulated", marks=needs_nvcc)])
def run(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(c[:2]) for c in CASES])
def test_matches_torch(run, index):
    op, dtype, arity = CASES[index]
    a, b = inputs(op, dtype)
    if op in ("sin", "cos", "tan"):
        a = torch.where(a.isfinite(), a.clamp(-1e15, 1e15), a)  # beyond 2^50 they are NaN
    check(op, dtype, arity, a, b, lambda out: run(index, a, b, out))


def test_integer_division_by_zero_is_zero_and_never_traps(run):
    least = torch.full((COUNT,), -(2**31)).to(torch.int32)
    for index, (op, dtype, _) in enumerate(CASES):
        if dtype != "int32" or op not in DIVISIONS:
            continue
        out = torch.ones(COUNT, dtype=torch.int32)
        run(index, least, torch.zeros_like(least), out)
        assert (out == 0).all()
        run(index, least, torch.full_like(least, -1), out)
        assert (out == (-(2**31) if op in ("floordiv", "truncdiv") else 0)).all()


@pytest.mark.parametrize("op", DIVISIONS)
def test_wide_integers_divide_exactly(run, op):
    index = CASES.index((op, "int64", 2))
    rng = np.random.default_rng(7)
    shift = rng.integers(0, 63, (2, COUNT))
    a, b = (torch.from_numpy(x) for x in rng.integers(-(2**63), 2**63 - 1, (2, COUNT)) >> shift)
    b[b == 0] = 3
    check(op, "int64", 2, a, b, lambda out: run(index, a, b, out))
