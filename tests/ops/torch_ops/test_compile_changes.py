"""Calls in compiled functions that change, before the call, what its hooks read."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.ops.torch_ops.compiled import Compiled, dense

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]

WINDOW, BIAS = 3, torch.ones(4)


class Config:
    def __init__(self) -> None:
        self.window, self.cap = 3, None
        self.bias = torch.ones(4)
        self.windows, self.named = [3, 4], {"window": 3}


def within(b, h, i, j):
    return i - j < WINDOW


def biased(s, b, h, i, j):
    return s + BIAS[h] * j


def of(config: Config) -> dict[str, Any]:
    """Hooks that read a config."""
    return {
        "window": lambda b, h, i, j: i - j < config.window,
        "item": lambda b, h, i, j: i - j < config.windows[1],
        "length": lambda b, h, i, j: i - j < config.windows[-1],
        "entry": lambda b, h, i, j: i - j < config.named["window"],
        "bias": lambda s, b, h, i, j: s + config.bias[h] * j,
        "cap": lambda s, b, h, i, j: s if config.cap is None else s * config.cap,
    }


def set_window(config: Config, n: int) -> None:
    config.window = n


def set_item(config: Config, n: int) -> None:
    config.windows[1] = n


def set_entry(config: Config, n: int) -> None:
    config.named["window"] = n


def set_bias(config: Config, n: int) -> None:
    config.bias = torch.full((4,), 0.25 * n)


CHANGES: dict[str, Callable[[Config, int], None]] = {
    "window": set_window, "item": set_item, "entry": set_entry, "bias": set_bias,
}  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("is_variant", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_numbers_and_tensors(name: str, is_variant: bool) -> None:
    """The value of the call, with variants that existed before too."""
    config = Config()
    hook, change = of(config)[name], CHANGES[name]
    kind = "score_mod" if name == "bias" else "mask_mod"
    chosen = fa.variant(**{kind: hook}) if is_variant else hook

    def call(q, k, v, n):
        change(config, n)
        first = fa.attention(q, k, v, chosen)
        change(config, n + 2)
        return first, fa.attention(q, k, v, chosen)

    run = Compiled(call)
    for n in (5, 8, 2, 8):
        first, second = run(*dense(), n)
        assert not torch.equal(first, second)


def test_params_of_a_variant_in_a_loop_over_layers() -> None:
    window = fa.SlidingWindow(3)

    def call(q, k, v, widths):
        for width in widths:
            window.window = width
            q = fa.attention(q, k, v, window & fa.ALiBi())
        return q

    run = Compiled(call)
    for widths in ((3, 9), (2, 5), (9, 3)):
        run(*dense(), widths)


def test_a_cell() -> None:
    width = 3
    hook = lambda b, h, i, j: i - j < width  # noqa: E731
    before = fa.variant(mask_mod=hook)

    def call(q, k, v, n):
        nonlocal width
        width = n
        return fa.attention(q, k, v, before), fa.attention(q, k, v, hook)

    run = Compiled(call)
    for n in (5, 8, 2):
        run(*dense(), n)


@dataclasses.dataclass
class Part:
    gain: float
    is_on: bool = True


def plain(s, b, h, i, j):
    return s


def doubled(s, b, h, i, j):
    return s * 2


class Model:
    """What hooks read through an attribute."""

    def __init__(self, part: Any) -> None:
        self.part = part


def first_of(model: Any) -> Any:
    return lambda s, b, h, i, j: s + model.part[0] * j if model.part[-1] else s


def gain_of(model: Any) -> Any:
    return lambda s, b, h, i, j: s + model.part.gain * j if model.part.is_on else s


def called(model: Any) -> Any:
    return lambda s, b, h, i, j: model.part(s, b, h, i, j)


OTHER = Part(5.0)
REPLACED: dict[str, tuple[Any, Any, Any]] = {
    "a tuple": ((1.0, 2), lambda n: (5.0, 3), first_of),
    "another tuple in each call": ((1.0, True), lambda n: (n * 0.5, True), first_of),
    "a list": ([1.0], lambda n: [n * 0.5], first_of),
    "an object": (Part(1.0), lambda n: OTHER, gain_of),
    "a new object": (Part(1.0), lambda n: Part(n * 0.5), gain_of),
    "nothing": (doubled, lambda n: doubled, called),
}
REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "a flag in a tuple": ((1.0, True), lambda n: (1.0, False), first_of),
    "a longer tuple": ((1.0, 2), lambda n: (1.0, 3, 4), first_of),
    "a flag of an object": (Part(1.0), lambda n: Part(1.0, False), gain_of),
    "a function": (plain, lambda n: doubled, called),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("is_variant", [False, True])
@pytest.mark.parametrize("name", [*REPLACED, *REFUSED])
def test_replaced_containers_objects_and_functions(name: str, is_variant: bool) -> None:
    """Their numbers are those of the call; another structure is an error."""
    before, after, hook_of = {**REPLACED, **REFUSED}[name]
    model = Model(before)
    hook = hook_of(model)
    chosen = fa.variant(score_mod=hook) if is_variant else hook

    def call(q, k, v, n):
        model.part = after(n)
        return fa.attention(q, k, v, chosen)

    if name in REPLACED:
        run = Compiled(call)
        model.part = before
        for n in (5, 8, 2):
            run(*dense(), n)
        return
    with pytest.raises(fa.VariantError, match="changes 'part' of a Model, which a hook"):
        torch.compile(call, backend="eager", fullgraph=True)(*dense(), 2)


@pytest.mark.parametrize("is_variant", [False, True])
def test_a_tuple_in_a_cell_and_a_flag_in_a_list(is_variant: bool) -> None:
    pair, flags = (1.0, 2.0), [True]
    scaled = lambda s, b, h, i, j: s + pair[0] * j  # noqa: E731
    switched = lambda s, b, h, i, j: s * 2 if flags[0] else s  # noqa: E731
    if is_variant:
        scaled, switched = fa.variant(score_mod=scaled), fa.variant(score_mod=switched)

    def call(q, k, v, n):
        nonlocal pair
        pair = n * 0.5, 2.0
        return fa.attention(q, k, v, scaled)

    def switch(q, k, v):
        flags[0] = False
        return fa.attention(q, k, v, switched)

    run = Compiled(call)
    for n in (5, 8, 2):
        run(*dense(), n)
    with pytest.raises(fa.VariantError, match="changes an item of a list"):
        torch.compile(switch, backend="eager", fullgraph=True)(*dense())


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("is_variant", [False, True])
@pytest.mark.parametrize("name", ["an attribute", "an item", "an entry"])
def test_changes_of_what_a_shared_cell_refers_to(name: str, is_variant: bool) -> None:
    """The hook and the compiled function close over the same variable."""
    held: Any = {"an attribute": Part(1.0), "an item": [1.0], "an entry": {"gain": 1.0}}[name]
    hooks: dict[str, Any] = {
        "an attribute": lambda s, b, h, i, j: s + held.gain * j,
        "an item": lambda s, b, h, i, j: s + held[0] * j,
        "an entry": lambda s, b, h, i, j: s + held["gain"] * j,
    }
    chosen = fa.variant(score_mod=hooks[name]) if is_variant else hooks[name]

    def call(q, k, v, n):
        if name == "an attribute":
            held.gain = n * 0.5
        elif name == "an item":
            held[0] = n * 0.5
        else:
            held["gain"] = n * 0.5
        return fa.attention(q, k, v, chosen)

    run = Compiled(call)
    for n in (5, 8, 2):
        run(*dense(), n)


def test_an_object_that_is_another_one_in_a_later_call() -> None:
    """The first call assigns what is there already."""
    model = Model(OTHER)
    chosen = fa.variant(score_mod=gain_of(model))

    def call(q, k, v, part):
        model.part = part
        return fa.attention(q, k, v, chosen)

    run = Compiled(call)
    model.part = OTHER
    for part in (OTHER, Part(3.0), OTHER):
        run(*dense(), part)


def test_an_exported_call() -> None:
    window = fa.SlidingWindow(9)

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            window.window = 2
            return fa.attention(q, k, v, window)

    given = dense()
    with pytest.warns(UserWarning, match="side effects"):
        program = torch.export.export(Module(), given, strict=True)
    assert torch.equal(program.module()(*given), fa.attention(*given, fa.SlidingWindow(2)))


@pytest.mark.parametrize("is_variant", [False, True])
@pytest.mark.parametrize(
    ("what", "words"),
    [("cap", "'cap' of a Config"), ("length", "the length of a list"),
     ("within", "the global WINDOW"), ("biased", "the global BIAS")],
)  # fmt: skip
def test_another_structure_and_globals_are_errors(what: str, words: str, is_variant: bool) -> None:
    """A graph cannot see them."""
    config = Config()
    hook = {**of(config), "within": within, "biased": biased}[what]
    kind = "score_mod" if what in ("biased", "cap") else "mask_mod"
    chosen = fa.variant(**{kind: hook}) if is_variant else hook

    def call(q, k, v, n):
        global WINDOW, BIAS
        if what == "cap":
            config.cap = 2.5
        elif what == "length":
            config.windows.append(n)
        elif what == "within":
            WINDOW = n
        else:
            BIAS = BIAS * n
        return fa.attention(q, k, v, chosen)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(fa.VariantError, match=f"changes {words}, which a hook"):
        compiled(*dense(), 2)


class Layer(torch.nn.Module):
    """Keeps outputs and flags, which its hooks do not read."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.last, self.is_first = 2.0, None, True
        self.outputs: list[torch.Tensor] = []
        self.kept: dict[str, torch.Tensor] = {}

    def score(self, s, b, h, i, j):
        return s * self.gain

    def forward(self, q, k, v, n):
        self.last, self.is_first, self.gain = q, False, n
        self.outputs.append(q)
        self.kept["k"] = k
        own = lambda s, b, h, i, j: self.score(s, b, h, i, j)  # noqa: E731
        return fa.attention(q, k, v, self.score), fa.attention(q, k, v, own)


