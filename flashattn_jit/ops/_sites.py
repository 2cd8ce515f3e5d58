"""Calls that tracers see: what is fixed while tracing, and how a run gets its values back.

A *site* is one call in a compiled graph. While the graph is traced, the site learns which tensors
the variant captures and the paths that lead to them, so that the graph takes them as inputs; when
the graph runs, the site binds the variant as any call does, with the graph's values in the places
of the captured ones. The tracer calls `variant_site` and `function_site`; it never looks inside.
"""

from __future__ import annotations

import enum
import itertools
import secrets
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..errors import FlashAttnJitError, InputError, VariantError
from ..variants.binding import param_locations
from ..variants.captures import Walk
from ..variants.extract import (
    NOWHERE,
    PARAMS,
    ROOT,
    Location,
    Step,
    Yields,
    extractor,
    stride_pattern,
)
from ..variants.params import MISSING, Pointwise
from ..variants.spec import Variant, as_variant, variant
from .block_mask import own_mask_mod

ATTRIBUTE, ITEM = 0, 1
CELL = -4  # beside where a location may start
Path = tuple[int, tuple[tuple[int, Any], ...]]
"""How to reach a value: from that of an earlier path (or ROOT), by attributes and items.
CELL: what the function of that name in `CELLS` returns."""

Tensors = tuple[torch.Tensor, ...]
Numbers = tuple[float, ...]

# What a hook's structure depends on by value; the tracer guards on them when it looks at them.
_FIXED = (types.FunctionType, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)


class Plan(NamedTuple):
    """What the traced code needs of a site: tuples, strings and numbers alone.

    number: the site's, for when the graph runs. paths: what to read of the root, in order. The
    others say what paths end at: captured tensors, Python numbers, fixed things (functions and
    constants), functions that must stay the same objects. pointwise: there is no lse. error:
    (class, message) of why the call cannot be.
    """

    number: int
    paths: tuple[Path, ...] = ()
    tensors: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    functions: tuple[int, ...] = ()
    pointwise: bool = False
    error: tuple[str, str] | None = None


class Site:
    """The running graph's side of a call; subclasses say whose values the graph's replace."""

    def variant(self, tensors: Tensors, numbers: Numbers) -> Variant:
        """The variant to bind."""
        raise NotImplementedError

    def swap(self, tensors: Tensors, numbers: Numbers) -> Callable[[Tensors, Numbers], Any]:
        """What puts the graph's tensors and numbers in the place of the variant's (a `Swap`)."""
        raise NotImplementedError


class _Cells:
    """Functions that read a cell, as attributes: `_Paths.use_cell_readers` says why."""


CELLS = _Cells()
_sites: dict[int, Site] = {}
_numbers = itertools.count()
_once: set[int] = set()
_exported: dict[int, Any] = {}
_lock = threading.Lock()

Use = Literal["compiled", "exported", "once", "fake"]
"""What becomes of a traced call. compiled: a graph of ``torch.compile``, which guards on the
variant. exported: a graph on its own, of torch.export or make_fx, which keeps its site for the life
of the process. once: it runs now and never again. fake: shapes, and no graph."""

# An exported graph can be saved, and loaded by another process whose sites and batches have the
# same numbers: its numbers are counted from here on, which is another number in each process.
FIRST_EXPORTED = secrets.randbits(30) + 1 << 32


def local_number(number: int) -> int:
    """A number of a graph as this process counts.

    Raises:
        InputError: the graph is of another process.
    """
    if 0 <= number < 1 << 32:
        return number
    if number >> 32 != FIRST_EXPORTED >> 32:
        raise InputError(
            "this graph was exported by another process, where its variants and batches are; "
            "export it in the process that runs it"
        )
    return number - FIRST_EXPORTED


def exported_number(owner: Any) -> int:
    """The number of a batch in an exported graph, which keeps the batch alive."""
    with _lock:
        _exported[owner._number] = owner
    return int(owner._number) + FIRST_EXPORTED


def site(number: int) -> Site:
    """The site of a number that a plan gave. Raises InputError as `local_number` does."""
    return _sites[local_number(number)]


def _number(made: Site, use: Use) -> int:
    if use == "fake":
        return -1  # never run
    with _lock:
        number = next(_numbers)
        _sites[number] = made
        if use == "once":
            _once.add(number)
    return number + (FIRST_EXPORTED if use == "exported" else 0)


