"""The tables of operations in docs/variants.md: what works traces, what it replaces does not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.ir.ir import HOOK_INPUTS
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.trace.operations import ELEMENTWISE
from flashattn_jit.variants.trace.tracer import LONG_VECTOR, SCORE_VECTOR, SMALL_VECTOR
from flashattn_jit.variants.trace.values import HANDLERS
from flashattn_jit.variants.variant import variant

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "variants.md").read_text()
DIMS = Dims(2, 3, 3, 5, 7, 16, 16)
SHORT = {"q_idx": "i", "kv_idx": "j", "score": "s"}
SCOPE: dict[str, Any] = {
    "math": math, "torch": torch, "F": F, "table": torch.rand(16, 16), "edges": torch.rand(16),
}  # fmt: skip


def rows() -> Iterator[tuple[str, str, str]]:
    """(hook, what works, what is replaced) of each row."""
    for hook, table in re.findall(r"<!-- operations: (\w+) -->\n\n((?:\|.*\n)+)", PAGE):
        for line in table.splitlines()[2:]:
            left, right = re.split(r"(?<!\\)\|", line)[1:3]
            yield hook, left.replace(r"\|", "|"), right.replace(r"\|", "|")


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def pairs(hook: str, right: str) -> Iterator[tuple[str, str]]:
    """(hook, expression) of what is replaced."""
    for entry in right.split(";"):
        yield from ((hook, code) for code in codes(entry.partition("`: ")[0] + "`"))


WORKS = [(hook, code) for hook, left, _ in rows() for code in codes(left)]
WORKS += [
    (hook, code)
    for hook, _, right in rows()
    for entry in right.split(";")
    for code in codes(entry.partition("`: ")[2])
]
REPLACED = [pair for hook, _, right in rows() for pair in pairs(hook, right)]


def traces(hook: str, expression: str) -> None:
    """Traces a hook that evaluates the expression and returns what it is to change."""
    names = [SHORT.get(name, name) for name in HOOK_INPUTS[hook]]
    vectors = "a, b = table[i], table[j]; " if hook == "score_mod" else ""
    text = f"def made({', '.join(names)}):\n    {vectors}_ = {expression}\n    return {names[0]}\n"
    scope = dict(SCOPE)
    exec(text, scope)
    variant(**{hook: scope["made"]}).bind(DIMS)


@pytest.mark.parametrize(("hook", "code"), WORKS)
def test_what_a_table_names_traces(hook: str, code: str) -> None:
    if not code.isidentifier():
        traces(hook, code)
        return
    assert code in HANDLERS
    owner = "torch" if hasattr(torch, code) else "F"
    x = "s" if code in ELEMENTWISE else "a"
    wrong = []
    for arguments in (x, f"{x}, {x}", f"{x}, {x}, {x}", f"{x}, 0.5, 0.5", f"{x}, 0"):
        try:
            traces(hook, f"{owner}.{code}({arguments})")
            return
        except TraceError as error:
            wrong.append(str(error))
    raise AssertionError(wrong)


@pytest.mark.parametrize(("hook", "code"), REPLACED)
def test_what_is_replaced_does_not(hook: str, code: str) -> None:
    with pytest.raises(TraceError):
        traces(hook, code)


def test_the_functions_of_a_number_are_named() -> None:
    """All of one argument; of several names of a function, the first."""
    first: dict[int, str] = {}
    for name, handler in HANDLERS.items():
        if not name.startswith("_"):
            first.setdefault(id(handler), name)
    named = {code for _, code in WORKS} | {"clone", "neg", "positive", "logical_not", "clamp"}
    missing = []
    for name in first.values():
        if name not in ELEMENTWISE or name in named or not hasattr(torch, name):
            continue
        try:
            traces("score_mod", f"torch.{name}(s)")
        except TraceError:
            continue
        missing.append(name)
    assert not missing


def test_the_lengths_of_vectors_are_those_of_the_tracer() -> None:
    assert f"{SCORE_VECTOR}\nelements in a `score_mod`, {SMALL_VECTOR} in a `mask_mod`" in PAGE
    assert f"{LONG_VECTOR:,} in hooks of rows" in PAGE
