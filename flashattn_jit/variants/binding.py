"""`bind`: the structure, tensors and numbers of a variant for a call's dims and params.

It takes three dictionary look-ups: the variant's shape (its class or code) gives its readers, a
reader's extractor gives the structural key and the values, the key gives the structure. Only a miss
traces the hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashattn_jit.errors import FlashAttnJitError, ParamError, VariantError
from flashattn_jit.torch_modes import example, is_outside, outside_modes, refuse_transforms
from flashattn_jit.variants.capture.extract import (
    Extracted,
    Extractor,
    Finish,
    Location,
    Source,
    calculator,
    extractor,
)
from flashattn_jit.variants.capture.walk import Walk
from flashattn_jit.variants.interval.simplify import RangeTableSpec, range_tables, simplify
from flashattn_jit.variants.ir.ir import Graph, VariantIR
from flashattn_jit.variants.params import Declared, Dims, Param, resolve
from flashattn_jit.variants.trace.tracer import Traced, trace_variant
from flashattn_jit.variants.value_checks import ValueChecks

if TYPE_CHECKING:
    from flashattn_jit.variants.variant import Variant

MAX_READERS = 64
MAX_STRUCTURES = 4096
_NONE: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The IR of a variant and what follows from it; one object in a process for equal IR.

    Structures are therefore compared by identity.

    tables: min/max tables, which follow the param tensors. tensor_names: of the param tensors, then
    of the tables. scalar_kinds: "i" or "f" per scalar. mask_slots: tensors and scalars that the
    mask reads. costed_by_mask: the schedule uses the mask's cost, because the mask reads no
    tensors; else it uses lengths, as a plan never depends on the contents of tensors.
    schedule_reads_scalars: the schedule depends on the values of scalars. mask_is_contiguous:
    consecutive rows of a request together keep one run of keys (causal, windows).
    """

    ir: VariantIR
    tables: tuple[RangeTableSpec, ...]
    tensor_names: tuple[str, ...]
    scalar_kinds: str
    pointwise: bool
    mask_slots: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    costed_by_mask: bool = False
    schedule_reads_scalars: bool = False
    mask_is_contiguous: bool = False
    mask_reads_request: bool = True


# By text, because -0.0 == 0.0 and nan != nan.
_structures: dict[str, Structure] = {}


def structure_of(ir: VariantIR) -> Structure:
    """The one structure of equal IR."""
    text = repr(ir)
    found = _structures.get(text)
    return _structures.setdefault(text, _structure(ir)) if found is None else found


def _structure(ir: VariantIR) -> Structure:
    mask = ir.hook("mask_mod")
    names = tuple(t.name for t in ir.tensors)
    kinds = "".join("i" if s.dtype == "int64" else "f" for s in ir.scalars)
    pointwise = ir.normalizer == "pointwise"
    if mask is None:
        return Structure(ir, (), names, kinds, pointwise)
    tables = range_tables(mask)
    slots = mask.tensor_slots(), mask.scalar_slots()
    return Structure(
        ir,
        tables,
        names + tuple(f"{side} table of {names[t.slot]}" for t in tables for side in ("lo", "hi")),
        kinds,
        pointwise,
        mask_slots=slots,
        costed_by_mask=not slots[0],
        schedule_reads_scalars=not slots[0] and bool(slots[1]),
        mask_is_contiguous=_is_contiguous(mask),
        mask_reads_request=mask.uses("b"),
    )


def _is_contiguous(mask: Graph) -> bool:
    """Whether the keys that consecutive rows together keep are one run, the same for all heads.

    That holds where the mask is one conjunction of limits on q_idx, kv_idx and q_idx - kv_idx that
    depend on the request at most: the runs of two neighbouring rows then overlap or touch. False is
    always safe.
    """
    program = simplify(mask)
    # A guard that does not read kv_idx makes all tiles of a row partial, which is one run as well.
    if len(program.keep) != 1 or any("kv_idx" in program.inputs[n] for n, _, _ in program.guards):
        return False
    clause = program.keep[0]

    def fixed(node: int) -> bool:
        return program.inputs[node] <= {"b"}

    if clause.nested or not all(fixed(t.term) for t in clause.tests):
        return False
    indices = (program.q, program.k, program.distance)
    return all(
        (bound.value in indices and not bound.excludes or fixed(bound.value))
        and all(fixed(n) for n in (*bound.lows, *bound.highs))
        for bound in clause.bounds
    )


