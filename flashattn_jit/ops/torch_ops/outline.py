"""The outline of a call's arguments: lists of their tensors and numbers, and their structure.

``torch.compile`` runs this code symbolically. An object that existed before tracing is referred to
by its index in `Found.outside`; the paths of a site (`sites`) lead to its tensors and numbers. An
object that the compiled function creates, a closure or a variant, exists only in the compiler: its
parts are read here, and `sites` builds an equal object when the graph runs.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import GradError
from ...variants.params import COMPUTED
from ...variants.variant import Variant
from ..arguments.checks import check_grad

Outline = tuple[Any, ...]
"""A kind and its content: ("tensor" | "float" | "int" | "outside", index), ("constant", x),
("tuple" | "list", outlines), ("named", class, outlines), ("dict", keys, outlines), ("partial",
function, arguments, keywords), ("method", owner, name), ("function", index of its template, cells,
defaults, keyword defaults), ("object", index of its template, names, outlines), ("seen", index of a
function or object in the order of their outlines)."""

_CONSTANTS = (str, bytes, type(None), type(Ellipsis), enum.Enum, torch.dtype, torch.device,
              torch.layout)  # fmt: skip
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
"""Types that become a plain dict: a hook reads the same entries from it, or gets a KeyError."""


class Found:
    """Values that outlines refer to by index, and the names of methods in them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.floats: list[Any] = []
        self.ints: list[Any] = []
        self.outside: list[Any] = []
        self.names: list[str] = []
        self.seen: list[Any] = []
        self.problem = ""


class _Templates:
    """Functions with empty cells and objects without attributes, by name.

    Traced code reads them as attributes, and reaches a closure's globals or an object's class
    through them.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[object, int], str] = {}

    def of_function(self, code: types.CodeType, scope: dict[str, Any]) -> str:
        """The name of the template of functions with this code."""
        key = (code, id(scope))
        if key not in self._names:
            cells = tuple(types.CellType() for _ in code.co_freevars)
            made = types.FunctionType(code, scope, code.co_name, None, cells)
            self._names[key] = self.hold("function", made)
        return self._names[key]

    def of_object(self, kind: type) -> str:
        """The name of the template of instances of a class."""
        key = (kind, 0)
        if key not in self._names:
            make: Any = kind.__new__ if issubclass(kind, Variant) else object.__new__
            made = make(kind)
            for own in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
                if not hasattr(made, own.name):
                    object.__setattr__(made, own.name, None)  # Dynamo hashes frozen ones
            self._names[key] = self.hold("object", made)
        return self._names[key]

    def hold(self, kind: str, held: object) -> str:
        """Store an object; returns the name of its attribute."""
        name = f"{kind}_{len(self.__dict__)}"
        setattr(self, name, held)
        return name


TEMPLATES = _Templates()


def outline(x: Any, found: Found) -> Outline:
    """The outline of a value; its tensors and numbers are added to `found`."""
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(x)
    if isinstance(x, torch.Tensor):
        found.tensors.append(x)
        return "tensor", len(found.tensors) - 1
    if isinstance(x, np.number):
        x = x.item()
    if isinstance(x, (bool, torch.SymBool)):
        # The branch turns a flag that depends on a shape into a constant, with a guard.
        return ("constant", True) if x else ("constant", False)
    if isinstance(x, _CONSTANTS):
        return "constant", x
    if isinstance(x, (int, torch.SymInt)):
        found.ints.append(x)
        return "int", len(found.ints) - 1
    if isinstance(x, (float, torch.SymFloat)):
        found.floats.append(x)
        return "float", len(found.floats) - 1
    kind = type(x)
    is_named = isinstance(x, tuple) and hasattr(x, "_fields")
    if is_named or kind in (tuple, list, torch.Size) or kind.__module__ == "torch.return_types":
        items = tuple([outline(item, found) for item in x])
        if is_named:
            return "named", kind, items
        return "list" if isinstance(x, list) else "tuple", items
    if kind in _DICTS:
        return "dict", tuple(x), tuple([outline(item, found) for item in x.values()])
    if torch.compiler.is_dynamo_compiling():
        return _compiled_outline(x, found)
    return _outside(x, found)


def _outside(x: Any, found: Found) -> Outline:
    found.outside.append(x)
    return "outside", len(found.outside) - 1


def _compiled_outline(x: Any, found: Found) -> Outline:
    if isinstance(x, functools.partial):
        parts = (x.func, tuple(x.args), dict(x.keywords))
        return "partial", *[outline(part, found) for part in parts]
    if isinstance(x, types.MethodType):
        found.names.append(x.__func__.__name__)
        return "method", outline(x.__self__, found), x.__func__.__name__
    facts, cells, defaults, slots = made_inside(x, found.seen)
    if not facts:
        return _outside(x, found)
    kind, fact = facts
    if kind == "seen":
        return "seen", fact
    if kind == "unknown":
        found.problem = fact
        return "constant", None
    index = len(found.outside)
    found.outside.append(getattr(TEMPLATES, fact))
    if kind == "function":
        return "function", index, *[outline(part, found) for part in (tuple(cells), *defaults)]
    state: dict[str, Any] = dict(x.__dict__) if "__dict__" in slots else {}
    state.update({n: getattr(x, n) for n in slots if n != "__dict__" and hasattr(x, n)})
    for name in COMPUTED:  # a variant computes these again
        state.pop(name, None)
    return "object", index, tuple(state), tuple([outline(v, found) for v in state.values()])


def made_inside(x: Any, seen: list[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Dynamo's description of a function or an object that the compiled function creates.

    Returns facts, cells, defaults, slots. facts: ("seen", index), ("function" | "object", name of
    its template) or ("unknown", reason); empty for an object that existed before tracing. cells,
    defaults: a function's cell contents, and its defaults and keyword defaults. slots: names of an
    object's slots, ``__dict__`` included. seen: objects that have been described before.
    """
    facts: list[Any] = []
    cells: list[Any] = []
    defaults: list[Any] = []
    slots: list[Any] = []
    from torch._dynamo.comptime import comptime

    comptime(_look_inside)
    return facts, cells, defaults, slots


