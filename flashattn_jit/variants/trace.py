"""Tracing: a hook runs once on proxies and becomes a `Graph` of the IR.

No make_fx, FakeTensor or sympy: the proxies of trace_values.py are called with the user's function,
operators and ``torch.*`` calls arrive at `Tracer.dispatch`, and the handlers of trace_ops.py,
trace_composite.py, trace_vectors.py and trace_load.py emit nodes. About 0.1-0.3 ms a hook.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flashattn_jit.errors import FlashAttnJitError
from flashattn_jit.variants import (
    ir,
    trace_factory,
    trace_load,
    trace_methods,  # noqa: F401  attaches operators
    trace_vectors,
)
from flashattn_jit.variants.builtins import CONTEXT
from flashattn_jit.variants.extract import Node, Source
from flashattn_jit.variants.promotion import is_float
from flashattn_jit.variants.trace_errors import Where
from flashattn_jit.variants.trace_fold import Emitter
from flashattn_jit.variants.trace_host import HostProgram, HostTensor, map_tree
from flashattn_jit.variants.trace_ops import HANDLERS, cast
from flashattn_jit.variants.trace_values import ACTIVE, Captured, Number, Value

SMALL_VECTOR = 32
"""Elements of a vector in masks, sinks and normalisers: it lives in registers."""
SCORE_VECTOR = 128
"""Elements of a vector in a score_mod: reductions of longer ones are loops."""
LONG_VECTOR = 4096
"""Elements of a vector in row hooks."""

ROW_HOOKS = ("query_mod", "key_mod", "value_mod", "output_mod")
_INT_INPUTS = frozenset({"b", "h", "kv_h", "q_idx", "kv_idx"})
_BUILTINS = {"q_len": "int32", "kv_len": "int32", "q_row": "int64", "kv_slot": "int64"}
_RANDOM = frozenset({"rand", "randn", "randint", "rand_like", "randn_like", "randint_like",
                     "bernoulli", "dropout", "multinomial", "normal", "randperm", "poisson",
                     "feature_dropout", "alpha_dropout", "native_dropout"})  # fmt: skip
_READS = {"item": ".item()", "tolist": ".tolist()", "__bool__": "bool", "__float__": "float()",
          "__int__": "int()", "__index__": "index", "numpy": ".numpy()"}  # fmt: skip


class _Mode(TorchFunctionMode):
    """Sends calls without proxies (factories, tensors reached past the captures) to the tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._tracer.dispatch(func, args, kwargs or {})


