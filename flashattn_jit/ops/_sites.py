"""Calls that tracers see: what is fixed while tracing, and how a run gets its values back.

A *site* is one call in a compiled graph. While the graph is traced, the site learns which tensors
the variant captures and the paths that lead to them, so that the graph takes them as inputs; when
the graph runs, the site binds the variant as any call does, with the graph's values in the places
of the captured ones. The tracer calls `variant_site` and `function_site`; it never looks inside.
"""

from __future__ import annotations

import ast
import enum
import itertools
import secrets
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..errors import FlashAttnJitError, InputError, VariantError
from ..variants.binding import param_locations
from ..variants.captures import Walk, stride_pattern
from ..variants.params import MISSING, Pointwise
from ..variants.spec import Variant, as_variant, variant
from .block_mask import own_mask_mod

ATTRIBUTE, ITEM = 0, 1
ROOT, CELL = -1, -2
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
        self._values, self._extract = tuple(values), walk.extractor()
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
        paths = _Paths(walk, chosen)
        if use == "compiled":
            paths.use_cell_readers()
        for i, d in enumerate(chosen._declared):
            if d.name not in given and isinstance(d.owner.__dict__.get(d.param.name), torch.Tensor):
                steps = (*_steps_to(chosen, d.owner), (ATTRIBUTE, d.param.name))
                paths.known[f"p[{i}]"] = (ROOT, steps)
        places, tensors = [], []
        for place, var in enumerate(paths.tensor_vars):
            index = paths.index(var)
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
        paths = _Paths(walk, chosen, root_is_mapping=True)
        wanted = [paths.index(var) for var in (*paths.tensor_vars, *paths.number_vars)]
        fixed = [paths.index(var) for var, value in paths.found.items() if _is_fixed(value)]
        if None in wanted or None in fixed:
            raise VariantError(
                f"{chosen.name} captures a value in a way that torch.compile cannot follow; make a "
                "variant of it outside of the compiled region, with fa.variant(...)"
            )
        count = len(paths.tensor_vars)
        made = _FunctionSite(walk, [type(x) for x in walk.numbers])
        indices = tuple(i for i in wanted if i is not None)
        return Plan(
            _number(made, use), tuple(paths.made), indices[:count], indices[count:],
            tuple(i for i in fixed if i is not None),
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


def _is_fixed(value: Any) -> bool:
    return isinstance(value, _FIXED)


# --- paths ---------------------------------------------------------------------------------------


class _Paths:
    """The visits of a `Walk` as paths: its extractor is the list of them, as Python source."""

    def __init__(self, walk: Walk, root: Any, root_is_mapping: bool = False) -> None:
        nodes = list(ast.walk(ast.parse(walk.source)))
        self._visits = {
            line.targets[0].id: line.value
            for line in nodes
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        }
        self._classes = dict(found for n in nodes if (found := _class_guard(n)) is not None)
        (result,) = (n.value for n in nodes if isinstance(n, ast.Return) and _is_result(n.value))
        assert isinstance(result, ast.Tuple)
        _, tensors, numbers = result.elts
        self.tensor_vars, self.number_vars = _names(tensors), _names(numbers)
        self.found = self._find(root)
        self._root_is_mapping = root_is_mapping
        self._cell_readers = False
        self.functions: list[int] = []
        self.known: dict[str, Path] = {}  # other ways to what the extractor gets as an argument
        self.made: list[Path] = []
        self._index: dict[str, int | None] = {"v": ROOT}

    def use_cell_readers(self) -> None:
        """Read cells of functions by calling functions that share them.

        Dynamo cannot read an attribute of a cell that the compiled function closes over, too, but
        follows a call to a function that does. The functions' identities are then guarded, since
        the readers hold the cells of one of them.
        """
        self._cell_readers = True

    def _find(self, root: Any) -> dict[str, Any]:
        """What each variable is now, where it can be read without the extractor."""
        found: dict[str, Any] = {"v": root}
        for var, visit in self._visits.items():
            classes = {k: type(found[x]) for k, x in self._classes.items() if x in found}
            try:
                found[var] = eval(
                    compile(ast.Expression(visit), "<path>", "eval"),
                    {"__builtins__": {}},
                    {**classes, **found},
                )
            except Exception:  # refers to an argument or a constant of the extractor
                continue
        del found["v"]
        return found

    def index(self, var: str) -> int | None:
        """The index of the path to a variable; None where there is no such path."""
        if var not in self._index:
            self._index[var] = self._add(self._visits[var]) if var in self._visits else None
        return self._index[var]

    def _add(self, visit: ast.expr) -> int | None:
        if isinstance(visit, ast.Name):
            return self.index(visit.id)
        path = self.known.get(ast.unparse(visit)) or self._cell(visit) or self._path(visit)
        if path is None:
            return None
        self.made.append(path)
        return len(self.made) - 1

    def _cell(self, visit: ast.expr) -> Path | None:
        """The path through a reader to ``closure[i].cell_contents``."""
        if not (
            self._cell_readers
            and isinstance(visit, ast.Attribute)
            and visit.attr == "cell_contents"
            and isinstance(visit.value, ast.Subscript)
            and isinstance(visit.value.value, ast.Name)
            and isinstance(visit.value.slice, ast.Constant)
        ):
            return None
        closure = visit.value.value.id
        owner = self._visits[closure]
        if not (isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name)):
            return None
        function = self.index(owner.value.id)
        if function is None or closure not in self.found:
            return None
        if function not in self.functions:
            self.functions.append(function)
        name = _cell_reader(self.found[closure][visit.value.slice.value])
        return CELL, ((ATTRIBUTE, name),)

    def _path(self, visit: ast.expr) -> Path | None:
        steps: list[tuple[int, Any]] = []
        while not isinstance(visit, ast.Name):
            if isinstance(visit, ast.Attribute):
                steps.append((ATTRIBUTE, visit.attr))
                visit = visit.value
            elif isinstance(visit, ast.Subscript) and isinstance(visit.slice, ast.Constant):
                steps.append((ITEM, visit.slice.value))
                visit = visit.value
            elif _is_get(visit):
                assert isinstance(visit, ast.Call) and isinstance(visit.func, ast.Attribute)
                (key,) = visit.args
                assert isinstance(key, ast.Constant)
                steps.append((ITEM, key.value))
                visit = visit.func.value
            else:
                return None
        steps.reverse()
        var = visit.id
        if var in self._classes:
            steps.insert(0, (ATTRIBUTE, "__class__"))
            var = self._classes[var]
        base = self.index(var)
        if base is None:
            return None
        if base == ROOT and self._root_is_mapping:
            steps[0] = (ITEM, steps[0][1])
        return base, tuple(steps)


def _names(node: ast.expr) -> list[str]:
    return [x.id for x in getattr(node, "elts", ()) if isinstance(x, ast.Name)]


def _is_result(value: ast.expr | None) -> bool:
    """Whether an extractor returns it when it finds what it looks for: (key, tensors, numbers)."""
    return isinstance(value, ast.Tuple) and len(value.elts) == 3


def _class_guard(node: ast.AST) -> tuple[str, str] | None:
    """(K, x) of a test ``type(x) is not K``, which makes K another name of x's class."""
    if not (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.IsNot)):
        return None
    left, right = node.left, node.comparators[0]
    if (
        isinstance(left, ast.Call)
        and isinstance(left.func, ast.Name)
        and left.func.id == "type"
        and isinstance(left.args[0], ast.Name)
        and isinstance(right, ast.Name)
    ):
        return right.id, left.args[0].id
    return None


def _is_get(visit: ast.expr) -> bool:
    return (
        isinstance(visit, ast.Call)
        and isinstance(visit.func, ast.Attribute)
        and visit.func.attr == "get"
        and len(visit.args) == 1
        and isinstance(visit.args[0], ast.Constant)
    )
