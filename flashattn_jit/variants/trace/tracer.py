"""Tracing: a hook runs once on proxies and becomes a `Graph` of the IR.

No make_fx, FakeTensor or sympy: the user's function is called with the proxies of values.py, whose
operators and ``torch.*`` calls reach `Tracer.dispatch`, and the handlers of operations.py,
functions.py, vectors.py, captured_tensors.py and factories.py emit nodes by node_emitter.py. A hook
takes 0.1 to 0.3 ms.
`trace_variant` joins all hooks of a variant to one `VariantIR` with canonical slots.
"""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flashattn_jit.errors import FlashAttnJitError, ParamError, TraceError
from flashattn_jit.variants.builtins import CONTEXT
from flashattn_jit.variants.capture.extract import (
    Finish,
    HostProgram,
    HostTensor,
    Node,
    Source,
    leaves,
    map_tree,
    stride_pattern,
)
from flashattn_jit.variants.capture.recorder import unique_name
from flashattn_jit.variants.capture.walk import Walk
from flashattn_jit.variants.ir import ir
from flashattn_jit.variants.ir.dtypes import DTYPE_NAMES
from flashattn_jit.variants.ir.ir import is_float
from flashattn_jit.variants.params import Dims, declared_params, parts_of
from flashattn_jit.variants.trace import (
    captured_tensors,
    factories,
    functions,  # noqa: F401  its handlers
    vectors,
)
from flashattn_jit.variants.trace.errors import LOOK_UP_REMEDY, OP_REMEDIES, OP_REMEDY, Where
from flashattn_jit.variants.trace.methods import attach, run_handler
from flashattn_jit.variants.trace.node_emitter import Emitter
from flashattn_jit.variants.trace.operations import cast, stored
from flashattn_jit.variants.trace.positions import INDEX_BOUNDS, UNKNOWN
from flashattn_jit.variants.trace.values import (
    ACTIVE,
    HANDLERS,
    READS,
    STAND_INS,
    Captured,
    Number,
    Value,
    updated_by,
)

if TYPE_CHECKING:
    from flashattn_jit.variants.variant import Variant

attach()

SMALL_VECTOR = 32
"""Elements of a vector in masks, sinks and normalisers: it lives in registers."""
SCORE_VECTOR = 128
"""Elements of a vector in a score_mod: reductions of longer ones are loops."""
LONG_VECTOR = 4096
"""Elements of a vector in row hooks."""

_RESHAPES = frozenset({"t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze"})
_RANDOM = frozenset({"rand", "randn", "randint", "rand_like", "randn_like", "randint_like",
                     "bernoulli", "dropout", "multinomial", "normal", "randperm", "poisson",
                     "feature_dropout", "alpha_dropout", "native_dropout"})  # fmt: skip


