"""Records what a hook captures.

A hook may reach tensors and numbers through closure cells, defaults, globals, partial arguments,
attributes of captured objects, modules and classes, helper functions, tuples, lists and dicts.
`Walk` visits all of them once and records the locations (`extract.Location`), with guards that tell
whether a later call finds the same structure. `extract.extractor` turns the locations into the
function that every call runs; the support of ``torch.compile`` reads their paths.

Each call reads the values through their locations, so that a changed global, default, attribute or
cell is never stale. `Walk.build` makes the same hook with other values at these locations.
"""

from __future__ import annotations

import builtins
import copy
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flashattn_jit.errors import ParamError, TraceError
from flashattn_jit.torch_modes import refuse_unreadable
from flashattn_jit.variants.capture.extract import (
    NOWHERE,
    PARAMS,
    ROOT,
    Held,
    Step,
)
from flashattn_jit.variants.capture.objects import (
    ABSENT,
    View,
    asks_for_absent,
    attribute,
    dunder_names,
    is_absent,
    is_opaque_module,
    is_plain_number,
    is_users,
    names_in,
    names_of_getter,
    sequence_like,
    shallow_copy,
    static_attribute,
)
from flashattn_jit.variants.capture.recorder import MAX_LOCATIONS, Build, Recorder, Values
from flashattn_jit.variants.params import Param

CONSTANTS = (bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
             torch.memory_format, complex, type(Ellipsis), slice, torch.Size, range, set,
             frozenset)  # fmt: skip
"""Types whose objects are constants of a hook."""

_ASK_FOR_TYPES = frozenset({"isinstance", "issubclass", "type"})
_OF_FUNCTIONS = frozenset(dir(types.FunctionType))
_CLASS: Any = object.__dict__["__class__"]  # sets it past a class's own __setattr__ and __class__
_HIDDEN_BY_OWN = (types.FunctionType, Param, functools.cached_property)
_WRAPPERS = {property: "fget", functools.cached_property: "func", staticmethod: "__func__",
             classmethod: "__func__"}  # fmt: skip
_C_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType,
                  types.ClassMethodDescriptorType, types.BuiltinFunctionType)  # fmt: skip


_NO_BUILTINS: Mapping[str, object] = types.MappingProxyType({})


