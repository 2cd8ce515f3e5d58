"""Arithmetic on random bits and special values, a different value in each lane, against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.emulator.harness import kernel, launch

Array = np.ndarray[Any, Any]
COUNT = 512

SPECIAL = {
    "f32": np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-44, 3.4e38], np.float32),
    "f64": np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-310, 1.7e308, 0.5]),
}
NUMPY = {
    "s16": np.int16, "u16": np.uint16, "s32": np.int32, "u32": np.uint32, "s64": np.int64,
    "u64": np.uint64, "f32": np.float32, "f64": np.float64, "f16": np.float16, "b32": np.uint32,
    "b64": np.uint64, "b16": np.uint16,
}  # fmt: skip


def samples(kind: str, seed: int) -> Array:
    """Random bits; half of the floats are of ordinary size, and some are special values."""
    generator = np.random.default_rng(seed)
    dtype = np.dtype(NUMPY[kind])
    data = generator.integers(0, 256, (COUNT, dtype.itemsize), np.uint8).view(dtype).ravel()
    if kind in SPECIAL:
        data[::2] = generator.standard_normal(COUNT // 2).astype(dtype) * 8
        data[: 8 * len(SPECIAL[kind])] = generator.choice(SPECIAL[kind], 8 * len(SPECIAL[kind]))
    elif kind == "f16":
        data = np.where(np.isnan(data), dtype.type(1), data)
    else:
        data[::3] = data[::3] % dtype.type(100)
    return data


def run(mnemonic: str, result: str, *inputs: tuple[str, Array]) -> Array:
    """`mnemonic d, a, b ...` for every element of the inputs."""
    letters = {2: "h", 4: "r", 8: "w"}
    body = "mov.u32 %r60, %tid.x;\n"
    names = []
    for i, (kind, _) in enumerate(inputs):
        size = np.dtype(NUMPY[kind]).itemsize
        names.append(f"%{letters[size]}{i + 1}")
        body += f"mul.wide.u32 %w60, %r60, {size}; add.u64 %w61, %a{i + 1}, %w60;\n"
        body += f"ld.global.b{8 * size} {names[-1]}, [%w61];\n"
    size = np.dtype(NUMPY[result]).itemsize
    target = f"%{letters[size]}20"
    body += f"{mnemonic} {target}, {', '.join(names)};\n"
    body += f"mul.wide.u32 %w60, %r60, {size}; add.u64 %w61, %a0, %w60;\n"
    body += f"st.global.b{8 * size} [%w61], {target};"
    out = np.zeros(COUNT, NUMPY[result])
    arrays = [out, *(np.ascontiguousarray(data) for _, data in inputs)]
    launch(kernel(body, len(arrays)), arrays, block=(COUNT, 1, 1))
    return out


def assert_same(got: Array, expected: Array) -> None:
    """Equal bits, except that any NaN equals any other."""
    if got.dtype.kind == "f":
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(got), nan)
        got, expected = got[~nan], expected[~nan]
    bits = np.dtype(f"u{got.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(bits), expected.view(bits))


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": np.minimum,
    "max": np.maximum,
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", BINARY)
def test_integers(name: str, kind: str) -> None:
    a, b = samples(kind, 1), samples(kind, 2)
    with np.errstate(over="ignore"):
        assert_same(run(f"{name}.{kind}", kind, (kind, a), (kind, b)), BINARY[name](a, b))


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_integer_products_and_quotients(kind: str) -> None:
    a, b, c = samples(kind, 3), samples(kind, 4), samples(kind, 5)
    b[b == 0] = 1
    width = 8 * a.dtype.itemsize
    exact = [int(x) * int(y) for x, y in zip(a, b, strict=True)]

    def wrapped(values: list[int], bits: int) -> Array:
        words = np.array([v & ((1 << bits) - 1) for v in values], np.uint64)
        return words.astype(f"u{bits // 8}").view(f"{a.dtype.kind}{bits // 8}")

    pair = (kind, a), (kind, b)
    assert_same(run(f"mul.hi.{kind}", kind, *pair), wrapped([e >> width for e in exact], width))
    sums = [e + int(z) for e, z in zip(exact, c, strict=True)]
    assert_same(run(f"mad.lo.{kind}", kind, *pair, (kind, c)), wrapped(sums, width))
    if width == 32:
        long = kind[0] + "64"
        assert_same(run(f"mul.wide.{kind}", long, *pair), wrapped(exact, 64))
        c64 = samples(long, 6)
        sums = [e + int(z) for e, z in zip(exact, c64, strict=True)]
        assert_same(run(f"mad.wide.{kind}", long, *pair, (long, c64)), wrapped(sums, 64))
    quotients = [abs(int(x)) // abs(int(y)) for x, y in zip(a, b, strict=True)]
    signed = [q if (x < 0) == (y < 0) else -q for q, x, y in zip(quotients, a, b, strict=True)]
    rests = [int(x) - q * int(y) for q, x, y in zip(signed, a, b, strict=True)]
    assert_same(run(f"div.{kind}", kind, *pair), wrapped(signed, width))
    assert_same(run(f"rem.{kind}", kind, *pair), wrapped(rests, width))


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ["add.rn", "sub.rn", "mul.rn", "div.rn"])
def test_floats(name: str, kind: str) -> None:
    a, b = samples(kind, 7), samples(kind, 8)
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    with np.errstate(all="ignore"):
        expected = operation[name[:3]](a, b)
    assert_same(run(f"{name}.{kind}", kind, (kind, a), (kind, b)), expected)


def test_fused_multiply_add() -> None:
    """One rounding: compared with exact rational arithmetic where the values are finite."""
    from fractions import Fraction

    a, b, c = (samples("f32", seed) for seed in (9, 10, 11))
    got = run("fma.rn.f32", "f32", ("f32", a), ("f32", b), ("f32", c))
    for x, y, z, r in zip(a, b, c, got, strict=True):
        if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if not math.isfinite(r):
            assert abs(exact) > Fraction(float(np.finfo(np.float32).max))
            continue
        error = abs(Fraction(float(r)) - exact)
        for other in (np.nextafter(r, np.float32(np.inf)), np.nextafter(r, np.float32(-np.inf))):
            if math.isfinite(other):
                assert error <= abs(Fraction(float(other)) - exact)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_extremes(kind: str) -> None:
    a, b = samples(kind, 12), samples(kind, 13)
    equal = a == b  # zeros of either sign
    with np.errstate(invalid="ignore"):
        for name, least, greatest in (("min", np.fmin, np.minimum), ("max", np.fmax, np.maximum)):
            got = run(f"{name}.{kind}", kind, (kind, a), (kind, b))
            assert_same(got[~equal], least(a, b)[~equal])
            got = run(f"{name}.NaN.{kind}", kind, (kind, a), (kind, b))
            assert_same(got[~equal], greatest(a, b)[~equal])


@pytest.mark.parametrize("comparison", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64", "f32", "f64"])
def test_comparisons(comparison: str, kind: str) -> None:
    a, b = samples(kind, 14), samples(kind, 15)
    b[::5] = a[::5]
    operation = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal,
    }[comparison]  # fmt: skip
    expected = operation(a, b)
    unordered = np.isnan(a) | np.isnan(b) if kind[0] == "f" else np.zeros(COUNT, bool)
    expected = expected & ~unordered
    mnemonic = f"setp.{comparison}.{kind} %p1, {{}}; selp.u32"
    for suffix, wanted in (("", expected), ("u", expected | unordered)):
        if suffix and kind[0] != "f":
            continue
        letter = {2: "h", 4: "r", 8: "w"}[a.dtype.itemsize]
        text = mnemonic.replace(comparison, comparison + suffix).format(f"%{letter}1, %{letter}2")
        got = run_selected(text, kind, a, b)
        np.testing.assert_array_equal(got, wanted)


def run_selected(text: str, kind: str, a: Array, b: Array) -> Array:
    size = a.dtype.itemsize
    letter = {2: "h", 4: "r", 8: "w"}[size]
    body = (
        f"mov.u32 %r60, %tid.x; mul.wide.u32 %w60, %r60, {size};\n"
        f"add.u64 %w61, %a1, %w60; ld.global.b{8 * size} %{letter}1, [%w61];\n"
        f"add.u64 %w61, %a2, %w60; ld.global.b{8 * size} %{letter}2, [%w61];\n"
        f"{text} %r20, 1, 0, %p1;\n"
        "mul.wide.u32 %w60, %r60, 4; add.u64 %w61, %a0, %w60; st.global.u32 [%w61], %r20;"
    )
    out = np.zeros(COUNT, np.uint32)
    launch(kernel(body, 3), [out, a, b], block=(COUNT, 1, 1))
    return out.astype(bool)


# Conversions


def test_float_to_half() -> None:
    a = samples("f32", 16)
    with np.errstate(over="ignore", under="ignore"):
        a[:128] *= np.float32(1e-5)
        a[128:200] *= np.float32(1e4)
        assert_same(run("cvt.rn.f16.f32", "f16", ("f32", a)), a.astype(np.float16))
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    for part in every.reshape(-1, COUNT):
        assert_same(run("cvt.f32.f16", "f32", ("f16", part)), part.astype(np.float32))


def test_float_to_bf16() -> None:
    a = samples("f32", 17)
    bits = a.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    nearest[np.isnan(a)] = 0x7FFF
    assert_same(run("cvt.rn.bf16.f32", "u16", ("f32", a)), nearest)
    cut = np.where(np.isnan(a), 0x7FFF, bits >> 16).astype(np.uint16)
    assert_same(run("cvt.rz.bf16.f32", "u16", ("f32", a)), cut)
    b = samples("f32", 18)
    both = run("cvt.rn.bf16x2.f32", "u32", ("f32", b), ("f32", a))
    assert_same((both & 0xFFFF).astype(np.uint16), nearest)


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def clamped(value: float, low: int, high: int) -> int:
    return low if value <= low else high if value >= high else int(value)


@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("mode", ROUND)
def test_float_to_integer(mode: str, source: str) -> None:
    a = samples(source, 19)
    assert_same(run(f"cvt.{mode}.{source}.{source}", source, (source, a)), ROUND[mode](a))
    for kind in ("s32", "u32", "s64", "u64"):
        info = np.iinfo(NUMPY[kind])
        whole = [None if math.isnan(x) else ROUND[mode](x) for x in a.astype(np.float64)]
        top = 1 << (info.bits - 1)
        nan = 0 if source == "f32" and info.bits == 32 else (-top if info.min < 0 else top)
        expected = [nan if w is None else clamped(w, info.min, info.max) for w in whole]
        got = run(f"cvt.{mode}.{kind}.{source}", kind, (source, a))
        np.testing.assert_array_equal(got, np.array(expected, NUMPY[kind]))


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_integer_to_float(source: str) -> None:
    a = samples(source, 20)
    assert_same(run(f"cvt.rn.f32.{source}", "f32", (source, a)), a.astype(np.float32))
    assert_same(run(f"cvt.rn.f64.{source}", "f64", (source, a)), a.astype(np.float64))
    low = run(f"cvt.rm.f32.{source}", "f32", (source, a))
    high = run(f"cvt.rp.f32.{source}", "f32", (source, a))
    for value, below, above in zip(a, low, high, strict=True):
        assert int(below) <= int(value) <= int(above)
        assert above == below or above == np.nextafter(below, np.float32(np.inf))


# Bits


def test_bit_fields_and_shifts() -> None:
    a, b, n = samples("u32", 21), samples("u32", 22), samples("u32", 23) % 80
    length = samples("u32", 24) % 40

    def every(function: Callable[..., int], *arrays: Array) -> Array:
        rows = zip(*(array.tolist() for array in arrays), strict=True)
        return np.array([function(*row) & 0xFFFFFFFF for row in rows], np.uint32)

    word = ("u32", a), ("u32", b), ("u32", n)
    expected = every(lambda x, s: x << s if s < 32 else 0, a, n)
    assert_same(run("shl.b32", "u32", word[0], word[2]), expected)
    assert_same(run("shr.u32", "u32", word[0], word[2]), every(lambda x, s: x >> s, a, n))
    signed = a.view(np.int32)
    expected = every(lambda x, s: x >> min(s, 31), signed, n)
    assert_same(run("shr.s32", "u32", word[0], word[2]), expected)
    wrap = every(lambda x, y, s: (y << 32 | x) << (s & 31) >> 32, a, b, n)
    assert_same(run("shf.l.wrap.b32", "u32", *word), wrap)
    clamp = every(lambda x, y, s: (y << 32 | x) >> min(s, 32), a, b, n)
    assert_same(run("shf.r.clamp.b32", "u32", *word), clamp)
    field = every(lambda x, p, c: x >> p & ((1 << c) - 1), a, n, length)
    assert_same(run("bfe.u32", "u32", word[0], word[2], ("u32", length)), field)

    def insert(x: int, y: int, p: int, c: int) -> int:
        mask = ((1 << c) - 1) << p
        return y & ~mask | x << p & mask

    expected = every(insert, a, b, n, length)
    assert_same(run("bfi.b32", "u32", *word, ("u32", length)), expected)

    def permute(x: int, y: int, selector: int) -> int:
        data = (y << 32 | x).to_bytes(8, "little")
        picks = [selector >> 4 * i & 15 for i in range(4)]
        parts = [data[p & 7] if p < 8 else 255 * (data[p & 7] >> 7) for p in picks]
        return int.from_bytes(bytes(parts), "little")

    selector = samples("u32", 25)
    expected = every(permute, a, b, selector)
    assert_same(run("prmt.b32", "u32", *word[:2], ("u32", selector)), expected)


@pytest.mark.parametrize(
    ("name", "function", "bound"),
    [
        ("ex2.approx.ftz", np.exp2, 2**-21),
        ("lg2.approx.ftz", np.log2, 2**-21),
        ("rcp.approx.ftz", lambda x: 1 / x, 2**-22),
        ("sqrt.rn", np.sqrt, 2**-24),
        ("rsqrt.approx.ftz", lambda x: 1 / np.sqrt(x), 2**-22),
        ("tanh.approx", np.tanh, 2**-11),
    ],
)
def test_functions(name: str, function: Callable[[Array], Array], bound: float) -> None:
    a = np.abs(np.random.default_rng(26).standard_normal(COUNT).astype(np.float32)) * 4 + 0.01
    expected = function(a.astype(np.float64))
    got = run(f"{name}.f32", "f32", ("f32", a.astype(np.float32))).astype(np.float64)
    errors = np.abs(got - expected) / np.maximum(np.abs(expected), 1e-2)
    assert np.all(errors <= bound)
    if name == "tanh.approx":
        assert errors.max() > 0.8 * bound, "the documented error is there"