class _Mode(TorchFunctionMode):
    """Sends calls without proxies (factories, tensors that are no captures) to the tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._tracer.dispatch(func, args, kwargs or {})


class Tracer:
    """Traces the hooks of one variant; tensor and scalar slots are shared between them.

    tensors, numbers: the captures of this call, in extraction order. made: what stands for the
    objects and classes that hooks use, by the object's id.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] = (),
        tensor_names: Sequence[str] = (),
        numbers: Sequence[float] = (),
        number_names: Sequence[str] = (),
        device: torch.device | None = None,
        owner: str = "hook",
        codes: Iterable[types.CodeType] = (),
    ) -> None:
        self.device = device or torch.device("cpu")
        self._owner = owner, codes
        self.made: dict[int, Any] = {}
        self._running: tuple[str, Any, types.FrameType] | None = None
        self.program = HostProgram()
        self.hosts = [
            HostTensor(t, n, frozenset(("size", i, d) for d in range(t.dim())), raw=i)
            for i, (t, n) in enumerate(zip(tensors, tensor_names, strict=True))
        ]
        self.captured = [Captured(h) for h in self.hosts]
        self.numbers = [
            Number(v, ("number", i), frozenset([("number", i)])) for i, v in enumerate(numbers)
        ]
        self.number_names = list(number_names)
        self.pins: dict[Source, None] = {}
        self._of_bounds: set[Source] = set()
        self.emitter = Emitter(())
        self.max_elements = SMALL_VECTOR
        self.of_row = False
        self.tensor_slots: dict[int, tuple[HostTensor, dict[int, int]]] = {}
        self._slot_of: dict[int, int] = {}
        self.scalar_slots: dict[Node, Number] = {}

    # --- tracing one hook --------------------------------------------------------------------

    def trace(self, kind: str, fn: Callable[..., Any], row_length: int = 0) -> ir.Graph:
        """The graph of the hook `fn`; row_length: elements of `row`. Slots are provisional."""
        inputs = ir.HOOK_INPUTS[kind]
        self.emitter = Emitter(inputs)
        self.of_row = kind in ir.ROW_HOOKS
        self.max_elements = (
            LONG_VECTOR if self.of_row
            else SCORE_VECTOR if kind == "score_mod" else SMALL_VECTOR
        )  # fmt: skip
        self._running = kind, fn, sys._getframe()
        arguments = [self._input(name, row_length) for name in inputs]
        active, context = ACTIVE.set(self), CONTEXT.set(self)
        try:
            with _Mode(self):
                result = fn(*arguments)
            return self.emitter.builder.finish(self._result(kind, result, row_length))
        except FlashAttnJitError:
            raise
        except Exception as error:
            raise self._where().from_exception(error) from error
        finally:
            ACTIVE.reset(active)
            CONTEXT.reset(context)
            self._running = None  # so that no frame stays alive

    def _input(self, name: str, row_length: int) -> Value:
        if name == "row":
            node = self.emitter.builder.add("input", (), "float32", (row_length,), name=name)
            if row_length == 1:
                node = self.emitter.emit("sum", [node], "float32", ())
            return Value(node, "float32", (row_length,))
        dtype = "int32" if name in INDEX_BOUNDS else "float32"
        node = self.emitter.builder.add("input", (), dtype, (), name=name)
        return Value(node, dtype, bound=INDEX_BOUNDS.get(name))

    def _result(self, kind: str, result: Any, row_length: int) -> int:
        if result is None:
            self.refuse("a hook that returns nothing", "return the value", user_frame=False)
        value = self.as_value(result)
        wanted = (row_length,) if kind in ir.ROW_HOOKS else ()
        if tuple(value.shape) != wanted and math.prod(value.shape) == math.prod(wanted) == 1:
            value = Value(value.node, value.name, wanted)
        if tuple(value.shape) != wanted:
            self.refuse(
                f"a result of shape {list(value.shape)}",
                f"return shape {list(wanted)}: " + (
                    "as many elements as came in" if wanted else "one value"
                ),
                user_frame=False,
            )  # fmt: skip
        if kind == "mask_mod":
            if is_float(value.name):
                self.refuse(
                    "a floating mask",
                    "return a boolean: True where the pair is kept; a bias belongs to score_mod",
                    user_frame=False,
                )
            return cast(value, "bool").node
        value = cast(value, "float32")
        return (vectors.full(value) if wanted else value).node

    def __enter__(self) -> Tracer:
        """Make the tracer active outside `trace`, for code of the user's that makes hooks."""
        self._token = ACTIVE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        ACTIVE.reset(self._token)

    # --- values ------------------------------------------------------------------------------

    def as_value(self, x: Any) -> Value:
        """An operand: proxies, Python numbers (weak), captured tensors (loaded)."""
        kind = type(x)
        if kind is Value:
            return x  # type: ignore[no-any-return]
        if kind is bool:
            return Value(self.emitter.const(x, "bool"), "bool", (), weak=True)
        if kind is int:
            return Value(self._weak_int(x), "int64", (), weak=True)
        if kind is float:
            return Value(self.emitter.const(x, "float64"), "float64", (), weak=True)
        if kind is Number:
            return self._scalar(x)
        if kind is Captured:
            return captured_tensors.load(self, x)
        if isinstance(x, np.generic):
            return self.as_value(x.item())
        if isinstance(x, torch.Tensor):
            self._refuse_unknown(x)
        return self.refuse(f"a value of type {kind.__name__}", "use tensors and numbers")

    def _weak_int(self, x: int) -> int:
        if not -(2**63) <= x < 2**63:
            self.refuse(f"the integer {x}", "use one that fits in 64 bits")
        return self.emitter.const(x, "int64")

    def _scalar(self, x: Number) -> Value:
        dtype = "float64" if isinstance(x.value, float) else "int64"
        node = self.emitter.builder.add("scalar", (), dtype, slot=self.scalar_slot(x))
        return Value(node, dtype, (), weak=True)

    def scalar_slot(self, x: Number) -> int:
        """The provisional slot of a number's node."""
        self.scalar_slots.setdefault(x.node, x)
        return list(self.scalar_slots).index(x.node)

    def number_of(self, node: int) -> Number | None:
        """The captured number that a node converts; None for other nodes."""
        found = self.emitter.node(node)
        if found.op == "cast":
            found = self.emitter.node(found.args[0])
        if found.op != "scalar":
            return None
        return list(self.scalar_slots.values())[found.int_attr("slot")]

    def tensor_slot(self, host: HostTensor, sizes: dict[int, int]) -> int:
        """The provisional slot of a host tensor; sizes: dims whose size the graph holds."""
        slot = self._slot_of.setdefault(id(host), len(self._slot_of))
        known = self.tensor_slots.setdefault(slot, (host, {}))
        known[1].update(sizes)
        return slot

    def size_of(self, host: HostTensor, dim: int) -> Any:
        """A size of a captured tensor, as a `Number`; specialised on for results of the prelude."""
        if host.raw < 0:
            self.specialise(host.sources)
            return host.shape[dim]
        source: Source = ("size", host.raw, dim)
        return Number(host.shape[dim], source, frozenset([source]))

    def pin_sizes(self, host: HostTensor, dims: Iterable[int]) -> None:
        """Specialise on sizes of a host tensor."""
        if host.raw < 0:
            self.specialise(host.sources)
        else:
            self.specialise(("size", host.raw, d) for d in dims)

    def specialise(self, sources: Iterable[Source]) -> None:
        """Add the values of `sources` to the structural key."""
        for source in sorted(sources, key=repr):
            self.pins.setdefault(source)
            self._of_bounds.discard(source)

    def structural_pins(self) -> list[Source]:
        """The values that the graphs depend on, of those that were specialised on."""
        return [pin for pin in self.pins if pin not in self._of_bounds]

    def specialise_bound(self, sources: Iterable[Source]) -> None:
        """`specialise` for the bound of an integer, which is no part of the graph."""
        new = [s for s in sources if s not in self.pins]
        self.specialise(new)
        self._of_bounds.update(new)

    def broadcast_shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The common shape of operands."""
        try:
            shape = np.broadcast_shapes(*(tuple(s) for s in shapes))
        except ValueError:
            texts = " and ".join(str(list(s)) for s in shapes)
            self.refuse(f"values of shapes {texts} together", "use shapes that broadcast")
        if math.prod(shape) > self.max_elements:
            self.refuse(f"a vector of {math.prod(shape)} elements", "use shorter ones")
        return shape

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """The value broadcast to `shape`."""
        return vectors.expand(x, tuple(shape))

    def builtin(self, name: str, args: tuple[Any, ...]) -> Value:
        """The node of a built-in such as `fa.q_len`."""
        nodes = [cast(self.as_value(a), "int32").node for a in args]
        dtype = ir.BUILTINS[name]
        bound = UNKNOWN if dtype == "int32" else None  # a length, as positions
        return Value(self.emitter.emit(name, nodes, dtype), dtype, bound=bound)

    # --- calls -------------------------------------------------------------------------------

    def dispatch(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """A torch function or Tensor method called by the hook."""
        name = getattr(func, "__name__", str(func))
        if name in _RANDOM:
            self.refuse(f"`{name}`", "random numbers cannot be part of a kernel; capture a tensor")
        traced = False
        for x in leaves((args, kwargs)):
            if isinstance(x, Value) or type(x) is Captured and not x.on_host:
                traced = True
            elif isinstance(x, torch.Tensor):
                self._refuse_unknown(x)
        if kwargs.get("out") is not None:
            self.refuse(f"`{name}(out=...)`", "use the returned value")
        if name in READS:
            self.refuse_value(READS[name], args[0] if args else None)
        if not traced:
            return factories.host_call(self, func, name, tuple(args), kwargs)
        if type(args[0] if args else None) is Captured and name == "__getitem__":
            return captured_tensors.index(self, args[0], args[1])
        return self._handle(name, args, kwargs)

    def _handle(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        base = updated_by(name)
        if base in _RESHAPES:
            self.refuse(f"`{name}`, which changes a shape in place", f"write `x = x.{base}(...)`")
        handler = HANDLERS.get(base or name)
        if handler is None:
            self.refuse_op(base or name)
        result = run_handler(name, handler, args, kwargs)
        if not base and not kwargs.get("inplace"):
            return result
        target = args[0]
        if type(target) is not Value:
            self.refuse_mutation(name)
        new = self.expand(self.as_value(result), target.shape)
        vectors.check_dtype(base or name, target, new)
        vectors.check_overlap(base or name, target, args[1:], kwargs)
        vectors.write(target, stored(target, new))
        return target

    def run_host(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record a call of the prelude, on host tensors."""

        def leaf(x: Any) -> Any:
            if type(x) is Captured:
                return captured_tensors.materialise(self, x)
            return x.host() if type(x) is Number else x

        with torch._C.DisableTorchFunction():
            return self.program.run(func, map_tree(args, leaf), map_tree(kwargs, leaf))

    def captured_attribute(self, c: Captured, name: str) -> Any:
        """``captured.name`` for a method or property of tensors that `Captured` does not define."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name, None)
        if attribute is None:
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if name == "data":
            return c
        if callable(attribute):
            return lambda *args, **kwargs: self.dispatch(attribute, (c, *args), kwargs)
        if name in ("T", "mT", "H", "mH"):
            if c.on_host:
                return Captured(self.run_host(getattr, (c, name), {}))
            if name == "T":
                return self.dispatch(torch.Tensor.permute, (c, tuple(range(c.ndim))[::-1]), {})
            if name != "H" or c.ndim == 2:
                return self.dispatch(torch.Tensor.transpose, (c, -2, -1), {})
        with torch._C.DisableTorchFunction():
            found = getattr(c.host.tensor, name)
        if isinstance(found, torch.Tensor):
            self.refuse_op(f"Tensor.{name}")
        return found

    # --- refusals ----------------------------------------------------------------------------

    def _where(self) -> Where:
        return Where(*self._owner, *(self._running or ()))

    def refuse(self, what: str, remedy: str, *, user_frame: bool = True) -> NoReturn:
        """Raise a `TraceError` that names the user's line, what it does and what to write."""
        raise self._where().error(what, remedy, user_frame=user_frame)

    def refuse_value(self, what: str, x: Any) -> NoReturn:
        """Refuse to read the value of `x`, which is known in the kernel, or in each call, alone."""
        raise self._where().value_error(what, captured=type(x) is Captured and x.on_host)

    def refuse_look_up(self) -> NoReturn:
        """Refuse to look a value up in a set or a dict."""
        self.refuse("a look-up of a tensor in a set, a dict or a cache", LOOK_UP_REMEDY)

    def refuse_text(self, frame: types.FrameType) -> None:
        """Refuse to make a text of a value in `frame`, if that runs the user's code."""
        if self._where().is_users(frame):
            self.refuse("the text of a tensor", "to see what it is, print(repr(x))")

    def refuse_op(self, name: str) -> NoReturn:
        """Refuse a function that has no handler."""
        self.refuse(f"`{name}`", OP_REMEDIES.get(name.removeprefix("Tensor."), OP_REMEDY))

    def refuse_mutation(self, name: str) -> NoReturn:
        """Refuse to write to a captured tensor."""
        self.refuse(f"`{name}` on a captured tensor", "hooks must not write; use a new value")

    def _refuse_unknown(self, x: torch.Tensor) -> NoReturn:
        self.refuse(
            f"a tensor of shape {list(x.shape)} that the hook reaches through something opaque",
            "capture it in a variable, an attribute, a tuple, a list or a dict; in place of an "
            "nn.Sequential or nn.ModuleList capture list(modules)",
        )


