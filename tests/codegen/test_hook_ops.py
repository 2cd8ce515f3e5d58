"""Every operation of the hook headers against torch, scalar and vector, on every CPU target."""

from __future__ import annotations

import ctypes
import math
import subprocess

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import host_targets
from flashattn_jit.codegen.targets import CPU_TARGETS
from flashattn_jit.env import include_dir
from flashattn_jit.jit.compilation.toolchain import flags_for
from flashattn_jit.variants.functions import TANH_APPROX_ERROR
from flashattn_jit.variants.ir.ir import FLOAT_FUNCTIONS, Node
from flashattn_jit.variants.lower.expressions import TAG, map_op

INTS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float32", "float64")
COUNT = 256  # a multiple of every vector width

torch_ops = {
    **{name: getattr(torch, name, None) or getattr(fa, name) for name in FLOAT_FUNCTIONS},
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floordiv": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "pow": torch.pow, "minimum": torch.minimum, "maximum": torch.maximum,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "atan2": torch.atan2,
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "not": torch.bitwise_not,
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc,
    "ge": torch.ge, "gt": torch.gt, "le": torch.le, "lt": torch.lt, "eq": torch.eq, "ne": torch.ne,
    "isnan": torch.isnan, "isinf": torch.isinf,
}  # fmt: skip

ARITHMETIC = ["add", "sub", "mul", "minimum", "maximum"]
DIVISIONS = ["floordiv", "remainder", "fmod", "truncdiv"]
COMPARISONS = ["ge", "gt", "le", "lt", "eq", "ne"]
BITS = ["and", "or", "xor", "shl", "shr"]
FUNCTIONS = [*FLOAT_FUNCTIONS, *"floor ceil round trunc neg abs sign isnan isinf".split()]


def cases():
    """(op, dtype, number of arguments)."""
    for dtype in (*INTS, *FLOATS):
        yield from ((op, dtype, 2) for op in (*ARITHMETIC, *DIVISIONS, *COMPARISONS))
    for dtype in INTS:
        yield from ((op, dtype, 2) for op in BITS)
        yield from ((op, dtype, 1) for op in ("neg", "abs", "sign", "not"))
    for dtype in FLOATS:
        yield from ((op, dtype, 2) for op in ("div", "pow", "atan2"))
        yield from ((op, dtype, 1) for op in FUNCTIONS)
    yield from ((op, "bool", 2) for op in ("and", "or", "xor"))
    yield ("not", "bool", 1)


CASES = list(cases())


def source() -> str:
    """A function for each case and orientation: op_<index>_<v|s>(a, b, out, n)."""
    parts = [
        "#include <fajit/abi.h>\n#include <fajit/cpu/hooks/hook_ops.h>\nusing namespace fajit;\n"
    ]
    parts.append("""
template <class D> void keep(void* out, int64_t i, typename ops::storage<D>::type x) {
  static_cast<typename ops::storage<D>::type*>(out)[i] = x;
}
template <class D, class V> V pick(const void* p, int64_t i) {
  fajit_tensor t{}; t.ptr = p;
  V v{};
  for (int l = 0; l < FAJIT_LANES; ++l) {
    if constexpr (same<D, dt::b1>) v[l] = -int32_t(ops::load_scalar<D>(t, i + l));
    else v[l] = ops::load_scalar<D>(t, i + l);
  }
  return v;
}
""")
    for index, (op, dtype, arity) in enumerate(CASES):
        result = "bool" if op in (*COMPARISONS, "isnan", "isinf") else dtype
        node = Node(op, tuple(range(arity)), result)
        expression = map_op(node, ["a", "b"][:arity], [dtype] * arity)
        tag, out = TAG[dtype], TAG[result]
        load = f"ops::load_scalar<{tag}>"
        vector = f"pick<{tag}, ops::Vector<{tag}::type>>"
        parts.append(f"""
extern "C" void op_{index}_s(const void* pa, const void* pb, void* out, int64_t n) {{
  fajit_tensor ta{{}}, tb{{}}; ta.ptr = pa; tb.ptr = pb;
  for (int64_t i = 0; i < n; ++i) {{
    auto a = {load}(ta, i); [[maybe_unused]] auto b = {load}(tb, i);
    keep<{out}>(out, i, {expression});
  }}
}}
extern "C" void op_{index}_v(const void* pa, const void* pb, void* out, int64_t n) {{
  for (int64_t i = 0; i < n; i += FAJIT_LANES) {{
    auto a = {vector}(pa, i); [[maybe_unused]] auto b = {vector}(pb, i);
    auto r = {expression};
    for (int l = 0; l < FAJIT_LANES; ++l)
      keep<{out}>(out, i + l, {"r[l] != 0" if result == "bool" else "r[l]"});
  }}
}}""")
    return "\n".join(parts)


