"""Properties of transformers' layer classes, read from their sources."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator


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
        for node in _nodes(layer_class)
    )


@functools.cache
def attends_twice(layer_class: type) -> bool:
    """Whether a class calls its attention function at more than one place."""
    return len(_attention_calls(layer_class)) > 1


@functools.cache
def keywords(layer_class: type) -> frozenset[str]:
    """The keyword arguments that a class passes to its attention function by name."""
    return frozenset(
        keyword.arg
        for call in _attention_calls(layer_class)
        for keyword in call.keywords
        if keyword.arg is not None
    )


@functools.cache
def passes_keywords(layer_class: type) -> bool:
    """Whether a class passes keyword arguments that it does not name on to others."""
    return any(
        isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords)
        for node in _nodes(layer_class)
    )


def _attention_calls(layer_class: type) -> list[ast.Call]:
    return [
        node
        for node in _nodes(layer_class)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attention_interface"
    ]


def _nodes(layer_class: type) -> Iterator[ast.AST]:
    """The nodes of the code that a class runs."""
    for base in _running(layer_class):
        yield from ast.walk(_tree(base) or ast.Module([], []))


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
