"""Plans of steps: flat or cascade by cost, shared levels kept between steps, equal results."""

from __future__ import annotations

import random

import pytest
import torch

import flashattn_jit as fa

HEADS, DIM = (4, 2), 32


def cache_of(variant: fa.Variant, num_pages: int = 400, page_size: int = 16) -> fa.kv.Cache:
    group = fa.kv.Group((0,), HEADS[1], DIM, num_q_heads=HEADS[0], variant=variant)
    spec = fa.kv.Spec((group,), page_size, torch.float32)
    return fa.kv.Cache(spec, num_pages, max_kv_len=20_000)


def attention(kind: type, variant: fa.Variant) -> fa.BatchAttention | fa.CascadeAttention:
    return kind(
        variant, num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM, q_dtype=torch.float32
    )


def append(step: fa.kv.Step) -> None:
    k, v = (torch.randn(step.num_tokens, HEADS[1], DIM) for _ in range(2))
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
        step.plan(attention(fa.BatchAttention, fa.Causal()), group=1)
    with pytest.raises(fa.InputError, match="layer"):
        step.append(1, torch.zeros(2, 2, 32), torch.zeros(2, 2, 32))
