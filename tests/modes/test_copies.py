"""Copies and pickles of public objects work as the objects do, or an error says why not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.harness import rotation
from tests.modes.subjects import Gated, by_name

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}
each_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
q, k, v = by_name("attention").tensors


def score_mod(score, b, h, q_idx, kv_idx):
    return score + 0.25 * (kv_idx - q_idx)


def half(row, lse, b, h, q_idx):
    return row * 0.5


VARIANTS: dict[str, fa.Variant] = {
    "class": Gated(window=9),
    "and": fa.Causal() & fa.SoftCap(3.0),
    "or": fa.PrefixLM(prefix_len=torch.tensor([4, 9])) | fa.SlidingWindow(5),
    "not": ~fa.SlidingWindow(3),
    "named": fa.SlidingWindow(6).named("near"),
    "functions": fa.variant(score_mod=score_mod, output_mod=half),
    "text": fa.variant(score_mod=fa.cpp("score * 0.5f")),
    "rope": fa.RoPE(500.0, interleaved=True, scaling=fa.LinearScaling(2.0)),
    "computed rope": fa.RoPE(partial=0.5, tables=False),
    "t5": fa.RelativeBias(table=torch.randn(32, 4)),
    "tensors": fa.ALiBi(slopes=torch.rand(4)) & fa.Sink(sink=torch.rand(4)),
    "sigmoid": fa.Sigmoid(),
}


@pytest.mark.by_turns(3)
@each_copy
@pytest.mark.parametrize("name", rotation.chosen(list(VARIANTS), 2))
def test_variants(name: str, copied: Callable[[Any], Any]) -> None:
    variant = VARIANTS[name]
    expected = fa.attention(q, k, v, variant)
    again = copied(copied(variant))
    assert type(again) is type(variant) and again.param_names == variant.param_names
    assert torch.equal(fa.attention(q, k, v, again), expected)
    assert torch.equal(fa.attention(q, k, v, variant), expected)


@each_copy
def test_a_changed_copy_leaves_the_original(copied: Callable[[Any], Any]) -> None:
    variant = Gated(window=9)
    expected = fa.attention(q, k, v, variant)
    again = copied(variant)
    again.window = 2
    assert not torch.equal(fa.attention(q, k, v, again), expected)
    assert torch.equal(fa.attention(q, k, v, variant), expected)


@each_copy
@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
def test_batches_are_copied_without_their_plan(kind: type, copied: Callable[[Any], Any]) -> None:
    rows, keys, values = by_name("varlen").tensors
    q_indptr, kv_indptr = by_name("varlen").host
    batch = kind(
        Gated(), num_q_heads=4, num_kv_heads=2, head_dim=32, q_dtype=torch.float32,
        batch_invariant=True, limits=fa.Limits(4, 64, 64),
        workspace=torch.empty(1 << 20, dtype=torch.uint8),
    )  # fmt: skip

    def plan(it: Any, window: int) -> None:
        storage = fa.Ragged(kv_indptr)
        if kind is fa.CascadeAttention:
            it.plan([fa.CascadeLevel(q_indptr, storage)], window=window)
        else:
            it.plan(q_indptr, storage, window=window)

    plan(batch, 10)
    expected = batch.run(rows, keys, values)
    again = copied(batch)
    with pytest.raises(fa.InputError, match="before plan"):
        again.run(rows, keys, values)
    plan(again, 3)
    other = again.run(rows, keys, values)
    assert not torch.equal(other, expected)
    assert torch.equal(batch.run(rows, keys, values), expected)
    compiled = torch.compile(again.run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(rows, keys, values), other)


@each_copy
def test_a_plan_is_refused(copied: Callable[[Any], Any]) -> None:
    q_indptr, kv_indptr = by_name("varlen").host
    batch = fa.BatchAttention(num_q_heads=4, num_kv_heads=2, head_dim=32, q_dtype=torch.float32)
    plan = batch.plan(q_indptr, fa.Ragged(kv_indptr))
    with pytest.raises(fa.InputError, match="copy that object"):
        copied(plan)
    assert "requests" in repr(plan)


INDPTR = torch.tensor([0, 3])
VALUES: dict[str, Any] = {
    "limits": fa.Limits(4, 20, 100, 10),
    "ragged": fa.Ragged(INDPTR),
    "paged": fa.Paged(INDPTR, INDPTR, INDPTR, 8),
    "block sparse": fa.BlockSparse(INDPTR, INDPTR, (8, 8)),
    "token sparse": fa.TokenSparse(INDPTR),
    "tree": fa.Tree(INDPTR),
    "bits": fa.Bits(INDPTR),
    "cascade level": fa.CascadeLevel(INDPTR, fa.Ragged(INDPTR)),
    "softmax": fa.Softmax(sink=INDPTR),
    "pointwise": fa.Pointwise(torch.sigmoid),
    "cpp": fa.cpp("score + 1"),
    "int4": fa.kv.Format("int4", zero=True).quantize(torch.randn(3, 2, 8)),
    "latent": fa.absorb_mla(torch.randn(20, 4), 2, 4, 6),
    "scaling": fa.LinearScaling(4.0),
    "doctor": fa.doctor(),
    "cache": fa.cache_info(),
    "explanation": fa.Causal().explain(q, k, v),
    "report": fa.Causal().verify(dtypes=[torch.float32], raise_on_failure=False),
}


@each_copy
@pytest.mark.parametrize("name", VALUES)
def test_other_objects_keep_their_fields(name: str, copied: Callable[[Any], Any]) -> None:
    again = copied(VALUES[name])
    assert type(again) is type(VALUES[name])
    if "object at" not in repr(again):
        assert repr(again) == repr(VALUES[name])
    assert str(again) == str(VALUES[name]) or "object at" in str(again)


@each_copy
def test_errors_keep_their_message(copied: Callable[[Any], Any]) -> None:
    report = VALUES["report"]
    errors = [
        getattr(fa, n)("what is wrong, and what to do") for n in fa.__all__
        if n != "VerificationError" and _is_error(getattr(fa, n))
    ]  # fmt: skip
    assert len(errors) > 15
    for error in (*errors, fa.VerificationError("the kernel disagrees", report)):
        again = copied(error)
        assert type(again) is type(error) and str(again) == str(error)
    assert copied(fa.VerificationError("x", report)).report is not None


def _is_error(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, fa.FlashAttnJitError)


def test_every_public_class_is_here() -> None:
    """A new public class gets an entry."""
    covered = {type(x).__name__ for x in (*VALUES.values(), *VARIANTS.values())}
    covered |= {"AppendPlan", "BatchAttention", "CascadeAttention", "Plan", "Variant"}
    covered |= {"ContextParallel", "ParallelPlan"}  # tests/distributed: they refuse to be copied
    covered |= {"RayExecutor"}  # of one connection to a cluster, as any executor
    names = [n for n in fa.__all__ if isinstance(getattr(fa, n), type)]
    missing = {n for n in names if not _is_error(getattr(fa, n))} - covered
    assert not missing


# --- errors ---------------------------------------------------------------------------------------


class Pair(fa.CompileError):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a}:{b}", first_error="c")


ERRORS = (fa.CompileError, fa.MissingKernelError, fa.EmulatorFault, fa.WarmError)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("make", [lambda k: k("why"), lambda k: k(message="why")])
@each_copy
def test_errors_say_their_message(
    kind: type[Exception],
    make: Callable[[type[Exception]], Exception],
    copied: Callable[[Any], Any],
) -> None:
    for error in (make(kind), copied(make(kind))):
        assert (str(error), error.args) == ("why", ("why",))
        assert vars(error) == vars(make(kind))


def test_what_errors_hold_comes_after_their_message() -> None:
    warm = fa.WarmError("why", {"report": 1})
    assert str(warm) == "why" and pickle.loads(pickle.dumps(warm)).report == {"report": 1}
    assert str(Pair(1, 2)) == "1:2" and Pair(1, 2).first_error == "c"
    assert fa.MissingKernelError("why", layers=[]).layers == ()


def test_errors_without_fields_may_be_bases_of_dataclasses() -> None:
    @dataclass
    class Refused(fa.InputError):
        code: int

    assert (Refused(3).code, Refused(3).args) == (3, (3,))