# --- all hooks of a variant ----------------------------------------------------------------------


class Traced(NamedTuple):
    """The result of tracing a variant.

    finish: computes the values of the slots from captures; None where they are the captures.
    selected: the captured tensors of the slots; None if one is computed. pins: the values that the
    trace specialised on. mask_params: declared params that `mask_mod` depends on.
    """

    ir: ir.VariantIR
    finish: Finish | None
    selected: tuple[int, ...] | None
    pins: Mapping[Source, None]
    mask_params: frozenset[str]


def trace_variant(variant: Variant, walk: Walk, dims: Dims) -> Traced:
    """Trace every hook, with numbers as runtime params unless a hook needs their values."""
    try:
        return _trace(variant, walk, dims, numbers=True)
    except TraceError as error:
        if not walk.numbers or not isinstance(error.__cause__, TypeError):
            raise
    # A function in the hook takes Python numbers alone: the trace specialises on all of them.
    return _trace(variant, walk, dims, numbers=False)


def _trace(variant: Variant, walk: Walk, dims: Dims, *, numbers: bool) -> Traced:
    tracer = Tracer(
        walk.tensors, walk.tensor_names, walk.numbers, walk.number_names, dims.device,
        variant.name, walk.codes,
    )  # fmt: skip
    if not numbers:
        tracer.specialise(s for n in tracer.numbers for s in n.sources)
    given = tracer.numbers if numbers else walk.numbers
    view = walk.build(tracer.captured, given, STAND_INS, tracer.made)
    graphs: list[tuple[str, ir.Graph]] = []
    texts: list[tuple[str, str]] = []
    with tracer:
        hooks = view.hooks()
    for kind in ir.HOOKS:
        hook = hooks.get(kind)
        if hook is None:
            continue
        if getattr(hook, "text", None) is not None:
            texts.append((kind, hook.text))
            continue
        length = 0
        if kind in ir.ROW_HOOKS:
            dim = ir.ROW_HOOKS[kind]
            length = getattr(dims, dim)
            if length < 1:
                raise ParamError(f"{variant.name} has a {kind}, so the dims must say {dim}")
            tracer.specialise([("dim", dim)])
        graphs.append((kind, tracer.trace(kind, hook, length)))
    declared = _named_in_texts(variant, texts, view, tracer)
    mask_params = _mask_params(variant, walk, tracer, dict(graphs), dict(texts))
    return _assemble(tracer, graphs, texts, declared, mask_params)


