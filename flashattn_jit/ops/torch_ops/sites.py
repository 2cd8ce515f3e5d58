"""Sites: the constant part of calls that are one torch op, from which a run makes the call again.

The op's inputs are tensors and numbers. Everything else of the call is its *site*, which an int
identifies. While a graph is traced, the site determines which tensors and numbers the variant
captures, and the paths to them, so that the graph takes them as inputs. When the graph runs, the
site rebuilds variant, params and arguments with the values of the graph's inputs. Only this file
resolves the int.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ... import errors
from ...errors import FlashAttnJitError, InputError, VariantError
from ...torch_modes import PLAIN
from ...variants.binding import Swap, param_locations
from ...variants.capture.extract import (
    ROOT,
    Extractor,
    extractor,
    stride_pattern,
)
from ...variants.capture.walk import Walk
from ...variants.params import MISSING, PARTS, declared_params, parts_of
from ...variants.variant import Variant, as_variant, is_pointwise
from ...variants.variant import variant as function_variant
from ..keys.block_mask import own_mask_mod
from .outline import Maker, Outline
from .paths import ATTRIBUTE, ITEM, Path, Paths
from .pending import Assignment, changes_values, take

Tensors = Sequence[torch.Tensor]

_STAND_IN = 1 << 40
"""Numbers from here on are placeholders for numbers that are inputs of an op."""


class SiteInfo(NamedTuple):
    """A site for traced code, which reads only tuples, strings and numbers.

    number: identifies the site when the graph runs. paths: values to read, in order, from the
    objects outside. tensors, numbers, fixed, functions: indices of the paths to captured tensors,
    to Python numbers, to functions and constants whose value is guarded, and to functions whose
    identity is guarded. pointwise: there is no lse. keys: paths to dicts whose keys are guarded.
    absent: paths to objects, and attributes that they do not have of their own. names: of the
    captured tensors, for messages.
    """

    number: int
    paths: tuple[Path, ...] = ()
    tensors: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    functions: tuple[int, ...] = ()
    pointwise: bool = False
    keys: tuple[int, ...] = ()
    absent: tuple[tuple[int, tuple[str, ...]], ...] = ()
    names: tuple[str, ...] = ()


NOT_LIVE = SiteInfo(-1)
"""In place of a live variant's site: traced code has to read the variant's numbers."""


class Hooks(NamedTuple):
    """The hooks of a FlexAttention call, in place of a variant."""

    score_mod: Any
    mask_mod: Any


class UserCall(NamedTuple):
    """The arguments of a call. swap: see `bind`. kept: a dict that lives as long as the site."""

    variant: Any
    params: dict[str, Any]
    arguments: dict[str, Any]
    swap: Swap | None
    kept: dict[str, Any]


# --- sites by number -----------------------------------------------------------------------------

_Site = Callable[[Tensors, torch.Tensor, Sequence[int]], UserCall]
_sites: dict[int, _Site] = {}
_numbers = itertools.count()
_once: set[int] = set()
_exported: dict[int, Any] = {}
_lock = threading.Lock()

Use = Literal["compiled", "exported", "once"]
"""The use of an op. compiled: in a graph of ``torch.compile``, which guards on the variant.
exported: in a standalone graph of torch.export or make_fx, which keeps its site for the life of the
process. once: the op runs now and never again."""

# An exported graph can be saved and loaded by another process, in which the same numbers identify
# other sites and batches. Its numbers therefore start at a base that is random in each process.
FIRST_EXPORTED = secrets.randbits(30) + 1 << 32


def local_number(number: int) -> int:
    """A graph's number without the base. Raises InputError for a graph of another process."""
    if 0 <= number < 1 << 32:
        return number
    if number >> 32 != FIRST_EXPORTED >> 32:
        raise InputError(
            "this graph was exported by another process, where its variants and batches are; "
            "export it in the process that runs it"
        )
    return number - FIRST_EXPORTED


def exported_number(owner: Any) -> int:
    """The number of a batch for an exported graph; keeps the batch alive."""
    with _lock:
        _exported[owner.number] = owner
    return int(owner.number) + FIRST_EXPORTED


def call_of(number: int, tensors: Tensors, floats: torch.Tensor, ints: Sequence[int]) -> UserCall:
    """The call of a site with the values of a run. Raises InputError as `local_number` does."""
    site = _sites.get(local_number(number))
    if site is None:
        raise InputError(
            f"number {number} names no call of this process that can run again: make the graph "
            "again; for the recorded op of a call that has returned, call the function itself"
        )
    return site(tensors, floats, ints)