@pytest.fixture(scope="module", params=CPU_TARGETS)
def library(request, tmp_path_factory):
    if request.param not in host_targets():
        pytest.skip(f"{request.param} needs instructions that this machine lacks")
    folder = tmp_path_factory.mktemp("hook_ops")
    path = folder / "ops.cpp"
    path.write_text(source())
    # -O1: only arithmetic is tested, and 400 functions at -O3 take a minute to compile.
    flags = [f for f in flags_for(request.param) if not f.startswith(("-O", "-fvisibility"))]
    command = ["g++", *flags, "-O1", "-shared", "-fPIC", "-w", f"-I{include_dir()}", str(path)]
    subprocess.run([*command, "-o", str(folder / "ops.so")], check=True)
    return ctypes.CDLL(str(folder / "ops.so"))


def inputs(op: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random and special values."""
    generator = torch.Generator().manual_seed(1)
    if dtype == "bool":
        return tuple(torch.rand(COUNT, generator=generator) < 0.5 for _ in range(2))
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        a, b = (torch.randn(COUNT, generator=generator, dtype=kind) * 4 for _ in range(2))
        special = torch.tensor(
            [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 1e-30,
             88.0, -88.0, 0.5, -0.5, 1e5, -1e5], dtype=kind)  # fmt: skip
        a[: len(special)] = special
        b[8 : 8 + len(special)] = special
        if op in ("asin", "acos"):
            a = a.clamp(-1.5, 1.5) / 1.5
        if op in DIVISIONS:  # torch's own kernels differ between versions on infinities
            a, b = a.nan_to_num(1.0, 2.0, -2.0).clamp(-1e3, 1e3), b.nan_to_num(1.0, 2.0, -2.0)
            b = torch.where(b.abs() < 1e-3, torch.full_like(b, 0.75), b).clamp(-1e3, 1e3)
        return a, b
    info = torch.iinfo(kind)
    low, high = (-50, 50) if info.min < 0 else (0, 100)
    a = torch.randint(low, high, (COUNT,), generator=generator, dtype=kind)
    b = torch.randint(low, high, (COUNT,), generator=generator, dtype=kind)
    if op in ("shl", "shr"):
        return a, b.abs() % (8 * a.element_size() if op == "shr" else 8)
    a[:4] = torch.tensor([info.max, info.min, info.max - 1, 0], dtype=kind)
    if op not in DIVISIONS:
        b[2:6] = torch.tensor([info.max, info.min, info.max, 1], dtype=kind)
    return a, torch.where(b == 0, torch.ones_like(b), b) if op in DIVISIONS else b


@pytest.mark.parametrize("orientation", ["scalar", "vector"])
@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(c[:2]) for c in CASES])
def test_matches_torch(library, index, orientation):
    op, dtype, arity = CASES[index]
    a, b = inputs(op, dtype)
    function = getattr(library, f"op_{index}_{orientation[0]}")
    check(
        op, dtype, arity, a, b,
        lambda out: function(
            ctypes.c_void_p(a.data_ptr()), ctypes.c_void_p(b.data_ptr()),
            ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(COUNT),
        ),
    )  # fmt: skip


def check(op, dtype, arity, a, b, run) -> None:
    """Compares what `run(out)` writes with torch's result for the operands."""
    expected = torch_ops[op](a, b) if arity == 2 else torch_ops[op](a)
    out = torch.empty(COUNT, dtype=expected.dtype)
    run(out)
    if expected.dtype.is_floating_point:
        wide = a.double(), b.double()
        exact = torch_ops[op](*wide) if arity == 2 else torch_ops[op](wide[0])
        tolerance = (
            {"rtol": 2e-6, "atol": 1e-37} if dtype == "float32" else {"rtol": 1e-14, "atol": 0}
        )
        if op == "tanh_approx" and dtype == "float32":
            tolerance["rtol"] = TANH_APPROX_ERROR
        if op in ("sin", "cos", "tan", "remainder", "fmod"):
            tolerance["atol"] = 1e-6 if dtype == "float32" else 1e-12
        if op in (*DIVISIONS, "add", "sub", "mul", "div"):
            torch.testing.assert_close(out, expected, equal_nan=True, **tolerance)
        else:
            torch.testing.assert_close(
                out.double(), exact.to(a.dtype).double(), equal_nan=True, **tolerance
            )
    else:
        assert torch.equal(out, expected)


def test_integer_division_by_zero_is_zero_and_never_traps(library):
    zero, one = torch.zeros(COUNT, dtype=torch.int32), torch.full((COUNT,), -(2**31))
    one = one.to(torch.int32)
    minus = torch.full((COUNT,), -1, dtype=torch.int32)
    for index, (op, dtype, _) in enumerate(CASES):
        if dtype != "int32" or op not in DIVISIONS:
            continue
        for orientation in "sv":
            out = torch.empty(COUNT, dtype=torch.int32)
            call = getattr(library, f"op_{index}_{orientation}")
            args = [ctypes.c_void_p(one.data_ptr()), ctypes.c_void_p(zero.data_ptr())]
            call(*args, ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(COUNT))
            assert (out == 0).all()
            args[1] = ctypes.c_void_p(minus.data_ptr())
            call(*args, ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(COUNT))
            expected = -(2**31) if op in ("floordiv", "truncdiv") else 0
            assert (out == expected).all()


@pytest.mark.parametrize("orientation", "sv")
@pytest.mark.parametrize("kind", ["small", "large", "mixed"])
def test_tanh_is_within_four_ulp_whatever_the_other_lanes_hold(library, kind, orientation):
    """A vector of small values alone takes a branch of its own (vector/fast_math.h)."""
    border = torch.linspace(0.7499, 0.7501, 4001)
    magnitudes = 10.0 ** torch.linspace(-38, 38, 40001)
    x = torch.cat([torch.linspace(0, 12, 400001), border, magnitudes, torch.zeros(1)])
    x = torch.cat([x, -x])
    if kind != "mixed":
        x = x[x.abs() < 0.75] if kind == "small" else x[x.abs() >= 0.75]
    x = x[: x.numel() // 64 * 64]
    if kind == "mixed":
        x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(2))].contiguous()
    out = torch.empty_like(x)
    call = getattr(library, f"op_{CASES.index(('tanh', 'float32', 1))}_{orientation}")
    call(*map(ctypes.c_void_p, (x.data_ptr(), None, out.data_ptr())), ctypes.c_int64(x.numel()))
    exact = torch.tanh(x.double())
    ulp = torch.finfo(torch.float32).eps * 2.0 ** exact.abs().clamp(min=2.0**-126).log2().floor()
    assert ((out.double() - exact).abs() / ulp).max() <= 4
    assert torch.equal(out.signbit(), x.signbit())


