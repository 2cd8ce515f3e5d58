"""ggml, of llama.cpp: its flash_attn_ext on the CPU, through the C interface of its libraries.

q and the result are fp32 there; K and V have the case's dtype. A causal mask is a tensor.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from ctypes import CDLL, POINTER, c_bool, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engines.case import (
    Case,
    Engine,
    Inputs,
    NotAvailable,
    Prepared,
    Source,
    dense,
)
from flashattn_jit.codegen.spec import default_target

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_OVERHEAD_BYTES = 1 << 20
"""Of a graph and its tensors, besides their data."""


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _PoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    )


@cache
def _libraries() -> tuple[CDLL, CDLL]:
    """The base and the CPU library, with the types of the functions that are called."""
    found = importlib.util.find_spec("libggml")
    if found is None or found.origin is None:
        raise NotAvailable("not installed")
    folder = Path(found.origin).parent / "lib64"
    try:
        base = CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        cpu = CDLL(str(folder / "libggml-cpu.so"))
    except OSError as error:
        raise NotAvailable(str(error)) from error
    for library, name, result, *types in (
        (base, "ggml_init", c_void_p, _InitParams),
        (base, "ggml_new_tensor_4d", c_void_p, c_void_p, c_int, *[c_int64] * 4),
        (base, "ggml_get_data", c_void_p, c_void_p),
        (base, "ggml_flash_attn_ext", c_void_p, *[c_void_p] * 5, *[c_float] * 3),
        (base, "ggml_new_graph", c_void_p, c_void_p),
        (base, "ggml_build_forward_expand", None, c_void_p, c_void_p),
        (base, "ggml_threadpool_params_init", None, POINTER(_PoolParams), c_int),
        (cpu, "ggml_threadpool_new", c_void_p, POINTER(_PoolParams)),
        (cpu, "ggml_graph_plan", _Plan, c_void_p, c_int, c_void_p),
        (cpu, "ggml_graph_compute", c_int, c_void_p, POINTER(_Plan)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, types
    cpu.ggml_cpu_init()
    return base, cpu


@cache
def _threads(count: int) -> c_void_p:
    base, cpu = _libraries()
    params = _PoolParams()
    base.ggml_threadpool_params_init(params, count)
    params.poll = 0  # threads that poll for the next graph would slow the engine that runs next
    return c_void_p(cpu.ggml_threadpool_new(params))


def _make(case: Case, inputs: Inputs) -> Mapping[str, Prepared]:
    base, cpu = _libraries()
    batch, q_len, kv_len = len(case.q_lens), case.q_lens[0], case.kv_lens[0]
    q, k, v = (dense(t, batch) for t in (inputs.q.float(), inputs.k, inputs.v))
    given = [q, k, v]
    if case.causal and q_len > 1:
        mask = torch.full((1, 1, q_len, kv_len), float("-inf"), dtype=torch.float16)
        given.append(mask.triu(kv_len - q_len + 1))
    size = sum(t.nbytes for t in (*given, q)) + _OVERHEAD_BYTES
    memory = torch.empty(size, dtype=torch.uint8)
    context = base.ggml_init(_InitParams(size, memory.data_ptr(), False))
    tensors = []
    for tensor in given:
        made = base.ggml_new_tensor_4d(context, _TYPES[tensor.dtype], *reversed(tensor.shape))
        ctypes.memmove(base.ggml_get_data(made), tensor.data_ptr(), tensor.nbytes)
        tensors.append(made)
    if len(tensors) == 3:
        tensors.append(None)
    node = base.ggml_flash_attn_ext(context, *tensors, case.scale, 0.0, 0.0)
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, node)
    count = torch.get_num_threads()
    plan = cpu.ggml_graph_plan(graph, count, _threads(count))
    work = torch.empty(plan.work_size, dtype=torch.uint8)
    plan.work_data = work.data_ptr()
    # The result is [batch, rows, heads, dim], as packed rows are.
    begin = base.ggml_get_data(node) - memory.data_ptr()
    out = memory[begin : begin + q.nbytes].view(torch.float32).view_as(inputs.q)

    def run() -> None:
        status = cpu.ggml_graph_compute(graph, plan)
        assert status == 0, status

    def result() -> Tensor:
        run()
        return out

    return {"ggml": Prepared(run, result, (memory, work))}


def _open() -> Engine:
    _, cpu = _libraries()
    built = "cpu:avx512" if cpu.ggml_cpu_has_avx512() else "cpu:avx2"
    if not default_target().startswith(built) and default_target() != "cpu:amx_bf16":
        raise NotAvailable(f"this build is for {built}, not for {default_target()}")
    return Engine(importlib.metadata.version("libggml-python"), _make)


SOURCE = Source(_open, "pip install --no-deps libggml-python, with --target cpu:avx2")
