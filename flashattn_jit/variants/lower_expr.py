"""C++ expressions for single IR operations, shared by the pair and row lowerings."""

from __future__ import annotations

import math

from .ir import Attr, Node

CPP_TYPE = {
    "bool": "bool",
    # 8- and 16-bit integers live in 32-bit registers and are wrapped after arithmetic.
    "uint8": "int32_t",
    "int8": "int32_t",
    "int16": "int32_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float32": "float",
    "float64": "double",
}
"""The C++ type that holds a value of each IR dtype."""

TAG = {
    "bool": "dt::b1",
    "uint8": "dt::u8",
    "int8": "dt::i8",
    "int16": "dt::i16",
    "int32": "dt::i32",
    "int64": "dt::i64",
    "float32": "dt::f32",
    "float64": "dt::f64",
    "float16": "dt::f16",
    "bfloat16": "dt::bf16",
    "float8_e4m3fn": "dt::e4m3",
    "float8_e5m2": "dt::e5m2",
}
"""The tag type of each IR or storage dtype."""

_WRAPPED = {"add", "sub", "mul", "neg", "abs", "shl", "floordiv", "truncdiv", "pow", "not"}
_RENAMED = {"and": "and_", "or": "or_", "xor": "xor_", "not": "not_"}


def literal(value: Attr, dtype: str) -> str:
    """A C++ literal of the IR dtype; floats are exact."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype in ("float32", "float64"):
        number = float(value)  # type: ignore[arg-type]
        suffix = "f" if dtype == "float32" else ""
        if math.isnan(number):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
        if abs(number) < 1e6 and float(repr(number)) == number and len(repr(number)) <= 9:
            return f"{number!r}{suffix}"
        return f"{number.hex()}{suffix}"
    number = int(value)  # type: ignore[arg-type]
    if dtype == "int64":
        low = -(2**63)
        return "INT64_MIN" if number == low else f"INT64_C({number})"
    return "INT32_MIN" if number == -(2**31) else f"int32_t({number})"


def map_op(node: Node, args: list[str], arg_dtypes: list[str]) -> str:
    """The C++ expression of an elementwise operation on named values."""
    if node.op == "cast":
        return f"ops::cast<{TAG[arg_dtypes[0]]}, {TAG[node.dtype]}>({args[0]})"
    call = f"ops::{_RENAMED.get(node.op, node.op)}({', '.join(args)})"
    if node.dtype in ("uint8", "int8", "int16") and node.op in _WRAPPED:
        return f"ops::wrap<{TAG[node.dtype]}>({call})"
    return call