class Tracer:
    """Traces the hooks of one variant; tensor and scalar slots are shared between them.

    tensors, numbers: the captures of this call, in extraction order.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] = (),
        tensor_names: Sequence[str] = (),
        numbers: Sequence[float] = (),
        number_names: Sequence[str] = (),
        device: torch.device | None = None,
        where: Where | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.where = where or Where("hook")
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
        self.emitter = Emitter(())
        self.max_elements = SMALL_VECTOR
        self.tensor_slots: dict[int, tuple[HostTensor, dict[int, int]]] = {}
        self._slot_of: dict[int, int] = {}
        self.scalar_slots: dict[Node, Number] = {}

    # --- tracing one hook --------------------------------------------------------------------

    def trace(self, kind: str, fn: Callable[..., Any], row_length: int = 0) -> ir.Graph:
        """The graph of the hook `fn`; row_length: elements of `row`. Slots are provisional."""
        inputs = ir.HOOK_INPUTS[kind]
        self.emitter = Emitter(inputs)
        self.max_elements = (
            LONG_VECTOR if kind in ROW_HOOKS
            else SCORE_VECTOR if kind == "score_mod" else SMALL_VECTOR
        )  # fmt: skip
        self.where.begin(kind, fn)
        arguments = [self._input(name, row_length) for name in inputs]
        active, context = ACTIVE.set(self), CONTEXT.set(self)
        try:
            with _Mode(self):
                result = fn(*arguments)
            return self.emitter.builder.finish(self._result(kind, result, row_length))
        except FlashAttnJitError:
            raise
        except Exception as error:
            raise self.where.from_exception(error) from error
        finally:
            ACTIVE.reset(active)
            CONTEXT.reset(context)
            self.where.end()

    def _input(self, name: str, row_length: int) -> Value:
        if name == "row":
            node = self.emitter.builder.add("input", (), "float32", (row_length,), name=name)
            if row_length == 1:
                node = self.emitter.emit("sum", [node], "float32", ())
            return Value(node, "float32", (row_length,))
        dtype = "int32" if name in _INT_INPUTS else "float32"
        return Value(self.emitter.builder.add("input", (), dtype, (), name=name), dtype)

    def _result(self, kind: str, result: Any, row_length: int) -> int:
        if result is None:
            self.refuse("a hook that returns nothing", "return the value", user_frame=False)
        value = self.as_value(result)
        wanted = (row_length,) if kind in ROW_HOOKS else ()
        if kind in ROW_HOOKS and math.prod(value.shape) == row_length and value.shape != wanted:
            value = Value(value.node, value.name, wanted) if len(value.shape) <= 1 else value
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
        return trace_vectors.full(cast(value, "float32")).node

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
            return trace_load.load(self, x)
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

    def tensor_slot(self, host: HostTensor, sizes: dict[int, int]) -> int:
        """The provisional slot of a host tensor; sizes: dims whose size the graph holds."""
        slot = self._slot_of.setdefault(id(host), len(self._slot_of))
        known = self.tensor_slots.setdefault(slot, (host, {}))
        known[1].update(sizes)
        return slot

    def size_of(self, host: HostTensor, dim: int) -> Any:
        """A size of a captured tensor: a runtime number, or pinned for what the prelude made."""
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
        """Make the values of `sources` part of the structural key."""
        for source in sorted(sources, key=repr):
            self.pins.setdefault(source)

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
        return trace_vectors.expand(x, tuple(shape))

    def builtin(self, name: str, args: tuple[Any, ...]) -> Value:
        """fa.q_len and its siblings."""
        nodes = [cast(self.as_value(a), "int32").node for a in args]
        dtype = _BUILTINS[name]
        return Value(self.emitter.emit(name, nodes, dtype), dtype)

    # --- calls -------------------------------------------------------------------------------

    def dispatch(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """A torch function or Tensor method called by the hook."""
        name = getattr(func, "__name__", str(func))
        if name in _RANDOM:
            self.refuse(f"`{name}`", "random numbers cannot be part of a kernel; capture a tensor")
        traced = False

        def look(x: Any) -> Any:
            nonlocal traced
            if isinstance(x, Value) or type(x) is Captured and not x.on_host:
                traced = True
            elif isinstance(x, torch.Tensor):
                self._refuse_unknown(x)
            return x

        map_tree((tuple(args), kwargs), look)
        if kwargs.get("out") is not None:
            self.refuse(f"`{name}(out=...)`", "use the returned value")
        if not traced:
            return trace_factory.host_call(self, func, name, tuple(args), kwargs)
        if name in _READS:
            self.refuse_value(_READS[name])
        if type(args[0] if args else None) is Captured and name == "__getitem__":
            return trace_load.index(self, args[0], args[1])
        return self._handle(name, args, kwargs)

    def _handle(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        inplace = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        base = name[:-1] if inplace else name
        if name.startswith("__i") and name[3:] and f"__{name[3:]}" in HANDLERS:
            inplace, base = True, f"__{name[3:]}"
        handler = HANDLERS.get(base) or trace_factory.FACTORIES.get(base)
        if handler is None:
            self.refuse_op(base)
        result = handler(*args, **kwargs)
        if not inplace and not kwargs.get("inplace"):
            return result
        target = args[0]
        if type(target) is not Value:
            self.refuse_mutation(name)
        updated = cast(self.expand(self.as_value(result), target.shape), target.name)
        target.node = updated.node
        return target

    def run_host(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record a call of the prelude, on host tensors."""

        def leaf(x: Any) -> Any:
            if type(x) is Captured:
                return trace_load.materialise(self, x)
            return x.host() if type(x) is Number else x

        with torch._C.DisableTorchFunction():
            return self.program.run(func, map_tree(args, leaf), map_tree(kwargs, leaf))

    def number_op(self, symbol: str, a: Any, b: Any) -> Any:
        """An operator with a captured number on one side and a tensor on the other."""
        if any(isinstance(x, Value) or (type(x) is Captured and not x.on_host) for x in (a, b)):
            return HANDLERS[_OPERATORS[symbol].__name__.strip("_").join(("__", "__"))](a, b)
        if not all(type(x) in (Captured, Number, int, float, bool) for x in (a, b)):
            return NotImplemented
        return trace_factory.host_call(self, _OPERATORS[symbol], "", (a, b), {})

    def captured_attribute(self, c: Captured, name: str) -> Any:
        """``captured.name`` for what `Captured` does not define: a method, or a property."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name, None)
        if attribute is None:
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if callable(attribute):
            return lambda *args, **kwargs: self.dispatch(attribute, (c, *args), kwargs)
        if name in ("T", "mT", "H", "mH") and c.on_host:
            return Captured(self.run_host(getattr, (c, name), {}))
        with torch._C.DisableTorchFunction():
            return getattr(c.host.tensor, name)

    # --- refusals ----------------------------------------------------------------------------

    def refuse(self, what: str, remedy: str, *, user_frame: bool = True) -> NoReturn:
        """Raise a `TraceError` that names the user's line, what it does and what to write."""
        raise self.where.error(what, remedy, user_frame=user_frame)

    def refuse_value(self, what: str) -> NoReturn:
        """The hook asked for a value that is only known in the kernel."""
        raise self.where.value_error(what)

    def refuse_op(self, name: str) -> NoReturn:
        """The hook called something that has no meaning in a kernel."""
        self.refuse(
            f"`{name}`",
            "it has no form inside a kernel; use elementwise operations, or compute the tensor "
            "before the call and capture it",
        )

    def refuse_mutation(self, name: str) -> NoReturn:
        """The hook writes to a captured tensor."""
        self.refuse(f"`{name}` on a captured tensor", "hooks must not write; use a new value")

    def _refuse_unknown(self, x: torch.Tensor) -> NoReturn:
        self.refuse(
            f"a tensor of shape {list(x.shape)} that the hook reaches through something opaque",
            "capture it in a variable, an attribute, a tuple, a list or a dict",
        )


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "**": operator.pow, "<<": operator.lshift,
    ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
