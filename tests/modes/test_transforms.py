"""Under functional transforms and with tensor subclasses: the right result, or a typed error."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

import flashattn_jit as fa
from tests.modes.subjects import HOST, PLANS, Subject, by_name, subjects
from tests.modes.worker import flat

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func itself

SUBJECTS = subjects()
each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)


class Plain(torch.Tensor):
    """A subclass that holds data and changes nothing."""


class Logging(torch.Tensor):
    """A subclass that records the functions that it is passed to."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def assert_plain_again(subject: Subject, expected: list[Tensor]) -> None:
    for a, b in zip(flat(subject.run()), expected, strict=True):
        assert type(a) is Tensor and torch.equal(a, b)


@each_subject
@pytest.mark.parametrize("kind", [Plain, Logging, torch.nn.Parameter])
def test_subclasses_with_data(subject: Subject, kind: Any) -> None:
    expected = flat(subject.run())
    for _ in range(2):
        if kind is torch.nn.Parameter:
            given = [kind(t, requires_grad=False) for t in subject.tensors]
        else:
            given = [t.as_subclass(kind) for t in subject.tensors]
        for a, b in zip(flat(subject.run(*given)), expected, strict=True):
            assert torch.equal(torch.Tensor(a), b)
    assert_plain_again(subject, expected)


@pytest.mark.parametrize(
    "subject", [s for s in SUBJECTS if not s.traits & (HOST | PLANS)], ids=lambda s: s.name
)
def test_vmap_is_refused(subject: Subject) -> None:
    expected = flat(subject.run())
    stacked = [torch.stack([t, t]) for t in subject.tensors]
    for _ in range(2):
        with pytest.raises(fa.InputError, match="vmap"):
            torch.vmap(lambda *t: tuple(flat(subject.run(*t))))(*stacked)
    assert_plain_again(subject, expected)


@each_subject
def test_functionalized(subject: Subject) -> None:
    expected = flat(subject.run())
    run = torch.func.functionalize(lambda *t: tuple(flat(subject.run(*t))))
    for _ in range(2):
        if subject.name in ("attention out", "append", "run out"):
            with pytest.raises(fa.InputError, match="functionalize"):
                run(*subject.tensors)
            continue
        for a, b in zip(run(*subject.tensors), expected, strict=True):
            assert type(a) is Tensor and torch.equal(a, b)
    assert_plain_again(subject, expected)


@pytest.mark.parametrize(
    "subject", [s for s in SUBJECTS if not s.traits & HOST and s.name != "append"],
    ids=lambda s: s.name,
)  # fmt: skip
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_derivatives_are_refused(subject: Subject, transform: Any) -> None:
    expected = flat(subject.run())
    for _ in range(2):
        with pytest.raises(fa.GradError):
            transform(lambda *t: flat(subject.run(*t))[0].sum())(*subject.tensors)
    assert_plain_again(subject, expected)


@each_subject
def test_autocast_is_torch_s(subject: Subject) -> None:
    """Functions of torch's signature take autocast's dtype; the others compute what they get."""
    expected = flat(subject.run())
    torch_s = subject.name.startswith(("flex", "sdpa"))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = flat(subject.run())
        for a, b in zip(found, expected, strict=True):
            if torch_s and a.dim() == 4:
                assert a.dtype == torch.bfloat16
                torch.testing.assert_close(a.float(), b, atol=0.05, rtol=0.05)
            elif not torch_s and not subject.traits & HOST:
                assert torch.equal(a, b)
    assert_plain_again(subject, expected)


# --- transforms of what the variant holds, with plain q, k and v ----------------------------------

Q, K, V = SUBJECTS[0].tensors


def _captured(w: Tensor) -> Tensor:
    return fa.attention(Q, K, V, lambda s, b, h, i, j: s + (w * 2)[h] * j)


def _declared(w: Tensor) -> Tensor:
    return fa.attention(Q, K, V, fa.ALiBi(), slopes=w)


def _held(w: Tensor) -> Tensor:
    return fa.attention(Q, K, V, fa.ALiBi(slopes=w))


def _packed(w: Tensor) -> Tensor:
    named = by_name("varlen")
    hook = lambda s, b, h, i, j: s + (w * 2)[h] * j  # noqa: E731
    return fa.varlen_attention(*named.tensors, *named.host, hook)


def _planned(w: Tensor) -> Tensor:
    named = by_name("varlen")
    batch = fa.BatchAttention(
        fa.variant(score_mod=lambda s, b, h, i, j: s + (w * 2)[h] * j),
        num_q_heads=4, num_kv_heads=2, head_dim=32, q_dtype=torch.float32,
    )  # fmt: skip
    batch.plan(named.host[0], fa.Ragged(named.host[1]))
    return batch.run(*named.tensors)


@pytest.mark.parametrize("run", [_captured, _declared, _held, _packed, _planned])
def test_transforms_of_held_tensors_are_refused(run: Any) -> None:
    w = torch.linspace(0.1, 0.4, 4)
    expected = run(w)
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(fa.GradError):
            transform(lambda x: run(x).sum())(w)
    with pytest.raises(fa.GradError):
        torch.func.jvp(run, (w,), (w,))
    with pytest.raises(fa.InputError, match="vmap"):
        torch.vmap(run)(torch.stack([w, w]))
    assert torch.equal(run(w), expected)


@pytest.mark.parametrize("name", ["attention gated", "varlen", "flex", "sdpa causal", "captured"])
def test_derivatives_inside_of_a_compiled_function_are_refused(name: str) -> None:
    """Also where the backend removes the op because only its derivatives are used."""
    if name == "captured":
        x, run = torch.linspace(0.1, 0.4, 4), _captured
    else:
        subject = by_name(name)
        run = lambda q: flat(subject.run(q, *subject.tensors[1:]))[0]  # noqa: E731
        x = subject.tensors[0]
    for derive in (
        lambda x: torch.func.grad(lambda x: run(x).sum())(x),
        lambda x: torch.func.vjp(run, x)[0],
        lambda x: torch.func.jvp(run, (x,), (x,)),
    ):
        torch._dynamo.reset()
        with pytest.raises(TorchDynamoException, match="GradError"):
            torch.compile(derive, fullgraph=True, backend="eager")(x)


def test_functionalized_calls_leave_nothing_behind() -> None:
    from flashattn_jit.ops.torch_ops import sites

    run = torch.func.functionalize(lambda *t: SUBJECTS[1].run(*t))
    run(*SUBJECTS[1].tensors)
    before = len(sites._sites)
    for _ in range(3):
        run(*SUBJECTS[1].tensors)
    assert len(sites._sites) == before


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_is_refused() -> None:
    for name in ("attention gated", "varlen", "sdpa causal", "run"):
        subject = by_name(name)
        with pytest.raises(fa.InputError, match=r"torch\.jit\.trace"):
            torch.jit.trace(lambda *t, s=subject: tuple(flat(s.run(*t))), subject.tensors)
