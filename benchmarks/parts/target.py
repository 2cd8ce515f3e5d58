"""One CPU target for this package and its peers, so that any machine can measure the narrower ones.

A library reads its variable once, at its first use, so the process starts anew with them set.
"""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
from pathlib import Path

from flashattn_jit.codegen.spec import host_targets

_LIMITS = {
    # ATen's own kernels, oneDNN and MKL; each name means "nothing wider".
    "cpu:generic": ("default", "SSE41", "SSE4_2"),
    "cpu:avx2": ("avx2", "AVX2", "AVX2"),
    "cpu:avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "cpu:avx512_vnni": ("avx512", "AVX512_CORE_VNNI", "AVX512_E1"),
    "cpu:avx512_fp16": ("avx512", "AVX512_CORE_FP16", "AVX512_E3"),
    "cpu:avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512_E3"),
    "cpu:amx_bf16": ("avx512", "AVX512_CORE_AMX", "AVX512_E4"),
}
TARGETS = tuple(_LIMITS)
_NAMES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def variables(target: str) -> dict[str, str]:
    """The environment variables that hold this package and torch's libraries to `target`.

    FlexAttention's generated code follows ATEN_CPU_CAPABILITY in its vectors; its compiler is
    still given ``-march=native``. On AMD's CPUs MKL ignores its variable and runs its AVX2 code:
    there fp32 matrix products of torch are wider than cpu:generic, and narrower than cpu:avx512.

    Each target has its own cache of compiled FlexAttention: torch 2.13 finds code again that it
    compiled for wider vectors, and the results are wrong.
    """
    limits = dict(zip(_NAMES, _LIMITS[target], strict=True))
    cache = f"torchinductor-{getpass.getuser()}-{target.replace(':', '-')}"
    return {
        "FLASHATTN_JIT_TARGET": target,
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), cache)),
    } | limits


def hold(target: str) -> None:
    """Starts this process anew under `variables(target)`, unless they are set already.

    Ends it with a message if this machine cannot run the target's kernels.
    """
    can_run = host_targets()
    if target not in can_run:
        sys.exit(f"--target {target}: this machine can run {', '.join(can_run)}")
    wanted = variables(target)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
