"""The library's variants as its source files list them: completion imports no torch."""

from __future__ import annotations

import ast
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "variants" / "library"


def variants() -> dict[str, str]:
    """Names of the library that make a variant, sorted, with the first lines of their docs."""
    public = {
        alias.name
        for node in _read(_FOLDER / "__init__.py")
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = {
        node.name: (ast.get_docstring(node) or "").partition("\n")[0]
        for path in _FOLDER.glob("*.py")
        for node in _read(path)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and _makes_a_variant(node)
    }
    return {name: found[name] for name in sorted(found.keys() & public)}


def _read(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_bytes()).body


def _makes_a_variant(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether it is a variant class, or a function that says that it returns a variant."""
    said = node.bases if isinstance(node, ast.ClassDef) else [node.returns]
    return any(isinstance(one, ast.Name) and one.id == "Variant" for one in said)
