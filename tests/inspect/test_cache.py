"""`fa.cache_info` and `fa.last_kernel_source`, in new processes."""

from __future__ import annotations

import os

from tests.harness import processes

CODE = """
import torch
import flashattn_jit as fa
print(fa.last_kernel_source())
q = torch.randn(1, 1, 8, 16)
fa.attention(q, q, q, fa.Causal())
print(fa.last_kernel_source())
q = torch.randn(2, 1, 8, 16)
fa.attention(q, q, q, fa.Causal())
print(fa.last_kernel_source())
info = fa.cache_info()
print(info.kernels, info.in_memory, info.disk_hits, info.compiles)
print(info)
"""


def run(cache):
    """What a new process prints, by line."""
    done = processes.run(
        ["-c", CODE], env=os.environ | {"FLASHATTN_JIT_CACHE_DIR": str(cache)}, check=True
    )
    return done.stdout.splitlines()


def test_a_kernel_comes_from_the_compiler_then_from_memory_then_from_disk(tmp_path):
    cache = tmp_path / "cache"
    assert run(cache)[:4] == ["None", "compiler", "memory", "1 1 0 1"]
    again = run(cache)
    assert again[:4] == ["None", "disk", "memory", "1 1 1 0"]
    assert again[4].startswith(f"{cache}: 1 kernels, ")


def test_an_empty_cache_is_not_created(tmp_path, monkeypatch):
    import flashattn_jit as fa

    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "nothing"))
    info = fa.cache_info()
    assert (info.kernels, info.bytes) == (0, 0)
    assert not info.directory.exists()
