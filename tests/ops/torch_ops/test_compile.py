"""Calls run under ``torch.compile(fullgraph=True)``: same results, same errors, no recompilation.

Most tests use the `aot_eager` backend, which traces as the default one does and generates no code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import flashattn_jit as fa
from flashattn_jit.ops.keys import block_mask
from tests.ops.torch_ops.compiled import Compiled, D, Window, dense

# The compiler's own modules warn when they are first imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_attention(backend: str) -> None:
    variant = Window()
    run = Compiled(lambda q, k, v: fa.attention(q, k, v, variant, return_lse=True), backend)
    run(*dense())
    assert run.graphs == 1


@pytest.mark.parametrize("variant", [None, fa.Causal(), fa.SoftCap(cap=5.0) & fa.Causal()], ids=str)
def test_library_variants(variant) -> None:
    Compiled(lambda q, k, v: fa.attention(q, k, v, variant, scale=0.2))(*dense())


def test_transposed_inputs_keep_their_stride_order() -> None:
    variant = fa.Causal()
    run = Compiled(lambda q, k, v: fa.attention(q, k, v, variant))
    run(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in dense()))


def test_a_layer_around_it_is_one_graph() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(4 * D, 12 * D)
            self.back = torch.nn.Linear(4 * D, 4 * D)
            self.variant = Window()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).view(*x.shape[:2], 3, 4, D).unbind(2)
            out = fa.attention(*(t.transpose(1, 2) for t in (q, k, v)), self.variant)
            return x + self.back(out.transpose(1, 2).flatten(2))

    layer, x = Layer().eval(), torch.randn(2, 50, 4 * D)
    counter = CompileCounterWithBackend("inductor")
    with torch.no_grad():  # parameters that require grad pass
        out = torch.compile(layer, fullgraph=True, backend=counter)(x)
        torch.testing.assert_close(out, layer(x), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_lengths_and_offsets() -> None:
    variant = fa.Causal()

    def call(q, k, v, lengths, q_offset):
        return fa.attention(q, k, v, variant, kv_len=lengths, q_offset=q_offset)

    run = Compiled(call)
    for lengths in ([5, 70], [33, 44]):
        run(*dense(), torch.tensor(lengths), "end")
    assert run.graphs == 1
    run(*dense(), None, torch.tensor([3, 9]))
    run(*dense(), None, torch.tensor([4, 7]))
    assert run.graphs == 2
    for offset in (5, 6, 7, 8):
        run(*dense(), None, offset)
    assert run.graphs <= 4


def test_partial_states_and_their_merge() -> None:
    variant = fa.Causal()

    def call(q, k, v):
        parts = [
            fa.attention(q, k[:, :, s], v[:, :, s], variant, partial=True, q_offset=o)
            for s, o in ((slice(0, 30), 0), (slice(30, None), -30))
        ]
        return fa.merge_states([p[0] for p in parts], [p[1] for p in parts])

    Compiled(call)(*dense())


def test_pointwise_partial_states_have_no_lse() -> None:
    variant = fa.Sigmoid()
    out = Compiled(lambda q, k, v: fa.attention(q, k, v, variant, partial=True))(*dense())
    assert isinstance(out, torch.Tensor)


def test_out_is_written_in_place() -> None:
    variant = fa.Causal()
    q, k, v = dense()

    def call(q, k, v, out):
        result, lse = fa.attention(q, k, v, variant, out=out, return_lse=True)
        return result * 2, lse

    out = torch.zeros(2, 4, 40, D)
    twice, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, out)
    expected, expected_lse = fa.attention(q, k, v, variant, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(twice, expected * 2)
    assert torch.equal(lse, expected_lse)


# --- nothing recompiles --------------------------------------------------------------------------


def test_a_new_value_of_a_scalar_param() -> None:
    variant = Window()
    run = Compiled(lambda q, k, v, w, f: fa.attention(q, k, v, variant, window=w, factor=f))
    for window, factor in ((10, 0.5), (20, 0.25), (30, 2.5), (40, 1.0), (1, 0.0), (50, -3.0)):
        run(*dense(), window, factor)
    # The compiler takes a Python number for a constant once; then it is an input of the graph.
    assert run.graphs <= 2


def test_a_new_value_of_a_scalar_param_with_dynamic_numbers() -> None:
    variant = Window()

    def call(q, k, v, w, f):
        return fa.attention(q, k, v, variant, window=w, factor=f)

    run = Compiled(call, dynamic=True)
    for window, factor in ((10, 0.5), (20, 0.25), (30, 2.5)):
        run(*dense(), window, factor)
    assert run.graphs == 1


def test_a_new_value_of_a_variants_own_scalar() -> None:
    variant = Window()
    run = Compiled(lambda q, k, v: fa.attention(q, k, v, variant))
    for window in (10, 20, 30, 1):
        variant.window = window
        run(*dense())
    assert run.graphs == 1


def test_new_param_tensors() -> None:
    variant = Window()
    run = Compiled(lambda q, k, v, s: fa.attention(q, k, v, variant, slopes=s))
    for _ in range(3):
        run(*dense(), torch.randn(4))
    assert run.graphs == 1
    for _ in range(2):
        variant.slopes = torch.randn(4)
        run(*dense(), torch.randn(4))
    assert run.graphs == 1


BIAS, TEMPERATURE = torch.zeros(4), 1.0


def test_captured_globals_are_never_stale() -> None:
    global BIAS, TEMPERATURE
    variant = fa.variant(score_mod=lambda s, b, h, i, j: s * TEMPERATURE + BIAS[h] * j)
    run = Compiled(lambda q, k, v: fa.attention(q, k, v, variant))
    for i in range(4):
        BIAS, TEMPERATURE = torch.randn(4), 0.5 + i
        run(*dense())
        BIAS.mul_(2.0)
        run(*dense())
    assert run.graphs == 1


def test_captured_cells_of_a_variant_are_never_stale() -> None:
    def make():
        bias, window = torch.randn(4), 10

        def score_mod(score, b, h, i, j):
            return score + bias[h]

        def mask_mod(b, h, i, j):
            return i - j < window

        def change() -> None:
            nonlocal bias, window
            bias, window = torch.randn(4), window + 7

        return fa.variant(score_mod=score_mod, mask_mod=mask_mod), change

    variant, change = make()
    run = Compiled(lambda q, k, v: fa.attention(q, k, v, variant))
    for _ in range(3):
        run(*dense())
        change()
    assert run.graphs == 1


def test_captured_tensors_that_the_graph_changes() -> None:
    """The order of a change and a read is that of the program."""
    position, table = torch.zeros(1, dtype=torch.int64), torch.randn(4)
    variant = fa.variant(
        score_mod=lambda s, b, h, i, j: s + table[h],
        mask_mod=lambda b, h, i, j: j <= i + position[0],
    )

    def call(q, k, v):
        before = fa.attention(q, k, v, variant)
        position.add_(5)
        table.mul_(0.5)
        return before, fa.attention(q, k, v, variant)

    q, k, v = dense()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        kept = position.clone(), table.clone()
        expected = call(q, k, v)
        position.copy_(kept[0]), table.copy_(kept[1])
        actual = compiled(q, k, v)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


def test_new_lengths_with_dynamic_shapes() -> None:
    variant = Window()
    run = Compiled(lambda q, k, v: fa.attention(q, k, v, variant), dynamic=True)
    for batch, q_len, kv_len in ((3, 40, 70), (5, 41, 99), (6, 17, 256), (7, 64, 63)):
        run(*dense(batch, q_len, kv_len))
    assert run.graphs == 1
    run = Compiled(lambda q, k, v: fa.attention(q, k, v, variant))
    for q_len in (40, 50, 60, 70):
        run(*dense(q_len=q_len))
    assert run.graphs == 2


def test_params_of_named_parts() -> None:
    far = fa.SlidingWindow(window=9).named("far")
    variant = (fa.SlidingWindow(window=5).named("near") | far) & Window(slopes=torch.randn(4))
    run = Compiled(lambda q, k, v, w: fa.attention(q, k, v, variant, near_window=w))
    for w in (3, 6, 12):
        run(*dense(), w)
    assert run.graphs <= 2


# --- bare hooks ----------------------------------------------------------------------------------


def make_hook(slope: float, table: torch.Tensor, flag: bool = True):
    def score_mod(score, b, h, i, j):
        return score * slope + table[h] if flag else score

    return score_mod


def causal(b, h, i, j):
    return i >= j


def test_closures_of_one_code_share_a_graph() -> None:
    run = Compiled(lambda q, k, v, mod: fa.attention(q, k, v, mod))
    for i in range(4):
        run(*dense(), make_hook(1.5 + i, torch.randn(4)))
    assert run.graphs <= 2
    run(*dense(), make_hook(1.5, torch.randn(4), flag=False))
    run(*dense(), make_hook(2.5, torch.randn(4), flag=True))
    assert run.graphs <= 3


def test_a_closure_that_changes_after_the_graph_was_made() -> None:
    """The graph holds no part of the closure that it was made with."""

    def make(flag: bool):
        slope = 1.0

        def score_mod(score, b, h, i, j):
            return score * slope if flag else -score

        def change() -> None:
            nonlocal slope, flag
            slope, flag = 3.0, not flag

        return score_mod, change

    run = Compiled(lambda q, k, v, mod: fa.attention(q, k, v, mod))
    first, change = make(True)
    run(*dense(), first)
    change()
    run(*dense(), make(True)[0])
    run(*dense(), first)


def test_global_functions_partials_and_objects() -> None:
    class Object:
        def __init__(self) -> None:
            self.table = torch.randn(4)

        def __call__(self, score, b, h, i, j):
            return score + self.table[h]

    def shifted(b, h, i, j, *, by):
        return i + by >= j

    hook, partial = Object(), functools.partial(shifted, by=9)
    Compiled(lambda q, k, v: fa.attention(q, k, v, causal))(*dense())
    Compiled(lambda q, k, v: fa.attention(q, k, v, hook))(*dense())
    Compiled(lambda q, k, v: fa.attention(q, k, v, partial))(*dense())
    Compiled(lambda q, k, v: fa.attention(q, k, v, lambda b, h, i, j: i >= j))(*dense())


# --- flex_attention ------------------------------------------------------------------------------


def test_flex_attention_itself_is_compiled() -> None:
    q, k, v = dense(kv_len=40, kv_heads=4)
    run = Compiled(fa.flex_attention)
    run(q, k, v)
    mask = create_block_mask(causal, None, None, 40, 40, "cpu", BLOCK_SIZE=16)
    run(q, k, v, None, mask)
    run(q, k, v, make_hook(0.5, torch.randn(4)), mask, scale=0.2, return_lse=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_flex_attention_with_masks_of_every_batch(backend: str) -> None:
    def make(ids: torch.Tensor) -> BlockMask:
        def mask_mod(b, h, i, j):
            return (ids[i] == ids[j]) & (i >= j)

        return create_block_mask(mask_mod, None, None, 128, 128, "cpu", BLOCK_SIZE=32)

    def call(q, k, v, mask):
        return fa.flex_attention(q * 1.0, k, v, None, mask, enable_gqa=True)

    run = Compiled(call, backend)
    q, k, v = dense(q_len=128, kv_len=128)
    for cut in (20, 64, 100):
        run(q, k, v, make((torch.arange(128) >= cut).int()))
    assert run.graphs == 1


def test_a_block_mask_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    convert = block_mask.block_states
    monkeypatch.setattr(
        block_mask, "block_states", lambda *lists: made.append(1) or convert(*lists)
    )
    mask = create_block_mask(causal, None, None, 128, 128, "cpu", BLOCK_SIZE=32)
    run = compiled(lambda q, k, v: fa.flex_attention(q, k, v, None, mask))
    q, k, v = dense(q_len=128, kv_len=128, kv_heads=4)
    first = run(q, k, v)
    assert torch.equal(run(q, k, v), first)
    assert len(made) == 1
    mask.full_kv_num_blocks.zero_()
    assert not torch.equal(run(q, k, v), first)
    assert len(made) == 2


def test_flex_attention_outputs() -> None:
    q, k, v = dense(kv_len=40, kv_heads=4)
    mod = make_hook(0.5, torch.randn(4))

    def call(q, k, v):
        return fa.flex_attention(q, k, v, mod, return_aux=AuxRequest(lse=True, max_scores=True))

    Compiled(call)(q, k, v)


def test_flex_attention_with_a_last_dim_that_is_not_contiguous() -> None:
    q, k, v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in dense(kv_heads=4))
    Compiled(fa.flex_attention)(q, k, v)


# --- the other ops -------------------------------------------------------------------------------


def test_varlen_attention() -> None:
    variant = Window()

    def call(q, k, v, q_indptr, kv_indptr):
        return fa.varlen_attention(
            q, k, v, q_indptr, kv_indptr, variant, max_q_len=60, return_lse=True
        )

    run = Compiled(call)
    q, k, v = torch.randn(50, 4, D), torch.randn(60, 2, D), torch.randn(60, 2, D)
    for cut in (10, 20, 30):
        run(q, k, v, torch.tensor([0, cut, 50]), torch.tensor([0, cut + 5, 60]))
    assert run.graphs == 1


def test_varlen_attention_of_new_lengths() -> None:
    variant = fa.Causal()
    run = Compiled(lambda q, k, v, i, j: fa.varlen_attention(q, k, v, i, j, variant), dynamic=True)
    for lens in ([3, 9], [40, 2], [7, 7, 7], [1, 2, 3, 4]):
        indptr = torch.tensor([0, *lens]).cumsum(0)
        tokens = sum(lens)
        run(*(torch.randn(tokens, 4, D) for _ in range(3)), indptr, indptr)
    assert run.graphs == 1


def test_varlen_attention_into_out() -> None:
    variant = fa.Causal()
    q, indptr, out = torch.randn(50, 4, D), torch.tensor([0, 20, 50]), torch.zeros(50, 4, D)

    def call(q, out):
        fa.varlen_attention(q, q, q, indptr, indptr, variant, out=out)
        return out + 1

    plus_one = torch.compile(call, fullgraph=True, backend="aot_eager")(q, out)
    expected = fa.varlen_attention(q, q, q, indptr, indptr, variant)
    assert torch.equal(out, expected)
    assert torch.equal(plus_one, expected + 1)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("lead", [(), (4,), (2, 4), (3, 2, 4)], ids=str)
def test_scaled_dot_product_attention(lead: tuple[int, ...]) -> None:
    q, k, v = torch.randn(*lead, 40, D), torch.randn(*lead, 70, D), torch.randn(*lead, 70, D)
    run = Compiled(lambda q, k, v, m: fa.scaled_dot_product_attention(q, k, v, m, scale=0.2))
    for _ in range(2):
        run(q, k, v, torch.rand(40, 70) < 0.7)
    assert run.graphs == 1
    causal_run = Compiled(lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, is_causal=True))
    causal_run(q, k, v)


def test_autocast() -> None:
    def call(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (
                fa.scaled_dot_product_attention(q, k, v),
                fa.flex_attention(q, k, v),
            )

    out, flex = Compiled(call)(*dense(kv_len=40, kv_heads=4))
    assert out.dtype == flex.dtype == torch.bfloat16


# --- errors are those of eager calls -------------------------------------------------------------


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def test_inputs_that_require_grad() -> None:
    variant, table = Window(), torch.zeros(4)
    q, k, v = dense()
    captures = fa.variant(score_mod=lambda s, b, h, i, j: s + table[h])
    calls: list[Callable[..., Any]] = [
        lambda q, k, v: fa.attention(q, k, v, variant),
        lambda q, k, v: fa.flex_attention(q, k, v, enable_gqa=True),
        lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    ]
    for call in calls:
        needs = q.clone().requires_grad_()
        with pytest.raises(fa.GradError, match=r"q(uery)? requires grad while grad mode is on"):
            compiled(call)(needs, k, v)
        with torch.no_grad():
            assert torch.equal(compiled(call)(needs, k, v), call(q, k, v))
    table.requires_grad_()
    with pytest.raises(fa.GradError, match="the variant's tensor 'table' requires grad"):
        compiled(lambda q, k, v: fa.attention(q, k, v, captures))(q, k, v)
    slopes = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(fa.GradError, match="slopes requires grad"):
        compiled(lambda q, k, v: fa.attention(q, k, v, variant, slopes=slopes))(q, k, v)
    with torch.no_grad():
        compiled(lambda q, k, v: fa.attention(q, k, v, variant, slopes=slopes))(q, k, v)


WRONG: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "batch": (lambda q, k, v: fa.attention(q, k[:1], v), fa.InputError, "k has batch=1"),
    "rank": (lambda q, k, v: fa.attention(q[0], k, v), fa.InputError, "q must be"),
    "dtype": (lambda q, k, v: fa.attention(q.double(), k, v), fa.InputError, "float64"),
    "scale": (lambda q, k, v: fa.attention(q, k, v, scale="1"), fa.InputError, "scale must be"),
    "offset": (lambda q, k, v: fa.attention(q, k, v, q_offset="x"), fa.InputError, "q_offset"),
    "not_a_tensor": (
        lambda q, k, v: fa.attention(3, k, v),
        fa.InputError,
        "q must be a torch.Tensor",
    ),
    "param": (lambda q, k, v: fa.attention(q, k, v, SHARED, cap=1.0), fa.ParamError, "cap"),
    "param_kind": (lambda q, k, v: fa.attention(q, k, v, SHARED, window=1.5), fa.ParamError, "int"),
    "param_shape": (
        lambda q, k, v: fa.attention(q, k, v, SHARED, slopes=q),
        fa.ParamError,
        "slopes",
    ),
    "target": (lambda q, k, v: fa.attention(q, k, v, target="cpu:mmx"), fa.TargetError, "mmx"),
    "lse": (
        lambda q, k, v: fa.attention(q, k, v, POINTWISE, return_lse=True),
        fa.InputError,
        "log-sum",
    ),
    "trace": (lambda q, k, v: fa.attention(q, k, v, BRANCHES), fa.TraceError, "torch.where"),
    "arity": (lambda q, k, v: fa.attention(q, k, v, dense), fa.VariantError, "arguments"),
    "flex_heads": (lambda q, k, v: fa.flex_attention(q, k, v), fa.InputError, "enable_gqa=True"),
    "sdpa_both": (
        lambda q, k, v: fa.scaled_dot_product_attention(
            q, q, q, torch.ones(40, 40) > 0, is_causal=True
        ),
        RuntimeError,
        "should not be set",
    ),
    "indptr": (
        lambda q, k, v: fa.varlen_attention(q[0], q[0], q[0], INDPTR, INDPTR),
        fa.InputError,
        "q_indptr",
    ),
}
SHARED, POINTWISE = Window(), fa.Sigmoid()
BRANCHES = fa.variant(score_mod=lambda s, b, h, i, j: s if i > j else -s)
INDPTR = torch.tensor([0, 3])


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    call, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        compiled(call)(*dense())


# --- function transforms -------------------------------------------------------------------------


def test_vmap_says_what_to_do_instead() -> None:
    q, k, v = (torch.randn(3, 2, 4, 20, D) for _ in range(3))
    with pytest.raises(fa.InputError, match="vmap"):
        torch.vmap(fa.attention)(q, k, v)
    with pytest.raises(fa.InputError, match="vmap"):
        torch.vmap(lambda q: fa.scaled_dot_product_attention(q, q, q))(q)