# --- binding -------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """A variant bound to one call.

    structure: decides the kernel. tensors, scalars: in the order of ``ir.tensors`` and
    ``ir.scalars``. specialised: (name, value) of the captures that are part of the structure.
    mask_params: names of the declared params that the mask depends on.
    """

    structure: Structure
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]
    specialised: tuple[tuple[str, object], ...]
    mask_params: frozenset[str] = frozenset()

    @property
    def ir(self) -> VariantIR:
        """The IR of the structure."""
        return self.structure.ir


class _Result(NamedTuple):
    """The result of tracing, for calls with the same structural key and pinned values whose numbers
    `checks` fit."""

    structure: Structure
    finish: Finish | None
    checks: ValueChecks
    selected: tuple[int, ...] | None
    specialised: tuple[tuple[str, object], ...]
    mask_params: frozenset[str]


Swap = Callable[
    [tuple[torch.Tensor, ...], tuple[float, ...]],
    tuple[tuple[torch.Tensor, ...], tuple[float, ...]],
]
"""Replaces the extracted tensors and numbers by others, in the same order."""

_NOT_COMPUTED = (ArithmeticError, TypeError, ValueError)
"""Exceptions of arithmetic with captured numbers."""

Select = Callable[[Sequence[torch.Tensor], Sequence[float], Dims], object]


@dataclass(slots=True, eq=False)
class _Group:
    """The results for one structural key, by the values that tracing specialised on: the last one
    without and the last one with numbers that are too large for int32."""

    pins: dict[Source, None] = field(default_factory=dict)
    select: Select | None = None
    results: dict[Any, tuple[_Result, ...]] = field(default_factory=dict)

    def add(
        self, pins: Mapping[Source, None], key_of: Callable[[Select], Any], made: _Result
    ) -> None:
        """Add a result; `pins` are the sources of the values that its trace specialised on."""
        new = [p for p in pins if p not in self.pins]
        if new:
            # Earlier results have no keys with these values: their calls are traced again.
            self.pins.update(dict.fromkeys(new))
            self.results.clear()
            self.select = calculator([("repr", p) if p[0] == "number" else p for p in self.pins])
        if len(self.results) >= MAX_STRUCTURES:
            self.results.clear()
        key = None if self.select is None else key_of(self.select)
        is_wide = bool(made.checks.wide)
        kept = [x for x in self.results.get(key, ()) if bool(x.checks.wide) is not is_wide]
        self.results[key] = (*kept, made) if is_wide else (made, *kept)


@dataclass(slots=True, eq=False)
class _Reader:
    """The locations that captures are read from, their extractor, and results by structural key."""

    locations: list[Location]
    extract: Extractor
    groups: dict[Any, _Group] = field(default_factory=dict)


# By the default dtype, which is that of float tensors that a hook creates, and by shape.
_readers: dict[torch.dtype, dict[Any, list[_Reader]]] = {}
_lock = threading.RLock()


def bind(
    variant: Variant, dims: Dims, params: Mapping[str, object], swap: Swap | None = None
) -> Bound:
    """See `Variant.bind`. swap: gives the values of a compiled graph for the captured ones."""
    declared = variant._declared
    values: Sequence[Any] = ()
    if declared or params:
        values = resolve(declared, dims, params, variant.name)
    found = _look_up(variant, dims, values, swap)
    if found is None:
        return _bind_new(variant, dims, declared, values, swap, params)
    results, _, (_, tensors, numbers) = found
    for result in results:
        bound = _finish(result, tensors, numbers, dims)
        if result.checks.fit(bound.scalars):
            return bound
    return _bind_new(variant, dims, declared, values, swap, params)


def _look_up(
    variant: Variant, dims: Dims, values: Sequence[Any], swap: Swap | None = None
) -> tuple[tuple[_Result, ...], Extractor, Extracted] | None:
    """What earlier traces of an equal variant gave, and what was read to find it."""
    for reader in _readers.get(torch.get_default_dtype(), _NONE).get(variant._shape, ()):
        found = reader.extract(variant, values)
        if found is None:
            continue
        key, tensors, numbers = found
        group = reader.groups.get(key)
        if group is None:
            return None
        if swap is not None:
            tensors, numbers = swap(tensors, numbers)
        select = group.select
        try:
            results = group.results.get(None if select is None else select(tensors, numbers, dims))
        except _NOT_COMPUTED:  # tracing the hook again says where
            return None
        return None if results is None else (results, reader.extract, (key, tensors, numbers))
    return None


def shape_of(variant: Variant) -> Any:
    """The class, the code of functions or the parts of a variant: variants of one shape are read
    alike."""
    return variant._shape


GIVEN, OWN, DEFAULT, FIXED = range(4)
"""Sources of the values of declared params: the call, an attribute of the variant, the param's
default, the plan."""

Described = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]
"""A layout: shape, strides, and an empty tensor of the dtype."""


class Captured(NamedTuple):
    """What `bind` reads at every call: an equal variant, with the same default dtype, is bound to
    the same structure and numbers where params and extracted tensors have these layouts, and the
    key and numbers are equal. It holds no tensor that is given or the variant's own.

    params: (`Param`, attribute, source, value, layout) of each declared param: the layout of a
    tensor that is given or an attribute, else the value. tensors: the extracted ones. selected:
    those of the kernel among them.
    """

    extract: Extractor
    key: Any
    numbers: tuple[float, ...]
    default_dtype: torch.dtype
    params: tuple[tuple[Param, str, int, object, Described | None], ...]
    tensors: tuple[Described, ...]
    selected: tuple[int, ...]


def captured(
    variant: Variant, dims: Dims, planned: Mapping[str, object], given: Mapping[str, object],
    bound: Bound,
) -> Captured | None:  # fmt: skip
    """What `bind` read for `bound`; None if it has changed since, or if `bind` also computes
    something from the contents of tensors.

    planned, given: params of the plan and of the call.
    """
    if bound.structure.tables:
        return None
    params: list[tuple[Param, str, int, object, Described | None]] = []
    values = resolve(variant._declared, dims, {**planned, **given}, variant.name)
    for (name, param, owner), value in zip(variant._declared, values, strict=True):
        source, raw = DEFAULT, value
        if name in given:
            source, raw = GIVEN, given[name]
        elif name in planned:
            source = FIXED
        elif param.name in owner.__dict__:
            source, raw = OWN, owner.__dict__[param.name]
        if raw is not value:  # converted: a new value at each call
            return None
        if source in (GIVEN, OWN) and isinstance(value, torch.Tensor):
            params.append((param, param.name, source, None, _described(value)))
        else:
            params.append((param, param.name, source, value, None))
    found = _look_up(variant, dims, values)
    if found is None:
        return None
    results, extract, (key, tensors, numbers) = found
    result = next((x for x in results if x.structure is bound.structure), None)
    if result is None or result.selected is None:
        return None
    same = _finish(result, tensors, numbers, dims)
    if not result.checks.fit(same.scalars) or repr(same.scalars) != repr(bound.scalars):
        return None
    return Captured(
        extract, key, numbers, torch.get_default_dtype(), tuple(params),
        tuple(map(_described, tensors)), result.selected,
    )  # fmt: skip


def _described(tensor: torch.Tensor) -> Described:
    return tuple(tensor.shape), tensor.stride(), example(tensor.dtype)


def bind_outside_modes(
    variant: Variant, dims: Dims, params: Mapping[str, object], swap: Swap | None = None
) -> Bound:
    """`bind` where a mode of torch may be active, which must not affect what is cached.

    Also raises GradError or InputError for captured tensors and params that belong to a functional
    transform such as `torch.func.grad` or `torch.vmap`.
    """

    def checked(
        tensors: tuple[torch.Tensor, ...], numbers: tuple[float, ...]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[float, ...]]:
        for tensor in tensors:
            refuse_transforms(tensor, "a tensor of the variant")
        return (tensors, numbers) if swap is None else swap(tensors, numbers)

    with outside_modes():
        return bind(variant, dims, params, checked)


def bind_on_host(variant: Variant, dims: Dims, params: Mapping[str, object]) -> Bound:
    """`bind` for functions of `on_host`, which have left the modes that were active."""
    return (bind_outside_modes if is_outside() else bind)(variant, dims, params)


def _finish(
    result: _Result,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, ...],
    dims: Dims,
) -> Bound:
    if result.finish is not None:
        try:
            tensors, numbers = result.finish(tensors, numbers)
        except FlashAttnJitError:
            raise
        except _NOT_COMPUTED as error:
            raise ParamError(
                "a hook computes a number from captured ones, which cannot be done with those of "
                f"this call: {type(error).__name__}: {error}"
            ) from error
    result.checks.check(result.structure.ir, tensors, numbers, dims)
    if tensors:
        device = dims.device
        for i, t in enumerate(tensors):
            if t.device != device:
                tensors = _moved(result, tensors, i, device)
    return Bound(result.structure, tensors, numbers, result.specialised, result.mask_params)


def _moved(
    result: _Result, tensors: tuple[torch.Tensor, ...], i: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    t = tensors[i]
    if t.dim() == 0 and t.device.type == "cpu":
        # A fill instead of a copy, which works in CUDA graphs and does not synchronise.
        moved = torch.full((), t.item(), dtype=t.dtype, device=device)
        return (*tensors[:i], moved, *tensors[i + 1 :])
    name = result.structure.ir.tensors[i].name
    raise ParamError(
        f"captured tensor {name!r} is on {t.device}, the call on {device}; "
        f"move it with `.to({str(device)!r})`"
    )


def _bind_new(
    variant: Variant,
    dims: Dims,
    declared: Sequence[Declared],
    values: Sequence[Any],
    swap: Swap | None,
    params: Mapping[str, object],
) -> Bound:
    # Autocast and inference mode are not part of the key, but would change the prelude's results.
    with _lock, outside_modes():
        walk, traced = _traced(variant, dims, declared, values, swap)
        if (twin := variant._twin) is not None:
            twin_values = resolve(twin._declared, dims, params, twin.name)
            again = _traced(twin, dims, twin._declared, twin_values, swap)
            _check_equal(variant.name, (walk, traced), again)
        reader = _reader_for(variant, walk)
        found = reader.extract(variant, values)
        assert found is not None, walk.locations
        key, tensors, numbers = found
        if swap is not None:
            tensors, numbers = swap(tensors, numbers)
        scalars = numbers if traced.finish is None else traced.finish(tensors, numbers)[1]
        result = _Result(
            structure_of(traced.ir),
            traced.finish,
            ValueChecks.of(traced.ir, scalars, declared),
            traced.selected,
            _specialised(traced, walk, dims),
            traced.mask_params,
        )
        if len(reader.groups) >= MAX_STRUCTURES:
            reader.groups.clear()
        group = reader.groups.setdefault(key, _Group())
        group.add(traced.pins, lambda select: select(tensors, numbers, dims), result)
    return _finish(result, tensors, numbers, dims)


def _traced(
    variant: Variant,
    dims: Dims,
    declared: Sequence[Declared],
    values: Sequence[Any],
    swap: Swap | None,
) -> tuple[Walk, Traced]:
    """The visit of all that a variant's hooks read, and their trace."""
    walk = Walk(variant, params=param_locations(declared, values))
    if swap is not None:
        tensors, numbers = swap(tuple(walk.tensors), tuple(walk.numbers))
        walk.tensors, walk.numbers = list(tensors), list(numbers)
    return walk, trace_variant(variant, walk, dims)


