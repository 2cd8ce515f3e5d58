"""Calls that are one torch op: what is constant in them, and how a run makes the call again.

The op's inputs are tensors and numbers. All else of the call is its *site*, which the op names by
an int. While a graph is made, the site learns which tensors and numbers the variant captures and
the paths that lead to them, so that the graph takes them as inputs; when the graph runs, the site
puts variant, params and arguments together again, with the graph's values in their places. Nothing
but this file resolves the int.
"""

from __future__ import annotations

import enum
import itertools
import secrets
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ... import errors
from ...errors import FlashAttnJitError, InputError, VariantError
from ...torch_modes import PLAIN
from ...variants.binding import Swap, param_locations
from ...variants.capture.extract import (
    NOWHERE,
    PARAMS,
    ROOT,
    Extractor,
    Location,
    Step,
    extractor,
    stride_pattern,
)
from ...variants.capture.walk import Walk
from ...variants.params import MISSING
from ...variants.variant import Variant, as_variant, is_pointwise
from ...variants.variant import variant as function_variant
from ..keys.block_mask import own_mask_mod
from .outline import Maker, Outline

ATTRIBUTE, ITEM = 0, 1
CELL = -4  # beside where a location may start
Path = tuple[int, tuple[tuple[int, Any], ...]]
"""How to reach a value: from that of an earlier path (or ROOT), by attributes and items.
CELL: what the function of that name in `CELLS` returns."""

Tensors = Sequence[torch.Tensor]

