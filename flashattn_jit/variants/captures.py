"""What a hook captures, and a fast way to read it again on every call.

A hook may reach tensors and numbers through closure cells, defaults, globals, partial arguments,
attributes of captured objects, modules and classes, helper functions, tuples, lists and dicts.
`Walk` visits all of them once and writes a Python function, the *extractor*, which repeats the
visit in well under a microsecond a location: it checks by identity what must not have changed
(code objects, types, modules) and returns

* a structural key: dtype, rank and stride pattern of each tensor, and the value of what cannot be
  a runtime param (booleans, strings, None, enums),
* the tensors, and
* the Python numbers.

Values are read through their location each time, so that a changed global, default, attribute or
cell is never stale. `Walk.build` makes the same hook with other values at these locations.
"""

from __future__ import annotations

import builtins
import copy
import dis
import enum
import functools
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from flashattn_jit.errors import ParamError, TraceError
from flashattn_jit.variants import captures_objects
from flashattn_jit.variants.captures_objects import Build, Values, is_opaque_module
from flashattn_jit.variants.readable import PLAIN, refuse_unreadable
from flashattn_jit.variants.trace_values import STAND_INS

MAX_LOCATIONS = 256
"""How many locations one hook may capture: past that it holds data, not parameters."""

_CONSTANTS = (bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
              torch.memory_format, complex, type(Ellipsis), slice, torch.Size, range, set,
              frozenset)  # fmt: skip
_LOST = (AttributeError, LookupError, TypeError, ValueError)

Extracted = tuple[Any, tuple[torch.Tensor, ...], tuple[float, ...]]
Extractor = Callable[[object, Sequence[object]], Extracted | None]