def once(variant: Any, params: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """The number of a site for a call that runs once, now, with these arguments; see `release`."""
    call = UserCall(variant, dict(params), dict(arguments), None, {})
    return _number(lambda tensors, floats, ints: call, "once")


def refusal(use: Use, kind: str, message: str) -> int:
    """The number of a site that raises an error when the graph runs. kind: the error's class."""

    def refuse(*_: object) -> UserCall:
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
    """Delete the site of a call that has run and will not run again."""
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
    changes: int,
    *outside: Any,
) -> SiteInfo:
    """Makes the site of a call, and returns its description.

    outline: of (variant, params, arguments). counts: its numbers of tensors, floats and ints.
    names: of methods in it. outside: the objects that it refers to. is_live: the first of these is
    the variant, made before the traced function: its numbers are read when the graph runs, and are
    no inputs of the graph. changes: those of `pending.changes_before_call`; where they change a
    live variant's values, the result is `NOT_LIVE`.
    """
    try:
        pending = take(changes)
        if is_live:
            return _live_site(use, outline, counts[0], outside, pending)
        walk = Walk(outside, frozenset(names))
        changes_values(walk, pending)
        paths = Paths(walk)
        reached = [paths.index(at) for at in (*walk.yielding("tensor"), *walk.yielding("number"))]
        for name, index in zip((*walk.tensor_names, *walk.number_names), reached, strict=True):
            if index is None:
                raise VariantError(
                    f"a hook captures {name!r} in a way that the compiler cannot follow; make a "
                    "variant of the hook outside of the compiled function, with fa.variant(...)"
                )
        found = [i for i in reached if i is not None]
        fixed, absent, keys = paths.fixed(), paths.absent(), paths.keys()
        count = len(walk.tensors)
        if use == "compiled":  # the site may outlive what the function captured
            walk = walk.without_tensors([_shell(t) for t in walk.tensors])
        site = _MadeSite(outline, counts, walk)
        return SiteInfo(
            _number(site, use), tuple(paths.made), tuple(found[:count]), tuple(found[count:]),
            fixed, (), site.is_pointwise(outside), keys, absent,
            tuple(walk.tensor_names),
        )  # fmt: skip
    except FlashAttnJitError as error:
        return SiteInfo(refusal(use, type(error).__name__, str(error)))
    except Exception as error:
        return SiteInfo(
            refusal(use, "VariantError", f"{type(error).__name__} in a variant: {error}")
        )


class _Prototype(NamedTuple):
    """The variant of a site for one layout of its tensors, with placeholders for all values.

    outside: the objects that it is made of. declared: its params whose values are inputs of the op:
    name, kind, index of the input. tensors, numbers: for each captured value, in the order of
    `bind`, the index of the input that replaces it, or None.
    """

    variant: Variant
    outside: Sequence[Any]
    declared: tuple[tuple[str, Literal["tensor", "number"], int], ...]
    tensors: tuple[int | None, ...]
    numbers: tuple[int | None, ...]


class _MadeSite:
    """The site of a call whose variant is rebuilt from what its hooks captured.

    The op's inputs are the outline's own tensors and numbers, then those that the objects outside
    captured. Another closure of the same code runs the same graph, so the objects themselves are
    not read: prototypes are copies, and `bind` swaps the graph's values in.
    """

    def __init__(self, outline: Outline, counts: tuple[int, int, int], walk: Walk) -> None:
        self._variant, *self._rest = outline[1]
        self._counts = counts
        self._build = walk.build
        self._kinds = tuple(type(x) for x in walk.numbers)
        self._prototypes: dict[object, _Prototype] = {}
        self._kept: dict[str, Any] = {}

    def __call__(self, tensors: Tensors, packed: torch.Tensor, ints: Sequence[int]) -> UserCall:
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

        return UserCall(made.variant, params, arguments, put, self._kept)

    def _prototype(self, tensors: Tensors, num_floats: int, num_ints: int) -> _Prototype:
        shells = [_shell(t) for t in tensors]
        # All placeholder numbers differ: a number identifies its input.
        floats, ints = _placeholders(_STAND_IN, num_floats, num_ints)
        variant, outside = self._of_values(shells, floats, ints)
        others = _placeholders(3, num_floats, num_ints)  # also others than limits of hooks
        twin, _ = self._of_values(shells, *others)
        if twin is not variant and floats + ints:
            variant.__dict__["_twin"] = twin
        tensor_index = {id(x): i for i, x in enumerate(shells)}
        number = {x: i for i, x in enumerate((*floats, *ints))}
        declared: list[tuple[str, Literal["tensor", "number"], int]] = []
        for d in declared_params(variant):
            value = d.owner.__dict__.get(d.param.name)
            if id(value) in tensor_index:
                declared.append((d.name, "tensor", tensor_index[id(value)]))
            elif type(value) in (int, float) and value in number:
                declared.append((d.name, "number", number[value]))
        walk = _walk(variant, {name for name, _, _ in declared})
        return _Prototype(
            variant,
            outside,
            tuple(declared),
            tuple([tensor_index.get(id(t)) for t in walk.tensors]),
            tuple([number.get(x) for x in walk.numbers]),
        )

    def _of_values(
        self, tensors: Tensors, floats: Sequence[float], ints: Sequence[int]
    ) -> tuple[Variant, Sequence[Any]]:
        """The variant with these inputs of the op, and the objects outside with them."""
        others = {float: iter(floats[self._counts[1] :]), int: iter(ints[self._counts[2] :])}
        outside = self._build(
            tensors[self._counts[0] :], [next(others[kind]) for kind in self._kinds]
        )
        return self._made_variant(Maker(tensors, floats, ints, outside)), outside

    def _made_variant(self, maker: Maker) -> Variant:
        made = maker.make(self._variant)
        if not isinstance(made, Hooks):
            return as_variant(made)
        return function_variant(score_mod=made.score_mod, mask_mod=own_mask_mod(made.mask_mod))

    def is_pointwise(self, outside: Sequence[Any]) -> bool:
        """Whether the variant has no lse; False if that depends on its values."""
        tensors = [torch.empty(0, device="cpu")] * self._counts[0]
        maker = Maker(tensors, [0.0] * self._counts[1], [0] * self._counts[2], outside)
        try:
            return is_pointwise(self._made_variant(maker))
        except Exception:
            return False  # the run raises the error