def release(number: int) -> None:
    """Let go of the site of a call that has run and will not run again."""
    with _lock:
        if number in _once:
            _once.remove(number)
            del _sites[number]


def _cell_reader(cell: types.CellType) -> str:
    """The name in `CELLS` of a function that returns what the cell holds."""

    def reader(held: Any) -> Callable[[], Any]:
        def read() -> Any:
            return held

        return read

    twin = types.FunctionType(reader(None).__code__, globals(), "read_cell", None, (cell,))
    with _lock:
        name = f"cell_{len(CELLS.__dict__)}"
        setattr(CELLS, name, twin)
    return name


def _refused(error: Exception) -> Plan:
    if isinstance(error, FlashAttnJitError):
        return Plan(-1, error=(type(error).__name__, str(error)))
    return Plan(-1, error=("VariantError", f"{type(error).__name__} in a variant: {error}"))


# --- variants: made outside of the graph, read anew in every run ---------------------------------


class _VariantSite(Site):
    """A `Variant` object: its numbers are read when the graph runs, its tensors are inputs.

    frozen: of an exported graph, whose variant is kept alive and must stay what it was: only its
    numbers and the values of its tensors may change, which the graph does not follow.
    """

    def __init__(
        self, chosen: Variant, count: int, places: Sequence[int], frozen: _Frozen | None
    ) -> None:
        self._variant = weakref.ref(chosen)
        self._kept = None if frozen is None else chosen
        self._count = count
        self._places = tuple(places)
        self._frozen = frozen

    def variant(self, tensors: Tensors, numbers: Numbers) -> Variant:
        chosen = self._variant()
        if chosen is None:
            raise VariantError("the variant of a compiled graph is gone; keep it alive")
        if self._frozen is not None:
            self._frozen.check(chosen)
        return chosen

    def swap(self, tensors: Tensors, numbers: Numbers) -> Callable[[Tensors, Numbers], Any]:
        fixed = {} if self._frozen is None else self._frozen.numbers
        again = "call torch.compiler.reset()" if self._frozen is None else "export the call again"

        def put(own: Tensors, own_numbers: Numbers) -> tuple[Tensors, Numbers]:
            if len(own) != self._count:
                raise VariantError(
                    f"the variant captured {self._count} tensors when the call was traced, and "
                    f"captures {len(own)} now; {again}"
                )
            out = list(own)
            for place, tensor in zip(self._places, tensors, strict=True):
                out[place] = _laid_out_as(tensor, own[place], again)
            if not fixed:
                return tuple(out), own_numbers
            return tuple(out), tuple(fixed.get(i, x) for i, x in enumerate(own_numbers))

        return put


class _Frozen:
    """What an exported call was traced with: its numbers, and the structure that must stay."""

    def __init__(self, chosen: Variant, walk: Walk, values: Sequence[Any], given: set[str]) -> None:
        own = walk.param_numbers
        self.numbers = {i: x for i, x in enumerate(walk.numbers) if own.get(i) not in given}
        self._values, self._extract = tuple(values), extractor(walk.locations)
        self._key = self._seen(chosen)

    def _seen(self, chosen: Variant) -> object:
        """All of the variant but its numbers and tensors: code, flags, and which params are set."""
        found = self._extract(chosen, self._values)
        if found is None:
            return None
        is_set = tuple(d.param.name in d.owner.__dict__ for d in chosen._declared)
        return found[0], len(found[2]), is_set

    def check(self, chosen: Variant) -> None:
        """Raises VariantError where the variant has become another one."""
        if self._seen(chosen) != self._key:
            raise VariantError(
                f"{chosen.name} is not what it was when the call was exported: its hooks, flags or "
                "the kinds of its params have changed; export the call again"
            )


def _laid_out_as(tensor: torch.Tensor, own: torch.Tensor, again: str) -> torch.Tensor:
    """The tensor in the layout that the kernel is compiled for: that of the captured one."""
    if tensor.dtype != own.dtype or tensor.shape != own.shape:
        raise InputError(
            f"a captured tensor is {list(own.shape)} of {own.dtype}, the graph's "
            f"{list(tensor.shape)} of {tensor.dtype}; {again}"
        )
    if tensor is own or stride_pattern(tensor) == stride_pattern(own):
        return tensor
    return tensor.new_empty_strided(own.shape, own.stride()).copy_(tensor)