# What a hook's structure depends on by value; the tracer guards on them when it looks at them.
_FIXED = (types.FunctionType, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_STAND_IN = 1 << 40
"""Numbers from here on stand for numbers that are inputs of an op."""


class Plan(NamedTuple):
    """What the code that is traced needs of a site: tuples, strings and numbers alone.

    number: the site's, for when the graph runs. paths: what to read, in order, of the objects
    outside. The others say what paths end at: captured tensors, Python numbers, fixed things
    (functions and constants), functions that must stay the same objects. pointwise: there is no
    lse.
    """

    number: int
    paths: tuple[Path, ...] = ()
    tensors: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    functions: tuple[int, ...] = ()
    pointwise: bool = False


class Hooks(NamedTuple):
    """What FlexAttention has for a variant."""

    score_mod: Any
    mask_mod: Any


class Call(NamedTuple):
    """A call as its user made it. swap: see `bind`. kept: a place for the site's own use."""

    variant: Any
    params: dict[str, Any]
    arguments: dict[str, Any]
    swap: Swap | None
    kept: dict[str, Any]


# --- sites by number -----------------------------------------------------------------------------

_Site = Callable[[Tensors, torch.Tensor, Sequence[int]], Call]
_sites: dict[int, _Site] = {}
_numbers = itertools.count()
_once: set[int] = set()
_exported: dict[int, Any] = {}
_lock = threading.Lock()

Use = Literal["compiled", "exported", "once"]
"""What becomes of a call that is one op. compiled: a graph of ``torch.compile``, which guards on
the variant. exported: a graph on its own, of torch.export or make_fx, which keeps its site for the
life of the process. once: it runs now and never again."""

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


def call_of(number: int, tensors: Tensors, floats: torch.Tensor, ints: Sequence[int]) -> Call:
    """The call of a site with the values of a run. Raises InputError as `local_number` does."""
    site = _sites.get(local_number(number))
    if site is None:
        raise InputError(
            f"number {number} names no call of this process that can run again: make the graph "
            "again; for the recorded op of a call that has returned, call the function itself"
        )
    return site(tensors, floats, ints)


def once(variant: Any, params: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """The number of a site for one call that runs now, with what it got; see `release`."""
    call = Call(variant, dict(params), dict(arguments), None, {})
    return _number(lambda tensors, floats, ints: call, "once")


def refusal(use: Use, kind: str, message: str) -> int:
    """The number of a site that raises an error, of the class of that name, when the graph runs."""

    def refuse(*_: object) -> Call:
        raise getattr(errors, kind, FlashAttnJitError)(message)

    return _number(refuse, use)


def _number(made: _Site, use: Use) -> int:
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


# --- the site of a call --------------------------------------------------------------------------


def call_site(
    use: Use,
    outline: Outline,
    counts: tuple[int, int, int],
    names: tuple[str, ...],
    is_live: bool,
    *outside: Any,
) -> Plan:
    """The plan of a call, and its site.

    outline: of (variant, params, arguments). counts: how many tensors, floats and ints it has.
    names: of methods that it mentions. outside: what it takes as it is. is_live: the variant is the
    first of these, one that was made before the traced function: its numbers are read when the
    graph runs, so that a new one changes no input of the graph.
    """
    try:
        if is_live:
            return _live_site(use, outline, counts[0], outside)
        walk = Walk(outside, frozenset(names))
        paths = _Paths(walk)
        reached = [paths.index(at) for at in (*walk.yielding("tensor"), *walk.yielding("number"))]
        for name, index in zip((*walk.tensor_names, *walk.number_names), reached, strict=True):
            if index is None:
                raise VariantError(
                    f"a hook captures {name!r} in a way that the compiler cannot follow; make a "
                    "variant of the hook outside of the compiled function, with fa.variant(...)"
                )
        found = [i for i in reached if i is not None]
        fixed, count = paths.fixed(), len(walk.tensors)
        if use == "compiled":  # the site may outlive what the function captured
            walk = walk.without_tensors([_shell(t) for t in walk.tensors])
        site = _MadeSite(outline, counts, walk)
        return Plan(
            _number(site, use), tuple(paths.made), tuple(found[:count]), tuple(found[count:]),
            fixed, (), site.is_pointwise(outside),
        )  # fmt: skip
    except FlashAttnJitError as error:
        return Plan(refusal(use, type(error).__name__, str(error)))
    except Exception as error:
        return Plan(refusal(use, "VariantError", f"{type(error).__name__} in a variant: {error}"))


class _Prototype(NamedTuple):
    """The variant of a site for tensors of some layout, with stand-ins for all of its values.

    outside: the objects that it is made of. declared: its params whose values are inputs of the op,
    by the indices of these. tensors, numbers: for each that the variant captures, in the order of
    `bind`, the index of the input that takes its place, None for its own.
    """

    variant: Variant
    outside: Sequence[Any]
    declared: tuple[tuple[str, Literal["tensor", "number"], int], ...]
    tensors: tuple[int | None, ...]
    numbers: tuple[int | None, ...]


class _MadeSite:
    """Makes a variant of what hooks captured.

    The op's inputs are the outline's own tensors and numbers, then those that the objects outside
    captured. Another closure of the same code runs the same graph, so nothing is read of the
    objects themselves: prototypes are copies, and `bind` swaps the graph's values in.
    """

    def __init__(self, outline: Outline, counts: tuple[int, int, int], walk: Walk) -> None:
        self._variant, *self._rest = outline[1]
        self._counts = counts
        self._build = walk.build
        self._kinds = tuple(type(x) for x in walk.numbers)
        self._prototypes: dict[object, _Prototype] = {}
        self._kept: dict[str, Any] = {}

    def __call__(self, tensors: Tensors, packed: torch.Tensor, ints: Sequence[int]) -> Call:
        floats = packed.tolist()
        values = {"tensor": tensors, "number": (*floats, *ints)}
        layout = tuple((t.dtype, stride_pattern(t), t.is_contiguous()) for t in tensors)
        made = self._prototypes.get(layout)
        if made is None:
            made = self._prototypes[layout] = self._prototype(tensors, len(floats), len(ints))
        params, arguments = Maker(tensors, floats, ints, made.outside).all(self._rest)
        for name, kind, index in made.declared:
            params.setdefault(name, values[kind][index])

        def put(captured: Any, numbers: Any) -> Any:
            given = zip(captured, made.tensors, strict=True)
            known = zip(numbers, made.numbers, strict=True)
            return (
                tuple([t if i is None else tensors[i] for t, i in given]),
                tuple([x if i is None else type(x)(values["number"][i]) for x, i in known]),
            )

        return Call(made.variant, params, arguments, put, self._kept)

    def _prototype(self, tensors: Tensors, num_floats: int, num_ints: int) -> _Prototype:
        shells = [_shell(t) for t in tensors]
        # Each number is another one, by which it is found again.
        floats = [_STAND_IN + i + 0.5 for i in range(num_floats)]
        ints = [_STAND_IN + num_floats + i for i in range(num_ints)]
        others = {float: iter(floats[self._counts[1] :]), int: iter(ints[self._counts[2] :])}
        outside = self._build(
            shells[self._counts[0] :], [next(others[kind]) for kind in self._kinds]
        )
        variant = self._made_variant(Maker(shells, floats, ints, outside))
        place = {id(x): i for i, x in enumerate(shells)}
        number = {x: i for i, x in enumerate((*floats, *ints))}
        declared: list[tuple[str, Literal["tensor", "number"], int]] = []
        for d in variant._declared:
            value = d.owner.__dict__.get(d.param.name)
            if id(value) in place:
                declared.append((d.name, "tensor", place[id(value)]))
            elif type(value) in (int, float) and value in number:
                declared.append((d.name, "number", number[value]))
        walk = _walk(variant, {name for name, _, _ in declared})
        return _Prototype(
            variant,
            outside,
            tuple(declared),
            tuple([place.get(id(t)) for t in walk.tensors]),
            tuple([number.get(x) for x in walk.numbers]),
        )

    def _made_variant(self, maker: Maker) -> Variant:
        made = maker.make(self._variant)
        if not isinstance(made, Hooks):
            return as_variant(made)
        return function_variant(score_mod=made.score_mod, mask_mod=own_mask_mod(made.mask_mod))

    def is_pointwise(self, outside: Sequence[Any]) -> bool:
        """Whether the variant has no lse, as far as that can be told without its values."""
        tensors = [torch.empty(0, device="cpu")] * self._counts[0]
        maker = Maker(tensors, [0.0] * self._counts[1], [0] * self._counts[2], outside)
        try:
            return is_pointwise(self._made_variant(maker))
        except Exception:
            return False  # the run says what is wrong


def _shell(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


# --- variants that were made before: read anew in every run --------------------------------------


def _live_site(use: Use, outline: Outline, count: int, outside: Sequence[Any]) -> Plan:
    chosen: Variant = outside[0]
    given = set(outline[1][1][1])
    walk = _walk(chosen, given)
    paths = _Paths(walk, params=_param_paths(chosen, given), cell_readers=use == "compiled")
    reached = [paths.index(at) for at in walk.yielding("tensor")]
    frozen = _Frozen(chosen, walk, given) if use == "exported" else None
    places = [i for i, index in enumerate(reached) if index is not None]
    site = _LiveSite(outline, count, outside, len(reached), places, frozen)
    return Plan(
        _number(site, use),
        tuple(paths.made),
        tuple([i for i in reached if i is not None]),
        functions=tuple(paths.functions),
        pointwise=is_pointwise(chosen),
    )


class _LiveSite:
    """Calls with a `Variant` object: its numbers are read in each run, its tensors are inputs.

    The op's inputs are the outline's own tensors and numbers, then the variant's tensors, which
    take the `places` among those that it captures. frozen: of an exported graph, whose variant is
    kept alive and must stay what it was: only its numbers and the values of its tensors may change,
    which the graph does not follow.
    """

    def __init__(
        self,
        outline: Outline,
        count: int,
        outside: Sequence[Any],
        num_captured: int,
        places: Sequence[int],
        frozen: _Frozen | None,
    ) -> None:
        self._rest = outline[1][1:]
        self._count = count
        self._variant = weakref.ref(outside[0])
        self._outside = outside if frozen is not None else (None, *outside[1:])
        self._num_captured, self._places, self._frozen = num_captured, places, frozen
        self._kept: dict[str, Any] = {}

    def __call__(self, tensors: Tensors, packed: torch.Tensor, ints: Sequence[int]) -> Call:
        chosen = self._variant()
        if chosen is None:
            raise VariantError("the variant of a compiled graph is gone; keep it alive")
        if self._frozen is not None:
            self._frozen.check(chosen)
        params, arguments = Maker(tensors, packed.tolist(), ints, self._outside).all(self._rest)
        fixed = {} if self._frozen is None else self._frozen.numbers
        again = "call torch.compiler.reset()" if self._frozen is None else "export the call again"

        def put(captured: Any, numbers: Any) -> Any:
            if len(captured) != self._num_captured:
                raise VariantError(
                    f"the variant captured {self._num_captured} tensors when the call was traced, "
                    f"and captures {len(captured)} now; {again}"
                )
            out = list(captured)
            for place, tensor in zip(self._places, tensors[self._count :], strict=True):
                out[place] = _laid_out_as(tensor, captured[place], again)
            if not fixed:
                return tuple(out), numbers
            return tuple(out), tuple([fixed.get(i, x) for i, x in enumerate(numbers)])

        return Call(chosen, params, arguments, put, self._kept)


class _Frozen:
    """What an exported call was traced with: its numbers, and the structure that must stay."""

    def __init__(self, chosen: Variant, walk: Walk, given: set[str]) -> None:
        own = walk.param_numbers
        self.numbers = {i: x for i, x in enumerate(walk.numbers) if own.get(i) not in given}
        self._given = given
        self._extract: Extractor | None = None
        # A tracer that lends a variant tensors of its own, for as long as it runs, is over when the
        # graph runs for the first time.
        if all(type(t) in PLAIN for t in walk.tensors):
            self._learn(chosen)

    def _learn(self, chosen: Variant) -> None:
        self._extract = extractor(_walk(chosen, self._given).locations)
        self._key = self._seen(chosen)

    def _seen(self, chosen: Variant) -> object:
        """All of the variant but its numbers and tensors: code, flags, and which params are set."""
        assert self._extract is not None
        found = self._extract((chosen,), _stand_ins(chosen, self._given))
        if found is None:
            return None
        is_set = tuple(d.param.name in d.owner.__dict__ for d in chosen._declared)
        return found[0], len(found[2]), is_set

    def check(self, chosen: Variant) -> None:
        """Raises VariantError where the variant has become another one."""
        if self._extract is None:
            self._learn(chosen)
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


def _param_paths(chosen: Variant, given: set[str]) -> dict[int, Path]:
    """The paths to declared params that are tensors of the variant itself, by their index."""
    return {
        i: (ROOT, ((ITEM, 0), *_steps_to(chosen, d.owner), (ATTRIBUTE, d.param.name)))
        for i, d in enumerate(chosen._declared)
        if d.name not in given and isinstance(d.owner.__dict__.get(d.param.name), torch.Tensor)
    }


def _walk(chosen: Variant, given: Collection[str]) -> Walk:
    """The visit of a variant, in the order of `bind`; given: params that a call gives."""
    values = _stand_ins(chosen, given)
    return Walk((chosen,), params=param_locations(chosen._declared, values))


def _stand_ins(chosen: Variant, given: Collection[str]) -> list[Any]:
    return [_stand_in(d, d.name in given) for d in chosen._declared]


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


# --- paths ---------------------------------------------------------------------------------------


class _Cells:
    """Functions that read a cell, as attributes: `_Paths` says why."""


CELLS = _Cells()


class _Paths:
    """The locations of a `Walk` as paths that traced code can follow.

    params: the paths to values of declared params, by their index. cell_readers: read cells by
    calling functions that share them. Dynamo cannot read an attribute of a cell that the compiled
    function closes over, too, but follows a call to a function that does. The functions' identities
    are then guarded, since the readers hold the cells of one of them.
    """

    def __init__(
        self,
        walk: Walk,
        *,
        params: Mapping[int, Path] = types.MappingProxyType({}),
        cell_readers: bool = False,
    ) -> None:
        self._walk = walk
        self._params = params
        self._cell_readers = cell_readers
        self.functions: list[int] = []
        self.made: list[Path] = []
        self._index: dict[int, int | None] = {ROOT: ROOT, NOWHERE: None}

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
        return base, tuple(found)


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