def _mask_params(
    variant: Variant,
    walk: Walk,
    tracer: Tracer,
    graphs: Mapping[str, ir.Graph],
    texts: Mapping[str, str],
) -> frozenset[str]:
    """The declared params that the mask, or the structure, depends on."""
    tensors, numbers = set[int](), set[int]()
    sources: set[Source] = {pin for pin in tracer.structural_pins() if pin[0] == "number"}
    scalars = list(tracer.scalar_slots.values())
    mask = graphs.get("mask_mod")
    for node in () if mask is None else mask.nodes:
        if node.op == "scalar":
            sources |= scalars[node.int_attr("slot")].sources
        elif node.op in ("gather", "lookup", "searchsorted"):
            read = tracer.program.reads(tracer.tensor_slots[node.int_attr("slot")][0])
            tensors |= read[0]
            numbers |= read[1]
    tensors |= {int(s[1]) for s in sources if s[0] == "size"}
    numbers |= {int(s[1]) for s in sources if s[0] == "number"}
    words = set(re.findall(r"[A-Za-z_]\w*", texts.get("mask_mod", "")))
    return frozenset(
        {walk.param_tensors[i] for i in tensors & walk.param_tensors.keys()}
        | {walk.param_numbers[i] for i in numbers & walk.param_numbers.keys()}
        | {d.name for d in declared_params(variant) if d.param.kind == "static" or d.name in words}
    )


