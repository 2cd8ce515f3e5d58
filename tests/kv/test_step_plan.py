"""Plans of steps: flat or cascade by cost, shared levels kept between steps, equal results."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa

HEADS, DIM = (4, 2), 32


def cache_of(
    variant: fa.Variant, num_pages: int = 400, page_size: int = 16,
    dtype: torch.dtype = torch.float32, **options: Any,
) -> fa.kv.Cache:  # fmt: skip
    group = fa.kv.Group((0,), HEADS[1], DIM, num_q_heads=HEADS[0], variant=variant)
    return fa.kv.Cache(
        fa.kv.Spec((group,), page_size, dtype), num_pages, max_kv_len=20_000, **options
    )


def attention(
    kind: type, variant: fa.Variant, dtype: torch.dtype = torch.float32, **options: Any
) -> fa.BatchAttention | fa.CascadeAttention:
    return kind(
        variant, num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM, q_dtype=dtype, **options
    )


def append(step: fa.kv.Step) -> None:
    cache = step.sequences[0].cache
    k, v = torch.randn(2, step.num_tokens, HEADS[1], DIM).to(cache.device, cache.spec.dtype)
    step.append(0, k, v)


def shared(cache: fa.kv.Cache, count: int, prefix: int, own: int = 20) -> list[fa.kv.Sequence]:
    """Sequences with a common prefix, which is computed once."""
    prompt = list(range(prefix))
    seqs = []
    for i in range(count):
        tokens = prompt + [100_000 + i] * own
        seq = cache.open(tokens)
        assert seq.num_cached == (prefix // 16 * 16 if i else 0)
        with cache.step([(seq, tokens[seq.num_cached :])]) as step:
            append(step)
            step.commit()
        seqs.append(seq)
    return seqs


def decode(cache: fa.kv.Cache, seqs: list[fa.kv.Sequence]) -> fa.kv.Step:
    step = cache.step([(seq, [7]) for seq in seqs])
    append(step)
    return step


def tables_of(levels: list[fa.CascadeLevel]) -> list[list[int]]:
    """The page table of each request, put together from all levels."""
    *shared, own = levels
    starts = own.q_indptr.tolist()
    tables: list[list[int]] = [[] for _ in starts[1:]]
    for level in shared:
        pages = level.storage
        for g in range(len(level.q_indptr) - 1):
            tokens = level.tokens[level.q_indptr[g] : level.q_indptr[g + 1]].tolist()
            held = pages.page_indices[pages.page_indptr[g] : pages.page_indptr[g + 1]].tolist()
            for b, begin in enumerate(starts[:-1]):
                if begin in tokens:
                    tables[b] += held
    pages = own.storage
    for b, table in enumerate(tables):
        table += pages.page_indices[pages.page_indptr[b] : pages.page_indptr[b + 1]].tolist()
    return tables


def test_both_kinds_of_plan_give_the_same_and_the_cheaper_is_taken() -> None:
    variant = fa.Causal()
    flat, cascade = attention(fa.BatchAttention, variant), attention(fa.CascadeAttention, variant)
    for prefix, cascades in ((3200, True), (0, False)):
        cache = cache_of(variant)
        seqs = shared(cache, 6, prefix, own=16)
        step = decode(cache, seqs)
        levels = step.levels()
        assert len(levels) == (2 if prefix else 1)
        plan = step.plan(cascade)
        others = flat.plan(step.q_indptr, step.paged())
        text = plan.explain()
        assert ("levels of shared keys" in text) == cascades, text
        assert plan.predicted_ns <= others.predicted_ns
        q = torch.randn(step.num_tokens, HEADS[0], DIM)
        a, b = cascade.run(q, *cache.tensors(0)), flat.run(q, *cache.tensors(0))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_decision_is_kept_for_the_same_sequences_and_levels_stay_right() -> None:
    variant = fa.Causal()
    cache, cascade = cache_of(variant), attention(fa.CascadeAttention, variant)
    flat = attention(fa.BatchAttention, variant)
    seqs = shared(cache, 4, 1600)
    for _ in range(40):  # over two ends of pages
        with decode(cache, seqs) as step:
            step.plan(cascade)
            flat.plan(step.q_indptr, step.paged())
            wanted = fa.cascade_levels(step.q_indptr, step.paged())
            for one, other in zip(step.levels(), wanted, strict=True):
                assert torch.equal(one.storage.page_indices, other.storage.page_indices)
                assert torch.equal(one.storage.last_page_len, other.storage.last_page_len)
            q = torch.randn(step.num_tokens, HEADS[0], DIM)
            a, b = cascade.run(q, *cache.tensors(0)), flat.run(q, *cache.tensors(0))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            step.commit()


@pytest.mark.parametrize("seed", range(4))
def test_levels_over_random_steps_of_a_window(seed: int) -> None:
    """Pages that the mask gives up leave the shared levels as well."""
    pick = random.Random(seed)
    variant = fa.SlidingWindow(40)
    cache, cascade = cache_of(variant, page_size=8), attention(fa.CascadeAttention, variant)
    flat = attention(fa.BatchAttention, variant)
    seqs = []
    for i in range(5):
        tokens = list(range(64)) + [100 + i] * pick.randrange(1, 9)
        seq = cache.open(tokens)
        with cache.step([(seq, tokens[seq.num_cached :])]) as step:
            append(step)
            step.commit()
        seqs.append(seq)
    for _ in range(60):
        act = pick.random()
        chosen = pick.sample(seqs, pick.randrange(2, len(seqs) + 1))
        if act < 0.1:
            seqs.append(chosen[0].fork())
        elif act < 0.2:
            chosen[0].suspend()
            chosen[0].resume()
        else:
            with cache.step([(s, [3] * pick.randrange(1, 12)) for s in chosen]) as step:
                append(step)
                assert tables_of(step.levels()) == tables_of(
                    [fa.CascadeLevel(step.q_indptr, step.paged())]
                )
                step.plan(cascade)
                flat.plan(step.q_indptr, step.paged())
                q = torch.randn(step.num_tokens, HEADS[0], DIM)
                a, b = cascade.run(q, *cache.tensors(0)), flat.run(q, *cache.tensors(0))
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                step.commit()
        cache.check()


def test_kept_levels_follow_the_tables_of_the_same_sequences() -> None:
    """A window gives shared pages up; a resumed sequence has other pages."""
    cache = cache_of(fa.SlidingWindow(90), page_size=8)
    seqs = []
    for i in range(3):
        tokens = [*range(80), 100 + i]
        seq = cache.open(tokens)
        with cache.step([(seq, tokens[seq.num_cached :])]) as step:
            append(step)
            step.commit()
        seqs.append(seq)
    most = 0
    for turn in range(110):
        if turn == 5:
            seqs[1].suspend()
            cache.clear()
            seqs[1].resume()
        with decode(cache, seqs) as step:
            levels = step.levels()
            most = max(most, len(levels))
            flat = [fa.CascadeLevel(step.q_indptr, step.paged())]
            assert tables_of(levels) == tables_of(flat), turn
            step.commit()
    assert most == 2 and not seqs[0].pages()[:10].any()


def test_sixteen_requests_compute_a_shared_system_prompt_once() -> None:
    cache = cache_of(fa.Causal(), num_pages=600)
    system = list(range(1024))
    for i in range(16):
        prompt = [*system, 5000 + i, 6000 + i]
        seq = cache.open(prompt)
        with cache.step([(seq, prompt[seq.num_cached :])]) as step:
            append(step)
            step.commit()
    stats = cache.stats()
    assert stats.appended_tokens == 1024 + 16 * 2
    assert stats.hit_tokens == 15 * 1024
    assert stats.groups[0].used == 1024 // 16 + 16
    assert stats.groups[0].shared == 1024 // 16


def test_plans_of_what_is_no_attention() -> None:
    cache = cache_of(fa.Causal())
    step = decode(cache, shared(cache, 2, 32))
    with pytest.raises(fa.InputError, match="CascadeAttention"):
        step.plan(fa.Causal())  # type: ignore[arg-type]
    with pytest.raises(fa.InputError, match="group"):
        step.plan(attention(fa.BatchAttention, fa.Causal()), 1)
    with pytest.raises(fa.InputError, match="layer"):
        step.append(1, torch.zeros(2, 2, 32), torch.zeros(2, 2, 32))


def test_appends_of_rows_that_do_not_fit_the_step() -> None:
    cache = cache_of(fa.Causal())
    step = decode(cache, shared(cache, 2, 32))
    few = torch.zeros(1, 2, 32)
    message = "k has num_tokens=1, but the step, or q_indptr, has 2 new tokens"
    with pytest.raises(fa.InputError, match=message):
        step.append(0, few, few)
    rows = torch.zeros(2, 2, 32, device="meta")
    with pytest.raises(fa.InputError, match="k is on meta, so it has no values"):
        step.append(0, rows, rows)


def planned(
    group: dict[str, Any], attention: dict[str, Any], kind: type = fa.BatchAttention, **params: Any
) -> fa.Plan:
    """A plan of three requests by an attention that differs from the group in what is given."""
    heads = {"num_kv_heads": 2, "head_dim": 32, "num_q_heads": 4}
    spec = fa.kv.Spec((fa.kv.Group((0,), **{**heads, **group}),), 16, torch.float32)
    cache = fa.kv.Cache(spec, 16, max_kv_len=256)
    with cache.step([(cache.open([]), range(20)) for _ in range(3)]) as step:
        made = kind(q_dtype=torch.float32, **{**heads, **attention})
        step.plan(made, **params)
        plan: fa.Plan = step.plan(made, **params)  # which looks at nothing again
        assert plan.explain() == made.plan(*_arguments(step, kind), **_all(group, params)).explain()
    return plan


def _arguments(step: fa.kv.Step, kind: type) -> list[Any]:
    return [step.levels()] if kind is fa.CascadeAttention else [step.q_indptr, step.paged()]


def _all(group: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {**group.get("mask_params", {}), **params}


class Window(fa.Variant):
    """A window without a default, with another hook and a table of slopes."""

    window: int = fa.scalar()
    slopes: torch.Tensor = fa.tensor("num_q_heads", default=fa.alibi_slopes)

    def score_mod(self, score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score + self.slopes[h] * (kv_idx - q_idx)

    def mask_mod(self, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (kv_idx <= q_idx) & (q_idx - kv_idx < self.window)


class Documents(fa.Variant):
    """Documents, the same for every request."""

    ids: torch.Tensor = fa.tensor("tokens", dtype=torch.int64)

    def mask_mod(self, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (kv_idx <= q_idx) & (self.ids[q_idx] == self.ids[kv_idx])


HEADED = fa.variant(mask_mod=lambda b, h, q, k: (k <= q) & (q - k < 8 * (h + 1)))
IDS = torch.arange(256) // 50


@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
@pytest.mark.parametrize(
    ("group", "attention", "message"),
    [
        ({}, {"num_kv_heads": 4}, "num_kv_heads=4, but group 0 has 2"),
        ({}, {"head_dim": 16, "head_dim_v": 32}, "head_dim=16, but group 0 has 32"),
        ({}, {"head_dim_v": 16}, "head_dim_v=16, but group 0 has 32"),
        ({"variant": HEADED}, {"variant": HEADED, "num_q_heads": 8}, "num_q_heads=8"),
        ({"variant": fa.SlidingWindow(9)}, {"variant": fa.Causal()}, "mask of attention"),
        ({"variant": fa.Causal()}, {"variant": fa.SlidingWindow(9)}, "mask of attention"),
        ({"variant": fa.SlidingWindow(9)}, {"variant": fa.SlidingWindow(10)}, "mask of attention"),
        ({"variant": fa.SlidingWindow(9)}, {"variant": None}, "mask of attention"),
        ({"variant": fa.ALiBi()}, {"variant": fa.Causal()}, "mask of attention"),
    ],
)  # fmt: skip
def test_an_attention_that_is_not_the_groups(
    group: dict[str, Any], attention: dict[str, Any], message: str, kind: type
) -> None:
    with pytest.raises(fa.InputError, match=message):
        planned(group, attention, kind)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("group", "attention"),
    [
        ({}, {"variant": fa.Causal(), "num_q_heads": 8}),  # without a variant every key stays
        ({"variant": fa.Causal()}, {"variant": fa.Causal(), "num_q_heads": 8}),
        ({"variant": fa.SlidingWindow(9), "reclaim": "never"}, {"variant": fa.Causal()}),
        ({"variant": HEADED}, {"variant": HEADED}),
        ({"variant": fa.SlidingWindow(9)}, {"variant": Window(window=9)}),
        ({"variant": Documents(ids=IDS)}, {"variant": Documents(ids=IDS.clone())}),
    ],
)  # fmt: skip
def test_an_attention_of_the_groups_mask(group: dict[str, Any], attention: dict[str, Any]) -> None:
    planned(group, attention)


@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
def test_params_of_the_groups_mask_are_defaults(kind: type) -> None:
    group = {"variant": Window(), "mask_params": {"window": 9}}
    planned(group, {"variant": Window()}, kind)
    planned(group, {"variant": Window()}, kind, window=9)
    for wrong in ({"variant": Window(window=10)}, {"variant": fa.Causal()}):
        with pytest.raises(fa.InputError, match="mask of attention"):
            planned(group, wrong, kind)
    with pytest.raises(fa.InputError, match="mask of attention"):
        planned(group, {"variant": Window()}, kind, window=10)
    given = {"variant": Documents(), "mask_params": {"ids": IDS}}
    planned(given, {"variant": Documents()}, kind)
    with pytest.raises(fa.InputError, match="mask of attention"):
        planned(given, {"variant": Documents()}, kind, ids=IDS + IDS % 2)
    padded = {"variant": fa.PaddingMask() & fa.Causal()}
    with pytest.raises(fa.InputError, match="mask of attention"):
        planned({"variant": fa.Causal()}, padded, kind, keep=torch.ones(3, 20, dtype=torch.bool))
    never = {**given, "reclaim": "never"}
    planned(never, {"variant": Documents()}, kind, ids=IDS + IDS % 2)


def test_params_of_a_plan_are_looked_at_again_when_they_change() -> None:
    group = fa.kv.Group((0,), 2, 32, num_q_heads=4, variant=Window(), mask_params={"window": 9})
    cache = fa.kv.Cache(fa.kv.Spec((group,), 16, torch.float32), 16, max_kv_len=256)
    own = attention(fa.BatchAttention, Window())
    with cache.step([(cache.open([]), range(20))]) as step:
        step.plan(own)
        step.plan(own, window=9)
        with pytest.raises(fa.InputError, match="mask of attention"):
            step.plan(own, window=10)
        step.plan(own)


@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
def test_numbers_of_the_variant_are_looked_at_again_when_they_change(kind: type) -> None:
    """Else it would read pages that the group's mask has given up."""
    near = [9]
    closure = fa.variant(mask_mod=lambda b, h, q, k: (k <= q) & (q - k < near[0]))

    def set_closure(n: int) -> None:
        near[0] = n

    window = fa.SlidingWindow(9)
    for variant, change in (
        (closure, set_closure), (window, lambda n: setattr(window, "window", n))
    ):  # fmt: skip
        group = fa.kv.Group((0,), 2, 32, num_q_heads=4, variant=fa.SlidingWindow(9) & fa.Causal())
        if variant is closure:
            group = replace(group, variant=closure)
        cache = fa.kv.Cache(fa.kv.Spec((group,), 16, torch.float32), 16, max_kv_len=256)
        own = attention(kind, variant if variant is closure else variant & fa.Causal())
        with cache.step([(cache.open([]), range(20))]) as step:
            step.plan(own)
            change(10)
            with pytest.raises(fa.InputError, match="mask of attention"):
                step.plan(own)
            change(9)
            step.plan(own)


