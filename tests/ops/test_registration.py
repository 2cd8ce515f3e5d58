"""Registered ops pass torch's own checks: schema, fake shapes, tracing, autograd keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import opcheck

import flashattn_jit as fa
from flashattn_jit.ops import _register
from flashattn_jit.ops.batch import BatchAttention
from tests import processes

# The compiler's own modules warn when they are first imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPS = torch.ops.flashattn_jit
D = 32


def calls_of(op: str, run: Callable[[], object]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments with which `run` calls an op: what users cannot write by hand."""
    recorded = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is getattr(OPS, op).default:
                recorded.append((args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        run()
    assert recorded, f"{op} was not called"
    return recorded


def compiled_calls_of(
    op: str, fn: Callable[..., object], *args: Any
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments with which a compiled graph of `fn` calls an op."""
    recorded: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            recorded.extend(calls_of(op, lambda: graph(*values)))
            return graph(*values)

        return run

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    torch._dynamo.reset()
    return recorded


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


def _block_masked() -> object:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 70, "cpu", BLOCK_SIZE=16)
    return fa.flex_attention(*dense(), None, mask, enable_gqa=True)


def _varlen(**options: Any) -> object:
    q, k, v = torch.randn(50, 4, D), torch.randn(60, 2, D), torch.randn(60, 2, D)
    indptr = torch.tensor([0, 20, 50]), torch.tensor([0, 25, 60])
    if options.pop("into", False):
        options["out"] = torch.empty(50, 4, D)
    return fa.varlen_attention(q, k, v, *indptr, Sliding(), **options)


DENSE: dict[str, Callable[[], object]] = {
    "plain": lambda: fa.attention(*dense()),
    "lse": lambda: fa.attention(*dense(), Sliding(), return_lse=True),
    "partial": lambda: fa.attention(*dense(), partial=True),
    "half": lambda: fa.attention(*dense(torch.bfloat16)),
    "transposed": lambda: fa.attention(
        *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in dense())
    ),
    "lengths": lambda: fa.attention(*dense(), kv_len=torch.tensor([5, 70]), q_offset="end"),
    "block_mask": _block_masked,
}


def _batch(**options: Any) -> object:
    q, k, v = torch.randn(50, 4, D), torch.randn(60, 2, D), torch.randn(60, 2, D)
    batch = BatchAttention(
        Sliding(), num_q_heads=4, num_kv_heads=2, head_dim=D, q_dtype=torch.float32
    )
    batch.plan(torch.tensor([0, 20, 50]), fa.Ragged(torch.tensor([0, 25, 60])), window=9)
    _alive.append(batch)  # the op names it by number
    slopes = torch.linspace(0.1, 1.0, 4)
    if options.pop("into", False):
        options["out"] = torch.empty(50, 4, D)
    return batch.run(q, k, v, slopes=slopes, scale=0.1, **options)


_alive: list[BatchAttention] = []


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"partial": True}], ids=str)
def test_batch_attention(options: dict[str, bool]) -> None:
    for args, kwargs in calls_of("batch_attention", lambda: _batch(**options)):
        opcheck(OPS.batch_attention.default, args, kwargs)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
def test_batch_attention_out(options: dict[str, bool]) -> None:
    for args, kwargs in calls_of("batch_attention_out", lambda: _batch(into=True, **options)):
        opcheck(OPS.batch_attention_out.default, args, kwargs)


@pytest.mark.parametrize("name", DENSE)
def test_attention(name: str) -> None:
    for args, kwargs in calls_of("attention", DENSE[name]):
        opcheck(OPS.attention.default, args, kwargs)


@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_out(return_lse: bool) -> None:
    def run() -> None:
        fa.attention(*dense(), Sliding(), out=torch.empty(2, 4, 40, D), return_lse=return_lse)

    for args, kwargs in calls_of("attention_out", run):
        opcheck(OPS.attention_out.default, args, kwargs)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"partial": True}], ids=str)
def test_varlen_attention(options: dict[str, Any]) -> None:
    for args, kwargs in calls_of("varlen_attention", lambda: _varlen(**options)):
        opcheck(OPS.varlen_attention.default, args, kwargs)


@pytest.mark.parametrize("return_lse", [False, True])
def test_varlen_attention_out(return_lse: bool) -> None:
    run = lambda: _varlen(into=True, return_lse=return_lse)  # noqa: E731
    for args, kwargs in calls_of("varlen_attention_out", run):
        opcheck(OPS.varlen_attention_out.default, args, kwargs)


@pytest.mark.parametrize("with_lse", [False, True])
def test_merge_states(with_lse: bool) -> None:
    outs = [torch.randn(2, 4, 40, D) for _ in range(3)]
    lses = [torch.randn(2, 4, 40) for _ in range(3)] if with_lse else []
    opcheck(OPS.merge_states.default, (outs, lses))


SLIDING, TABLE = Sliding(window=20), torch.randn(4)


def _with_table(score, b, h, i, j):
    return score + TABLE[h]


def test_call_attention() -> None:
    def call(q, k, v, slopes, window):
        return fa.attention(q, k, v, SLIDING, slopes=slopes, window=window, scale=0.2)

    arguments = (*dense(), torch.randn(4), 7)
    for args, kwargs in compiled_calls_of("call_attention", call, *arguments):
        opcheck(OPS.call_attention.default, args, kwargs)
    hooked = lambda q, k, v: fa.attention(q, k, v, _with_table, return_lse=True)  # noqa: E731
    for args, kwargs in compiled_calls_of("call_attention", hooked, *dense()):
        opcheck(OPS.call_attention.default, args, kwargs)


def test_call_attention_out() -> None:
    def call(q, k, v, out):
        return fa.attention(q, k, v, SLIDING, out=out, return_lse=True)

    arguments = (*dense(), torch.empty(2, 4, 40, D))
    for args, kwargs in compiled_calls_of("call_attention_out", call, *arguments):
        opcheck(OPS.call_attention_out.default, args, kwargs)


def test_call_append_paged_kv() -> None:
    def call(k, v, k_pages, v_pages, *indices):
        q_indptr, *tables = indices
        fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, fa.Paged(*tables, 4))
        return k_pages

    new, pages = torch.randn(2, 5, 2, D), torch.randn(2, 3, 4, 2, D)
    indices = [torch.tensor(x) for x in ([0, 3, 5], [0, 1, 3], [2, 0, 1], [4, 3])]
    for args, kwargs in compiled_calls_of("call_append_paged_kv", call, *new, *pages, *indices):
        opcheck(OPS.call_append_paged_kv.default, args, kwargs)


def _packed_inputs() -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(50, 4, D), torch.randn(60, 2, D), torch.randn(60, 2, D),
        torch.tensor([0, 20, 50]), torch.tensor([0, 25, 60]),
    )  # fmt: skip


def test_call_varlen_attention() -> None:
    def call(q, k, v, q_indptr, kv_indptr):
        return fa.varlen_attention(q, k, v, q_indptr, kv_indptr, SLIDING, return_lse=True)

    for args, kwargs in compiled_calls_of("call_varlen_attention", call, *_packed_inputs()):
        opcheck(OPS.call_varlen_attention.default, args, kwargs)


def test_call_varlen_attention_out() -> None:
    def call(q, k, v, q_indptr, kv_indptr, out):
        return fa.varlen_attention(q, k, v, q_indptr, kv_indptr, SLIDING, out=out)

    arguments = (*_packed_inputs(), torch.empty(50, 4, D))
    for args, kwargs in compiled_calls_of("call_varlen_attention_out", call, *arguments):
        opcheck(OPS.call_varlen_attention_out.default, args, kwargs)


def test_call_flex_attention() -> None:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 70, "cpu", BLOCK_SIZE=16)

    def call(q, k, v):
        aux = AuxRequest(lse=True, max_scores=True)
        return fa.flex_attention(q, k, v, _with_table, mask, enable_gqa=True, return_aux=aux)

    for args, kwargs in compiled_calls_of("call_flex_attention", call, *dense()):
        opcheck(OPS.call_flex_attention.default, args, kwargs)


@pytest.mark.parametrize("lead", [(), (3, 2, 4)], ids=str)
def test_call_scaled_dot_product_attention(lead: tuple[int, ...]) -> None:
    q, mask = torch.randn(*lead, 40, D), torch.rand(40, 40) < 0.7
    op = "call_scaled_dot_product_attention"
    for args, kwargs in compiled_calls_of(
        op, lambda q, m: fa.scaled_dot_product_attention(q, q, q, m, scale=0.2), q, mask
    ):
        opcheck(OPS.call_scaled_dot_product_attention.default, args, kwargs)


def test_refuse() -> None:
    q = torch.randn(2, 4, 40, D)
    with pytest.raises(fa.InputError, match="why"):
        OPS.refuse(q, q, "InputError", "why")
    opcheck(
        OPS.refuse.default, (q, q, "InputError", "why"), test_utils=("test_schema",),
        raise_exception=False,
    )  # fmt: skip


def test_every_op_has_a_schema_shapes_and_a_test_here() -> None:
    names = {name.split("::")[1].split(".")[0] for name in _registered()}
    here = set(globals())
    for name in names:
        assert f"test_{name}" in here, f"{name} has no opcheck"


def _registered() -> list[str]:
    every = torch._C._dispatch_get_all_op_names()
    found = [n for n in every if n.startswith("flashattn_jit::")]
    assert found
    assert _register.__doc__
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
