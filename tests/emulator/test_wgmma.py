"""Asynchronous products of warpgroups: values in every layout, and mistakes that are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashattn_jit.errors import EmulatorError, EmulatorFault
from tests.emulator.harness import compile_cuda, kernel, launch
from tests.emulator.products import Operand, Product, accumulator_places, bits, run
from tests.harness.toolkit import needs_nvcc

FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
MOMENTS = ["late", "early", *range(20)]


def fault(body: str, product: Product = Product(), **options: Any) -> EmulatorFault:  # noqa: B008
    with pytest.raises(EmulatorFault) as caught:
        run(product, body, **options)
    return caught.value


def changed(product: Product, old: str, new: str) -> str:
    """The kernel with the last occurrence of `old` replaced."""
    before, found, after = product.body().rpartition(old)
    assert found
    return before + new + after


# Values


@pytest.mark.parametrize("n", [8, 16, 24, 64, 80, 96, 112, 128, 160, 192, 248, 256])
@pytest.mark.parametrize("in_registers", [False, True])
def test_every_width(n: int, in_registers: bool) -> None:
    """As attention multiplies: Q K^T from shared memory, P V with V transposed."""
    product = Product(n=n, in_registers=in_registers, b_mn_major=in_registers)
    run(product)
    run(replace(product, kind="f16", accumulate=False))


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("a_mn_major", [False, True])
@pytest.mark.parametrize("b_mn_major", [False, True])
def test_every_layout(width: int, a_mn_major: bool, b_mn_major: bool) -> None:
    for n in (40, 128):
        run(Product(n, 128, width=width, a_mn_major=a_mn_major, b_mn_major=b_mn_major))


def test_signs() -> None:
    for signs in ((1, -1), (-1, 1), (-1, -1)):
        run(Product(16, 16, signs=signs))
        run(Product(16, 16, signs=signs, in_registers=True))


def test_rounding() -> None:
    """Products are summed exactly, added to D, and rounded once."""
    product = Product(8, 16)
    image = np.zeros(product.shared_bytes, np.uint8)
    words = image.view(np.uint16)
    words[product.a.addresses()[0, :3] // 2] = 0x3F80  # 1
    b = (product.b_begin + product.b.addresses()[0, :3]) // 2
    words[b] = [0x4F00, 0x4040, 0xCF00]  # 2^31, 3, -2^31: a sum in fp32 would lose the 3
    out = np.full((128, 4), 2.0**24, np.float32)
    launch(kernel(product.body(), 3, "sm_90a"), [image, image, out], block=(128, 1, 1))
    assert out[0, 0] == 2.0**24 + 4


# Sequences


def pipeline(product: Product) -> str:
    """Products one step at a time, of which one stays in flight: the last wait is for all."""
    steps = []
    for step in range(product.k // 16):
        steps += [product.mma(step), COMMIT, WAIT.replace("0", "1")]
    return "\n".join([product.setup(), FENCE, *steps, WAIT, product.store()])


@pytest.mark.parametrize("moment", MOMENTS)
def test_moments_of_completion(moment: Any) -> None:
    for product in (Product(), Product(in_registers=True)):
        run(product, async_copies=moment)
        run(product, pipeline(product), async_copies=moment)


@pytest.mark.parametrize("moment", ["late", "early", 1, 2, 3])
def test_warpgroups_do_not_wait_for_each_other(moment: Any) -> None:
    """The second one multiplies the same operands later, and stores nothing."""
    product = Product(k=16)
    late = "setp.ge.u32 %p4, %r9, 4; @%p4 nanosleep.u32 20;\n"
    body = product.body().replace(product.setup(), product.setup(256))
    body = body.replace("mul.wide.u32 %w8", "and.b32 %r1, %r1, 127;\nmul.wide.u32 %w8")
    body = body.replace(FENCE, late + FENCE).replace("STORE:", "@%p4 bra DONE;") + "\nDONE:"
    run(product, body, threads=256, async_copies=moment)


# Mistakes: order


@pytest.mark.parametrize("moment", ["late", "early", 1, 2])
def test_waits_that_are_missing(moment: Any) -> None:
    for product in (Product(), Product(n=16, in_registers=True)):
        for old, new in (
            (WAIT, ""),
            (WAIT, WAIT.replace("0", "1")),
            (COMMIT, ""),
            (COMMIT + "\n        " + WAIT, WAIT + COMMIT),
        ):
            error = fault(changed(product, old, new), product, async_copies=moment)
            assert error.kind == "in flight"
            assert "a read of an accumulator of the wgmma at PTX line" in str(error)
    error = fault(changed(Product(), WAIT, "mov.f32 %acc3, 0f00000000;" + WAIT))
    assert error.kind == "in flight" and "a write of an accumulator" in str(error)


def test_the_first_steps_are_in_flight_too() -> None:
    product = Product()
    body = pipeline(product).replace(WAIT + "\nSTORE:", "STORE:")
    assert fault(body).kind == "in flight"


def test_a_registers_are_kept_until_the_wait() -> None:
    product = Product(in_registers=True)
    run(product, changed(product, WAIT, "mov.b32 %r20, %pa0;" + WAIT))
    error = fault(changed(product, WAIT, "mov.b32 %pa0, 0;" + WAIT), product)
    assert error.kind == "in flight" and "a write of an A register of the wgmma" in str(error)


def test_the_fence_before_products() -> None:
    product = Product(in_registers=True)
    assert "no wgmma.fence before the first" in str(fault(changed(product, FENCE, "")))
    for touched in ("mov.f32 %acc1, %acc1;", "mov.b32 %pa2, %pa2;", "mov.f32 %f1, %acc1;"):
        error = fault(changed(product, FENCE, FENCE + touched), product)
        assert error.kind == "fence" and "was accessed at PTX line" in str(error)
        run(product, changed(product, FENCE, touched + FENCE))
    # The same accumulators need no second fence, neither in flight nor after a wait.
    steps = "\n".join(product.mma(step) + COMMIT + WAIT for step in range(4))
    run(product, "\n".join([product.setup(), FENCE, steps, product.store()]))


def test_other_products_may_not_use_the_registers() -> None:
    product = Product(k=32)
    fragments = replace(product, in_registers=True)
    more = ".reg .b32 %more<64>;"
    for first, second, words in (
        (product.mma(0), replace(product, n=32).mma(1), "a use by another wgmma of an accumul"),
        (product.mma(0), fragments.mma(1, "%more", "%acc"), "a use by another wgmma of an accumul"),
        (fragments.mma(0), product.mma(1, "%pa"), "a write by another wgmma of an A register"),
    ):
        lines = [more, fragments.setup().replace("%pa<8>", "%pa<64>"), FENCE, first, second]
        error = fault("\n".join([*lines, COMMIT, WAIT]))
        assert error.kind == "in flight" and words in str(error)
    # Other registers may be used at once, and a product may read what another one reads.
    lines = [more, fragments.setup(), FENCE, fragments.mma(0), fragments.mma(0, "%more")]
    with pytest.raises(AssertionError):  # half of the steps
        run(fragments, "\n".join([*lines, COMMIT, WAIT, product.store()]))


def test_an_exit_in_flight() -> None:
    error = fault(changed(Product(), WAIT, "exit;"))
    assert error.kind == "in flight" and "the thread ends while the wgmma at" in str(error)


# Mistakes: shared memory

OVERWRITE = "st.shared.u32 [%r3+{}], %r1;"


@pytest.mark.parametrize("moment", ["late", "early", 1, 2])
def test_operands_are_kept_until_the_wait(moment: Any) -> None:
    product = Product()
    for offset in (0, product.b_begin):
        write = "setp.eq.u32 %p5, %r1, 0; @%p5 " + OVERWRITE.format(offset)
        error = fault(changed(product, WAIT, write + WAIT), async_copies=moment)
        assert error.kind == "in flight" and "may still be reading" in str(error)
    # After its own wait, a warp may write its own rows of A, but B only behind a barrier.
    own = "setp.eq.u32 %p5, %r1, 0; @%p5 " + OVERWRITE.format(0)
    run(product, changed(product, WAIT, WAIT + own), async_copies=moment)
    shared = own.replace("+0", f"+{product.b_begin}")
    assert fault(changed(product, WAIT, WAIT + shared)).kind in ("in flight", "race")
    run(product, changed(product, WAIT, WAIT + "bar.sync 0;" + shared), async_copies=moment)


def test_writes_need_a_proxy_fence() -> None:
    error = fault(changed(Product(), "fence.proxy.async;", ""))
    assert error.kind == "proxy" and "fence.proxy.async is missing" in str(error)
    assert fault(changed(Product(), "bar.sync 0;", "")).kind == "race"


def test_bounds() -> None:
    product = Product()
    tile = f"tile[{product.shared_bytes}]"
    assert fault(changed(product, tile, f"tile[{product.shared_bytes - 1024}]")).kind == (
        "out of bounds"
    )


# Mistakes: descriptors


def exchanged(descriptor: int) -> int:
    """The byte offsets are exchanged."""
    leading, stride = descriptor >> 16 & 0x3FFF, descriptor >> 32 & 0x3FFF
    return descriptor + (stride - leading << 16) + (leading - stride << 32)


def test_offsets_that_are_exchanged() -> None:
    for product in (
        Product(b_mn_major=True, n=128),
        Product(width=16),
        Product(width=16, b_mn_major=True),
    ):
        with pytest.raises((AssertionError, EmulatorFault)) as caught:
            run(replace(product, edit_b=exchanged))
        assert getattr(caught.value, "kind", "out of bounds") == "out of bounds"
    with pytest.raises(EmulatorFault, match="byte offsets must be multiples of 1024") as caught:
        run(Product(edit_b=exchanged))
    assert caught.value.kind == "descriptor"


def test_a_step_that_is_missing() -> None:
    """The second step reads the columns of the first one."""
    start = Product().b.descriptor(0)
    with pytest.raises(AssertionError):
        run(Product(k=32, edit_b=lambda descriptor: descriptor & ~0x3FFF | start & 0x3FFF | 256))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d + (512 >> 4), "must begin at a multiple of 1024 bytes, not at 512 beyond"),
        (lambda d: d + (112 >> 4), "the operand exceeds a row of the 128-byte swizzle"),
        (lambda d: d | 1 << 49, "a base offset other than 0 is not emulated"),
        (lambda d: d | 1 << 46, "bits outside of its fields are set"),
    ],
)
def test_descriptors_that_are_wrong(edit: Any, words: str) -> None:
    with pytest.raises(EmulatorFault, match=words) as caught:
        run(Product(k=16, edit_b=edit))
    assert caught.value.kind == "descriptor"


# Mistakes: warps of a warpgroup


def test_warps_execute_the_same_products() -> None:
    product = Product()
    skipped = "setp.eq.u32 %p6, %r9, 2; @%p6 bra SKIP;" + product.mma(3) + "SKIP:"
    error = fault(changed(product, product.mma(3), skipped))
    assert error.kind == "warpgroup" and "another warp of the warpgroup executed" in str(error)
    exits = "setp.eq.u32 %p6, %r9, 3; @%p6 bra DONE;" + FENCE
    error = fault(changed(product, FENCE, exits) + "\nDONE:")
    assert error.kind == "warpgroup" and "warp 3 ended without executing it" in str(error)


def test_descriptors_are_uniform() -> None:
    for by, words in (
        ("%r9", "with another descriptor or scale-d"),
        ("%laneid", "the lanes have different descriptors of A"),
    ):
        add = f"mov.u32 %r20, {by}; cvt.u64.u32 %w20, %r20; shl.b64 %w20, %w20, 6; add.u64 %w6, "
        error = fault(changed(Product(), "wgmma.mma", add + "%w6, %w20; wgmma.mma"))
        assert error.kind == "warpgroup" and words in str(error)
    predicate = "setp.eq.u32 %p3, %r9, 0;"
    error = fault(changed(Product(k=16), FENCE, predicate + FENCE), Product(k=16))
    assert error.kind == "warpgroup"


@pytest.mark.parametrize("threads", [96, 160, 100])
def test_warpgroups_are_complete(threads: int) -> None:
    lines = f"mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, {threads // 128 * 128}; @%p1 bra DONE;"
    text = kernel(lines + FENCE + "DONE:", 0, "sm_90a")
    with pytest.raises(EmulatorFault, match="the warpgroup is incomplete") as caught:
        launch(text, [], block=(threads, 1, 1))
    assert caught.value.kind == "warpgroup"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("m64n64k16", "m64n60k16", "expected a shape"),
        (", %w7, 1, 1, 1, 0, 0;", ", %w7, 1, 1, 1, 0;", "has 7 operands"),
        (", %w7, 1, 1, 1, 0, 0;", ", %w7, 1, 0, 1, 0, 0;", "the factor of A or of B is not 1"),
        (", %w7, 1, 1, 1, 0, 0;", ", %w7, 1, 1, 1, 2, 0;", "operand 6 is not a constant from 0 to"),
        ("%acc5, ", "%acc4, ", "an accumulator is named twice"),
        ("%acc5, ", "", "operand 0 has 31 registers, not 32"),
        (".bf16.bf16", ".bf16.f16", "A and B must both be"),
    ],
)
def test_forms_that_do_not_exist(old: str, new: str, words: str) -> None:
    with pytest.raises(EmulatorError, match=words):
        run(Product(), changed(Product(), old, new))


@pytest.mark.parametrize("target", ["sm_90", "sm_100a"])
def test_only_sm_90a_has_them(target: str) -> None:
    for line in (FENCE, "setmaxnreg.inc.sync.aligned.u32 24;"):
        with pytest.raises(EmulatorError, match=r"needs PTX ISA 8\.0 and sm_90a"):
            launch(kernel(line, 0, target), [], block=(128, 1, 1))


# Register counts


def counts(first: str, second: str, threads: int = 256) -> None:
    """The first warpgroup runs the first lines, the others the second ones."""
    lines = f"mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 128; @!%p1 bra OTHER; {first} bra DONE;"
    launch(kernel(f"{lines} OTHER: {second} DONE:", 0, "sm_90a"), [], block=(threads, 1, 1))


INC, DEC = "setmaxnreg.inc.sync.aligned.u32 {};", "setmaxnreg.dec.sync.aligned.u32 {};"


def test_register_counts_are_taken_from_what_was_returned() -> None:
    counts(DEC.format(24), INC.format(240), threads=384)  # 168 each before
    counts(INC.format(256), DEC.format(240))
    counts(INC.format(176) + DEC.format(24), DEC.format(160) + INC.format(240), threads=384)
    with pytest.raises(EmulatorFault, match="deadlock") as caught:
        counts(DEC.format(32), INC.format(240), threads=384)
    text = str(caught.value)
    assert "240 registers for each of 32 threads, which have 168; the block has 1280 free" in text


def test_register_counts_change_in_their_direction() -> None:
    for lines in (DEC.format(256), INC.format(160), DEC.format(160) + INC.format(152)):
        with pytest.raises(EmulatorFault, match="registers a thread, which has") as caught:
            counts(lines, DEC.format(24), threads=384)
        assert caught.value.kind == "registers"
    for count in (16, 100, 264):
        with pytest.raises(EmulatorError, match=r"operand 0 is not a const|not a multiple of 8"):
            counts(INC.format(count), "")


def test_register_counts_are_those_of_a_warpgroup() -> None:
    one = "setp.lt.u32 %p2, %r1, 32; @%p2 bra SKIP;" + DEC.format(40) + "SKIP:"
    for lines in (one, one + DEC.format(32)):
        with pytest.raises(EmulatorFault) as caught:
            counts(lines, "")
        assert caught.value.kind == "warpgroup"


# Kernels of nvcc

TILES = 3
CHAINED = """
#include <cstdint>
#include <cuda_bf16.h>
__device__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ void wait(float (&s)[32], float (&o)[32], uint32_t (&p)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  // Keeps the compiler from moving accesses of these registers before the wait.
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(s[i]), "+f"(o[i])::"memory");
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(p[i])::"memory");
}
__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {ACCUMULATORS}, %32, %33, p, 1, 1, 0, 0;}"
    : OUTPUTS : "l"(a), "l"(b), "r"(accumulate));
}
__device__ void multiply(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {ACCUMULATORS}, "
    "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
    : OUTPUTS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ uint64_t descriptor(const void* at, uint64_t leading, uint64_t stride) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(at));
  return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | uint64_t{1} << 62;
}
// O = sum over tiles of (Q K^T / 8) V, of 64 rows each; images are as shared memory holds them.
extern "C" __global__ void chained(const uint4* q, const uint4* kv, float* out) {
  extern __shared__ __align__(1024) uint4 tiles[];
  for (int i = threadIdx.x; i < 512; i += 128) tiles[i] = q[i];
  for (int i = threadIdx.x; i < 1024 * TILES; i += 128) tiles[512 + i] = kv[i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  float s[32], o[32] = {};
  uint32_t p[16] = {};
  auto scores = [&](int tile) {
    fence();
    for (int k = 0; k < 4; ++k)
      multiply(s, descriptor(tiles + 2 * k, 16, 1024),
               descriptor(tiles + 512 * (1 + 2 * tile) + 2 * k, 16, 1024), k != 0);
    commit();
  };
  auto pack = [&](uint32_t (&to)[16]) {
    for (int i = 0; i < 16; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(s[2 * i] / 8, s[2 * i + 1] / 8);
      to[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  };
  auto output = [&](int tile) {
    fence();
    for (int k = 0; k < 4; ++k)
      multiply(o, p + 4 * k, descriptor(tiles + 512 * (2 + 2 * tile) + 128 * k, 8192, 1024));
    commit();
  };
  scores(0);
  wait<0>(s, o, p);
  pack(p);
#pragma unroll 1
  for (int tile = 1; tile < TILES; ++tile) {
    uint32_t next[16];
    scores(tile);
    output(tile - 1);
    wait<1>(s, o, p);  // for the scores
    pack(next);
    wait<0>(s, o, p);  // for the output
    for (int i = 0; i < 16; ++i) p[i] = next[i];
  }
  output(TILES - 1);
  wait<0>(s, o, p);  // for all
  for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = o[i];
}
"""


def chained(edit: Callable[[str], str] = str, **options: Any) -> None:
    """Runs the kernel, whose PTX is edited; values are exact."""
    source = (
        CHAINED.replace("ACCUMULATORS", ", ".join(f"%{i}" for i in range(32)))
        .replace("OUTPUTS", ", ".join(f'"+f"(d[{i}])' for i in range(32)))
        .replace("TILES", str(TILES))
    )
    generator = np.random.default_rng(0)
    q, *tiles = (generator.integers(-2, 3, (64, 64)) / 2.0 for _ in range(1 + 2 * TILES))
    keys, values = tiles[::2], tiles[1::2]
    k_major, mn_major = Operand(64, 64), Operand(64, 64, mn_major=True)
    images = [np.zeros(4096, np.uint16) for _ in range(1 + 2 * TILES)]
    images[0][k_major.addresses() // 2] = bits(q, "bf16")
    for i in range(TILES):
        images[1 + 2 * i][k_major.addresses() // 2] = bits(keys[i], "bf16")
        images[2 + 2 * i][mn_major.addresses() // 2] = bits(values[i].T, "bf16")
    out = np.zeros((128, 32), np.float32)
    data = [images[0], np.concatenate(images[1:]), out]
    shared = 8192 * (1 + 2 * TILES)
    text = compile_cuda(source, "sm_90a")
    launch(edit(text), data, name="chained", block=(128, 1, 1), shared_bytes=shared, **options)
    exact = sum((q @ k.T / 8 @ v for k, v in zip(keys, values, strict=True)), np.zeros((64, 64)))
    np.testing.assert_array_equal(out, exact[accumulator_places(64)].astype(np.float32))


@needs_nvcc
@pytest.mark.parametrize("moment", ["late", "early", 1, 2, 3])
def test_kernels_of_nvcc(moment: Any) -> None:
    chained(async_copies=moment)


@needs_nvcc
@pytest.mark.parametrize(
    ("line", "which", "new", "words"),
    [
        ("wgmma.wait_group.sync.aligned", 1, "// ", "a read of an accumulator"),  # for the scores
        ("wgmma.wait_group.sync.aligned", 2, "// ", "a write of an A register"),  # for the output
        ("wgmma.wait_group.sync.aligned", 3, "// ", "a read of an accumulator"),  # for all
        ("wgmma.wait_group.sync.aligned 0", 2, WAIT.replace("0;", "1; //"), "a read of an accum"),
        ("wgmma.fence.sync.aligned", 3, "// ", "an A register was accessed at"),
        ("fence.proxy.async", 0, "// ", "fence.proxy.async is missing"),
    ],
)
def test_mistakes_in_kernels_of_nvcc(line: str, which: int, new: str, words: str) -> None:
    def edit(text: str) -> str:
        parts = text.split(line)
        return line.join(parts[: which + 1]) + new + line.join(parts[which + 1 :])

    with pytest.raises(EmulatorFault, match=words) as caught:
        chained(edit)
    assert ".cu:" in caught.value.source
