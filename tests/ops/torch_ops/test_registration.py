"""Registered ops pass torch's own checks: schema, fake shapes, tracing, autograd keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import flashattn_jit as fa
from flashattn_jit.ops.batch import BatchAttention
from flashattn_jit.ops.torch_ops import sites
from tests.harness import processes

# The compiler's own modules warn when they are first imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPS = torch.ops.flashattn_jit
D = 32


class Recorder(TorchDispatchMode):
    """Keeps the operators that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def calls_of(op: str, fn: Callable[..., object], *args: Any) -> list[tuple[Any, ...]]:
    """The arguments with which a compiled graph of `fn` calls an op; users cannot write them."""
    recorder = Recorder()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            with recorder:
                graph(*values)
            return graph(*values)

        return run

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    torch._dynamo.reset()
    found = [args for func, args in recorder.calls if func is getattr(OPS, op).default]
    assert found, f"{op} was not called"
    return found


def check(op: str, fn: Callable[..., object], *args: Any) -> None:
    """The op passes torch's checks with the arguments that a compiled graph of `fn` gives it."""
    for arguments in calls_of(op, fn, *args):
        opcheck(getattr(OPS, op).default, arguments)


def dense(dtype: torch.dtype = torch.float32, q_len: int = 40) -> tuple[torch.Tensor, ...]:
    shapes = ((2, 4, q_len, D), (2, 2, 70, D), (2, 2, 70, D))
    return tuple(torch.randn(s).to(dtype) for s in shapes)


class Sliding(fa.Variant):
    """Tensors and scalars, in the score and in the mask."""

    slopes: torch.Tensor = fa.tensor("num_q_heads", default=fa.alibi_slopes)
    window: int = fa.scalar(30)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.slopes[h] * (kv_idx - q_idx)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window)


SLIDING, TABLE = Sliding(window=20), torch.randn(4)


def _with_table(score, b, h, i, j):
    return score + TABLE[h]


DENSE: dict[str, tuple[Callable[..., object], tuple[Any, ...]]] = {
    "plain": (lambda q, k, v: fa.attention(q, k, v), dense()),
    "lse": (lambda q, k, v: fa.attention(q, k, v, SLIDING, return_lse=True), dense()),
    "partial": (lambda q, k, v: fa.attention(q, k, v, partial=True), dense()),
    "half": (lambda q, k, v: fa.attention(q, k, v), dense(torch.bfloat16)),
    "transposed": (
        lambda q, k, v: fa.attention(q, k, v),
        tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in dense()),
    ),
    "lengths": (
        lambda q, k, v, n: fa.attention(q, k, v, kv_len=n, q_offset="end"),
        (*dense(), torch.tensor([5, 70])),
    ),
    "params": (
        lambda q, k, v, s, n: fa.attention(q, k, v, SLIDING, slopes=s, window=n, scale=0.2),
        (*dense(), torch.randn(4), 7),
    ),
    "hook": (lambda q, k, v: fa.attention(q, k, v, _with_table, return_lse=True), dense()),
    "inside": (
        lambda q, k, v, n: fa.attention(q, k, v, Sliding(window=n, slopes=q[0, :, 0, 0])),
        (*dense(), 5),
    ),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", DENSE)
def test_attention(name: str) -> None:
    call, arguments = DENSE[name]
    check("attention", call, *arguments)


@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_out(return_lse: bool) -> None:
    def call(q, k, v, out):
        return fa.attention(q, k, v, SLIDING, out=out, return_lse=return_lse)

    def call_with_lse(q, k, v, lse, out=None):
        return fa.attention(q, k, v, SLIDING, out=out, lse=lse)

    out, lse = torch.empty(2, 4, 40, D), torch.empty(2, 4, 40)
    check("attention_out", call, *dense(), out)
    check("attention_out", call_with_lse, *dense(), lse, out if return_lse else None)


def _packed_inputs() -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(50, 4, D), torch.randn(60, 2, D), torch.randn(60, 2, D),
        torch.tensor([0, 20, 50]), torch.tensor([0, 25, 60]),
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"partial": True}], ids=str)
def test_varlen_attention(options: dict[str, Any]) -> None:
    def call(q, k, v, q_indptr, kv_indptr):
        return fa.varlen_attention(q, k, v, q_indptr, kv_indptr, SLIDING, **options)

    check("varlen_attention", call, *_packed_inputs())


@pytest.mark.parametrize("return_lse", [False, True])
def test_varlen_attention_out(return_lse: bool) -> None:
    def call(q, k, v, q_indptr, kv_indptr, out):
        return fa.varlen_attention(
            q, k, v, q_indptr, kv_indptr, SLIDING, out=out, return_lse=return_lse
        )

    check("varlen_attention_out", call, *_packed_inputs(), torch.empty(50, 4, D))


