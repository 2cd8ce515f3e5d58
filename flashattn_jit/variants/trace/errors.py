"""Errors of tracing, which name the hook, the user's file and line, the source and a remedy."""

from __future__ import annotations

import dis
import linecache
import re
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from flashattn_jit.errors import TraceError

_REMEDIES = {
    ".item()": "keep it a tensor: arithmetic with the 0-dim tensor itself works",
    ".tolist()": "keep it a tensor and index it with constants",
    ".numpy()": "keep it a tensor",
    "float()": "keep it a tensor; math functions have torch forms (`torch.exp`, `torch.sqrt`)",
    "int()": "keep it a tensor: `.int()` or `.long()` converts",
    "index": "index captured tensors, not lists, with `t[q_idx]`; ranges and shapes need constants",
}
_CAPTURED_REMEDIES = {
    ".item()": "use the 0-dim tensor itself, or call it before the hook",
    ".tolist()": "call it before the hook, or index the tensor: `table[0]`; small vectors work too",
    ".numpy()": "call it before the hook, or keep it a tensor",
}
_MEMBERS = (
    "use `torch.isin(j, torch.tensor([1, 2]))` or `(j == 1) | (j == 2)`; for a position in a list, "
    "index a captured tensor: `table[j]`"
)
LOOK_UP_REMEDY = f"{_MEMBERS}, in place of a dict too"
"""What to write in place of ``j in {1, 2}`` and ``table.get(j)``."""

OP_REMEDY = (
    "it has no form inside a kernel; use elementwise operations, or compute the tensor before the "
    "call and capture it"
)
"""What to write in place of a function that has no handler."""

OP_REMEDIES = {
    **dict.fromkeys(
        ("view_as_complex", "view_as_real", "complex", "polar"),
        "kernels compute with real numbers; rotate pairs with fa.rotate(row, cos, sin, "
        "interleaved=True), or compute with row[0::2] and row[1::2]",
    ),
    "data": "use the value itself",
    "var_mean": "use `x.var(-1)` and `x.mean(-1)`",
    "std_mean": "use `x.std(-1)` and `x.mean(-1)`",
}
"""The same by the name of the function."""

_BY_CALL = (
    (r"\bcond\(", "use `torch.where(condition, a, b)`, which computes both branches"),
    (r"\bvmap\(", "a hook computes one pair: call the function itself"),
)
_BY_MESSAGE = (
    ("Dimension out of range", "a value has the dims 0 to `x.ndim - 1`, or -1 for the last"),
    ("multiple times in the list of dims", "give every dim once"),
    ("refer to a single memory location", "clone what is read: `x[1:] += x[:-1].clone()`"),
    ("can't be cast to", "write `x = x / y` in place of `x /= y`, or convert x before"),
)
_BOOL_REMEDIES = (
    (r"\.(index|count|remove)\(", "a search in a list", _MEMBERS),
    (r"\band\b", "`and`", "use `&` (with parentheses around comparisons)"),
    (r"\bor\b", "`or`", "use `|` (with parentheses around comparisons)"),
    (r"\bnot\b", "`not`", "use `~`"),
    (r"[<>]=?[^<>=&|()]+[<>]=?", "a chained comparison", "write `(a <= x) & (x < b)`"),
    (r"\b(min|max)\(", "`min` or `max`", "use torch.minimum, torch.maximum or torch.clamp"),
    (r"\b(if|while|assert)\b", "`if`", "use `torch.where(condition, a, b)`"),
)

_OF_NUMPY = re.compile(r"\b(?:np|numpy)\.(\w+)\(")
_OF_A_FUNCTION = re.compile(r"\w+_mod\([^()|~]*\)")


