"""Variants as they are named on a command line.

    Causal                              of the library, in any case
    SlidingWindow(4096)                 with arguments: literals and further names of the library
    "Causal & ~Chunked(512)"              composed with & | ~
    attention.py:MyVariant              of a file, which is run
    service.attention:variant           of a module, which is imported

An expression is read, never evaluated: it can name nothing but the library. A file or a module is
code, and runs with this user's rights.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, VariantError

if TYPE_CHECKING:
    from ..variants.variant import Variant

_SOURCE = re.compile(r"(?P<source>[^:]+):(?P<name>[A-Za-z_]\w*)")
_FORMS = (
    "a variant is a name of the library such as Causal or SlidingWindow(4096), file.py:NAME or "
    "module:NAME"
)
_TENSOR = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d, ]*)\]")


def is_file(text: str) -> bool:
    """Whether there is a file of that name; False for what cannot be one's name."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def variant_of(text: str) -> Variant:
    """The variant that `text` names. Raises InputError, and what its code raises."""
    from ..deploy.wanted.structures import parse_variant

    if source := _SOURCE.fullmatch(text.strip()):
        return parse_variant(_attribute(source["source"], source["name"]))
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise InputError(f"variant {text!r} cannot be read: {error.msg}; {_FORMS}") from None
    return parse_variant(_value(tree.body, text))


def param_value(text: str) -> Any:
    """A param's value: a Python literal, ``float32[8,2]`` for a tensor of zeros, else the text.

    Kernels depend on a tensor's dtype and rank, not on its values.
    """
    if found := _TENSOR.fullmatch(text):
        import torch

        dtype = getattr(torch, found["dtype"], None)
        if isinstance(dtype, torch.dtype):
            shape = [int(size) for size in found["shape"].split(",") if size.strip()]
            return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def params_of(variant: Variant, given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Params by name. Raises ParamError for one that the variant does not have."""
    from ..variants.params import unknown_param

    params = dict(given)
    for name in params:
        if name not in variant.param_names:
            raise unknown_param(variant.name, name, variant.param_names)
    return params


def library_variants(incomplete: str = "") -> dict[str, str]:
    """Names of the library that make a variant, sorted, with the first lines of their docs.

    As its source files list them: a shell that completes does not wait for torch.
    """
    folder = Path(__file__).parents[1] / "variants" / "library"
    exported = ast.parse(folder.joinpath("__init__.py").read_bytes()).body
    public = {a.name for node in exported if isinstance(node, ast.ImportFrom) for a in node.names}
    found = {}
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_bytes()).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name not in public:
                continue
            said = node.bases if isinstance(node, ast.ClassDef) else [node.returns]
            if any(isinstance(one, ast.Name) and one.id == "Variant" for one in said):
                found[node.name] = (ast.get_docstring(node) or "").partition("\n")[0]
    return dict(sorted(found.items()))


def _value(node: ast.expr, text: str) -> Any:
    from ..deploy.wanted.structures import parse_variant
    from ..variants.variant import Variant

    def variant(side: ast.expr) -> Variant:
        return parse_variant(_value(side, text))

    match node:
        case ast.Name(name) | ast.Attribute(ast.Name("fa" | "flashattn_jit"), name):
            return _library(name)
        case ast.BinOp(left, ast.BitAnd(), right):
            return variant(left) & variant(right)
        case ast.BinOp(left, ast.BitOr(), right):
            return variant(left) | variant(right)
        case ast.UnaryOp(ast.Invert(), operand):
            return ~variant(operand)
        case ast.Call(called, args, keywords):
            function = _value(called, text)
            if not callable(function) or isinstance(function, Variant):
                raise InputError(f"variant {text!r}: {ast.unparse(called)} takes no arguments")
            named = {k.arg: _value(k.value, text) for k in keywords if k.arg}
            try:
                return function(*(_value(one, text) for one in args), **named)
            except TypeError as error:
                raise InputError(f"variant {text!r}: {error}") from None
    try:
        return ast.literal_eval(node)
    except (ValueError, SyntaxError):
        problem = f"cannot read {ast.unparse(node)!r}; {_FORMS}"
        raise InputError(f"variant {text!r}: {problem}") from None


def _library(name: str) -> Any:
    from ..variants import library

    names = {n.lower(): n for n in library.__all__}
    if name.lower() not in names:
        near = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"; did you mean {names[near[0]]}?" if near else f"; {_FORMS}"
        raise InputError(f"the library has no variant {name!r}{hint}")
    return getattr(library, names[name.lower()])


def _attribute(source: str, name: str) -> Any:
    is_path = source.endswith(".py")
    if is_path and not is_file(source):
        raise InputError(f"there is no file {Path(source).absolute()}")
    try:
        module = _run_file(Path(source).absolute()) if is_path else _import(source)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and source.startswith(error.name):
            raise InputError(
                f"no module named {source!r}; a file is named {source}.py:{name}"
            ) from None
        raise VariantError(f"{_place(error, source)}: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise InputError(f"{source} defines no {name!r}") from None


def _place(error: Exception, source: str) -> str:
    """The file and line of `source` that raised; `source` if it was not compiled."""
    for frame in traceback.extract_tb(error.__traceback__):
        imports = frame.filename.startswith("<frozen importlib") or frame.filename in (
            __file__, importlib.__file__,
        )  # fmt: skip
        if not imports:
            return f"{frame.filename}, line {frame.lineno}"
    return source


def _import(source: str) -> Any:
    # As `python -m` does: a module of the working directory is found.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(source)


def _run_file(path: Path) -> Any:
    # By its own name where that is free, so that what it imports of itself is the same module.
    name = path.stem if path.stem not in sys.modules else f"flashattn_jit_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
