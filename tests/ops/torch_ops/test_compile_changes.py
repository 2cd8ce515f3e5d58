"""Calls in compiled functions that change, before the call, what its hooks read."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.ops.torch_ops.test_compile import Compiled, dense

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