class Where:
    """Names the variant's hook, and finds the user's line among the frames of a call.

    owner: the name of the variant. codes: the user's code objects. kind, fn: the hook that runs, if
    any. outside: the frame that called it.
    """

    def __init__(
        self,
        owner: str,
        codes: Iterable[types.CodeType],
        kind: str = "",
        fn: Any = None,
        outside: types.FrameType | None = None,
    ) -> None:
        self.owner, self.kind = owner, kind
        self._files = {c.co_filename for c in codes}
        self._outside = outside
        while fn is not None and not hasattr(fn, "__code__"):
            inner = getattr(fn, "func", None) or getattr(fn, "__func__", None)
            if inner is None:
                inner = type(fn).__call__
            if isinstance(inner, types.WrapperDescriptorType):
                break
            fn = inner
        code = getattr(fn, "__code__", None)
        self._hook = code if code is not None and code.co_filename in self._files else None

    def _name(self) -> str:
        parts = self.owner.split(" & ")
        own = [part for part in parts if part.startswith(f"{self.kind}(")]
        if len(own) == 1 and all(_OF_A_FUNCTION.fullmatch(part) for part in parts):
            return own[0]  # of plain functions: score_mod(cap) & mask_mod(causal)
        owner = f"({self.owner})" if " " in self.owner else self.owner
        return f"{owner}.{self.kind}" if owner else self.kind

    def is_users(self, frame: types.FrameType) -> bool:
        """Whether a frame runs the user's code."""
        return frame.f_code.co_filename in self._files

    def _frame(self) -> types.FrameType | None:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outside:
            if self.is_users(frame):
                return frame
            frame = frame.f_back
        return None

    def _line(self) -> tuple[str, int] | None:
        frame = self._frame()
        return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def _text(self, line: tuple[str, int] | None) -> tuple[str, str]:
        """The hook's name with (file, line), and the source of the line."""
        if line is None and self._hook is not None:
            line = self._hook.co_filename, self._hook.co_firstlineno
        if line is None:
            return self._name(), ""
        source = linecache.getline(*line).strip()
        shown = f": `{source}`" if source else ""
        return f"{self._name()} ({line[0]}:{line[1]}{shown})", source

    def error(self, what: str, remedy: str, *, user_frame: bool = True) -> TraceError:
        """The error for an operation that cannot be part of a kernel."""
        text, _ = self._text(self._line() if user_frame else None)
        return TraceError(f"{text}: {what} cannot become a kernel; {remedy}")

    def value_error(self, what: str, captured: bool) -> TraceError:
        """The error for reading the value of a tensor: `if`, `and`, float(), .item().

        captured: the tensor is captured, or computed from captured ones alone.
        """
        text, source = self._text(self._line())
        remedy = _REMEDIES.get(what, "")
        needs = "needs a value that is only known inside the kernel"
        if captured:
            remedy = _CAPTURED_REMEDIES.get(what, remedy)
            needs = "needs the value of a captured tensor, which may be another one in each call"
        if what == "bool" and _is_in(self._frame()):
            what, remedy = "`in` of a tensor", _MEMBERS
        elif what == "bool":
            what, remedy = (
                "the truth of a tensor",
                ("use `&`, `|`, `~` instead of and, or, not, and `torch.where` instead of if"),
            )
            for pattern, name, better in _BOOL_REMEDIES:
                if re.search(pattern, source):
                    what, remedy = f"{name} on tensors", better
                    break
        return TraceError(f"{text}: {what} {needs}; {remedy}")

    def from_exception(self, error: Exception) -> TraceError:
        """The error for an exception that the hook raised."""
        line = None
        tb = error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code.co_filename in self._files:
                line = tb.tb_frame.f_code.co_filename, tb.tb_lineno
            tb = tb.tb_next
        text, source = self._text(line)
        return TraceError(
            f"{text}: {type(error).__name__} while tracing: {error}; {_remedy(error, source)}"
        )


def _is_in(frame: types.FrameType | None) -> bool:
    """Whether the frame's current instruction is ``in`` or ``not in``."""
    if frame is None:
        return False
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["CONTAINS_OP"]


def _remedy(error: Exception, source: str) -> str:
    """What to write in place of a line that raised an exception."""
    if "from_numpy(" in source and "np.ndarray" in str(error):
        return "captured arrays are tensors in hooks: index the array itself, `t[j]`"
    for part, remedy in _BY_MESSAGE:
        if part in str(error):
            return remedy
    for pattern, remedy in _BY_CALL:
        if re.search(pattern, source):
            return remedy
    called = set(_OF_NUMPY.findall(source))
    if called and isinstance(error, TypeError | ValueError):
        names = ", ".join(f"`torch.{name}`" for name in sorted(called) if hasattr(torch, name))
        return f"numpy's functions take no tensors of hooks; write torch's{names and f': {names}'}"
    return "expected a function of 0-dim tensors made of torch operations"