def _check_equal(name: str, one: tuple[Walk, Traced], other: tuple[Walk, Traced]) -> None:
    """Raises VariantError where a variant of placeholders and its twin have other graphs: then a
    placeholder, and not the number that it stands for, is a part of them."""
    # As texts, in which NaN equals NaN.
    found = [(repr(walk.numbers), repr(traced.ir)) for walk, traced in (one, other)]
    if found[0] != found[1]:
        raise VariantError(
            f"a hook of {name} reads a number of the compiled function where it is not followed, "
            "such as an attribute whose name is computed; make the variant outside of the compiled "
            "function, with fa.variant(...)"
        )


def param_locations(
    declared: Sequence[Declared], values: Sequence[Any]
) -> dict[int, dict[str, tuple[int, str, object]]]:
    """The argument `params` of `Walk`: the attributes that declared params are."""
    locations: dict[int, dict[str, tuple[int, str, object]]] = {}
    for i, (d, value) in enumerate(zip(declared, values, strict=True)):
        locations.setdefault(id(d.owner), {})[d.param.name] = (i, d.name, value)
    return locations


def _reader_for(variant: Variant, walk: Walk) -> _Reader:
    shapes = _readers.setdefault(torch.get_default_dtype(), {})
    if len(shapes) >= MAX_STRUCTURES:
        shapes.clear()
    readers = shapes.setdefault(variant._shape, [])
    for reader in readers:
        if reader.locations == walk.locations:
            return reader
    if len(readers) >= MAX_READERS:
        readers.pop(0)
    readers.append(_Reader(walk.locations, extractor(walk.locations)))
    return readers[-1]


def _specialised(traced: Traced, walk: Walk, dims: Dims) -> tuple[tuple[str, object], ...]:
    found: list[tuple[str, object]] = list(zip(walk.const_names, walk.consts, strict=True))
    for pin in traced.pins:
        if pin[0] == "number":
            i = int(pin[1])
            found.append((walk.number_names[i], walk.numbers[i]))
        elif pin[0] == "size":
            i, d = int(pin[1]), int(pin[2])  # type: ignore[misc]
            found.append((f"{walk.tensor_names[i]}.shape[{d}]", walk.tensors[i].shape[d]))
        else:
            found.append((str(pin[1]), getattr(dims, str(pin[1]))))
    return tuple(found)


def clear() -> None:
    """Forget all readers and their results, but not structures. For tests."""
    with _lock:
        _readers.clear()
