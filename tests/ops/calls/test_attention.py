"""`fa.attention` against the fp64 reference: every variant, shape, dtype and CPU target."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import attention_reference
from tests.harness import rotation
from tests.ops.cases import DECODE, HOST_TARGETS, LIBRARY, SMALL, fitting, inputs, run
from tests.registry.case import Case, Shape
from tests.registry.cases import CASES, SHAPES

# The hooks of all closures run in tests/codegen/test_cpu_hooks.py, many in a compiled unit. A whole
# kernel adds the same to each of them, so that a few closures by turns are enough here.
CLOSURES = [c for c in CASES if "library" not in c.tags]
KINDS = [(s, d) for d in (torch.float32, torch.bfloat16) for s in (SMALL, DECODE)]


def in_turns() -> list[tuple[Case, Shape, torch.dtype]]:
    """Library variants and some closures, each with many rows or few and in one dtype.

    tests/full has all of them with both and in both dtypes."""
    cases = rotation.chosen(LIBRARY, 3, lambda c: c.tags) + rotation.chosen(CLOSURES, 40)
    return [
        (case, shape if case.fits(shape) else fitting(case, SMALL), dtype)
        for number, case in enumerate(cases)
        for shape, dtype in rotation.turn(number, KINDS)
    ]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("case", "shape", "dtype"),
    in_turns(),
    ids=lambda x: getattr(x, "name", None) or getattr(x, "id", None) or str(x),
)
def test_every_variant(case, shape, dtype):
    run(case, shape, dtype)


def plain(kind: str):
    return {"full": None, "causal": fa.Causal()}[kind]


PLAIN_KINDS = list(itertools.product(("full", "causal"), (torch.float32, torch.bfloat16)))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("shape", rotation.chosen(SHAPES, 2), ids=lambda s: s.id)
def test_every_shape(shape):
    for kind, dtype in rotation.turn(SHAPES.index(shape), PLAIN_KINDS):
        run(Case(kind, lambda s, g, kind=kind: plain(kind)), shape, dtype)


LEVELS = itertools.product(
    HOST_TARGETS,
    (torch.float32, torch.bfloat16, torch.float16),
    (SMALL, DECODE, Shape(1, 5, 1, 33, 200, 24, 40)),
)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("target", "dtype", "shape"),
    rotation.chosen(list(LEVELS), 3, lambda level: level[:2]),
    ids=lambda x: getattr(x, "id", None) or str(x),
)
def test_every_level_of_this_machine(target, dtype, shape):
    def mod(score, b, h, q_idx, kv_idx):
        return torch.tanh(score) + torch.exp(-0.1 * (q_idx - kv_idx).abs()) * (h + 1)

    score = fa.variant(score_mod=mod)
    run(
        Case("mix", lambda s, g: score & fa.SlidingWindow(40)), shape, dtype, target, q_offset="end"
    )


def test_kv_len_hides_what_is_past_it():
    q, k, v = inputs(SMALL, torch.float32)
    lengths = torch.tensor([130, 57])
    expected, _ = attention_reference(q, k, v, fa.Causal(), kv_len=lengths, q_offset="end")
    k[1, :, 57:] = float("nan")
    v[1, :, 57:] = float("nan")
    out = fa.attention(q, k, v, fa.Causal(), kv_len=lengths, q_offset="end")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_masked_keys_may_be_nan():
    q, k, v = inputs(SMALL, torch.float32)
    expected = fa.attention(q, k, v, fa.Causal())
    k[:, :, 70:] = float("nan")
    assert torch.equal(fa.attention(q, k, v, fa.Causal()), expected)


@pytest.mark.parametrize("kv_len", [5000, 20001])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_split_keys_give_the_same_result(rows, kv_len):
    shape = Shape(1, 2, 1, rows, kv_len, 32, 32)
    q, k, v = inputs(shape, torch.float32)
    variant = fa.Sink(sink=torch.tensor([0.5, -1.0]))
    out, lse = fa.attention(q, k, v, variant, return_lse=True)
    expected, expected_lse = attention_reference(q, k, v, variant)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("restored_threads")
def test_results_do_not_depend_on_the_number_of_threads_when_nothing_is_split():
    q, k, v = inputs(Shape(2, 8, 4, 300, 300, 32, 32), torch.float32)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(fa.attention(q, k, v, fa.Causal()))
    assert torch.equal(*results)


def test_the_same_call_gives_the_same_bits():
    q, k, v = inputs(Shape(1, 2, 1, 4, 9000, 32, 32), torch.bfloat16)
    first = fa.attention(q, k, v)
    assert all(torch.equal(first, fa.attention(q, k, v)) for _ in range(10))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "reversed_heads"])
def test_any_strides(layout):
    q, k, v = inputs(SMALL, torch.float32)
    expected = fa.attention(q, k, v, fa.Causal())

    def view(t):
        if layout == "transposed":  # [B, S, H, D] in memory
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":  # odd offsets and padded rows
            padded = torch.full((*t.shape[:3], t.shape[3] + 7), float("nan"))
            padded[..., 3:-4] = t
            return padded[..., 3:-4]
        if layout == "expanded":
            return t[:1].expand(t.shape)
        return t.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)

    if layout == "expanded":
        expected = fa.attention(
            *(t[:1].expand(t.shape).contiguous() for t in (q, k, v)), fa.Causal()
        )
    out = fa.attention(view(q), view(k), view(v), fa.Causal())
    assert torch.equal(out, expected)


def test_the_output_follows_the_stride_order_of_q():
    q, k, v = inputs(SMALL, torch.float32)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = fa.attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()


def test_out_is_written_in_place():
    q, k, v = inputs(SMALL, torch.float32)
    out = torch.full((2, 4, 70, 32), float("nan"))
    assert fa.attention(q, k, v, out=out) is out
    assert torch.equal(out, fa.attention(q, k, v))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [SMALL, DECODE], ids=lambda s: s.id)
def test_quantised_keys_and_values(storage, shape):
    q, k, v = inputs(shape, torch.float32)
    k_scale, v_scale = torch.tensor([0.03, 0.05]), torch.tensor([0.02, 0.04])

    def quantised(t, scale):
        x = t / scale[:, None, None]
        return (
            x.round().clamp(-127, 127).to(torch.int8)
            if storage == "int8"
            else x.clamp(-440, 440).to(getattr(torch, storage))
        )

    variant = fa.variant(
        key_mod=lambda row, b, kv_h, kv_idx: row * k_scale[kv_h],
        value_mod=lambda row, b, kv_h, kv_idx: row * v_scale[kv_h],
    )
    qk, qv = quantised(k, k_scale), quantised(v, v_scale)
    out = fa.attention(q, qk, qv, variant)
    expected, _ = attention_reference(
        q, qk.float() * k_scale[:, None, None], qv.float() * v_scale[:, None, None]
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_mixed_dtypes_of_keys_and_values():
    q, k, v = inputs(SMALL, torch.float32)
    k, v = k.bfloat16(), v.half()
    out = fa.attention(q, k, v)
    expected, _ = attention_reference(q, k.float(), v.float())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normaliser", ["softmax", "sink", "sigmoid"])
def test_partial_states_merge_to_the_whole(normaliser):
    q, k, v = inputs(SMALL, torch.float32)
    variant = {"softmax": fa.Causal(), "sink": fa.Sink(sink=torch.randn(4)), "sigmoid": None}[
        normaliser
    ]
    if normaliser == "sigmoid":
        variant = fa.variant(normalizer=fa.Pointwise(torch.sigmoid))
    parts = []
    for a, b in ((0, 50), (50, 130)):
        state = fa.attention(q, k[:, :, a:b], v[:, :, a:b], variant, q_offset=70 - a, partial=True)
        parts.append(state if isinstance(state, tuple) else (state, None))
    outs = [p[0] for p in parts]
    lses = None if normaliser == "sigmoid" else [p[1] for p in parts]
    out, _ = fa.merge_states(outs, lses)
    whole = fa.attention(q, k, v, variant, q_offset=70, partial=True)
    whole = whole[0] if isinstance(whole, tuple) else whole
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)


def test_the_gil_is_released_while_a_kernel_runs():
    q, k, v = inputs(Shape(1, 4, 4, 2048, 2048, 64, 64), torch.float32)
    fa.attention(q, k, v)
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    for _ in range(5):
        fa.attention(q, k, v)
    end = time.perf_counter()
    done.set()
    thread.join()
    inside = [t for t in ticks if begin < t < end]
    gaps = [b - a for a, b in itertools.pairwise(inside)]
    assert len(inside) > 20 and max(gaps) < (end - begin) / 5