def cell_content(cell: Any) -> Any:
    """The content of a cell. Dynamo cannot read the attribute of one that the compiled function
    closes over too."""
    if not torch.compiler.is_dynamo_compiling():
        return cell.cell_contents
    cells = [cell]
    found: list[Any] = []
    from torch._dynamo.comptime import comptime

    comptime(_look_into_cell)
    return found[0] if found else cells[0].cell_contents


def _look_into_cell(context: Any) -> None:
    from torch._dynamo import variables

    cell = _local(context, "cells").items[0].realize()  # as a local, it would be its content
    if isinstance(cell, variables.CellVariable):
        tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        _local(context, "found").items.append(tracer.output.side_effects.load_cell(cell))


def derivatives(tensors: Sequence[Any], names: Sequence[str]) -> list[str]:
    """The error messages of a call inside of a `torch.func` transform that would drop derivatives.

    Traced code cannot see that a tensor belongs to a transform; Dynamo's example tensors do.
    names: of the tensors, for the messages.
    """
    found: list[str] = []
    from torch._dynamo.comptime import comptime

    comptime(_look_at_tensors)
    return found


def _look_at_tensors(context: Any) -> None:
    from torch._dynamo import variables

    if torch._C._functorch.peek_interpreter_stack() is None:
        return
    traced = [x.realize() for x in _local(context, "tensors").items]
    names = [x.as_python_constant() for x in _local(context, "names").items]
    kept = [(x, name) for x, name in zip(traced, names, strict=True) if x.is_tensor()]
    try:
        check_grad(
            [x.as_proxy().node.meta["example_value"] for x, _ in kept], [name for _, name in kept]
        )
    except GradError as error:
        _local(context, "found").items.append(variables.ConstantVariable.create(str(error)))


def _local(context: Any, name: str) -> Any:
    return context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()


