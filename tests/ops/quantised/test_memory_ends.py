"""Nothing behind the last code, scale or zero point is read: the next page of memory cannot be."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.rotation import turn
from tests.ops.cases import HOST_TARGETS

TARGETS = turn(32, HOST_TARGETS)

SCRIPT = """
import ctypes, dataclasses, sys
import torch
import flashattn_jit as fa
from tests.batch.batches import indptr

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE, held = 4096, []

def guarded(x):
    if x is None:
        return None
    size = x.numel() * x.element_size()
    room = -(-size // PAGE) * PAGE
    first = libc.mmap(None, room + 2 * PAGE, 3, 0x22, -1, 0)
    for closed in (first, first + PAGE + room):
        assert libc.mprotect(closed, PAGE, 0) == 0
    memory = (ctypes.c_char * size).from_address(first + PAGE + room - size)
    held.append(memory)
    out = torch.frombuffer(memory, dtype=torch.uint8)
    out.copy_(x.contiguous().view(torch.uint8).flatten())
    return out.view(x.dtype).view(x.shape)

F = fa.kv.Format
half, short = torch.float16, torch.bfloat16
formats = [
    F("int8"), F("int4"), F("int4", group=32, zero=True, scale_dtype=half),
    F("nf4", group=32, scale_dtype=short), F("e4m3"),
]
for kv_format in formats:
    for dim, heads, rows in ((64, 3, 1), (128, 8, 4), (96, 1, 6)):
        k, v = (
            dataclasses.replace(x, codes=guarded(x.codes), scales=guarded(x.scales),
                                zeros=guarded(x.zeros))
            for x in (kv_format.quantize(torch.randn(37, heads, dim)) for _ in "kv")
        )
        q = torch.randn(2, heads * rows, dim).bfloat16()
        out = fa.varlen_attention(
            q, k, v, indptr([1, 1]), indptr([20, 17]), fa.Causal(), target=sys.argv[1]
        )
        assert out.isfinite().all()
print("finished")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="flags of mmap as Linux has them")
@pytest.mark.parametrize("target", TARGETS)
def test_memory_behind_the_last_entry_is_not_read(target: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, target], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "finished\n", done.stderr[-2000:]