def stride_pattern(t: torch.Tensor) -> str:
    """Per dim ``0`` (broadcast), ``1`` (dense) or ``n``; dims of one element count as dense."""
    last = t.dim() - 1
    inner_dense = last >= 0 and (t.size(last) <= 1 or t.stride(last) == 1)
    out = ["1" if d == last else "n" for d in range(last + 1)]
    for d, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if size > 1:
            out[d] = "0" if stride == 0 else "n"
            if stride == 1 and (d == last or not inner_dense):
                out[d] = "1"
    return "".join(out)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that `code` and the functions inside it load as globals, and any other names."""
    loaded, every = set(), set(code.co_names)
    for ins in dis.get_instructions(code):
        if ins.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(ins.argval)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = _names(const)
            loaded |= inner[0]
            every |= inner[1]
        elif isinstance(const, str) and const.isidentifier():
            every.add(const)  # getattr(config, "window"), vars(config)["window"]
    return frozenset(loaded), frozenset(every)


_EXTRACTOR_SCOPE = {
    "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "pattern": stride_pattern,
    "strided": torch.strided, "LOST": _LOST,
}  # fmt: skip


class Walk:
    """One visit of everything that `root` captures.

    root: the object to visit, `names`: attributes of objects that are always visited,
    params: for an object of the tree by id, its attributes that are read from the second argument
    of the extractor, as attribute -> (index, name).
    """

    def __init__(
        self,
        root: object,
        names: frozenset[str] = frozenset(),
        params: dict[int, dict[str, tuple[int, str, object]]] | None = None,
    ) -> None:
        self.root = root
        self.params = params or {}
        self.names = names
        while True:
            self._reset()
            before = self.names
            self._build = self.visit(root, "v", "")
            if self.names == before or not self.saw_objects:
                break
        self.source = self._source()

    def _reset(self) -> None:
        self.tensor_names: list[str] = []
        self.number_names: list[str] = []
        self.const_names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[float] = []
        self.consts: list[object] = []
        self.param_tensors: dict[int, str] = {}  # declared params by the index of their value
        self.param_numbers: dict[int, str] = {}
        self.codes: set[types.CodeType] = set()
        self._lines: list[str] = []
        self._env: dict[str, object] = dict(_EXTRACTOR_SCOPE)
        self._env_ids: dict[int, str] = {}
        self._tensor_vars: list[str] = []
        self._number_vars: list[str] = []
        self._keys: list[str] = []
        self.seen: dict[int, tuple[str, Build]] = {}
        self.alive: list[object] = []
        self._taken: set[str] = set()
        self._count = 0
        self.saw_objects = False
        self.frozen = False

    # --- the generated extractor -------------------------------------------------------------

    def _source(self) -> str:
        def tup(items: list[str]) -> str:
            return f"({', '.join(items)},)" if items else "()"

        key = tup(self._keys)
        result = f"    return {key}, {tup(self._tensor_vars)}, {tup(self._number_vars)}"
        # A location that is gone (an attribute, a key, an item) is another structure too.
        body = "\n".join(f"    {line}" for line in [*self._lines, result])
        return f"def extract(v, p):\n    try:\n{body}\n    except LOST:\n        return None\n"

    def extractor(self) -> Extractor:
        """The function (root, params) -> (key, tensors, numbers), or None: another structure."""
        scope = dict(self._env)
        exec(compile(self.source, "<flashattn_jit captures>", "exec"), scope)
        return scope["extract"]  # type: ignore[return-value]

    def build(self, tensors: Sequence[object], numbers: Sequence[object]) -> Any:
        """A copy of the root that finds `tensors` and `numbers` where it captured its own."""
        return self._build(Values(tensors, numbers))

    # --- helpers -----------------------------------------------------------------------------

    def var(self, expr: str) -> str:
        self._count += 1
        if self._count > 4 * MAX_LOCATIONS:
            raise TraceError(
                f"expected a hook that captures at most {MAX_LOCATIONS} values, this one reaches "
                "more through its containers and objects; capture a tensor instead"
            )
        var = f"x{self._count}"
        self._lines.append(f"    {var} = {expr}")
        return var

    def const(self, value: object) -> str:
        """A name that the extractor finds `value` under."""
        if id(value) not in self._env_ids:
            self._env_ids[id(value)] = f"K{len(self._env_ids)}"
            self.alive.append(value)
            self._env[self._env_ids[id(value)]] = value
        return self._env_ids[id(value)]

    def guard(self, condition: str) -> None:
        self._lines.append(f"    if {condition}: return None")

    def _unique(self, name: str) -> str:
        name = "".join(c if c.isalnum() else "_" for c in name).strip("_") or "value"
        name = f"_{name}" if name[0].isdigit() else name
        candidate, i = name, 1
        while candidate in self._taken:
            i += 1
            candidate = f"{name}_{i}"
        self._taken.add(candidate)
        return candidate

    # --- the visit ---------------------------------------------------------------------------

    def visit(self, value: Any, expr: str, name: str) -> Build:
        """Visit the object that the extractor finds as `expr`; `name` is what its values are."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, self.var(expr), name)
        if type(value) in (int, float) or isinstance(value, np.generic):
            return self._number(value, self.var(expr), name)
        if isinstance(value, np.ndarray):
            return self._array(value, self.var(expr), name)
        if isinstance(value, _CONSTANTS) or hasattr(type(value), "__fajit_constant__"):
            return self._constant(value, self.var(expr), name)
        known = self.seen.get(id(value))
        if known is not None:
            # The same object found twice (a cycle, a shared helper) must stay the same object.
            var = self.var(expr)
            self.guard(f"{var} is not {known[0]}")
            return known[1]
        if isinstance(value, types.FunctionType):
            if name and value.__closure__ is None and is_opaque_module(value.__module__):
                return self._opaque(value, expr)
            return self._function(value, self.var(expr))
        if isinstance(value, functools._lru_cache_wrapper):
            # Called with proxies, the cache would keep them beyond the trace.
            return self.visit(value.__wrapped__, f"({expr}).__wrapped__", name)
        if isinstance(value, types.MethodType):
            return self._method(value, self.var(expr), name)
        if isinstance(value, functools.partial):
            return self._partial(value, self.var(expr), name)
        if isinstance(value, tuple | list):
            return self._sequence(value, self.var(expr), name)
        if isinstance(value, dict):
            return self._dict(value, self.var(expr), name)
        if isinstance(value, types.ModuleType | type):
            module = value.__module__ if isinstance(value, type) else value.__name__
            if is_opaque_module(module):
                return self._opaque(value, expr)
            return captures_objects.visit_namespace(self, value, self.var(expr))
        if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType):
            return self._opaque(value, expr)
        if is_opaque_module(type(value).__module__) and not isinstance(value, torch.nn.Module):
            if isinstance(value, Collection):
                raise TraceError(
                    f"a hook captures {name!r}, a {type(value).__name__}, whose contents cannot be "
                    "followed; use a tuple, a list or a dict"
                )
            if not hasattr(value, "__dict__") and not hasattr(type(value), "__fajit_names__"):
                return self._opaque(value, expr)
        return captures_objects.visit_object(self, value, self.var(expr), name)

    def _tensor(self, value: torch.Tensor, var: str, name: str) -> Build:
        refuse_unreadable(name, value)
        index = len(self.tensors)
        self.tensors.append(value)
        self.tensor_names.append(self._unique(name))
        self._tensor_vars.append(var)
        if type(value) is torch.Tensor:
            self.guard(f"type({var}) is not Tensor")
        elif type(value) in PLAIN:
            self.guard(f"type({var}) is not Parameter")
        else:
            self.guard(f"type({var}) is not {self.const(type(value))}")
        # Of another layout it is refused, by the visit that follows.
        self.guard(f"{var}.layout is not strided or {var}.is_nested")
        self._keys += [
            f"{var}.dtype",
            f"{var}.dim() if {var}.is_contiguous() else pattern({var})",
        ]
        return lambda p: p.tensors[index]

    def _number(self, value: float, var: str, name: str) -> Build:
        self.guard(f"type({var}) is not {self.const(type(value))}")
        if self.frozen:
            return self._constant(value, var, name)
        index = len(self.numbers)
        if isinstance(value, np.generic):
            var = self.var(f"{var}.item()")
            value = value.item()
            if type(value) not in (int, float):
                return self._constant(value, var, name)
        self.numbers.append(value)
        self.number_names.append(self._unique(name))
        self._number_vars.append(var)
        return lambda p: p.numbers[index]

    def _array(self, value: Any, var: str, name: str) -> Build:
        # As a tensor over the same memory, made anew at each call: writes to it are seen.
        self.guard(f"type({var}) is not {self.const(type(value))}")
        try:
            tensor = torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise ParamError(
                f"the variant's array {name!r} cannot be read as a tensor: {error}"
            ) from None
        return self._tensor(tensor, self.var(f"{self.const(torch.from_numpy)}({var})"), name)

    def _constant(self, value: Any, var: str, name: str) -> Build:
        if value is None or value is Ellipsis:
            self.guard(f"{var} is not {value!r}" if value is None else f"{var} is not ...")
        else:
            self.guard(f"type({var}) is not {self.const(type(value))}")
            # A slice is hashable only from Python 3.12 on, a set never.
            form = {slice: "repr({})", set: "frozenset({})"}.get(type(value), "{}")
            self._keys.append(form.format(var))
            self.consts.append(value)
            self.const_names.append(name or "value")
        return lambda p: value

    def _opaque(self, value: object, expr: str) -> Build:
        self.guard(f"({expr}) is not {self.const(value)}")
        return lambda p: value

    def _function(self, fn: types.FunctionType, var: str) -> Build:
        code = fn.__code__
        self.codes.add(code)
        loaded, every = _names(code)
        self.names |= every
        key = id(fn)
        self.alive.append(fn)
        cells: list[Build | None] = []
        globs: dict[str, Build] = {}
        builtin_names: set[str] = set()
        defaults: list[Build] = []
        kwdefaults: dict[str, Build] = {}

        def build(p: Values) -> Any:
            if key in p.made:
                return p.made[key]
            new_cells = tuple(types.CellType() for _ in cells)
            scope = {
                "__builtins__": fn.__globals__.get("__builtins__", builtins),
                "__name__": fn.__globals__.get("__name__"),
            }
            new = types.FunctionType(code, scope, fn.__name__, None, new_cells)
            p.made[key] = new
            for cell, make in zip(new_cells, cells, strict=True):
                if make is not None:
                    cell.cell_contents = make(p)
            scope.update({n: make(p) for n, make in globs.items()})
            scope.update({n: stand_in for n, stand_in in STAND_INS.items() if n in builtin_names})
            new.__defaults__ = tuple(make(p) for make in defaults) or None
            new.__kwdefaults__ = {n: make(p) for n, make in kwdefaults.items()} or None
            return new

        self.seen[key] = (var, build)
        self.guard(f"{var}.__code__ is not {self.const(code)}")
        if code.co_freevars:
            cell_var = self.var(f"{var}.__closure__")
            for i, n in enumerate(code.co_freevars):
                cell = (fn.__closure__ or ())[i]
                try:
                    content = cell.cell_contents
                except ValueError:  # not assigned yet
                    cells.append(None)
                else:
                    path = f"{cell_var}[{i}].cell_contents"
                    # `super()` reads the class from its cell: it must stay the class.
                    own = n == "__class__"
                    visit = self._opaque if own else functools.partial(self.visit, name=n)
                    cells.append(visit(content, path))
        if loaded:
            scope_var = self.var(f"{var}.__globals__")
            for n in sorted(loaded):
                if n in fn.__globals__:
                    globs[n] = self.visit(fn.__globals__[n], f"{scope_var}.get({n!r})", n)
                else:
                    builtin_names.add(n)
                    self.guard(f"{n!r} in {scope_var}")
        self.guard(f"len({var}.__defaults__ or ()) != {len(fn.__defaults__ or ())}")
        if fn.__defaults__:
            argnames = code.co_varnames[: code.co_argcount][-len(fn.__defaults__) :]
            for i, (n, d) in enumerate(zip(argnames, fn.__defaults__, strict=True)):
                defaults.append(self.visit(d, f"{var}.__defaults__[{i}]", n))
        for n, d in (fn.__kwdefaults__ or {}).items():
            self.guard(f"{n!r} not in ({var}.__kwdefaults__ or ())")
            kwdefaults[n] = self.visit(d, f"{var}.__kwdefaults__[{n!r}]", n)
        return build

    def _method(self, method: types.MethodType, var: str, name: str) -> Build:
        self.guard(f"type({var}) is not {self.const(types.MethodType)}")
        func = self.visit(method.__func__, f"{var}.__func__", "")
        owner = self.visit(method.__self__, f"{var}.__self__", name)
        return lambda p: types.MethodType(func(p), owner(p))

    def _partial(self, value: functools.partial[Any], var: str, name: str) -> Build:
        self.guard(f"type({var}) is not {self.const(type(value))}")
        self.guard(f"len({var}.args) != {len(value.args)}")
        self.guard(f"tuple({var}.keywords) != {self.const(tuple(value.keywords))}")
        func = self.visit(value.func, f"{var}.func", name)
        args = [self.visit(a, f"{var}.args[{i}]", f"arg{i}") for i, a in enumerate(value.args)]
        kwargs = {k: self.visit(a, f"{var}.keywords[{k!r}]", k) for k, a in value.keywords.items()}
        return lambda p: functools.partial(
            func(p), *(a(p) for a in args), **{k: a(p) for k, a in kwargs.items()}
        )

    def _sequence(self, value: Any, var: str, name: str) -> Build:
        kind = type(value)
        self.guard(f"type({var}) is not {self.const(kind)} or len({var}) != {len(value)}")
        items = [self.visit(a, f"{var}[{i}]", f"{name}_{i}") for i, a in enumerate(value)]
        if hasattr(value, "_fields"):
            return lambda p: kind(*(a(p) for a in items))
        return lambda p: kind(a(p) for a in items)

    def _dict(self, value: dict[Any, Any], var: str, name: str) -> Build:
        keys = tuple(value)
        if len(keys) > MAX_LOCATIONS or not all(isinstance(k, str | int) for k in keys):
            raise TraceError(
                f"a hook captures {name!r}, a dict of {len(keys)} entries; expected at most "
                f"{MAX_LOCATIONS} with string or int keys; capture the entries that it reads"
            )
        kind = self.const(type(value))
        self.guard(f"type({var}) is not {kind} or tuple({var}) != {self.const(keys)}")
        items = [self.visit(value[k], f"{var}[{k!r}]", f"{name}_{k}") for k in keys]

        def build(p: Values) -> Any:
            new = copy.copy(value)
            new.update(zip(keys, (a(p) for a in items), strict=True))
            return new

        return build
