"""Records the kernel requests of calls, with a cache that compiles nothing.

Every kernel request gets the same artifact, whose kernels do nothing, so that planning goes on as
usual; launches are skipped. The results of the calls are therefore garbage.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashattn_jit import _C, env
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.ops.device import plan_memory
from flashattn_jit.ops.launching import appends, launches, utility
from flashattn_jit.ops.planning import batch_plan

_NOTHING = """
#include <fajit/abi.h>
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
extern "C" const char* fajit_describe(void) {
  return "{\\"abi_version\\": " TEXT(FAJIT_ABI_VERSION) ", \\"key\\": \\"nothing\\"}";
}
extern "C" int fajit_attention(const fajit_args* args) {
  if (args->cursors != nullptr) {  // the work of a list is claimed, as if it were done
    const int32_t* list = args->worker_indptr + args->worker;
    args->cursors[args->worker] = list[1] - list[0];
  }
  return FAJIT_OK;
}
extern "C" int fajit_merge(const fajit_args*) { return FAJIT_OK; }
extern "C" int fajit_classify(const fajit_classify_args* args) {
  uint8_t* state = args->states;
  for (int q = args->q_begin; q < args->q_end; q += args->tile_q) {
    for (int k = args->kv_begin; k < args->kv_end; k += args->tile_kv) {
      *state++ = FAJIT_TILE_PARTIAL;
    }
  }
  return FAJIT_OK;
}
"""


class Asked:
    """The kernel requests of calls, without the smaller tiles that a call falls back to."""

    def __init__(self, module: _C.Module) -> None:
        self._module = module
        self.requests: list[BuildRequest] = []

    @property
    def documents(self) -> list[str]:
        """The documents asked for so far, in order, each once."""
        return list(dict.fromkeys(r.spec for r in self.requests))

    def __call__(self, requests: Sequence[BuildRequest]) -> tuple[int, _C.Module]:
        self.requests.append(requests[0])
        return 0, self._module


def nothing_module(folder: Path) -> _C.Module:
    """A module whose kernels claim their work and do nothing."""
    source, artifact = folder / "nothing.cpp", folder / "nothing.so"
    source.write_text(_NOTHING)
    subprocess.run(
        ["c++", "-std=c++17", "-shared", "-fPIC", "-I", str(env.include_dir()), str(source),
         "-o", str(artifact)],
        check=True,
    )  # fmt: skip
    return _C.Module(str(artifact))


def intercept(patch: pytest.MonkeyPatch, asked: Asked) -> None:
    """Replaces the cache by `asked`, and launches by nothing."""
    for ops in (batch_plan, utility):
        patch.setattr(ops, "load_stepping", asked)
    # Plans and kernels that other tests made would hide requests.
    for known in (launches._launches, launches._kernels, utility._plans):
        known.clear()
    appends._kernel.cache_clear()
    patch.setattr(_C.BatchCall, "launch", lambda *args, **kwargs: None)
    for ops in (plan_memory, utility, appends):
        patch.setattr(ops, "launch", lambda *args: None)
