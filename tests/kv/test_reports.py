"""Statistics, metrics and pictures of a cache."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

import flashattn_jit as fa
from tests.kv.engine import Engine, contents, same
from tests.kv.test_sequences import made, run


def test_stats_count_pages_and_tokens() -> None:
    engine = made(num_pages=16)
    one = run(engine, list(range(12)))
    two = run(engine, [*range(8), 50, 51])
    engine.fork(two)
    stats = engine.cache.stats()
    (group,) = stats.groups
    assert (group.num_pages, group.free, group.used, group.evictable) == (16, 12, 4, 0)
    assert group.shared == 3  # two of the prefix, and the fork's last one
    assert (stats.asked_tokens, stats.hit_tokens, stats.appended_tokens) == (22, 8, 14)
    assert stats.hit_rate == 8 / 22
    one.close()
    assert engine.cache.stats().groups[0].evictable == 1
    assert group.used_bytes == 4 * 2 * 4 * 2 * (4 + 4) * 4  # layers, tokens, heads, dims, bytes


def test_prometheus_metrics() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    engine = made(num_pages=16)
    run(engine, list(range(12))).close()
    registry = prometheus.CollectorRegistry()
    registry.register(fa.kv.Collector(engine.cache, name="a"))
    text = prometheus.generate_latest(registry).decode()
    for line in (
        'flashattn_jit_kv_pages{cache="a",group="0",state="evictable"} 3.0',
        'flashattn_jit_kv_pages{cache="a",group="0",state="free"} 13.0',
        'flashattn_jit_kv_appended_tokens_total{cache="a"} 12.0',
        'flashattn_jit_kv_evicted_pages_total{cache="a",group="0"} 0.0',
        'flashattn_jit_kv_sequences{cache="a"} 0.0',
    ):
        assert line in text, text


def test_without_prometheus_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(fa.InputError, match="prometheus_client"):
        fa.kv.Collector(made().cache)


def test_a_timeline_accounts_for_every_page(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("matplotlib")
    engine = made(num_pages=16)
    timeline = fa.kv.Timeline(engine.cache)
    with pytest.raises(fa.InputError, match="no samples"):
        timeline.plot(tmp_path / "a.png")
    seqs = []
    for i in range(3):
        seqs.append(run(engine, [*range(8), 50 + i]))
        timeline.sample()
    seqs[0].suspend()
    seqs[1].close()
    timeline.sample()
    for sample in timeline.samples:
        assert sum(sample.own.values()) + sample.shared + sample.evictable + sample.free == 16
    timeline.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "policy", [fa.kv.LRU(), fa.kv.LFU(), fa.kv.Priority(10.0), fa.kv.RecomputeCost(10.0)]
)
def test_a_prefix_outlives_what_follows_it(policy: fa.kv.Policy) -> None:
    engine = made(num_pages=8, eviction=policy)
    run(engine, list(range(24))).close()
    run(engine, list(range(100, 116))).close()
    assert engine.open([*range(24), 1]).num_cached == 16
    engine.verify_all()


def test_a_prefix_outlives_its_branches_under_a_policy_that_would_drop_it_first() -> None:
    engine = made(num_pages=8, eviction=lambda entry: entry.position)
    for start in (50, 60):
        run(engine, [*range(8), *range(start, start + 8)]).close()
    run(engine, list(range(100, 116))).close()  # 4 pages: two free ones and two of the branches
    assert engine.open([*range(8), 1]).num_cached == 8
    engine.verify_all()


def test_a_prefix_that_a_window_gave_up_outlives_what_follows_the_pages_in_use() -> None:
    group = fa.kv.Group((0,), 1, 4, variant=fa.SlidingWindow(4))
    spec = fa.kv.Spec((group,), 4, torch.float32)
    cache = fa.kv.Cache(spec, 14, max_kv_len=256, eviction=lambda entry: entry.position)
    engine = Engine(cache, [lambda q, k: 0 <= q - k < 4])
    run(engine, [*range(8), 70, 71, 72, 73]).close()
    holder = run(engine, list(range(12)))  # page 2; pages 0 and 1 are evictable
    for token in (5, 6):
        run(engine, [*range(12), *[token] * 4]).close()
    assert cache.stats().groups[0].evictable == 5
    run(engine, list(range(100, 144)))  # room for what the window keeps on the way
    assert cache.stats().groups[0].evicted == 3, "the three branches"
    assert engine.open([*range(8), 1]).num_cached == 8
    assert holder.pages()[2]
    engine.verify_all()


def entry(**changes: object) -> fa.kv.Entry:
    given = {
        "order": 1, "age_s": 0.0, "num_uses": 1, "priority": 50, "position": 64, "num_bytes": 100,
        "recompute_ns": 1e4, **changes,
    }  # fmt: skip
    return fa.kv.Entry(**given)  # type: ignore[arg-type]


def test_keys_of_the_policies() -> None:
    lru, lfu = fa.kv.LRU(), fa.kv.LFU()
    assert lru(entry(order=1)) < lru(entry(order=2))
    assert lfu(entry(num_uses=1, order=9)) < lfu(entry(num_uses=2))
    priority = fa.kv.Priority(retention_s=10.0)
    assert priority(entry(priority=10)) < priority(entry(priority=60))
    assert priority(entry(age_s=9.0)) == priority(entry())
    assert priority(entry(priority=60, age_s=19.0)) < priority(entry(priority=10))
    assert priority(entry(priority=60, age_s=99.0))[0] == 0.0
    cost = fa.kv.RecomputeCost(half_life_s=10.0)
    assert cost(entry(recompute_ns=1e4)) < cost(entry(recompute_ns=2e4))
    assert cost(entry(recompute_ns=2e4, age_s=20.0)) < cost(entry(recompute_ns=1e4))
    for wrong in (0.0, -1, "a", None, float("nan"), True, [1.0]):
        with pytest.raises(fa.InputError, match="retention_s"):
            fa.kv.Priority(wrong)  # type: ignore[arg-type]
        with pytest.raises(fa.InputError, match="half_life_s"):
            fa.kv.RecomputeCost(wrong)  # type: ignore[arg-type]


def test_pages_far_behind_cost_more_to_compute_again() -> None:
    seen: list[fa.kv.Entry] = []

    def policy(found: fa.kv.Entry) -> int:
        seen.append(found)
        return found.order

    engine = made(num_pages=12, eviction=policy)
    run(engine, list(range(8))).close()
    run(engine, list(range(100, 128))).close()
    run(engine, list(range(200, 220))).close()
    short, long = sorted({(e.position, e.recompute_ns) for e in seen})[:2]
    assert short[0] == 8 and long[0] == 28 and short[1] < long[1]
    assert all(e.num_bytes == 2 * 4 * 2 * 8 * 4 for e in seen)


def test_a_policy_that_fails_leaves_a_sound_cache() -> None:
    def policy(found: fa.kv.Entry) -> int:
        raise ZeroDivisionError

    engine = made(num_pages=4, eviction=policy)
    run(engine, list(range(12))).close()
    seq = engine.open([])
    with pytest.raises(ZeroDivisionError):
        engine.cache.step([(seq, range(100, 108))])
    engine.cache.check()
    seq.close()


def test_a_policy_that_fails_late_has_dropped_nothing() -> None:
    calls = []

    def policy(found: fa.kv.Entry) -> int:
        calls.append(found)
        if len(calls) > 2:
            raise ZeroDivisionError
        return found.order

    engine = made(num_pages=8, eviction=policy)
    for start in (50, 60):
        run(engine, [*range(8), *range(start, start + 8)]).close()
    seq, before = engine.open([]), contents(engine.cache)
    with pytest.raises(ZeroDivisionError):  # after the branches the policy is asked for their stem
        engine.cache.step([(seq, range(100, 132))])
    assert same(before, contents(engine.cache))
    assert engine.cache.stats().groups[0].evicted == 0
    engine.cache.check()


@pytest.mark.parametrize(
    "keys",
    [[1, "a"], [None, 1], [{}, {1: 2}], [1, (1, 2)], [torch.ones(2), torch.zeros(2)]],
    ids=repr,
)
def test_keys_of_a_policy_that_do_not_compare(keys: list[object]) -> None:
    found = itertools.cycle(keys)
    engine = made(num_pages=6, eviction=lambda entry: next(found))
    for start in (0, 100, 200):
        run(engine, list(range(start, start + 8))).close()
    seq, before = engine.open([]), contents(engine.cache)
    with pytest.raises(fa.InputError, match="eviction policy"):
        engine.cache.step([(seq, range(300, 308))])
    assert same(before, contents(engine.cache))
    engine.cache.clear()  # which asks no policy
    engine.step([(seq, list(range(8)))])
    engine.verify_all()


@pytest.mark.parametrize("name", ["clear", "open", "step", "close"])
def test_a_policy_that_calls_the_cache(name: str) -> None:
    def policy(found: fa.kv.Entry) -> int:
        calls[name]()
        return found.order

    engine = made(num_pages=4, eviction=policy)
    run(engine, list(range(12))).close()
    seq = engine.open([])
    calls = {
        "clear": engine.cache.clear, "open": lambda: engine.cache.open([1]),
        "step": lambda: engine.cache.step([(seq, [1])]), "close": seq.close,
    }  # fmt: skip
    before = contents(engine.cache)
    with pytest.raises(fa.SequenceError, match="eviction policy"):
        engine.cache.step([(seq, range(100, 108))])
    assert same(before, contents(engine.cache))
    engine.step([(seq, [1])])
    engine.verify_all()


def test_swapped_bytes_are_those_that_were_moved() -> None:
    engine = made()
    seq = run(engine, list(range(10)))
    page = engine.cache.spec.page_bytes(0)
    seq.suspend()
    assert engine.cache.stats().swapped_bytes == 3 * page
    seq.resume()  # two of its pages are in the index
    assert engine.cache.stats().swapped_bytes == 4 * page
    seq.suspend()
    seq.close()
    stats = engine.cache.stats()
    assert (stats.swapped_bytes, stats.host_bytes) == (7 * page, 0)


def test_dtypes_and_layouts_of_the_memory() -> None:
    for layout in ("page", "layer"):
        group = fa.kv.Group((0, 1), 2, 16, head_dim_v=8)
        spec = fa.kv.Spec((group,), 4, torch.bfloat16)
        cache = fa.kv.Cache(spec, 5, max_kv_len=64, layout=layout)  # type: ignore[arg-type]
        for layer in (0, 1):
            k, v = cache.tensors(layer)
            assert (
                k.shape == (6, 4, 2, 16) and v.shape == (6, 4, 2, 8) and k.dtype == torch.bfloat16
            )
            assert k[0].is_contiguous() and v[0].is_contiguous()
        pieces = [t.shape[1] for t in cache.pools[0].memory]
        assert pieces == ([2 * 4 * 2 * 24] if layout == "page" else [128, 64] * 2)
        assert sum(pieces) * 2 == spec.page_bytes(0)