def _named_in_texts(
    variant: Variant, texts: Sequence[tuple[str, str]], view: Any, tracer: Tracer
) -> list[tuple[str, Captured | Number]]:
    """The declared params that C++ texts name, which need slots."""
    words = {w for _, text in texts for w in re.findall(r"[A-Za-z_]\w*", text)}
    if not words:
        return []
    views = _leaf_views(variant, view)
    found: list[tuple[str, Captured | Number]] = []
    for d in declared_params(variant):
        value: Any = getattr(views[id(d.owner)], d.param.name, None)
        if d.name in words and type(value) in (Captured, Number):
            found.append((d.name, value))
    return found


def _leaf_views(variant: Any, view: Any) -> dict[int, Any]:
    views = {id(variant): view}
    for part, part_view in zip(parts_of(variant), parts_of(view), strict=True):
        views.update(_leaf_views(part, part_view))
    return views


def _assemble(
    tracer: Tracer,
    graphs: Sequence[tuple[str, ir.Graph]],
    texts: Sequence[tuple[str, str]],
    declared: Sequence[tuple[str, Captured | Number]],
    mask_params: frozenset[str],
) -> Traced:
    tensors, scalars = ir.slot_order(graph for _, graph in graphs)
    for _, value in declared:
        if type(value) is Captured:
            tensors.setdefault(tracer.tensor_slot(value.host, {}), len(tensors))
        elif type(value) is Number:
            scalars.setdefault(tracer.scalar_slot(value), len(scalars))
    hosts = [tracer.tensor_slots[slot] for slot in tensors]
    numbers = [list(tracer.scalar_slots.values())[slot] for slot in scalars]
    taken = set[str]()
    made = ir.VariantIR(
        tuple((kind, ir.remap_slots(g, tensors, scalars)) for kind, g in graphs),
        tuple(_tensor_param(host, sizes, taken) for host, sizes in hosts),
        tuple(_scalar_param(n, tracer.number_names, taken) for n in numbers),
        tuple(texts),
    )
    finish = tracer.program.finish(
        len(tracer.hosts), len(tracer.numbers), [h for h, _ in hosts], [n.node for n in numbers]
    )
    raws = tuple(host.raw for host, _ in hosts)
    selected = None if min(raws, default=0) < 0 else raws
    return Traced(made, finish, selected, tracer.pins, mask_params)


def _tensor_param(host: HostTensor, sizes: Mapping[int, int], taken: set[str]) -> ir.TensorParam:
    t = host.tensor
    return ir.TensorParam(
        unique_name(host.name, taken),
        DTYPE_NAMES[t.dtype],
        t.dim(),
        stride_pattern(t),
        tuple(sizes.get(d, -1) for d in range(t.dim())),
    )


def _scalar_param(number: Number, number_names: Sequence[str], taken: set[str]) -> ir.ScalarParam:
    kinds = sorted(number.sources)
    name = "size" if kinds and kinds[0][0] == "size" else "number"
    if kinds and kinds[0][0] == "number":
        name = number_names[int(kinds[0][1])]
    return ir.ScalarParam(
        unique_name(name, taken), "float64" if isinstance(number.value, float) else "int64"
    )