class Named(fa.Variant):
    """Params that are called like arguments of a step's methods."""

    attention: float = fa.scalar(1.0)
    group: int = fa.scalar(64)
    layer: float = fa.scalar(2.0)
    levels: int = fa.scalar(0)

    def mask_mod(self, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        near = q_idx - kv_idx < self.group + self.levels + self.attention
        return (kv_idx <= q_idx) & near

    def key_mod(self, row, b, kv_h, kv_idx):  # type: ignore[no-untyped-def]
        return row * self.layer


@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
def test_params_may_be_called_like_arguments(kind: type) -> None:
    given = {"attention": 2.0, "group": 9, "levels": 1}
    group = fa.kv.Group(
        (0,), 2, 32, num_q_heads=4, variant=Named().only("mask_mod"), mask_params=given,
        transform=Named(),
    )  # fmt: skip
    cache = fa.kv.Cache(fa.kv.Spec((group,), 16, torch.float32), 16, max_kv_len=256)
    with cache.step([(cache.open([]), range(20))]) as step:
        step.plan(attention(kind, Named().only("mask_mod")), 0, **given)
        k = torch.randn(20, 2, 32)
        step.append(0, k, k, layer=3.0)
        assert torch.equal(cache.tensors(0)[0][step.paged().page_indices[0]], 3 * k[:16])


def test_an_attention_that_rotates_stored_keys_again() -> None:
    group = fa.kv.Group((0,), 2, 32, num_q_heads=4, transform=fa.QKNorm() & fa.RoPE())
    cache = fa.kv.Cache(fa.kv.Spec((group,), 16, torch.float32), 16, max_kv_len=256)
    with cache.step([(cache.open([]), range(20))]) as step:
        with pytest.raises(fa.InputError, match=r'applied twice.*without\("key_mod"\)'):
            step.plan(attention(fa.BatchAttention, fa.RoPE() & fa.Causal()))
        step.plan(attention(fa.BatchAttention, fa.RoPE().without("key_mod") & fa.Causal()))