def test_modules_that_change_what_their_hooks_do_not_read() -> None:
    layer = Layer()
    compiled, given = torch.compile(layer, backend="eager", fullgraph=True), dense()
    for n in (0.5, 3.0, 0.25):
        scaled = fa.attention(*given, lambda s, b, h, i, j, n=n: s * n)
        assert all(torch.equal(out, scaled) for out in compiled(*given, n))
    assert len(layer.outputs) == 3 and layer.last is given[0]


def test_another_kind_of_number_is_an_error() -> None:
    config = Config()
    hook = of(config)["window"]

    def call(q, k, v, n):
        config.window = n
        return fa.attention(q, k, v, hook)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(fa.VariantError, match="changes 'window' of a Config"):
        compiled(*dense(), 2.5)


def test_changes_of_what_no_hook_reads() -> None:
    """A counter, a list that grows, a flag that stays as it is, and changes after the call."""
    config = Config()
    seen: list[int] = []
    capped = fa.variant(score_mod=of(config)["cap"], mask_mod=of(config)["window"])

    def call(q, k, v, n):
        config.count = n  # type: ignore[attr-defined]
        config.cap = None
        seen.append(n)
        out = fa.attention(q, k, v, capped)
        config.window += 1
        return out

    compiled, given = torch.compile(call, backend="eager", fullgraph=True), dense()
    for n in (4, 5, 6):
        expected = fa.attention(*given, capped)
        assert torch.equal(compiled(*given, n), expected)
    assert config.window == 6
    assert seen == [4, 5, 6]


class Base:
    window = 100


class Shared(Base):
    window, calls = 3, 0


@pytest.mark.parametrize("own", [False, True], ids=["of the class", "of the object"])
def test_numbers_of_a_class(own: bool) -> None:
    """Dynamo finds the old one where an object has it from its class."""
    shared = Shared()
    if own:
        shared.window = 3
    windowed = fa.variant(mask_mod=lambda b, h, i, j: i - j < shared.window)

    def call(q, k, v, n):
        Shared.calls = Base.window = n
        if n > 4:
            Shared.window = n
        return fa.attention(q, k, v, windowed)

    compiled, given = torch.compile(call, backend="eager", fullgraph=True), dense()
    expected = fa.attention(*given, windowed)
    assert torch.equal(compiled(*given, 4), expected)
    try:
        if own:
            assert torch.equal(compiled(*given, 9), expected)
            return
        with pytest.raises(fa.VariantError, match="changes 'window' of a class"):
            compiled(*given, 9)
        assert Shared.window == 3
    finally:
        Shared.window, Shared.calls, Base.window = 3, 0, 100