def variant_site(
    chosen: Variant, tensor_names: tuple[str, ...], scalar_names: tuple[str, ...], use: Use
) -> Plan:
    """The plan of a call of a Variant. The names are those of the params that the call gives."""
    try:
        if "_declared" not in chosen.__dict__:
            raise VariantError(
                "the variant is made inside of the compiled region; make it outside, and let the "
                "function or module refer to it"
            )
        given = {*tensor_names, *scalar_names}
        values = [_stand_in(d, d.name in given) for d in chosen._declared]
        walk = Walk(chosen, params=param_locations(chosen._declared, values))
        params: dict[int, Path] = {
            i: (ROOT, (*_steps_to(chosen, d.owner), (ATTRIBUTE, d.param.name)))
            for i, d in enumerate(chosen._declared)
            if d.name not in given and isinstance(d.owner.__dict__.get(d.param.name), torch.Tensor)
        }
        paths = _Paths(walk, params=params, cell_readers=use == "compiled")
        places, tensors = [], []
        for place, at in enumerate(paths.yielding("tensor")):
            index = paths.index(at)
            if index is not None:
                places.append(place)
                tensors.append(index)
        frozen = _Frozen(chosen, walk, values, given) if use == "exported" else None
        made = _VariantSite(chosen, len(walk.tensors), places, frozen)
        return Plan(
            _number(made, use), tuple(paths.made), tuple(tensors), pointwise=_is_pointwise(chosen)
        )
    except Exception as error:
        return _refused(error)


def _stand_in(declared: Any, given: bool) -> Any:
    """A value of a declared param's kind, where its own is not known while tracing."""
    value = declared.owner.__dict__.get(declared.param.name, MISSING)
    if value is MISSING and not callable(declared.param.default):
        value = declared.param.default
    if declared.param.kind == "tensor":
        return torch.empty(0, device="cpu") if given or value is MISSING else value
    return declared.param.type(0) if given or value is MISSING else value


def _steps_to(root: Any, owner: Any) -> tuple[tuple[int, Any], ...]:
    """The way from a composed variant to the part that declares a param."""
    if root is owner:
        return ()
    for i, part in enumerate(getattr(root, "_parts", ())):
        if any(d.owner is owner for d in part._declared):
            return ((ATTRIBUTE, "_parts"), (ITEM, i), *_steps_to(part, owner))
    raise VariantError(f"{owner.name} is no part of {root.name}")


def _is_pointwise(chosen: Variant) -> bool:
    parts = getattr(chosen, "_parts", None)
    if parts is not None:
        return any(_is_pointwise(part) for part in parts)
    return isinstance(chosen._normalizer(), Pointwise)


# --- functions: any closure of the same code, its values are inputs ------------------------------


class _FunctionSite(Site):
    """Bare hooks: tensors and numbers are the graph's inputs, the hooks a copy of the first ones.

    Another closure of the same code runs the same graph, so nothing is read of the hooks
    themselves. The copy's tensors have no storage: they carry dtypes and strides.
    """

    def __init__(self, walk: Walk, kinds: Sequence[type]) -> None:
        self._build = walk.build
        self._numbers = tuple(walk.numbers)
        self._kinds = tuple(kinds)
        self._copies: dict[tuple[object, ...], Variant] = {}

    def variant(self, tensors: Tensors, numbers: Numbers) -> Variant:
        key = tuple((t.dtype, stride_pattern(t), t.is_contiguous()) for t in tensors)
        copy = self._copies.get(key)
        if copy is None:
            shells = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                for t in tensors
            ]
            copy = self._build(shells, self._numbers)
            self._copies[key] = copy
        return copy

    def swap(self, tensors: Tensors, numbers: Numbers) -> Callable[[Tensors, Numbers], Any]:
        values = tuple([kind(x) for kind, x in zip(self._kinds, numbers, strict=True)])

        def put(own: Tensors, own_numbers: Numbers) -> tuple[Tensors, Numbers]:
            assert len(own) == len(tensors) and len(own_numbers) == len(values)
            return tensors, values

        return put


