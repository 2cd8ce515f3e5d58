"""After warming every kind of call runs with compiling forbidden and no compiler installed."""

from __future__ import annotations

import os
from pathlib import Path

import flashattn_jit as fa
from tests.harness import processes, rotation
from tests.planner.calls import BATCHED

_ROOT = Path(__file__).resolve().parents[2]

CALLS = """
import sys, torch
import flashattn_jit as fa
from tests.planner.calls import Calls
from tests.planner.test_reachable_never import keep

calls = Calls(fa.Causal(), (16, 16), torch.float32)
for name in sys.argv[1:]:
    getattr(calls, name)()
calls.flex(None, keep)
info = fa.cache_info()
print(info.compiles, info.misses)
try:
    fa.attention(*calls.qkv(1), fa.SlidingWindow(3))
except fa.MissingKernelError as error:
    print(error.target)
"""


def keep(b, h, q_idx, kv_idx):
    """A mask of flex_attention."""
    return (q_idx >= kv_idx) | (kv_idx < 4)


def test_nothing_is_missed_after_warming(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXXFLAGS", "")
    options = {"head_dims": 16, "dtypes": "fp32", "targets": "host", "progress": False}
    formats = rotation.chosen(BATCHED, 3)
    fa.warm(fa.Causal(), **options, formats=None if rotation.takes_all() else formats)
    fa.warm(fa.variant(mask_mod=keep), **options, formats=("block_mask", "max_scores"))
    (tmp_path / "bin").mkdir()
    clean = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC", "FLASHATTN_JIT_CXX")}
    done = processes.run(
        ["-c", CALLS, *formats],
        cwd=_ROOT,
        env={**clean, "FLASHATTN_JIT_COMPILE": "never", "PATH": str(tmp_path / "bin")},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    counts, missed = done.stdout.strip().splitlines()
    assert counts == "0 0" and missed.startswith("cpu:")