def _look_inside(context: Any) -> None:
    """Fills the lists of `made_inside`. Dynamo runs it, with access to its own variables.

    Traced code cannot read the closure of a function that does not exist yet. Dynamo's `comptime`
    gives access to its variables, which may differ between versions of torch: anything unexpected
    becomes the fact "unknown", and then an error.
    """
    from torch._dynamo import variables

    constant = variables.ConstantVariable.create
    facts = _local(context, "facts").items
    x, seen = _local(context, "x"), _local(context, "seen").items
    try:
        tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        is_object = isinstance(x, variables.UserDefinedObjectVariable)
        before = [i for i, other in enumerate(seen) if other is x]
        if before:
            facts += [constant("seen"), constant(before[0])]
        elif isinstance(x, variables.NestedUserFunctionVariable):
            closure: Any = x.closure
            for cell in () if closure is None else closure.items:
                _local(context, "cells").items.append(tracer.output.side_effects.load_cell(cell))
            for default in (x.defaults, x.kwdefaults):
                _local(context, "defaults").items.append(default or constant(None))
            name = TEMPLATES.of_function(x.get_code(), x.get_globals())
            facts += [constant("function"), constant(name)]
            seen.append(x)
        elif is_object and issubclass(x.python_type(), (tuple, list, dict)):
            if x.source is None or tracer.output.side_effects.is_modified(x):
                raise TypeError("a subclass of a container")
        elif is_object and x.source is None:
            cls = x.python_type()
            _local(context, "slots").items.extend(constant(slot) for slot in _slots(cls))
            name = TEMPLATES.of_object(cls)
            facts += [constant("object"), constant(name)]
            seen.append(x)
    except Exception as error:
        name = getattr(x, "get_name", x.python_type)()
        problem = (
            f"{name} is made or changed inside of the compiled function, where its contents "
            f"cannot be read with this version of torch ({torch.__version__}; "
            f"{type(error).__name__}: {error}); make it outside"
        )
        facts[:] = [constant("unknown"), constant(problem)]


def _slots(cls: type) -> list[str]:
    names = ["__dict__"] if cls.__dictoffset__ else []
    for base in cls.__mro__:
        own = base.__dict__.get("__slots__", ())
        names += [n for n in ((own,) if isinstance(own, str) else own) if not n.startswith("__")]
    return names


class Maker:
    """Builds values from outlines."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        floats: Sequence[float],
        ints: Sequence[int],
        outside: Sequence[Any],
    ) -> None:
        self._made: list[Any] = []
        self._values: dict[str, Sequence[Any]] = {
            "tensor": tensors, "float": floats, "int": ints, "outside": outside, "seen": self._made,
        }  # fmt: skip

    def make(self, outline: Outline) -> Any:
        """The value of an outline."""
        kind, *rest = outline
        if kind in self._values:
            return self._values[kind][rest[0]]
        if kind == "constant":
            return rest[0]
        if kind == "function":
            return self._function(*rest)
        if kind == "object":
            return self._object(*rest)
        if kind == "dict":
            return dict(zip(rest[0], self.all(rest[1]), strict=True))
        if kind == "partial":
            function, args, keywords = self.all(rest)
            return functools.partial(function, *args, **keywords)
        if kind == "method":
            return getattr(self.make(rest[0]), rest[1])
        if kind == "named":
            return rest[0](*self.all(rest[1]))
        return tuple(self.all(rest[0])) if kind == "tuple" else self.all(rest[0])

    def all(self, outlines: Sequence[Outline]) -> list[Any]:
        """The values of outlines, in order."""
        return [self.make(x) for x in outlines]

    def _function(self, index: int, *parts: Outline) -> Any:
        template = self._values["outside"][index]
        code = template.__code__
        cells = tuple(types.CellType() for _ in code.co_freevars)
        new = types.FunctionType(code, template.__globals__, template.__name__, None, cells)
        self._made.append(new)
        contents, new.__defaults__, new.__kwdefaults__ = self.all(parts)
        for cell, content in zip(cells, contents, strict=True):
            cell.cell_contents = content
        return new

    def _object(self, index: int, names: Sequence[str], outlines: Sequence[Outline]) -> Any:
        template = self._values["outside"][index]
        kind: Any = type(template)
        new = kind.__new__(kind) if isinstance(template, Variant) else object.__new__(kind)
        self._made.append(new)
        for name, x in getattr(template, "__dict__", {}).items():
            of_template = isinstance(x, types.MethodType) and x.__self__ is template
            vars(new).setdefault(name, types.MethodType(x.__func__, new) if of_template else x)
        state = dict(zip(names, self.all(outlines), strict=True))
        if isinstance(new, Variant):
            new.__setstate__(state)
        else:
            for name, x in state.items():
                object.__setattr__(new, name, x)  # a class may forbid setattr: frozen dataclasses
        return new
