"""ONNX Runtime: its GroupQueryAttention operator on the CPU provider.

The operator appends the new keys to the cache itself, in place here: one row a request in decode,
all of K and V in prefill. That is part of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.engines.case import (
    Case,
    Engine,
    Inputs,
    NotAvailable,
    NotSupported,
    Prepared,
    Source,
    dense,
)

_DTYPES = {torch.float32: "FLOAT", torch.float16: "FLOAT16"}


def _model(case: Case, dtype: str) -> bytes:
    """One node; of its 10 inputs the rotary tables are left out."""
    from onnx import TensorProto, helper

    kind, batch, (num_q_heads, num_kv_heads) = (
        getattr(TensorProto, dtype),
        len(case.q_lens),
        case.heads,
    )
    q_len, kv_len, dim = case.q_lens[0], case.kv_lens[0], case.head_dim
    rows = {"query": num_q_heads, "key": num_kv_heads, "value": num_kv_heads}
    caches = ("past_key", "past_value")
    cache = [batch, num_kv_heads, kv_len, dim]
    inputs = [
        *(helper.make_tensor_value_info(n, kind, [batch, q_len, h * dim]) for n, h in rows.items()),
        *(helper.make_tensor_value_info(n, kind, cache) for n in caches),
        helper.make_tensor_value_info("last_key", TensorProto.INT32, [batch]),
        helper.make_tensor_value_info("longest", TensorProto.INT32, []),
    ]
    outputs = [
        helper.make_tensor_value_info("out", kind, [batch, q_len, num_q_heads * dim]),
        *(helper.make_tensor_value_info(f"new_{name}", kind, cache) for name in caches),
    ]
    node = helper.make_node(
        "GroupQueryAttention", [i.name for i in inputs], [o.name for o in outputs],
        domain="com.microsoft", num_heads=num_q_heads, kv_num_heads=num_kv_heads,
    )  # fmt: skip
    model = helper.make_model(
        helper.make_graph([node], "attention", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )
    return bytes(model.SerializeToString())


def _make(case: Case, inputs: Inputs) -> Mapping[str, Prepared]:
    import onnxruntime

    if case.dtype not in _DTYPES:
        raise NotSupported("its CPU provider takes fp32 and fp16 only")
    if not case.causal:
        raise NotSupported("the operator is always causal")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Threads that spin after a call would slow the engine that runs next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        _model(case, _DTYPES[case.dtype]), options, providers=["CPUExecutionProvider"]
    )
    batch, q_len, kv_len = len(case.q_lens), case.q_lens[0], case.kv_lens[0]
    binding, kept = session.io_binding(), []

    def value(array: Any) -> Any:
        kept.append(array)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)

    new = slice(kv_len - q_len, kv_len)
    given = {"query": inputs.q.unflatten(0, (batch, q_len)).flatten(2)}
    for name, rows in (("key", inputs.k), ("value", inputs.v)):
        given[name] = rows.unflatten(0, (batch, kv_len))[:, new].flatten(2).contiguous()
        cache = dense(rows, batch)
        cache[:, :, new] = 0  # which the operator fills
        cache = value(cache.numpy())
        binding.bind_ortvalue_input(f"past_{name}", cache)
        binding.bind_ortvalue_output(f"new_past_{name}", cache)
    given["last_key"] = torch.full((batch,), kv_len - 1, dtype=torch.int32)
    given["longest"] = torch.tensor(kv_len, dtype=torch.int32)
    for name, tensor in given.items():
        binding.bind_ortvalue_input(name, value(tensor.numpy()))
    out = np.empty((sum(case.q_lens), *inputs.q.shape[1:]), inputs.q.numpy().dtype)
    binding.bind_ortvalue_output("out", value(out.reshape(batch, q_len, -1)))

    def run() -> None:
        session.run_with_iobinding(binding)

    def result() -> torch.Tensor:
        run()
        return torch.from_numpy(out)

    return {"onnxruntime": Prepared(run, result, kept)}


def _open() -> Engine:
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as error:
        raise NotAvailable(str(error)) from error
    return Engine(onnxruntime.__version__, _make)


SOURCE = Source(_open, "pip install onnxruntime onnx", held=False)