def function_site(score_mod: Any, mask_mod: Any, use: Use) -> Plan:
    """The plan of a call of bare hooks, either None; a lone mask_mod or score_mod, too."""
    try:
        mask_mod = own_mask_mod(mask_mod)
        chosen = variant(score_mod=score_mod, mask_mod=mask_mod)
        walk = Walk(chosen)
        paths = _Paths(walk, root_is_mapping=True)
        wanted = [paths.index(at) for at in (*paths.yielding("tensor"), *paths.yielding("number"))]
        if None in wanted:
            raise VariantError(
                f"{chosen.name} captures a value in a way that torch.compile cannot follow; make a "
                "variant of it outside of the compiled region, with fa.variant(...)"
            )
        fixed, count = paths.fixed(), len(walk.tensors)
        made = _FunctionSite(walk, [type(x) for x in walk.numbers])
        indices = tuple(i for i in wanted if i is not None)
        return Plan(
            _number(made, use), tuple(paths.made), indices[:count], indices[count:],
            fixed,
        )  # fmt: skip
    except Exception as error:
        return _refused(error)


def callable_site(hook: Any, use: Use) -> Plan:
    """The plan of a call of one bare hook, a score_mod or a mask_mod by its arguments."""
    try:
        hooks = as_variant(hook).hooks()
    except Exception as error:
        return _refused(error)
    return function_site(hooks.get("score_mod"), hooks.get("mask_mod"), use)


def hook_name(hook: Any) -> str:
    """Whether a bare hook is a ``score_mod`` or a ``mask_mod``; for anything else, either."""
    try:
        return next(iter(as_variant(hook).hooks()))
    except FlashAttnJitError:
        return "score_mod"


# --- paths ---------------------------------------------------------------------------------------


class _Paths:
    """The locations of a `Walk` as paths that traced code can follow.

    params: the paths to values of declared params, by their index. root_is_mapping: traced code has
    a dict of the root's attributes. cell_readers: read cells by calling functions that share them.
    Dynamo cannot read an attribute of a cell that the compiled function closes over, too, but
    follows a call to a function that does. The functions' identities are then guarded, since the
    readers hold the cells of one of them.
    """

    def __init__(
        self,
        walk: Walk,
        *,
        params: Mapping[int, Path] = types.MappingProxyType({}),
        root_is_mapping: bool = False,
        cell_readers: bool = False,
    ) -> None:
        self._walk = walk
        self._params = params
        self._root_is_mapping = root_is_mapping
        self._cell_readers = cell_readers
        self.functions: list[int] = []
        self.made: list[Path] = []
        self._index: dict[int, int | None] = {ROOT: ROOT, NOWHERE: None}

    def yielding(self, what: Yields) -> list[int]:
        """The locations that yield tensors or numbers, in their order."""
        return [at for at, x in enumerate(self._walk.locations) if x.yields == what]

    def fixed(self) -> tuple[int, ...]:
        """The indices of the paths to functions and constants, as far as there are any."""
        found = []
        for at, (value, location) in enumerate(
            zip(self._walk.values, self._walk.locations, strict=True)
        ):
            no_value = any(kind == "empty" for kind, _ in location.guards)
            if isinstance(value, _FIXED) and not no_value:
                found.append(self.index(at))
        return tuple(i for i in found if i is not None)

    def index(self, at: int) -> int | None:
        """The index of the path to a location; None where there is no such path."""
        if at not in self._index:
            self._index[at] = self._add(at)
        return self._index[at]

    def _add(self, at: int) -> int | None:
        location = self._walk.locations[at]
        if location.base == PARAMS:
            path = self._params.get(location.steps[0][1])
        else:
            base = self.index(location.base)
            if base is None or not location.steps:
                return base
            path = self._through_cell(location) or self._path(base, location.steps)
        if path is None:
            return None
        self.made.append(path)
        return len(self.made) - 1

    def _through_cell(self, location: Location) -> Path | None:
        """The path through a reader to what a cell holds."""
        kind, key = location.steps[0]
        if not self._cell_readers or kind != "cell":
            return None
        function = self.index(self._walk.locations[location.base].base)
        assert function is not None
        if function not in self.functions:
            self.functions.append(function)
        closure = self._walk.values[location.base]
        return CELL, ((ATTRIBUTE, _cell_reader(closure[key])),)  # type: ignore[index]

    def _path(self, base: int, steps: Sequence[Step]) -> Path | None:
        found: list[tuple[int, Any]] = []
        for kind, key in steps:
            if kind == "attribute":
                found.append((ATTRIBUTE, key))
            elif kind == "item":
                found.append((ITEM, key))
            elif kind == "cell":
                found += [(ITEM, key), (ATTRIBUTE, "cell_contents")]
            elif kind == "class":
                found.append((ATTRIBUTE, "__class__"))
            else:
                return None
        if base == ROOT and self._root_is_mapping:
            found[0] = (ITEM, found[0][1])
        return base, tuple(found)
