"""What a variant's hooks read, for callers that cannot serve every variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .ir import Graph, VariantIR
from .normalizers import Pointwise

_OF_REQUEST = ("kv_len", "q_len", "q_row")


def keys_read_request(variant: VariantIR) -> bool:
    """Whether `key_mod` or `value_mod` reads its request b, or a built-in of any request.

    Keys that several requests share are changed once for all of them, with b the number of the
    group: a result that depends on b would be of no request, and a length or a slot of a number
    that is not b would be that of a group. ``fa.kv_slot(b, kv_idx)`` alone is the same for all
    requests of the group: the key lies in one place, whichever of them asks.
    """
    graphs = (variant.hook(h) for h in ("key_mod", "value_mod"))
    return any(g is not None and _reads_request(g) for g in graphs)


def _reads_request(graph: Graph) -> bool:
    inputs = {i: n.attr("name") for i, n in enumerate(graph.nodes) if n.op == "input"}

    def is_input(i: int, name: str) -> bool:
        while graph.nodes[i].op == "cast" and graph.nodes[i].dtype in ("int32", "int64"):
            (i,) = graph.nodes[i].args
        return inputs.get(i) == name

    def reads(i: int) -> bool:
        node = graph.nodes[i]
        if node.op == "kv_slot":
            return not (is_input(node.args[0], "b") and is_input(node.args[1], "kv_idx"))
        if node.op in _OF_REQUEST:
            return True
        return not is_input(i, "b") and any(is_input(arg, "b") for arg in node.args)

    return is_input(graph.output, "b") or any(reads(i) for i in range(len(graph.nodes)))


def is_pointwise(variant: Any) -> bool:
    """Whether a `Variant` has a pointwise normaliser, and so no lse."""
    parts = getattr(variant, "_parts", None)
    if parts is not None:
        return any(is_pointwise(part) for part in parts)
    return isinstance(variant._normalizer(), Pointwise)


def unscaled_integers(has: Callable[[str], bool], k_dtype: Any, v_dtype: Any) -> str:
    """What is wrong with keys or values of int8 that no hook turns into numbers; empty if nothing.

    Integers of a quantised cache mean nothing without their scale. float8_e4m3fn are numbers as
    they are: with a scale of 1, which is common, there is no hook.

    has: whether the variant has a hook of a name. k_dtype, v_dtype: torch's, or their names.
    """
    for name, dtype, hook in (("k", k_dtype, "key_mod"), ("v", v_dtype, "value_mod")):
        if str(dtype).removeprefix("torch.") == "int8" and not has(hook):
            return (
                f"{name} is int8, but the variant has no {hook}, so that raw integers would be "
                f"taken for {'keys' if name == 'k' else 'values'}; give it one that scales the "
                f"row, such as {hook}=lambda row, b, kv_h, kv_idx: row * scale[kv_h], or convert "
                f"{name} to float32, bfloat16 or float16"
            )
    return ""
