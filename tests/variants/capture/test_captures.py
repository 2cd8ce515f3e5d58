"""Captures of hooks are found wherever they are and read at each call, without a new trace."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,attr-defined,no-any-return"

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import functools
import itertools
import math
import time
import types
import typing

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from flashattn_jit.errors import ParamError, TraceError
from flashattn_jit.variants.capture.extract import extractor, stride_pattern
from flashattn_jit.variants.capture.recorder import MAX_LOCATIONS
from flashattn_jit.variants.capture.walk import Walk
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant, variant
from tests.harness.slowness import slowdown
from tests.variants.capture import captures_module
from tests.variants.capture.captures_oracle import DIMS, value

LIMIT = 3
FLAG = True
SLOPES = torch.tensor([1.0, 2.0, 3.0])


# --- values change, structure stays -----------------------------------------------------------


def windowed(window):
    return lambda b, h, q, k: q - k < window


def test_new_closures_over_other_numbers_are_the_same_structure(traces):
    bounds = [as_variant(windowed(w)).bind(DIMS) for w in (1, 5, 100, -3)]
    assert traces.n == 1
    assert {x.structure for x in bounds} == {bounds[0].structure}
    assert [x.scalars for x in bounds] == [(1,), (5,), (100,), (-3,)]


def test_lengths_heads_and_tensors_do_not_retrace(traces):
    def make(batch, heads, n):
        bias = torch.randn(batch, heads, n, n)
        return lambda s, b, h, q, k: s + bias[b, h, q, k]

    handles = {
        as_variant(make(batch, heads, n)).bind(Dims(batch, heads, heads, n, n, 64, 64)).structure
        for n, batch, heads in ((1, 1, 1), (7, 2, 3), (128, 9, 32))
    }
    assert traces.n == 1 and len(handles) == 1


def test_dtype_rank_and_strides_are_structure(traces):
    def make(t):
        return lambda s, b, h, q, k: s + t[q]

    zeros = torch.zeros(16)
    tensors = [zeros[:8], zeros[:8].double(), torch.zeros(1).expand(8), zeros[::2]]
    assert len({as_variant(make(t)).bind(DIMS).structure for t in tensors}) == 4
    with pytest.raises(TraceError, match=r"256 elements"):
        as_variant(make(torch.zeros(8, 256))).bind(DIMS)
    assert traces.n == 5


@pytest.mark.parametrize(
    ("t", "pattern"),
    [
        (torch.zeros(3, 4), "n1"), (torch.zeros(4, 3).t(), "1n"), (torch.zeros(3, 1), "n1"),
        (torch.zeros(1, 4), "n1"), (torch.zeros(1, 4).expand(3, 4), "01"), (torch.zeros(()), ""),
        (torch.zeros(4, 6)[:, ::2], "nn"), (torch.zeros(5, 1).expand(5, 4), "10"),
        (torch.zeros(2, 0), "n1"),
    ],
)  # fmt: skip
def test_stride_patterns(t, pattern):
    assert stride_pattern(t) == pattern


def test_ints_and_floats_are_different_structures():
    a, b = (as_variant(windowed(w)).bind(DIMS) for w in (4, 4.5))
    assert a.ir.scalars[0].dtype == "int64" and b.ir.scalars[0].dtype == "float64"
    assert a.structure != b.structure


# --- every kind of location, and its change -----------------------------------------------------


def test_globals(monkeypatch):
    def hook(s, b, h, q, k):
        return s * SLOPES[h] + LIMIT + (10 if FLAG else 20)

    assert value(hook) == 2 + 3 + 10
    monkeypatch.setitem(hook.__globals__, "LIMIT", 50)
    assert value(hook) == 2 + 50 + 10
    monkeypatch.setitem(hook.__globals__, "SLOPES", torch.tensor([0.0, 7.0, 0.0]))
    assert value(hook) == 7 + 50 + 10
    monkeypatch.setitem(hook.__globals__, "FLAG", False)
    assert value(hook) == 7 + 50 + 20
    monkeypatch.setitem(hook.__globals__, "LIMIT", 0.5)
    assert value(hook) == 7 + 0.5 + 20


def test_a_global_that_shadows_a_builtin(monkeypatch):
    def hook(s, b, h, q, k):
        return s * abs(-3.0)

    assert value(hook) == 3
    monkeypatch.setitem(hook.__globals__, "abs", lambda x: 100)
    assert value(hook) == 100


def test_cells_defaults_and_keyword_defaults():
    scale = 2.0

    def hook(s, b, h, q, k, offset=5, *, extra=SLOPES):
        return s * scale + offset + extra[h]

    assert value(hook) == 2 + 5 + 2
    scale = 3.0
    assert value(hook) == 3 + 5 + 2
    hook.__defaults__ = (6,)
    assert value(hook) == 3 + 6 + 2
    hook.__kwdefaults__["extra"] = torch.zeros(3)
    assert value(hook) == 3 + 6


def test_partials():
    def hook(scale, s, b, h, q, k, offset):
        return s * scale + offset

    for scale, offset in ((2.0, 1), (3.0, 4)):
        assert value(functools.partial(hook, scale, offset=offset)) == scale + offset
    nested = functools.partial(functools.partial(hook, offset=1), 5.0)
    assert value(nested) == 6


class Callable_:
    BASE = 100

    def __init__(self, window):
        self.window = window
        self.config = types.SimpleNamespace(extra=1, deep={"table": SLOPES})

    @property
    def double(self):
        return self.window * 2 * LIMIT

    @staticmethod
    def fixed(x):
        return x + LIMIT

    @classmethod
    def of_class(cls, x):
        return x + cls.BASE

    def helper(self, h):
        return self.config.deep["table"][h] + LIMIT

    def __call__(self, s, b, h, q, k):
        return s * self.window + self.helper(h) + self.config.extra

    def method(self, s, b, h, q, k):
        return s + self.double + self.fixed(1) + self.of_class(1)


def test_callable_objects_methods_and_properties(monkeypatch):
    obj = Callable_(2)
    assert value(obj) == 2 + (2 + 3) + 1
    obj.window = 5
    obj.config.extra = 7
    assert value(obj) == 5 + (2 + 3) + 7
    obj.config.deep["table"] = torch.zeros(3)
    assert value(obj) == 5 + (0 + 3) + 7
    assert value(obj.method) == 1 + 5 * 2 * 3 + (1 + 3) + (1 + 100)
    monkeypatch.setitem(globals(), "LIMIT", 10)
    assert value(obj) == 5 + (0 + 10) + 7
    assert value(obj.method) == 1 + 5 * 2 * 10 + (1 + 10) + (1 + 100)
    monkeypatch.setattr(Callable_, "BASE", 0)
    assert value(obj.method) == 1 + 5 * 2 * 10 + (1 + 10) + (1 + 0)


def test_new_objects_of_a_class_do_not_retrace(traces):
    assert [value(Callable_(w)) for w in (1, 2, 9)] == [7, 8, 15]
    assert traces.n == 1


def test_modules_and_classes_as_namespaces(monkeypatch):
    class Config:
        window = 4
        table = torch.tensor([5.0, 6.0, 7.0])

    def hook(s, b, h, q, k):
        extra = captures_module.helper(s) if captures_module.ENABLED else s
        return extra + captures_module.TABLE[k] + Config.window + Config.table[h]

    assert value(hook) == (1 + 4) + 1 + 4 + 6
    monkeypatch.setattr(captures_module, "WINDOW", 40)
    Config.window = 5
    assert value(hook) == (1 + 40) + 1 + 5 + 6
    monkeypatch.setattr(captures_module, "ENABLED", False)
    assert value(hook) == 1 + 1 + 5 + 6
    monkeypatch.setattr(captures_module, "TABLE", torch.zeros(8))
    assert value(hook) == 1 + 0 + 5 + 6


def test_containers():
    class Pair(typing.NamedTuple):
        first: float
        second: torch.Tensor

    tables = [SLOPES, SLOPES * 2]
    by_name = {"a": 1.5, 3: SLOPES}
    pair = Pair(2.0, SLOPES)

    def hook(s, b, h, q, k):
        total = sum(t[h] for t in tables) + by_name["a"] + by_name[3][h]
        return total + pair.first * pair.second[h]

    assert value(hook) == (2 + 4) + 1.5 + 2 + 4
    tables[1] = torch.zeros(3)
    by_name["a"] = 0.0
    assert value(hook) == 2 + 0 + 2 + 4
    tables.append(SLOPES)
    assert value(hook) == 4 + 0 + 2 + 4


def test_dataclasses_with_slots_and_frozen():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Settings:
        window: int
        table: torch.Tensor

    def make(settings):
        return lambda s, b, h, q, k: s + settings.window + settings.table[h]

    assert value(make(Settings(4, SLOPES))) == 1 + 4 + 2
    assert value(make(Settings(5, SLOPES))) == 1 + 5 + 2


def test_parameters_and_modules(traces):
    class Bias(torch.nn.Module):
        def __init__(self, w):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3,), w))
            self.register_buffer("offset", torch.tensor(1.0))

        def forward(self, h):
            return self.weight[h] + self.offset

        def hook(self, s, b, h, q, k):
            return s + self.weight[h]

    assert [value(Bias(w).hook) for w in (2.0, 3.0)] == [3, 4]
    module = Bias(5.0)
    assert value(lambda s, b, h, q, k: s + module(h)) == 1 + 5 + 1
    with torch.no_grad():
        module.weight.fill_(7)
    assert value(lambda s, b, h, q, k: s + module(h)) == 1 + 7 + 1


class Base:
    def bias(self, h):
        return SLOPES[h] if FLAG else h * 0.0 + LIMIT

    def __init__(self):
        self.gain = 2


class Derived(Base):
    def bias(self, h):
        return super().bias(h) * self.gain

    def hook(self, s, b, h, q, k):
        return s + self.bias(h)


def test_super_is_followed_or_pinned(monkeypatch):
    monkeypatch.setitem(globals(), "FLAG", False)
    obj = Derived()
    assert value(obj.hook) == 1 + 3 * 2
    obj.gain = 5
    assert value(obj.hook) == 1 + 3 * 5
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert value(obj.hook) == 1 + 4 * 5


def test_nested_helpers_and_recursion():
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    gain = 2.0

    def hook(s, b, h, q, k):
        inner = lambda x: x * gain + LIMIT  # noqa: E731
        return inner(power(s + 1, 3))

    assert value(hook) == 8 * 2 + 3
    gain = 3.0
    assert value(hook) == 8 * 3 + 3


def test_cached_helpers_do_not_keep_proxies():
    gain = 2.0

    @functools.lru_cache
    def helper(x):
        return x * gain

    hook = lambda s, b, h, q, k: helper(s)  # noqa: E731
    assert value(hook) == 2
    gain = 3.0
    assert value(hook) == 3


def test_decorated_hooks():
    def doubled(fn):
        @functools.wraps(fn)
        def wrapper(s, b, h, q, k):
            return fn(s, b, h, q, k) * 2

        return wrapper

    assert value(doubled(lambda s, b, h, q, k: s + LIMIT)) == 8


def test_mask_combiners_of_torch(traces):
    def causal(b, h, q, k):
        return q >= k

    for w in (1, 2, 3):
        mask = and_masks(causal, windowed(w), or_masks(causal, windowed(w)))
        assert value(mask, q_idx=4, kv_idx=2) == (w > 4 - 2)
    assert traces.n == 1


def test_numpy_values():
    array = np.arange(7.0)
    scalar = np.float32(0.5)
    hook = lambda s, b, h, q, k: s * scalar + array[k]  # noqa: E731
    assert value(hook) == 0.5 + 1
    array[1] = 9
    assert value(hook) == 0.5 + 9


def test_enums_strings_and_none_are_structure(traces):
    class Mode(enum.Enum):
        CAUSAL = 1
        FULL = 2

    def make(mode, kind, table):
        def hook(s, b, h, q, k):
            s = torch.where(q >= k, s, 0.0) if mode is Mode.CAUSAL else s
            s = s * 2 if kind == "double" else s
            return s if table is None else s + table[h]

        return hook

    assert value(make(Mode.CAUSAL, "double", None), kv_idx=5) == 0
    assert value(make(Mode.FULL, "double", None), kv_idx=5) == 2
    assert value(make(Mode.FULL, "x", SLOPES)) == 3
    assert traces.n == 3
    bound = as_variant(make(Mode.FULL, "x", None)).bind(DIMS)
    assert ("kind", "x") in bound.specialised and ("mode", Mode.FULL) in bound.specialised


# --- what is recorded ---------------------------------------------------------------------------


def test_closures_of_one_code_are_recorded_alike():
    def recorded(hook):
        return Walk(as_variant(hook)).locations

    assert recorded(windowed(3)) == recorded(windowed(5))
    assert recorded(windowed(3)) != recorded(windowed(5.0))
    assert recorded(windowed(3)) != recorded(windowed(SLOPES))
    assert recorded(lambda s, b, h, q, k: s) != recorded(lambda s, b, h, q, k: s)
    yielded = [x.yields for x in recorded(windowed(3)) if x.yields]
    assert yielded == ["number"]


def test_an_extractor_tells_another_structure_apart():
    """Each kind of guard, by a change that it must see."""

    class Config:
        def __init__(self):
            self.table = SLOPES

    def gain():
        return 2.0

    def hook(s, b, h, q, k, offset=1):
        extra = by_name["a"] + pair[0] + abs(offset) + config.table[h] + np.sign(2.0)
        return (s + extra) * helper() if flag is None else s

    def make(**changed):
        cells = {"by_name": {"a": 1.0}, "config": Config(), "flag": None, "helper": gain,
                 "pair": (1.0, 2.0), **changed}  # fmt: skip
        names = hook.__code__.co_freevars
        made = types.FunctionType(
            hook.__code__, {**globals(), **scope}, "hook", (1,),
            tuple(types.CellType(cells[n]) for n in names),
        )  # fmt: skip
        return as_variant(made)

    by_name = config = flag = helper = pair = None
    scope = {"np": np}
    root = make()
    walk = Walk(root)
    extract = extractor(walk.locations)
    found = extract(root, ())
    assert found == extract(make(), ())
    assert found[2] == (1.0, 1.0, 2.0, 1)
    changes = [
        {"by_name": {"a": 1.0, "b": 2.0}}, {"by_name": {"b": 1.0}}, {"by_name": {"a": 1}},
        {"config": types.SimpleNamespace(table=SLOPES)}, {"flag": 3}, {"pair": (1.0,)},
        {"pair": [1.0, 2.0]}, {"helper": lambda: 2.0},
    ]  # fmt: skip
    for change in changes:
        assert extract(make(**change), ()) is None, change
    config = Config()
    config.table = SLOPES.to_sparse()
    assert extract(make(config=config), ()) is None
    del config.table
    assert extract(make(config=config), ()) is None
    scope["abs"] = lambda x: x
    assert extract(make(), ()) is None
    scope = {"np": math}
    assert extract(make(), ()) is None
    root.score_mod.__defaults__ = None
    assert extract(root, ()) is None


def test_keys_of_dicts_may_be_enums():
    class Side(enum.IntEnum):
        LEFT = 1

    by_side = {Side.LEFT: 2.0}
    assert value(lambda s, b, h, q, k: s + by_side[Side.LEFT]) == 3


def test_numbers_are_computed_as_the_hook_computes_them():
    a, b = 7, -3

    def hook(s, b_, h, q, k):
        whole = (a // b) % 5 + (a << 2) - (a >> 1) + (a & 6) + (a | 8) - (a ^ b)
        real = -(a / 2.0) + abs(b) * round(a * 0.5) + 2.0**b + math.floor(a / b) + ~a
        return s + whole + real + SLOPES.shape[0] * math.trunc(-2.5 * b) + math.ceil(a / 2)

    for values in ((7, -3), (12, 5), (1, -1)):
        a, b = values
        wanted = hook(1.0, 1, 1, 1, 1)
        assert value(hook) == pytest.approx(wanted, rel=1e-6)


# --- limits --------------------------------------------------------------------------------------


def test_too_many_values_are_refused():
    many = [float(i) for i in range(5 * MAX_LOCATIONS)]
    with pytest.raises(TraceError, match="tensor instead"):
        as_variant(lambda s, b, h, q, k: s + many[0]).bind(DIMS)
    registry = dict.fromkeys(range(2 * MAX_LOCATIONS), 0.0)
    with pytest.raises(TraceError, match="registry"):
        as_variant(lambda s, b, h, q, k: s + registry[0]).bind(DIMS)


def test_containers_that_cannot_be_followed_are_refused():
    import collections

    queue = collections.deque([1.0])
    with pytest.raises(TraceError, match=r"queue.*deque.*tuple"):
        as_variant(lambda s, b, h, q, k: s + queue[0]).bind(DIMS)


def test_tensors_reached_past_the_captures_are_refused():
    hidden = itertools.repeat(SLOPES).__next__
    with pytest.raises(TraceError, match=r"opaque.*capture it"):
        as_variant(lambda s, b, h, q, k: s + hidden()[h]).bind(DIMS)


def test_operators_of_a_user_s_class(monkeypatch):
    class Curve:
        def __init__(self, gain):
            self.gain = gain

        def __getitem__(self, i):
            return i * self.gain + LIMIT

        def __getattr__(self, name):
            return self.gain + LIMIT

        def __rmul__(self, x):
            return x * self.gain

    curve = Curve(2.0)
    hook = lambda s, b, h, q, k: curve[k] + curve.anything + s * curve  # noqa: E731
    assert value(hook) == (2 + 3) + (2 + 3) + 2
    curve.gain = 3.0
    monkeypatch.setitem(globals(), "LIMIT", 1)
    assert value(hook) == (3 + 1) + (3 + 1) + 3


def test_captured_tensors_on_another_device():
    t = torch.ones(7, device="meta")
    with pytest.raises((ParamError, TraceError), match=r"'t'.*meta.*cpu"):
        as_variant(lambda s, b, h, q, k: s + t[k]).bind(DIMS)


def test_complex_tensors_are_refused():
    t = torch.ones(7, dtype=torch.complex64)
    with pytest.raises(TraceError, match="complex64"):
        as_variant(lambda s, b, h, q, k: s + t[k]).bind(DIMS)


def test_equal_code_in_equal_variants_has_equal_ir():
    text = "lambda b, h, q, k: (q >= k) & (q - k < window)"
    made = [eval(text, {"window": w}) for w in (3, 4)]
    bounds = [variant(mask_mod=f).bind(DIMS) for f in made]
    assert bounds[0].structure == bounds[1].structure


def test_hooks_that_ask_for_types_see_tensors_and_numbers():
    def as_tensor(x):
        return x if isinstance(x, torch.Tensor) else torch.tensor(float(x))

    def make(n):
        def hook(s, b, h, q, k):
            if type(n) is int and isinstance(n, int) and isinstance(SLOPES, torch.Tensor):
                return as_tensor(s) + as_tensor(SLOPES)[h] + n
            return s * 0 if isinstance(n, (float, str)) and type(s) is torch.Tensor else s

        return hook

    assert value(make(5)) == 1 + 2 + 5
    assert value(make(5.0)) == 0


def test_signed_zeros_are_different_kernels():
    a, b = (variant(score_mod=eval(f"lambda s, b, h, q, k: s + {z}")) for z in ("0.0 * 1", "-0.0"))
    assert a.bind(DIMS).structure != b.bind(DIMS).structure


def test_a_prelude_that_fails_later_is_a_param_error():
    def make(t):
        return lambda s, b, h, q, k: s + t.view(3, 2)[h, k]

    as_variant(make(torch.ones(6))).bind(DIMS)
    with pytest.raises(ParamError, match=r"`view`.*\[7\]"):
        as_variant(make(torch.ones(7))).bind(DIMS)


def test_a_known_structure_is_bound_within_6_microseconds():
    """The best of many CPU times, which depends little on the machine's other load."""

    def causal(b, h, q, k):
        return q >= k

    as_variant(causal).bind(DIMS)
    best = math.inf
    for _ in range(30):
        begin = time.process_time()
        for _ in range(500):
            as_variant(causal).bind(DIMS)
        best = min(best, (time.process_time() - begin) / 500 / slowdown())
    assert best < 6e-6


def test_threads_trace_side_by_side():
    def make(i):
        return eval(f"lambda s, b, h, q, k: s * {i} + w", {"w": i})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: value(make(i)), range(64)))
    assert results == [2 * i for i in range(64)]