class Walk(Recorder):
    """One visit of everything that `root` captures.

    root: the object to visit. names: attributes of objects that are always visited. params: for
    objects by id, the attributes that are read from the second argument of the extractor instead,
    as attribute -> (index, name, value).

    locations: those that the extractor reads. values: the objects there now. tensors, numbers:
    those that the extractor returns, in its order.
    """

    def __init__(
        self,
        root: object,
        names: frozenset[str] = frozenset(),
        params: dict[int, dict[str, tuple[int, str, object]]] | None = None,
    ) -> None:
        self.params = params or {}
        self.names = names
        self._asks = False  # whether code may see that an attribute is absent
        self._of_super: frozenset[str] = frozenset()  # names in code that calls `super()`
        while True:
            self._reset()
            before = self.names, self._asks, self._of_super
            self._build = self._visit(root, "", ROOT)
            after = self.names, self._asks, self._of_super
            if before == after or not self._saw_objects:
                break

    def _reset(self) -> None:
        super()._reset()
        self.codes: set[types.CodeType] = set()
        self._seen: dict[int, tuple[int, Build]] = {}
        self._saw_objects = False
        self._frozen = False
        self._without_values: set[int] = set()
        self._links = 0  # to objects that were visited before and have values, or are being visited

    def build(
        self,
        tensors: Sequence[object],
        numbers: Sequence[object],
        builtins: Mapping[str, object] = _NO_BUILTINS,
        made: dict[int, Any] | None = None,
    ) -> Any:
        """A copy of the root with `tensors` and `numbers` in place of the captured ones, and these
        `builtins` in place of Python's. made: is filled with the copies, by the object's id."""
        return self._build(Values(tensors, numbers, builtins, {} if made is None else made))

    def without_tensors(self, shells: Sequence[torch.Tensor]) -> Walk:
        """The visit of a copy with `shells` for tensors, which keeps no module's weights alive; or
        this visit, where that of the copy differs."""
        values = Values(shells, self.numbers, _NO_BUILTINS)
        root = self._build(values)
        for made in values.made.values():
            if isinstance(made, torch.nn.Module):
                made.__dict__.update(_parameters={}, _buffers={}, _modules={})
        again = Walk(root, self.names)
        same = (again.tensor_names, again.number_names) == (self.tensor_names, self.number_names)
        return again if same else self

    # --- the visit ---------------------------------------------------------------------------

    def _visit(self, value: Any, name: str, base: int, *steps: Step) -> Build:
        """Visit the object that `steps` lead to from `base`; `name` is for its values."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name, self._at(value, base, *steps))
        if type(value) in (int, float) or isinstance(value, np.generic):
            return self._number(value, name, self._at(value, base, *steps))
        if isinstance(value, np.ndarray):
            return self._array(value, name, self._at(value, base, *steps))
        if isinstance(value, CONSTANTS) or hasattr(type(value), "__fajit_constant__"):
            return self._constant(value, name, self._at(value, base, *steps))
        if is_plain_number(value) and not self.names & _ASK_FOR_TYPES:
            number = int(value) if isinstance(value, int) else float(value)
            at = self._at(value, base, *steps)
            self._guard_type(at)
            at = self._at(number, at, ("call", Held(type(number))))
            return self._number(number, name, at)
        known = self._seen.get(id(value))
        if known is not None:
            # An object that is reached twice (a cycle, a shared helper) must stay one object.
            self._guard(self._at(value, base, *steps), "same", known[0])
            self._links += id(value) not in self._without_values
            return known[1]
        before = self._num_values()
        build = self._visit_new(value, name, base, *steps)
        if self._num_values() == before:
            self._without_values.add(id(value))
        return build

    def _num_values(self) -> int:
        """How many values, and objects with values, were found so far."""
        return len(self.tensors) + len(self.numbers) + self._links

    def _visit_new(self, value: Any, name: str, base: int, *steps: Step) -> Build:
        """`_visit` of what was not visited before, and is no value."""
        if isinstance(value, types.FunctionType):
            if name and value.__closure__ is None and is_opaque_module(value.__module__):
                return self._opaque(value, base, *steps)
            return self._function(value, self._at(value, base, *steps))
        if isinstance(value, functools._lru_cache_wrapper):
            # Called with proxies, the cache would keep them beyond the trace.
            return self._visit(value.__wrapped__, name, base, *steps, ("attribute", "__wrapped__"))
        if isinstance(value, types.MethodType):
            return self._method(value, name, self._at(value, base, *steps))
        if isinstance(value, functools.partial):
            return self._partial(value, name, self._at(value, base, *steps))
        if isinstance(value, tuple | list):
            return self._sequence(value, name, self._at(value, base, *steps))
        if isinstance(value, dict):
            return self._dict(value, name, self._at(value, base, *steps))
        if isinstance(value, types.ModuleType | type):
            module = value.__module__ if isinstance(value, type) else value.__name__
            if is_opaque_module(module):
                return self._opaque(value, base, *steps)
            return self._namespace(value, self._at(value, base, *steps))
        if isinstance(value, operator.attrgetter | operator.methodcaller):
            self.names |= names_of_getter(value)
        if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType):
            return self._opaque(value, base, *steps)
        if is_opaque_module(type(value).__module__) and not isinstance(value, torch.nn.Module):
            if isinstance(value, Collection):
                raise TraceError(
                    f"a hook captures {name!r}, a {type(value).__name__}, whose contents cannot be "
                    "followed; use a tuple, a list or a dict"
                )
            if not hasattr(value, "__dict__") and not hasattr(type(value), "__fajit_names__"):
                return self._opaque(value, base, *steps)
        return self._object(value, self._at(value, base, *steps))

    def _tensor(self, value: torch.Tensor, name: str, at: int) -> Build:
        refuse_unreadable(name, value)
        index = len(self.tensors)
        self.tensors.append(value)
        self.tensor_names.append(self._unique(name))
        self._guard_type(at)
        # Where this guard fails, the next visit raises the error for other layouts.
        self._guard(at, "strided")
        self.locations[at].yields = "tensor"
        return lambda p: p.tensors[index]

    def _number(self, value: float, name: str, at: int) -> Build:
        self._guard_type(at)
        if self._frozen:
            return self._constant(value, name, at)
        index = len(self.numbers)
        if isinstance(value, np.generic):
            value = value.item()
            at = self._at(value, at, ("call", Held(np.generic.item)))
            if type(value) not in (int, float):
                return self._constant(value, name, at)
        self.numbers.append(value)
        self.number_names.append(self._unique(name))
        self.locations[at].yields = "number"
        return lambda p: p.numbers[index]

    def _array(self, value: Any, name: str, at: int) -> Build:
        # Each call makes a tensor that shares the array's memory, so that writes are visible.
        self._guard_type(at)
        try:
            tensor = torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise ParamError(
                f"the variant's array {name!r} cannot be read as a tensor: {error}"
            ) from None
        return self._tensor(tensor, name, self._at(tensor, at, ("call", Held(torch.from_numpy))))

    def _constant(self, value: Any, name: str, at: int) -> Build:
        if self._asks and isinstance(value, str):
            self.names |= {value}  # getattr(config, name)
        return self._part_of_key(value, name, at)

    def _function(self, fn: types.FunctionType, at: int) -> Build:
        code = fn.__code__
        self.codes.add(code)
        loaded, every = names_in(code)
        self.names |= every
        self._asks |= asks_for_absent(code)
        key = id(fn)
        cells: list[Build | None] = []
        globs: dict[str, Build] = {}
        builtin_names: set[str] = set()
        defaults: list[Build] = []
        kwdefaults: dict[str, Build] = {}
        attrs: dict[str, Build] = {}

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
            scope.update({n: stand_in for n, stand_in in p.builtins.items() if n in builtin_names})
            new.__defaults__ = tuple(make(p) for make in defaults) or None
            new.__kwdefaults__ = {n: make(p) for n, make in kwdefaults.items()} or None
            new.__dict__.update({n: make(p) for n, make in attrs.items()})
            return new

        self._seen[key] = (at, build)
        self._opaque(code, at, ("attribute", "__code__"))
        if code.co_freevars:
            closure = self._at(fn.__closure__, at, ("attribute", "__closure__"))
            for i, (n, cell) in enumerate(zip(code.co_freevars, fn.__closure__ or (), strict=True)):
                try:
                    content = cell.cell_contents
                except ValueError:  # not assigned yet
                    cells.append(None)
                    continue
                if n == "__class__":
                    self._of_super |= every | {code.co_name}
                    # `super()` reads the class from its cell: it must stay the class.
                    cells.append(self._opaque(content, closure, ("cell", i)))
                else:
                    cells.append(self._visit(content, n, closure, ("cell", i)))
        if loaded:
            scope_at = self._at(fn.__globals__, at, ("attribute", "__globals__"))
            for n in sorted(loaded):
                if n in fn.__globals__:
                    globs[n] = self._visit(fn.__globals__[n], n, scope_at, ("item", n))
                else:
                    builtin_names.add(n)
                    self._guard(scope_at, "lacks", n)
        defaults_at = self._at(fn.__defaults__, at, ("attribute", "__defaults__"))
        if fn.__defaults__:
            self._guard(defaults_at, "length", len(fn.__defaults__))
            argnames = code.co_varnames[: code.co_argcount][-len(fn.__defaults__) :]
            for i, (n, d) in enumerate(zip(argnames, fn.__defaults__, strict=True)):
                defaults.append(self._visit(d, n, defaults_at, ("item", i)))
        else:
            self._guard(defaults_at, "empty")
        for n, d in (fn.__kwdefaults__ or {}).items():
            kwdefaults[n] = self._visit(d, n, at, ("attribute", "__kwdefaults__"), ("item", n))
        self._saw_objects = True
        own = self._at(fn.__dict__, at, ("attribute", "__dict__"))
        absent = frozenset(self.names - fn.__dict__.keys() - _OF_FUNCTIONS)
        self._guard(own, *(("disjoint", absent) if fn.__dict__ else ("empty",)))
        for n in sorted((self.names & fn.__dict__.keys()) - _OF_FUNCTIONS):
            attrs[n] = self._visit(fn.__dict__[n], n, at, ("attribute", n))
        return build

    def _method(self, method: types.MethodType, name: str, at: int) -> Build:
        self._guard_type(at)
        func = self._visit(method.__func__, "", at, ("attribute", "__func__"))
        owner = self._visit(method.__self__, name, at, ("attribute", "__self__"))
        return lambda p: types.MethodType(func(p), owner(p))

    def _partial(self, value: functools.partial[Any], name: str, at: int) -> Build:
        self._guard_type(at)
        func = self._visit(value.func, name, at, ("attribute", "func"))
        args_at = self._at(value.args, at, ("attribute", "args"))
        self._guard(args_at, "length", len(value.args))
        args = [self._visit(a, f"arg{i}", args_at, ("item", i)) for i, a in enumerate(value.args)]
        kwargs_at = self._at(value.keywords, at, ("attribute", "keywords"))
        self._guard(kwargs_at, "keys", tuple(value.keywords))
        kwargs = {k: self._visit(a, k, kwargs_at, ("item", k)) for k, a in value.keywords.items()}
        return lambda p: functools.partial(
            func(p), *(a(p) for a in args), **{k: a(p) for k, a in kwargs.items()}
        )

    def _sequence(self, value: Any, name: str, at: int) -> Build:
        self._guard_type(at)
        self._guard(at, "length", len(value))
        items = [self._visit(a, f"{name}_{i}", at, ("item", i)) for i, a in enumerate(value)]
        attrs = self._container_attributes(value, at)

        def build(p: Values) -> Any:
            new = sequence_like(value, [a(p) for a in items])
            if attrs:
                new.__dict__.update({n: make(p) for n, make in attrs.items()})
            return new

        return build

    def _dict(self, value: dict[Any, Any], name: str, at: int) -> Build:
        keys = tuple(value)
        if len(keys) > MAX_LOCATIONS or not all(isinstance(k, str | int) for k in keys):
            raise TraceError(
                f"a hook captures {name!r}, a dict of {len(keys)} entries; expected at most "
                f"{MAX_LOCATIONS} with string or int keys; capture the entries that it reads"
            )
        self._guard_type(at)
        self._guard(at, "keys", keys)
        items = [self._visit(value[k], f"{name}_{k}", at, ("item", k)) for k in keys]
        attrs = self._container_attributes(value, at)

        def build(p: Values) -> Any:
            new = copy.copy(value)
            dict.update(new, zip(keys, (a(p) for a in items), strict=True))
            if getattr(value, "__dict__", None) is value:  # its entries are its attributes
                object.__setattr__(new, "__dict__", new)
            elif attrs:
                new.__dict__.update({n: make(p) for n, make in attrs.items()})
            return new

        return build

    def _container_attributes(self, value: Any, at: int) -> dict[str, Build]:
        """The attributes of a container of a user's class that the visited code names."""
        own = getattr(value, "__dict__", value)
        if own is value:
            return {}
        self._saw_objects = True
        own_at = self._at(own, at, ("attribute", "__dict__"))
        self._guard(own_at, "disjoint", frozenset(self.names - own.keys()))
        return {
            n: self._visit(own[n], n, own_at, ("item", n)) for n in sorted(self.names & own.keys())
        }

    # --- attributes: of objects, of users' modules and classes -------------------------------

    def _namespace(self, value: Any, at: int) -> Build:
        """A user's module or class that a hook reads values from."""
        self._saw_objects = True
        self._guard(at, "is", Held(value))
        attrs: dict[str, Build] = {}
        before, changes = self._num_values(), True

        def build(p: Values) -> Any:
            if not changes:
                return value
            if id(value) not in p.made:
                view = p.made[id(value)] = View(value)
                view.__dict__.update({n: make(p) for n, make in attrs.items()})
            return p.made[id(value)]

        self._seen[id(value)] = (at, build)
        for n in sorted(self.names):
            item = ABSENT if n.startswith("__") else attribute(value, n)
            if item is not ABSENT and not isinstance(
                item, (property, types.ModuleType, *_C_DESCRIPTORS)
            ):
                attrs[n] = self._visit(item, n, at, ("attribute", n))
        self._guard_absent(value, at, self.names)
        changes = self._num_values() > before
        return build

    def _guard_absent(self, value: object, at: int, wanted: frozenset[str]) -> None:
        """Attributes that a hook may have found absent stay absent."""
        if self._asks:
            absent = frozenset(n for n in wanted if is_absent(value, n))
            self._guard(at, "without", absent)

    def _object(self, value: object, at: int) -> Build:
        """Any other object: its methods, and the attributes that the visited code names."""
        self._saw_objects = True
        cls = type(value)
        shown = value.__class__  # of a copy, the class of its object
        own_class: Step = ("class", Held(cls))
        self._guard_type(at)
        attrs: dict[str, Build] = {}
        methods: set[str] = set()
        special: dict[str, tuple[Callable[[Any], Any], Build]] = {}

        def build(p: Values) -> Any:
            if id(value) in p.made:
                return p.made[id(value)]
            new = shallow_copy(value)
            p.made[id(value)] = new
            for n, make in attrs.items():
                made = make(p)
                made = types.MethodType(made, new) if n in methods else made
                # Not by the class's __setattr__, as that of nn.Module or a frozen dataclass.
                if isinstance(static_attribute(cls, n), types.MemberDescriptorType):  # a slot
                    object.__setattr__(new, n, made)
                else:
                    new.__dict__[n] = made
            if special:
                overrides = {n: wrap(make(p)) for n, (wrap, make) in special.items()}
                overrides.setdefault("__class__", property(lambda _: shown))
                # Without new slots, so that the layout is the same.
                overrides.update(__fajit_view__=True, __module__=cls.__module__, __slots__=())
                _CLASS.__set__(new, type(cls.__name__, (cls,), overrides))
            if "_declared" in own:  # a variant: its params belong to the copies
                declared = [
                    d._replace(owner=p.made.get(id(d.owner), d.owner)) for d in own["_declared"]
                ]
                new.__dict__["_declared"] = tuple(declared)
            return new

        self._seen[id(value)] = (at, build)
        params = self.params.get(id(value), {})
        for n, (index, full_name, current) in params.items():
            tensors, numbers = len(self.tensors), len(self.numbers)
            attrs[n] = self._visit(current, full_name, PARAMS, ("item", index))
            self.param_tensors.update((i, full_name) for i in range(tensors, len(self.tensors)))
            self.param_numbers.update((i, full_name) for i in range(numbers, len(self.numbers)))
        wanted = self.names | getattr(cls, "__fajit_names__", frozenset())
        if isinstance(value, torch.nn.Module):
            wanted |= {"forward"}
            forward = static_attribute(cls, "forward")
            if isinstance(forward, types.FunctionType) and not is_users(forward):
                # torch's own, which is not visited, but reads its object's weights and options.
                wanted |= names_in(forward.__code__)[1]
        own = getattr(value, "__dict__", {})
        hooks: frozenset[str] = getattr(cls, "__fajit_names__", frozenset())
        # An attribute of the object would take the place of these.
        inherited = frozenset(
            n for n in wanted - own.keys() - params.keys()
            if n in hooks or isinstance(static_attribute(cls, n), _HIDDEN_BY_OWN)
        )  # fmt: skip
        if inherited and hasattr(value, "__dict__"):
            self._guard(self._at(own, at, ("attribute", "__dict__")), "disjoint", inherited)
        for n in sorted(n for n in wanted if not n.startswith("__") and n not in params):
            static = static_attribute(cls, n)
            if n in own:
                attrs[n] = self._visit(own[n], n, at, ("attribute", n))
            elif isinstance(static, property | functools.cached_property):
                of = "fget" if isinstance(static, property) else "func"
                if is_users(get := getattr(static, of)):
                    there: Step = ("object", Held(static))
                    special[n] = (property, self._visit(get, "", NOWHERE, there, ("attribute", of)))
            elif isinstance(static, types.FunctionType):
                if is_users(static):
                    attrs[n] = self._visit(static, "", at, own_class, ("attribute", n))
                    methods.add(n)
            elif (
                not isinstance(static, _C_DESCRIPTORS)
                and (item := attribute(value, n)) is not ABSENT
            ):
                attrs[n] = self._visit(item, n, at, ("attribute", n))
            self._visit_overridden(cls, n, n in own)
        self._guard_absent(value, at, wanted - params.keys())
        # Syntax looks methods up on the class: `obj(x)`, `obj[i]`, `len(obj)`, `obj + 1`.
        for n in dunder_names(cls):
            found = static_attribute(cls, n)
            special[n] = (lambda x: x, self._visit(found, "", at, own_class, ("attribute", n)))
            self._visit_overridden(cls, n)
        if not attrs and not special and not hasattr(cls, "__fajit_names__"):
            # A weak reference where possible, so that a plan does not keep the user's data alive.
            try:
                self._guard(at, "alive", Held(weakref.ref(value)))
            except TypeError:
                self._guard(at, "is", Held(value))
        return build

    def _visit_overridden(self, cls: type, name: str, is_hidden: bool = False) -> None:
        """Visit what ``super().name`` may reach: it is not rebuilt, its numbers are constants.

        is_hidden: whether an attribute of the object hides that of the class, too. What cannot be
        followed may never be called, and is left to the trace.
        """
        if name not in self._of_super:
            return
        frozen, self._frozen = self._frozen, True
        for base in cls.__mro__:
            if name not in base.__dict__:
                continue
            if not is_hidden:
                is_hidden = True  # the first one is what the object has
                continue
            static: Any = base.__dict__[name]
            path: list[Step] = [("object", Held(base)), ("attribute", "__dict__"), ("item", name)]
            for kind, of in _WRAPPERS.items():
                if isinstance(static, kind):
                    static = getattr(static, of)
                    path.append(("attribute", of))
            is_value = isinstance(static, (int, float, *CONSTANTS))
            if is_users(static) or is_value and not is_opaque_module(base.__module__):
                before = self._mark(), dict(self._seen)
                try:
                    self._visit(static, name, NOWHERE, *path)
                except (TraceError, ParamError):
                    self._back_to(before[0])
                    self._seen = before[1]
        self._frozen = frozen
