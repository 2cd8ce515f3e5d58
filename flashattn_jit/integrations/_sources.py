"""Properties of transformers' layer classes, read from their sources."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap


@functools.cache
def _tree(layer_class: type) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(layer_class)))
    except (OSError, TypeError, SyntaxError):
        return None


@functools.cache
def calls_the_interface(layer_class: type) -> bool:
    """Whether the code that a class runs looks up transformers' attention function."""
    return any(
        isinstance(node, ast.Name) and node.id == "ALL_ATTENTION_FUNCTIONS"
        for base in _running(layer_class)
        for node in ast.walk(_tree(base) or ast.Module([], []))
    )


@functools.cache
def attends_twice(layer_class: type) -> bool:
    """Whether a class calls its attention function at more than one place."""
    calls = [
        node
        for base in _running(layer_class)
        for node in ast.walk(_tree(base) or ast.Module([], []))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attention_interface"
    ]
    return len(calls) > 1


@functools.cache
def keywords(layer_class: type) -> frozenset[str]:
    """The keyword arguments that a class passes to its attention function by name."""
    return frozenset(
        keyword.arg
        for base in _running(layer_class)
        for node in ast.walk(_tree(base) or ast.Module([], []))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attention_interface"
        for keyword in node.keywords
        if keyword.arg is not None
    )


@functools.cache
def passes_keywords(layer_class: type) -> bool:
    """Whether a class passes keyword arguments that it does not name on to others."""
    return any(
        isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords)
        for base in _running(layer_class)
        for node in ast.walk(_tree(base) or ast.Module([], []))
    )


def _running(layer_class: type) -> list[type]:
    """The classes of a layer, in MRO order, whose `forward` runs, and those before them."""
    found = []
    for base in _bases(layer_class):
        found.append(base)
        if "forward" in vars(base) and not _calls_super(base):
            break
    return found


def _calls_super(layer_class: type) -> bool:
    tree = _tree(layer_class)
    return tree is not None and "super().forward" in ast.unparse(tree)


def _bases(layer_class: type) -> list[type]:
    """The classes of a layer without those of torch and the base classes of transformers."""
    return [
        base
        for base in layer_class.__mro__
        if base.__module__.partition(".")[0] not in ("torch", "builtins")
        and (
            not base.__module__.startswith("transformers.")
            or base.__module__.startswith("transformers.models.")
        )
    ]
