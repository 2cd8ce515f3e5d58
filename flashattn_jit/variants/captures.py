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
import dis
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from flashattn_jit.errors import TraceError

MAX_LOCATIONS = 256
"""How many locations one hook may capture: past that it holds data, not parameters."""

_OPAQUE_PACKAGES = frozenset({"torch", "numpy", "math", "builtins", "operator", "functools",
                              "itertools", "typing", "flashattn_jit"}) | sys.stdlib_module_names  # fmt: skip
_CONSTANTS = (bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
              torch.memory_format, complex, type(Ellipsis), slice, torch.Size, range)  # fmt: skip
_CALLED_BY_SYNTAX = ("__call__", "__getitem__")

Extracted = tuple[Any, tuple[torch.Tensor, ...], tuple[float, ...]]
Extractor = Callable[[object, Sequence[object]], Extracted | None]


def stride_pattern(t: torch.Tensor) -> str:
    """Per dim ``0`` (broadcast), ``1`` (contiguous) or ``n``; dims of one element count as dense."""
    last = t.dim() - 1
    inner_dense = last >= 0 and (t.size(last) <= 1 or t.stride(last) == 1)
    out = ["1" if d == last else "n" for d in range(last + 1)]
    for d, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if size > 1:
            out[d] = "0" if stride == 0 else "n"
            if stride == 1 and (d == last or not inner_dense):
                out[d] = "1"
    return "".join(out)


class Values:
    """What `Walk.build` puts at the locations, in extraction order."""

    def __init__(self, tensors: Sequence[object], numbers: Sequence[object]) -> None:
        self.tensors = tensors
        self.numbers = numbers
        self.made: dict[int, Any] = {}


Build = Callable[[Values], Any]


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
    return frozenset(loaded), frozenset(every)


