"""OpenVINO: its ScaledDotProductAttention operation on the CPU plugin.

The operation takes as many kv heads as q heads. In decode the q heads of a kv head are packed as
its rows; prefill with grouped heads has no such form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.case import (
    Case,
    Engine,
    Inputs,
    NotAvailable,
    NotSupported,
    Prepared,
    Source,
    dense,
    packed,
)

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_CAPABILITIES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}


def _make(case: Case, inputs: Inputs) -> Mapping[str, Prepared]:
    import openvino
    from openvino import opset13

    batch, (num_q_heads, num_kv_heads) = len(case.q_lens), case.heads
    decode = case.q_lens[0] == 1
    if num_q_heads != num_kv_heads and not decode:
        raise NotSupported("the operation has no grouped heads")
    q, k, v = (dense(t, batch) for t in (inputs.q, inputs.k, inputs.v))
    if decode:
        q = q.view(batch, num_kv_heads, -1, case.head_dim)
    kind = getattr(openvino.Type, _NAMES[case.dtype])
    nodes = [opset13.parameter(list(t.shape), kind) for t in (q, k, v)]
    node = opset13.scaled_dot_product_attention(*nodes, causal=case.causal and not decode)
    core = openvino.Core()
    # Without fp16 arithmetic it would compute in bf16, less precisely than the tensors are.
    computes = _CAPABILITIES[case.dtype] in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    compiled = core.compile_model(
        openvino.Model([node], nodes, "attention"),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": kind if computes else openvino.Type.f32,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_HYPER_THREADING": True,  # logical cores, as torch counts threads
            "ENABLE_CPU_PINNING": False,  # it would bind the caller's thread, which all engines use
        },
    )
    threads = compiled.get_property("INFERENCE_NUM_THREADS")
    if threads != torch.get_num_threads():
        raise NotSupported(f"it runs on {threads} threads, not on {torch.get_num_threads()}")
    request, out = compiled.create_infer_request(), torch.empty_like(q)
    for i, tensor in enumerate((q, k, v)):
        request.set_input_tensor(i, _shared(openvino, tensor, kind))
    request.set_output_tensor(0, _shared(openvino, out, kind))

    def run() -> None:
        request.infer(share_outputs=True)

    def result() -> Tensor:
        run()
        return packed(out.view(batch, num_q_heads, -1, case.head_dim))

    return {"openvino": Prepared(run, result, (q, k, v, out))}


def _shared(openvino: Any, tensor: Tensor, kind: Any) -> Any:
    """OpenVINO's tensor over torch's memory; numpy has no bf16, so its bits go as integers."""
    array = tensor.view(torch.int16).numpy() if tensor.itemsize == 2 else tensor.numpy()
    return openvino.Tensor(array, openvino.Shape(list(tensor.shape)), kind)


def _open() -> Engine:
    try:
        import openvino
    except ImportError as error:
        raise NotAvailable(str(error)) from error
    return Engine(openvino.__version__.partition("-")[0], _make)


SOURCE = Source(_open, "pip install openvino", held=False)
