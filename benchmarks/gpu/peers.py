"""The peers of the CUDA kernels: torch's SDPA backends, FlexAttention, FlashInfer."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.machine import Machine
from benchmarks.parts.measure import Run
from benchmarks.parts.peers import compiled_flex, leave_out, missing, that_work


def sdpa_peers(
    machine: Machine, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
) -> dict[str, Run]:
    """torch SDPA's flash (FlashAttention 2) and cuDNN backends."""
    return that_work(
        {
            "flash": _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, is_causal),
            "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, is_causal),
        },
        machine.synchronize,
    )


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Run:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return run


def _compiled(machine: Machine) -> Any:
    """FlexAttention, compiled; in a dry run its eager form, which needs no minute of compiling."""
    return compiled_flex() if machine.full else flex_attention


def flex(machine: Machine, q: Tensor, k: Tensor, v: Tensor, score_mod: Any) -> dict[str, Run]:
    """FlexAttention with a score_mod."""
    run = _compiled(machine)
    return that_work({"flex": lambda: run(q, k, v, score_mod=score_mod)}, machine.synchronize)


def flex_masked(machine: Machine, q: Tensor, k: Tensor, v: Tensor, mask_mod: Any) -> dict[str, Run]:
    """FlexAttention with a mask: the kernel alone, and with the mask's creation, also compiled."""
    run = _compiled(machine)
    make = torch.compile(create_block_mask, dynamic=False) if machine.full else create_block_mask
    length = q.shape[2]

    def fresh() -> Any:
        return make(mask_mod, None, None, length, length, device=machine.device)

    ready: list[Any] = []

    def kept() -> Any:
        if not ready:
            ready.append(fresh())
        return ready[0]

    return that_work(
        {
            "flex": lambda: run(q, k, v, block_mask=kept()),
            "flex + mask": lambda: run(q, k, v, block_mask=fresh()),
        },
        machine.synchronize,
    )


def flashinfer_version() -> str:
    """FlashInfer's version, or an empty text where it cannot be imported."""
    if importlib.util.find_spec("flashinfer") is None:
        missing.setdefault("flashinfer", "not installed")
        return ""
    try:
        return str(importlib.import_module("flashinfer").__version__)
    except Exception as error:  # of any kind: it loads libraries
        leave_out("flashinfer", error)
        return ""


def flashinfer_prefill(
    machine: Machine, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
) -> dict[str, Run]:
    """FlashInfer's kernels on one request, FlashAttention 2's and 3's: q, k, v [1, H, S, D]."""
    if not flashinfer_version():
        return {}
    module = importlib.import_module("flashinfer")
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]

    def run(backend: str) -> Run:
        return lambda: module.single_prefill_with_kv_cache(*rows, causal=is_causal, backend=backend)

    runs = {f"flashinfer {backend}": run(backend) for backend in ("fa2", "fa3")}
    return that_work(runs, machine.synchronize)


def flashinfer_decode(
    machine: Machine, q: Tensor, k_pages: Tensor, v_pages: Tensor, indptr: Tensor, indices: Tensor,
    last: Tensor,
) -> dict[str, Run]:  # fmt: skip
    """FlashInfer's batch decode: q [B, Hq, D], pages [P, page, Hkv, D], int32 on the device."""
    if not flashinfer_version():
        return {}
    module = importlib.import_module("flashinfer")
    groups = q.shape[1] // k_pages.shape[2]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=machine.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=groups >= 4
    )
    try:
        wrapper.plan(
            indptr, indices, last, q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1],
            q_data_type=q.dtype, kv_data_type=k_pages.dtype,
        )  # fmt: skip
    except Exception as error:
        leave_out("flashinfer decode", error)
        return {}
    run = {"flashinfer": lambda: wrapper.run(q, (k_pages, v_pages))}
    return that_work(run, machine.synchronize)