def _is_opaque_module(name: str | None) -> bool:
    """Whether code of the module is taken as it is: its globals do not change."""
    if name is None or name.startswith("flashattn_jit.variants.library"):
        return False
    return name.partition(".")[0] in _OPAQUE_PACKAGES


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
        self._params = params or {}
        self._names = names
        while True:
            self._reset()
            before = self._names
            self._build = self._visit(root, "v", "")
            if self._names == before or not self._saw_objects:
                break
        self.source = self._source()

    def _reset(self) -> None:
        self.tensor_names: list[str] = []
        self.number_names: list[str] = []
        self.const_names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[float] = []
        self.consts: list[object] = []
        self.codes: set[types.CodeType] = set()
        self._lines: list[str] = []
        self._env: dict[str, object] = {"Tensor": torch.Tensor, "pattern": stride_pattern}
        self._env_ids: dict[int, str] = {}
        self._tensor_vars: list[str] = []
        self._number_vars: list[str] = []
        self._keys: list[str] = []
        self._seen: dict[int, tuple[str, Build]] = {}
        self._alive: list[object] = []
        self._taken: set[str] = set()
        self._count = 0
        self._saw_objects = False

    # --- the generated extractor -------------------------------------------------------------

    def _source(self) -> str:
        def tup(items: list[str]) -> str:
            return f"({', '.join(items)},)" if items else "()"

        key = tup(self._keys)
        result = f"    return {key}, {tup(self._tensor_vars)}, {tup(self._number_vars)}"
        return "\n".join(["def extract(v, p):", *self._lines, result])

    def extractor(self) -> Extractor:
        """The function (root, params) -> (key, tensors, numbers), or None: another structure."""
        scope = dict(self._env)
        exec(compile(self.source, "<flashattn_jit captures>", "exec"), scope)  # noqa: S102
        return scope["extract"]  # type: ignore[return-value]

    def build(self, tensors: Sequence[object], numbers: Sequence[object]) -> Any:
        """A copy of the root that finds `tensors` and `numbers` where it captured its own."""
        return self._build(Values(tensors, numbers))

    # --- helpers -----------------------------------------------------------------------------

    def _var(self, expr: str) -> str:
        self._count += 1
        if self._count > 4 * MAX_LOCATIONS:
            raise TraceError(
                f"expected a hook that captures at most {MAX_LOCATIONS} values, this one reaches "
                "more through its containers and objects; capture a tensor instead"
            )
        var = f"x{self._count}"
        self._lines.append(f"    {var} = {expr}")
        return var

    def _const(self, value: object) -> str:
        """A name that the extractor finds `value` under."""
        if id(value) not in self._env_ids:
            self._env_ids[id(value)] = f"K{len(self._env_ids)}"
            self._alive.append(value)
            self._env[self._env_ids[id(value)]] = value
        return self._env_ids[id(value)]

    def _guard(self, condition: str) -> None:
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

    def _visit(self, value: Any, expr: str, name: str) -> Build:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, self._var(expr), name)
        if type(value) in (int, float) or isinstance(value, np.generic):
            return self._number(value, self._var(expr), name)
        if isinstance(value, _CONSTANTS) or hasattr(type(value), "__fajit_constant__"):
            return self._constant(value, self._var(expr), name)
        known = self._seen.get(id(value))
        if known is not None:
            # The same object found twice (a cycle, a shared helper) must stay the same object.
            var = self._var(expr)
            self._guard(f"{var} is not {known[0]}")
            return known[1]
        if isinstance(value, types.FunctionType):
            if name and value.__closure__ is None and _is_opaque_module(value.__module__):
                return self._opaque(value, expr)
            return self._function(value, self._var(expr))
        if isinstance(value, types.MethodType):
            return self._method(value, self._var(expr), name)
        if isinstance(value, functools.partial):
            return self._partial(value, self._var(expr), name)
        if isinstance(value, tuple | list):
            return self._sequence(value, self._var(expr), name)
        if type(value) is dict:
            return self._dict(value, self._var(expr), name)
        if isinstance(value, types.ModuleType):
            if _is_opaque_module(value.__name__):
                return self._opaque(value, expr)
            return self._namespace(value, self._var(expr))
        if isinstance(value, type):
            if _is_opaque_module(value.__module__):
                return self._opaque(value, expr)
            return self._namespace(value, self._var(expr))
        if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType) or (
            _is_opaque_module(type(value).__module__) and not hasattr(value, "__dict__")
        ):
            return self._opaque(value, expr)
        return self._object(value, self._var(expr), name)

    def _tensor(self, value: torch.Tensor, var: str, name: str) -> Build:
        index = len(self.tensors)
        self.tensors.append(value)
        self.tensor_names.append(self._unique(name))
        self._tensor_vars.append(var)
        if type(value) is torch.Tensor:
            self._guard(f"type({var}) is not Tensor")
        else:
            self._guard(f"not isinstance({var}, Tensor)")
        self._keys += [
            f"{var}.dtype",
            f"{var}.dim() if {var}.is_contiguous() else pattern({var})",
        ]
        return lambda p: p.tensors[index]

    def _number(self, value: float, var: str, name: str) -> Build:
        index = len(self.numbers)
        self._guard(f"type({var}) is not {self._const(type(value))}")
        if isinstance(value, np.generic):
            var = self._var(f"{var}.item()")
            value = value.item()
            if type(value) not in (int, float):
                return self._constant(value, var, name)
        self.numbers.append(value)
        self.number_names.append(self._unique(name))
        self._number_vars.append(var)
        return lambda p: p.numbers[index]

    def _constant(self, value: object, var: str, name: str) -> Build:
        if value is None or value is Ellipsis:
            self._guard(f"{var} is not {value!r}" if value is None else f"{var} is not ...")
        else:
            self._guard(f"type({var}) is not {self._const(type(value))}")
            # A slice is hashable only from Python 3.12 on.
            self._keys.append(f"repr({var})" if isinstance(value, slice) else var)
            self.consts.append(value)
            self.const_names.append(name or "value")
        return lambda p: value

    def _opaque(self, value: object, expr: str) -> Build:
        self._guard(f"({expr}) is not {self._const(value)}")
        return lambda p: value

    def _function(self, fn: types.FunctionType, var: str) -> Build:
        code = fn.__code__
        self.codes.add(code)
        loaded, every = _names(code)
        self._names |= every
        key = id(fn)
        self._alive.append(fn)
        cells: list[Build | None] = []
        globs: dict[str, Build] = {}
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
            new.__defaults__ = tuple(make(p) for make in defaults) or None
            new.__kwdefaults__ = {n: make(p) for n, make in kwdefaults.items()} or None
            return new

        self._seen[key] = (var, build)
        self._guard(f"{var}.__code__ is not {self._const(code)}")
        if code.co_freevars:
            cell_var = self._var(f"{var}.__closure__")
            for i, n in enumerate(code.co_freevars):
                cell = (fn.__closure__ or ())[i]
                try:
                    content = cell.cell_contents
                except ValueError:  # not assigned yet
                    cells.append(None)
                else:
                    cells.append(self._visit(content, f"{cell_var}[{i}].cell_contents", n))
        if loaded:
            scope_var = self._var(f"{var}.__globals__")
            for n in sorted(loaded):
                if n in fn.__globals__:
                    globs[n] = self._visit(fn.__globals__[n], f"{scope_var}.get({n!r})", n)
                else:
                    self._guard(f"{n!r} in {scope_var}")
        self._guard(f"len({var}.__defaults__ or ()) != {len(fn.__defaults__ or ())}")
        if fn.__defaults__:
            argnames = code.co_varnames[: code.co_argcount][-len(fn.__defaults__) :]
            for i, (n, d) in enumerate(zip(argnames, fn.__defaults__, strict=True)):
                defaults.append(self._visit(d, f"{var}.__defaults__[{i}]", n))
        for n, d in (fn.__kwdefaults__ or {}).items():
            self._guard(f"{n!r} not in ({var}.__kwdefaults__ or ())")
            kwdefaults[n] = self._visit(d, f"{var}.__kwdefaults__[{n!r}]", n)
        return build

    def _method(self, method: types.MethodType, var: str, name: str) -> Build:
        self._guard(f"type({var}) is not {self._const(types.MethodType)}")
        func = self._visit(method.__func__, f"{var}.__func__", "")
        owner = self._visit(method.__self__, f"{var}.__self__", name)
        return lambda p: types.MethodType(func(p), owner(p))

    def _partial(self, value: functools.partial[Any], var: str, name: str) -> Build:
        self._guard(f"type({var}) is not {self._const(type(value))}")
        self._guard(f"len({var}.args) != {len(value.args)}")
        self._guard(f"tuple({var}.keywords) != {self._const(tuple(value.keywords))}")
        func = self._visit(value.func, f"{var}.func", name)
        args = [
            self._visit(a, f"{var}.args[{i}]", f"arg{i}") for i, a in enumerate(value.args)
        ]
        kwargs = {k: self._visit(a, f"{var}.keywords[{k!r}]", k) for k, a in value.keywords.items()}
        return lambda p: functools.partial(
            func(p), *(a(p) for a in args), **{k: a(p) for k, a in kwargs.items()}
        )

    def _sequence(self, value: Any, var: str, name: str) -> Build:
        kind = type(value)
        self._guard(f"type({var}) is not {self._const(kind)} or len({var}) != {len(value)}")
        items = [self._visit(a, f"{var}[{i}]", f"{name}_{i}") for i, a in enumerate(value)]
        if hasattr(value, "_fields"):
            return lambda p: kind(*(a(p) for a in items))
        return lambda p: kind(a(p) for a in items)

    def _dict(self, value: dict[Any, Any], var: str, name: str) -> Build:
        keys = tuple(value)
        if len(keys) > MAX_LOCATIONS or not all(isinstance(k, str | int) for k in keys):
            return self._opaque(value, var)
        self._guard(f"type({var}) is not dict or tuple({var}) != {self._const(keys)}")
        items = [self._visit(value[k], f"{var}[{k!r}]", f"{name}_{k}") for k in keys]
        return lambda p: dict(zip(keys, (a(p) for a in items), strict=True))

    def _namespace(self, value: Any, var: str) -> Build:
        """A user's module or class that a hook reads values from."""
        self._saw_objects = True
        self._guard(f"{var} is not {self._const(value)}")
        self._seen[id(value)] = (var, lambda p: value)
        attrs: dict[str, Build] = {}
        for n in sorted(self._names):
            if n.startswith("__") or not hasattr(value, n):
                continue
            item = getattr(value, n)
            if isinstance(item, property | types.ModuleType):
                continue
            attrs[n] = self._visit(item, f"{var}.{n}", n)
        if not attrs:
            return lambda p: value

        def build(p: Values) -> Any:
            made = {n: make(p) for n, make in attrs.items()}
            return _View(value, made)

        self._seen[id(value)] = (var, build)
        return build

    def _object(self, value: Any, var: str, name: str) -> Build:
        """Any other object: the attributes that some reached code names, and its own methods."""
        self._saw_objects = True
        cls = type(value)
        self._guard(f"type({var}) is not {self._const(cls)}")
        key = id(value)
        self._alive.append(value)
        attrs: dict[str, Build] = {}
        special: dict[str, tuple[Any, Build]] = {}
        own = getattr(value, "__dict__", {})

        def build(p: Values) -> Any:
            if key in p.made:
                return p.made[key]
            new = _shallow(value)
            p.made[key] = new
            for n, make in attrs.items():
                made = make(p)
                if n in methods:
                    made = types.MethodType(made, new)
                _force_attr(new, n, made)
            if special:
                overrides = {n: wrap(make(p)) for n, (wrap, make) in special.items()}
                new.__class__ = type(cls.__name__, (cls,), {"__fajit_view__": True, **overrides})
            return new

        methods: set[str] = set()
        self._seen[key] = (var, build)
        params = self._params.get(key, {})
        for n, (index, full_name, current) in params.items():
            attrs[n] = self._visit(current, f"p[{index}]", full_name)
        wanted = set(self._names) | getattr(cls, "__fajit_names__", frozenset())
        if isinstance(value, torch.nn.Module):
            wanted.add("forward")
        for n in sorted(wanted | set(_CALLED_BY_SYNTAX)):
            if n in params or (n.startswith("__") and n not in _CALLED_BY_SYNTAX):
                continue
            static = _static(cls, n)
            if isinstance(static, property) and static.fget is not None and n not in own:
                if isinstance(static.fget, types.FunctionType) and not _is_opaque_module(cls.__module__):
                    getter = self._visit(static.fget, f"{self._const(static)}.fget", "")
                    special[n] = (property, getter)
            elif n in _CALLED_BY_SYNTAX:
                if isinstance(static, types.FunctionType) and not _is_opaque_module(static.__module__):
                    special[n] = (_identity, self._visit(static, f"{var}.{n}.__func__", ""))
            elif n not in own and isinstance(static, types.FunctionType):
                if not _is_opaque_module(static.__module__):
                    attrs[n] = self._visit(static, f"{var}.{n}.__func__", "")
                    methods.add(n)
            elif n in own or _has(value, n) or not (static is _ABSENT or callable(static)):
                try:
                    item = getattr(value, n)
                except Exception:  # noqa: BLE001, S112  a descriptor that refuses: not captured
                    continue
                if not isinstance(item, types.MethodType) or item.__self__ is not value:
                    attrs[n] = self._visit(item, f"{var}.{n}", n)
        if not attrs and not special and not _is_value_object(value):
            self._guard_identity(value, var)
        return build

    def _guard_identity(self, value: object, var: str) -> None:
        # A weak reference where possible, so that a plan does not keep the user's data alive.
        try:
            ref = weakref.ref(value)
        except TypeError:
            self._guard(f"{var} is not {self._const(value)}")
        else:
            self._guard(f"{var} is not {self._const(ref)}()")


_ABSENT = object()


def _identity(x: Any) -> Any:
    return x


def _static(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _ABSENT


def _has(value: Any, name: str) -> bool:
    # nn.Module keeps its tensors in `_parameters` and finds them through __getattr__.
    return isinstance(value, torch.nn.Module) and hasattr(value, name)


def _is_value_object(value: Any) -> bool:
    return hasattr(type(value), "__fajit_params__")


def _shallow(value: Any) -> Any:
    new = object.__new__(type(value))
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    for base in type(value).__mro__:
        for slot in getattr(base, "__slots__", ()):
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                object.__setattr__(new, slot, getattr(value, slot))
    return new


def _force_attr(obj: Any, name: str, value: Any) -> None:
    if hasattr(obj, "__dict__"):
        obj.__dict__[name] = value
    else:
        object.__setattr__(obj, name, value)


class _View:
    """Stands for a module or class whose attributes have been replaced."""

    def __init__(self, base: Any, attrs: dict[str, Any]) -> None:
        self.__dict__.update(attrs)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_base"](*args, **kwargs)
