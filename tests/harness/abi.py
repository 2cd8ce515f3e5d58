"""The structures of `fajit/abi.h` in ctypes, for tests that call artifacts without the runtime.

An artifact refuses a `fajit_args` of another size, which notices a field that is missing here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

MAX_RANK = 8

_PTR, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class TensorParam(ctypes.Structure):
    """fajit_tensor."""

    _fields_ = (("ptr", _PTR), ("sizes", _I64 * MAX_RANK), ("strides", _I64 * MAX_RANK))

    def describe(self, tensor: torch.Tensor) -> None:
        """Sets address, sizes and strides to those of `tensor`, which the caller keeps alive."""
        self.ptr = tensor.data_ptr() if tensor.numel() else None
        self.sizes[: tensor.ndim], self.strides[: tensor.ndim] = tensor.shape, tensor.stride()


class BlockMask(ctypes.Structure):
    """fajit_block_mask."""

    _fields_ = (("states", _PTR), ("strides", _I64 * 4), ("q_block", _I32), ("kv_block", _I32))


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Args(ctypes.Structure):
    """fajit_args."""

    _fields_ = (
        *_fields(ctypes.c_uint32, "abi_version args_bytes"),
        *_fields(_PTR, "q k v out lse"),
        *_fields(_I64 * 3, "q_stride k_stride v_stride out_stride lse_stride"),
        *_fields(_I32, "num_requests num_q_heads num_kv_heads head_dim head_dim_v flags"),
        ("scale", ctypes.c_float),
        ("num_threads", _I32),
        *_fields(_PTR, "q_len kv_len q_row0 kv_row0 q_offset q_token0 kv_token0"),
        *_fields(_PTR, "tensors scalars"),
        *_fields(_I32, "num_tensors num_scalars"),
        *_fields(_PTR, "work merge_work"),
        *_fields(_I32, "num_work num_merge_work"),
        *_fields(_PTR, "partial_out partial_lse"),
        ("block_mask", BlockMask),
        *_fields(_PTR, "page_indptr page_indices"),
        *_fields(_I32, "page_size num_pages"),
        *_fields(_PTR, "row_request stream"),
        *_fields(_I32, "device max_merge_rows"),
        *_fields(_PTR, "worker_indptr cursors"),
        *_fields(_I32, "num_workers worker"),
        *_fields(_PTR, "row_token merge_sources kv_first key_blocks"),
        *_fields(_I32, "key_block num_key_blocks kv_rows kv_requests"),
    )


class Launch(ctypes.Structure):
    """fajit_launch, whose params begin at its byte 64."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("params_bytes", ctypes.c_uint32),
        ("waits", ctypes.c_uint32),
        ("num_tensor_maps", ctypes.c_uint32),
        ("tensor_maps", ctypes.c_uint32 * 4),
        ("params", ctypes.c_ubyte * 4096),
    )

    @classmethod
    def aligned(cls) -> Launch:
        """A launch at a multiple of 64 bytes, as artifacts expect it."""
        memory = (ctypes.c_ubyte * (ctypes.sizeof(cls) + 63))()
        return cls.from_buffer(memory, -ctypes.addressof(memory) % 64)