def test_tanh_approx_is_within_its_error_and_shaped_as_tanh(library):
    """Odd, bounded, monotonic but for rounding; equal in scalars and vectors of any other lanes.

    AVX-512 has a reciprocal to 2^-14, whose steps differ between processors.
    """
    border = torch.linspace(0.999, 1.001, 4001)
    magnitudes = 10.0 ** torch.linspace(-38, 38, 40001)
    special = torch.tensor([0.0, math.inf])
    x = torch.cat([torch.linspace(0, 12, 400001), border, magnitudes, special]).sort().values
    x = x[x.numel() % 64 :]
    shuffled = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(2))

    def values(x, orientation):
        out = torch.empty_like(x)
        call = getattr(library, f"op_{CASES.index(('tanh_approx', 'float32', 1))}_{orientation}")
        call(*(ctypes.c_void_p(p) for p in (x.data_ptr(), None, out.data_ptr())),
             ctypes.c_int64(x.numel()))  # fmt: skip
        return out

    out, exact = values(x, "s"), torch.tanh(x.double())
    error = torch.where(exact == 0, 0.0, (out.double() / exact - 1).abs())
    # Denormal results are rounded to multiples of 2^-149.
    assert (error[x > 1e-37] <= TANH_APPROX_ERROR).all()
    assert error.max() > TANH_APPROX_ERROR / 2, "as large as a shorter function needs"
    assert (out <= 1).all() and (out[x > 4.5] == 1).all()
    assert (out.cummax(0).values - out).max() < 2.0**-13
    assert torch.equal(values(-x, "s"), -out) and values(-x[x == 0], "s").signbit().all()
    assert torch.equal(values(x, "v"), out)
    assert torch.equal(values(x[shuffled].contiguous(), "v"), out[shuffled])
    assert values(torch.full((64,), math.nan), "v").isnan().all()
