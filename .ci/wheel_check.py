"""Checks an installed wheel: its folder, a call, a typed error, its one OpenMP runtime."""

from __future__ import annotations

import re
import site
from pathlib import Path

import torch

import flashattn_jit as fa


def mapped(pattern: str) -> set[str]:
    """The files of the process whose path matches."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return {path for path in paths if re.search(pattern, path)}


installed = [Path(folder).resolve() for folder in site.getsitepackages()]
assert any(Path(fa.__file__).is_relative_to(folder) for folder in installed), fa.__file__

torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 300, 64, device="cpu") for _ in range(3))
out = fa.attention(q, k, v, fa.Causal())
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected)

try:
    fa.attention(q, k[:, :3], v[:, :3])
except fa.InputError as error:
    print(error)
else:
    raise AssertionError("3 kv heads for 4 query heads must be refused")

# The process has one OpenMP runtime, torch's file, which the extension and the kernel resolve to.
runtimes = mapped(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")
assert len(runtimes) == 1, runtimes
(runtime,) = runtimes
assert Path(runtime).is_relative_to(Path(torch.__file__).parent.parent), runtime
# There is one pool of threads: kernels run on the threads that torch's operations started.
torch.set_num_threads(4)
for _ in range(3):
    torch.randn(1 << 22, device="cpu").exp_()
started = len(list(Path("/proc/self/task").iterdir()))
torch.testing.assert_close(fa.attention(q, k, v, fa.Causal()), expected)
assert started >= 4, started
assert len(list(Path("/proc/self/task").iterdir())) == started
print(f"torch {torch.__version__}: one OpenMP runtime, {runtime}")