def _batch() -> BatchAttention:
    batch = BatchAttention(
        Sliding(), num_q_heads=4, num_kv_heads=2, head_dim=D, q_dtype=torch.float32
    )
    *_, q_indptr, kv_indptr = _packed_inputs()
    batch.plan(q_indptr, fa.Ragged(kv_indptr), window=9)
    return batch


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"partial": True}], ids=str)
def test_batch_attention(options: dict[str, Any]) -> None:
    batch, slopes = _batch(), torch.linspace(0.1, 1.0, 4)

    def call(q, k, v):
        return batch.run(q, k, v, slopes=slopes, scale=0.1, **options)

    check("batch_attention", call, *_packed_inputs()[:3])


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
def test_batch_attention_out(options: dict[str, Any]) -> None:
    batch, slopes = _batch(), torch.linspace(0.1, 1.0, 4)

    def call(q, k, v, out):
        return batch.run(q, k, v, slopes=slopes, scale=0.1, out=out, **options)

    check("batch_attention_out", call, *_packed_inputs()[:3], torch.empty(50, 4, D))


@pytest.mark.parametrize("with_lse", [False, True])
def test_merge_states(with_lse: bool) -> None:
    outs = [torch.randn(2, 4, 40, D) for _ in range(3)]
    lses = [torch.randn(2, 4, 40) for _ in range(3)] if with_lse else []
    opcheck(OPS.merge_states.default, (outs, lses))
    mask = torch.rand(2, 4, 40) < 0.5
    opcheck(OPS.merge_states.default, (outs, lses), {"mask": mask, "dtype": torch.float16})


@pytest.mark.parametrize("with_lse", [False, True])
def test_merge_states_out(with_lse: bool) -> None:
    outs = [torch.randn(2, 4, 40, D) for _ in range(3)]
    lses = [torch.randn(2, 4, 40) for _ in range(3)] if with_lse else []
    out, lse = torch.empty_like(outs[0]), torch.empty(2, 4, 40) if with_lse else torch.empty(0)
    opcheck(OPS.merge_states_out.default, (outs, lses, torch.rand(2, 4, 40) < 0.5, out, lse))


def test_append_paged_kv() -> None:
    def call(k, v, k_pages, v_pages, *indices):
        q_indptr, *tables = indices
        fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, fa.Paged(*tables, 4))
        return k_pages

    new, pages = torch.randn(2, 5, 2, D), torch.randn(2, 3, 4, 2, D)
    indices = [torch.tensor(x) for x in ([0, 3, 5], [0, 1, 3], [2, 0, 1], [4, 3])]
    check("append_paged_kv", call, *new, *pages, *indices)


@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention(masked: bool) -> None:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 70, "cpu", BLOCK_SIZE=16)

    def call(q, k, v):
        aux = AuxRequest(lse=True, max_scores=True)
        chosen = mask if masked else None
        return fa.flex_attention(q, k, v, _with_table, chosen, enable_gqa=True, return_aux=aux)

    check("flex_attention", call, *dense())


@pytest.mark.parametrize("lead", [(), (3, 2, 4)], ids=str)
def test_scaled_dot_product_attention(lead: tuple[int, ...]) -> None:
    q, mask = torch.randn(*lead, 40, D), torch.rand(40, 40) < 0.7
    check(
        "scaled_dot_product_attention",
        lambda q, m: fa.scaled_dot_product_attention(q, q, q, m, scale=0.2), q, mask,
    )  # fmt: skip


def test_the_site_of_a_call_that_is_over() -> None:
    """A number that names no call is a typed error, not another call."""
    (arguments,) = calls_of("attention", lambda q: fa.attention(q, q, q), torch.randn(1, 2, 3, D))
    q, k, v, tensors, floats, ints, _, flags = arguments
    with pytest.raises(fa.InputError, match="names no call of this process"):
        OPS.attention(q, k, v, tensors, floats, ints, 2**31, flags)
    before = len(sites._sites)
    with torch.profiler.profile():
        fa.attention(q, k, v)
    assert len(sites._sites) == before


def test_a_recorded_op_says_that_its_call_is_over() -> None:
    q, k, v = dense()
    with Recorder() as recorder:
        fa.attention(q, k, v, fa.Causal())
    ((func, args),) = recorder.calls
    with pytest.raises(fa.InputError, match="has returned, call the function itself"):
        func(*args)


def test_every_op_has_a_schema_shapes_and_a_test_here() -> None:
    names = {name.split("::")[1].split(".")[0] for name in _registered()}
    here = set(globals())
    for name in names:
        assert f"test_{name}" in here, f"{name} has no opcheck"


def _registered() -> list[str]:
    every = torch._C._dispatch_get_all_op_names()
    found = [n for n in every if n.startswith("flashattn_jit::")]
    assert found
    return found


def test_plain_calls_import_nothing_of_the_compiler_stack() -> None:
    """A call must not pay for torch._dynamo, sympy or FlexAttention's module."""

    heavy = (
        "['sympy', 'torch._dynamo', 'torch._inductor', 'torch.nn.attention.flex_attention', "
        "'torch._subclasses.fake_tensor']"
    )
    report = f"print([m for m in {heavy} if m in sys.modules])\n"
    calls = (
        "q = torch.randn(1, 2, 40, 64)\n"
        "fa.attention(q, q, q, fa.Causal())\n"
        "fa.flex_attention(q, q, q, lambda s, b, h, i, j: s + (i - j))\n"
        "fa.scaled_dot_product_attention(q, q, q, is_causal=True)\n"
    )

    def loaded(source: str) -> str:
        done = processes.run(["-c", f"import sys, torch\n{source}{report}"], check=True)
        return done.stdout.strip().splitlines()[-1]

    assert loaded(f"import flashattn_jit as fa\n{calls}") == loaded("")