def _placeholders(first: int, num_floats: int, num_ints: int) -> tuple[list[float], list[int]]:
    return [first + i + 0.5 for i in range(num_floats)], [
        first + num_floats + i for i in range(num_ints)
    ]


def _shell(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


# --- variants that were made before: read anew in every run --------------------------------------


def _live_site(
    use: Use, outline: Outline, count: int, outside: Sequence[Any], pending: Sequence[Assignment]
) -> SiteInfo:
    chosen: Variant = outside[0]
    given = set(outline[1][1][1])
    walk = _walk(chosen, given)
    if changes_values(walk, pending):
        return NOT_LIVE
    paths = Paths(walk, params=_param_paths(chosen, given), cell_readers=use == "compiled")
    reached = [paths.index(at) for at in walk.yielding("tensor")]
    compiled = use == "compiled"
    fixed = paths.fixed((type(None),)) if compiled else ()
    absent, keys = (paths.absent(), paths.keys()) if compiled else ((), ())
    frozen = _Frozen(chosen, walk, given) if use == "exported" else None
    replaced = [i for i, index in enumerate(reached) if index is not None]
    site = _LiveSite(outline, count, outside, len(reached), replaced, frozen)
    return SiteInfo(
        _number(site, use),
        tuple(paths.made),
        tuple([i for i in reached if i is not None]),
        fixed=fixed,
        functions=tuple(paths.functions),
        pointwise=is_pointwise(chosen),
        keys=keys,
        absent=absent,
        names=tuple([walk.tensor_names[i] for i in replaced]),
    )


class _LiveSite:
    """The site of a call with a `Variant` object: its numbers are read in each run.

    The op's inputs are the outline's own tensors and numbers, then tensors of the variant, which
    replace the captured tensors at indices `replaced`. frozen: of an exported graph, which keeps
    the variant alive. The variant's structure must not change; changes of its numbers and of the
    values of its tensors are ignored.
    """

    def __init__(
        self,
        outline: Outline,
        count: int,
        outside: Sequence[Any],
        num_captured: int,
        replaced: Sequence[int],
        frozen: _Frozen | None,
    ) -> None:
        self._rest = outline[1][1:]
        self._count = count
        self._variant = weakref.ref(outside[0])
        self._outside = outside if frozen is not None else (None, *outside[1:])
        self._num_captured, self._replaced, self._frozen = num_captured, replaced, frozen
        self._kept: dict[str, Any] = {}

    def __call__(self, tensors: Tensors, packed: torch.Tensor, ints: Sequence[int]) -> UserCall:
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
            own = [captured[i] for i in self._replaced]
            given = _in_order(tensors[self._count :], own)
            for i, tensor in zip(self._replaced, given, strict=True):
                out[i] = _laid_out_as(tensor, captured[i], again)
            if not fixed:
                return tuple(out), numbers
            return tuple(out), tuple([fixed.get(i, x) for i, x in enumerate(numbers)])

        return UserCall(chosen, params, arguments, put, self._kept)


class _Frozen:
    """The numbers that an exported call was traced with, and the structure of its variant."""

    def __init__(self, chosen: Variant, walk: Walk, given: set[str]) -> None:
        own = walk.param_numbers
        self.numbers = {i: x for i, x in enumerate(walk.numbers) if own.get(i) not in given}
        self._given = given
        self._extract: Extractor | None = None
        # A tracer may replace a variant's tensors while it runs; then the structure is recorded
        # when the graph runs for the first time.
        if all(type(t) in PLAIN for t in walk.tensors):
            self._record(chosen)

    def _record(self, chosen: Variant) -> None:
        self._extract = extractor(_walk(chosen, self._given).locations)
        self._key = self._seen(chosen)

    def _seen(self, chosen: Variant) -> object:
        """The variant without its numbers and tensors: code, flags, and which tensors are set."""
        assert self._extract is not None
        found = self._extract((chosen,), _stand_ins(chosen, self._given))
        if found is None:
            return None
        tensors = (d for d in declared_params(chosen) if d.param.kind == "tensor")
        is_set = tuple(d.param.name in d.owner.__dict__ for d in tensors)
        return found[0], len(found[2]), is_set

    def check(self, chosen: Variant) -> None:
        """Raises VariantError if the variant's structure has changed."""
        if self._extract is None:
            self._record(chosen)
        if self._seen(chosen) != self._key:
            raise VariantError(
                f"{chosen.name} is not what it was when the call was exported: its hooks, flags or "
                "the kinds of its params have changed; export the call again"
            )


def _in_order(given: Tensors, captured: Tensors) -> list[torch.Tensor]:
    """A graph's tensors in the order of the captured ones, which may have changed: keys of a dict
    that were put in again are its last ones. Copies that a graph made, and fake tensors, stay where
    they are."""
    if not all(type(t) in PLAIN for t in (*given, *captured)):
        return list(given)
    known = {(t.data_ptr(), t.shape, t.stride(), t.dtype): t for t in given}
    return [
        known.get((c.data_ptr(), c.shape, c.stride(), c.dtype), t)
        for t, c in zip(given, captured, strict=True)
    ]


def _laid_out_as(tensor: torch.Tensor, own: torch.Tensor, again: str) -> torch.Tensor:
    """The tensor in the captured one's layout, for which the kernel is compiled."""
    if tensor.dtype != own.dtype or tensor.shape != own.shape:
        raise InputError(
            f"a captured tensor is {list(own.shape)} of {own.dtype}, the graph's "
            f"{list(tensor.shape)} of {tensor.dtype}; {again}"
        )
    if tensor is own or stride_pattern(tensor) == stride_pattern(own):
        return tensor
    return tensor.new_empty_strided(own.shape, own.stride()).copy_(tensor)


def _param_paths(chosen: Variant, given: set[str]) -> dict[int, Path]:
    """The paths to declared params that are tensors of the variant, by index of the param."""
    return {
        i: (ROOT, ((ITEM, 0), *_steps_to(chosen, d.owner), (ATTRIBUTE, d.param.name)))
        for i, d in enumerate(declared_params(chosen))
        if d.name not in given and isinstance(d.owner.__dict__.get(d.param.name), torch.Tensor)
    }


def _walk(chosen: Variant, given: Collection[str]) -> Walk:
    """The walk over a variant in the order of `bind`. given: params that the call passes."""
    values = _stand_ins(chosen, given)
    return Walk((chosen,), params=param_locations(declared_params(chosen), values))


def _stand_ins(chosen: Variant, given: Collection[str]) -> list[Any]:
    return [_stand_in(d, d.name in given) for d in declared_params(chosen)]


def _stand_in(declared: Any, given: bool) -> Any:
    """A declared param's value, or a placeholder of its kind if it is unknown while tracing."""
    value = declared.owner.__dict__.get(declared.param.name, MISSING)
    if value is MISSING and not callable(declared.param.default):
        value = declared.param.default
    if declared.param.kind == "tensor":
        return torch.empty(0, device="cpu") if given or value is MISSING else value
    return declared.param.type(0) if given or value is MISSING else value


def _steps_to(root: Any, owner: Any) -> tuple[tuple[int, Any], ...]:
    """The path from a composed variant to the part that declares a param."""
    if root is owner:
        return ()
    for i, part in enumerate(parts_of(root)):
        if any(d.owner is owner for d in declared_params(part)):
            return ((ATTRIBUTE, PARTS), (ITEM, i), *_steps_to(part, owner))
    raise VariantError(f"{owner.name} is no part of {root.name}")


# --- paths ---------------------------------------------------------------------------------------
