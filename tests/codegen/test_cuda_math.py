"""Math functions of hooks on CUDA are within 4 ulp for floats of every magnitude.

They are compiled for the host, with exactly rounded functions in place of those of the GPU's
special-function unit. So `tanh_approx` is exact here; its error is that of an instruction, which
the emulator has.
"""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.env import include_dir

COUNT = 200_000
UNARY = {
    "exp": (-104, 89), "exp2": (-140, 128), "expm1": (-20, 89), "log": (0, 10), "log2": (0, 10),
    "log10": (0, 10), "log1p": (-1, 10), "tanh": (-10, 10), "sigmoid": (-90, 20),
    "tanh_approx": (-10, 10),
    "sin": (-2e5, 2e5), "cos": (-2e5, 2e5), "tan": (-2e5, 2e5), "asin": (-1, 1), "acos": (-1, 1),
    "atan": (-5, 5), "sinh": (-89, 89), "cosh": (-89, 89), "erf": (-4, 4),
}  # fmt: skip
BINARY = ("pow", "atan2", "fmod")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("math")
    text = "#include <fajit/cuda/hooks/math.h>\nusing namespace fajit;\n"
    for name in (*UNARY, *BINARY):
        arguments = "x[i], y[i]" if name in BINARY else "x[i]"
        text += (
            f'extern "C" void f_{name}(const float* x, const float* y, float* out, int n) '
            f"{{ for (int i = 0; i < n; ++i) out[i] = math::{name}({arguments}); }}\n"
        )
    (folder / "math.cpp").write_text(text)
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{include_dir()}"]
    command = ["g++", *flags, str(folder / "math.cpp"), "-o", str(folder / "math.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "math.so"))


def assert_close(library, name: str, x: np.ndarray, y: np.ndarray) -> None:
    out = np.empty_like(x)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, y, out)]
    getattr(library, f"f_{name}")(*pointers, len(x))
    function = getattr(torch, name, None) or getattr(fa, name)
    operands = (x, y) if name in BINARY else (x,)
    exact = function(*(torch.from_numpy(a).double() for a in operands)).numpy()
    rounded = exact.astype(np.float32)
    unit = np.spacing(np.maximum(np.abs(rounded), np.float32(2**-126))).astype(np.float64)
    same = (out == rounded) | (np.isnan(out) & np.isnan(rounded))
    flushed = (np.abs(exact) < 2**-126) & (np.abs(out) <= 2**-126)
    errors = np.where(same | flushed, 0, np.abs(out.astype(np.float64) - exact) / unit)
    worst = int(np.nan_to_num(errors, nan=np.inf).argmax())
    assert errors[worst] <= 4, (name, x[worst], y[worst], out[worst], exact[worst])


def any_floats(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 2**32, COUNT, dtype=np.uint64).astype(np.uint32).view(np.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # expected values overflow
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_within_four_ulp(library, name):
    rng = np.random.default_rng(3)
    low, high = UNARY.get(name, (-20, 20))
    x = rng.uniform(low, high, COUNT).astype(np.float32)
    y = rng.uniform(-20, 20, COUNT).astype(np.float32)
    assert_close(library, name, x, y)
    assert_close(library, name, x, np.round(y))
    assert_close(library, name, (x / 100).astype(np.float32), y)
    x = any_floats(rng)
    if name in ("sin", "cos", "tan"):
        x[np.abs(x) >= 2.0**50] = np.inf  # NaN, as for infinity
    assert_close(library, name, x, any_floats(rng))
