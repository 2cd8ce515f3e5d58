"""What sequences share, keep and refuse, case by case."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from tests.kv.engine import Engine, contents, same


def made(num_pages: int = 32, page_size: int = 4, **options: object) -> Engine:
    spec = fa.kv.Spec((fa.kv.Group((0, 1), 2, 4, variant=fa.Causal()),), page_size, torch.float32)
    return Engine(fa.kv.Cache(spec, num_pages, max_kv_len=256, **options), [None])  # type: ignore[arg-type]


def run(engine: Engine, tokens: list[int], **options: object) -> fa.kv.Sequence:
    """A sequence of these tokens, computed where they are not cached."""
    seq = engine.open(tokens, **options)
    engine.step([(seq, tokens[seq.num_cached :])])
    return seq


def test_a_prefix_is_shared_by_whole_pages_and_leaves_a_token() -> None:
    engine = made()
    one = run(engine, list(range(12)))
    assert engine.open(list(range(12))).num_cached == 8  # the last token is computed again
    assert engine.open(list(range(13))).num_cached == 12
    assert engine.open([*range(6), 77, 78]).num_cached == 4
    assert engine.open([1, *range(12)]).num_cached == 0
    assert engine.open([]).num_cached == 0
    other = engine.open(list(range(13)))
    assert (other.pages() == one.pages()).all()
    engine.verify_all()


def test_a_closed_sequence_is_found_until_its_room_is_needed() -> None:
    engine = made(num_pages=6)
    run(engine, list(range(12))).close()
    assert engine.cache.stats().groups[0].evictable == 3
    run(engine, list(range(100, 116))).close()  # takes 3 free pages and evicts one
    assert engine.cache.stats().groups[0].evicted == 1
    # The last page of the prefix went, not its first one.
    assert engine.open(list(range(13))).num_cached == 8
    engine.verify_all()


def test_lru_order_is_that_of_uses() -> None:
    engine = made(num_pages=6)
    for start in (0, 100, 200):
        run(engine, list(range(start, start + 8))).close()
    engine.open(list(range(9))).close()  # used again
    run(engine, list(range(300, 308))).close()
    cached = [engine.open([*range(s, s + 8), 1]).num_cached for s in (0, 100, 200, 300)]
    assert cached == [8, 0, 8, 8]


def test_what_is_used_is_never_evicted() -> None:
    engine = made(num_pages=4)
    seq = run(engine, list(range(12)))
    before = contents(engine.cache)
    with pytest.raises(fa.OutOfPages) as info:
        run(engine, list(range(50, 60)))
    error = info.value
    assert (error.needed, error.free, error.evictable, error.group) == (3, 1, 0, 0)
    assert same(before, contents(engine.cache)[: len(before)])
    engine.verify(seq)


def test_a_fork_shares_pages_and_copies_the_one_it_writes() -> None:
    engine = made()
    one = run(engine, list(range(10)))
    two = engine.fork(one)
    assert (one.pages() == two.pages()).all()
    engine.step([(one, [70]), (two, [80])])
    a, b = one.pages(), two.pages()
    assert (a[:2] == b[:2]).all() and a[2] != b[2]
    assert engine.cache.stats().groups[0].copied == 1, "one of the two may keep the page"
    engine.verify_all()


def test_a_trimmed_page_of_the_index_is_copied_before_a_write() -> None:
    engine = made()
    seq = run(engine, list(range(8)))
    seq.trim(6)
    del engine.tokens[seq.number][6:]
    engine.step([(seq, [90, 91])])
    assert engine.open([*range(8), 5]).num_cached == 8, "the index still has what it had"
    assert engine.open([*range(6), 90, 91, 5]).num_cached == 8
    engine.verify_all()


def test_a_suspended_sequence_comes_back_with_its_contents() -> None:
    engine = made(num_pages=8)
    seq = run(engine, list(range(30)))
    seq.suspend()
    stats = engine.cache.stats()
    assert stats.host_bytes == 8 * stats.groups[0].page_bytes and stats.num_suspended == 1
    other = run(engine, list(range(100, 130)))  # overwrites all pages
    with pytest.raises(fa.OutOfPages):
        seq.resume()
    assert seq.is_suspended
    other.close()
    seq.resume()
    engine.step([(seq, [1, 2])])
    engine.verify_all()
    assert engine.cache.stats().host_bytes == 0


def test_a_resumed_sequence_shares_what_the_index_has() -> None:
    engine = made()
    one = run(engine, list(range(13)))
    two = run(engine, [*range(12), 50])
    two.suspend()
    two.resume()
    assert (one.pages()[:3] == two.pages()[:3]).all() and one.pages()[3] != two.pages()[3]
    engine.verify_all()


def test_namespaces_share_nothing() -> None:
    engine = made()
    run(engine, list(range(12)), namespace=b"a")
    assert engine.open(list(range(13)), namespace=b"b").num_cached == 0
    assert engine.open(list(range(13))).num_cached == 0
    assert engine.open(list(range(13)), namespace=b"a").num_cached == 12


def test_pages_are_found_after_the_commit_only() -> None:
    engine = made()
    seq = engine.open(list(range(12)))
    step = engine.cache.step([(seq, range(12))])
    assert engine.open(list(range(13))).num_cached == 0
    engine.write(step)
    assert engine.open(list(range(13))).num_cached == 0
    step.commit()
    assert engine.open(list(range(13))).num_cached == 12


def test_two_that_compute_the_same_prompt_keep_their_own_pages() -> None:
    engine = made()
    one, two = engine.open(list(range(9))), engine.open(list(range(9)))
    engine.step([(one, list(range(9))), (two, list(range(9)))])
    assert not set(one.pages()) & set(two.pages())
    one.close()
    assert engine.open(list(range(9))).num_cached == 8
    engine.verify_all()


def test_a_place_in_a_node_that_has_lost_pages_and_got_others() -> None:
    """What the sequence publishes next must not be found behind the other tokens."""
    engine = made()
    start, end = [1, 2, 3, 4], [5, 6, 7, 8]

    def opened(*tokens: int) -> fa.kv.Sequence:
        return engine.open(list(tokens), namespace=b"a")

    one, two = opened(), opened()
    engine.step([(one, start + end), (two, start + end)])  # two keeps its own pages
    holder = opened(*start, 9)
    one.close()
    engine.cache.clear()  # the node keeps its first page, which `holder` uses
    assert opened(*start, *end, 9).num_cached == 4
    engine.step([(holder, [60, 61, 62, 63])])  # the node's second page, with other tokens
    engine.step([(two, [10, 11, 12, 13])])
    assert opened(*start, 60, 61, 62, 63, 10, 11, 12, 13, 9).num_cached == 8
    assert opened(*start, *end, 10, 11, 12, 13, 9).num_cached == 12
    engine.verify_all()


def test_windows_hold_a_share_of_the_pages_and_still_hit() -> None:
    spec = fa.kv.Spec(
        (
            fa.kv.Group((0,), 1, 4, variant=fa.SlidingWindow(32)),
            fa.kv.Group((1,), 1, 4, variant=fa.Causal()),
        ),
        4, torch.float32,
    )  # fmt: skip
    cache = fa.kv.Cache(spec, [200, 200], max_kv_len=1024)
    engine = Engine(cache, [lambda q, k: 0 <= q - k < 32, None])
    seq = run(engine, list(range(400)))
    used = [g.used for g in cache.stats().groups]
    assert used == [8, 100]
    assert engine.open([*range(400), 1]).num_cached == 400
    assert engine.open([*range(200), 1]).num_cached == 200, "pages given up are still cached"
    assert (seq.pages(0)[:92] == 0).all()
    engine.verify_all()


def test_a_hit_needs_the_pages_that_its_continuation_reads_alone() -> None:
    spec = fa.kv.Spec((fa.kv.Group((0,), 1, 4, variant=fa.SlidingWindow(8)),), 4, torch.float32)
    cache = fa.kv.Cache(spec, 12, max_kv_len=1024)
    engine = Engine(cache, [lambda q, k: 0 <= q - k < 8])
    run(engine, list(range(24)))  # pages 4 and 5 live, 0 to 3 evictable
    run(engine, list(range(100, 132)))  # 8 pages: 6 free ones and two of the first prompt's
    assert cache.stats().groups[0].evicted == 2
    assert engine.open([*range(24), 1]).num_cached == 24
    # Pages 2 and 3 went: 16 tokens would read page 2 or 3, 8 tokens read pages 0 and 1.
    assert engine.open([*range(16), 1]).num_cached == 8
    engine.verify_all()


def test_compaction_moves_the_window_up_to_the_sinks() -> None:
    group = fa.kv.Group(
        (0,), 1, 4, variant=fa.StreamingLLM(window=8, num_sinks=4), reclaim="compact"
    )
    cache = fa.kv.Cache(fa.kv.Spec((group,), 4, torch.float32), 16, max_kv_len=1024)
    engine = Engine(cache, [None])
    seq = engine.open([])
    kept: list[int] = []  # positions in the table, by the definition
    for begin in range(0, 60, 3):
        engine.step([(seq, list(range(begin, begin + 3)))])
        kept += range(begin, begin + 3)
        length = len(kept)
        if length // 4 == (length - 3) // 4:
            continue  # the mask is asked once a page
        pages = [kept[i : i + 4] for i in range(0, length, 4)]
        live = [
            p for i, p in enumerate(pages)
            if i == 0 or length - (4 * i + 3) < 8 or i == len(pages) - 1
        ]  # fmt: skip
        kept = [x for p in live for x in p]
        assert seq.group_len(0) == len(kept)
        k, _ = cache.tensors(0)
        with cache.step([(seq, [])]) as step:
            paged = step.paged()
        rows = k[paged.page_indices.long()].flatten(0, 1)[: len(kept), 0]
        assert rows[:, 1].tolist() == kept
        assert cache.stats().groups[0].used <= 5
        cache.check()
    assert kept[:4] == [0, 1, 2, 3] and kept[-1] == 59 and len(kept) < 20
    assert cache.open(list(range(60))).num_cached <= 16, "pages at other positions are not shared"
    with pytest.raises(fa.InputError, match="too far back"):
        seq.trim(20)
    seq.suspend()
    seq.resume()
    cache.check()


def test_errors_of_closed_and_busy_sequences() -> None:
    engine = made()
    seq = run(engine, [1, 2, 3])
    with engine.cache.step([(seq, [4])]):
        for act in (seq.close, seq.fork, seq.suspend, lambda: seq.trim(1)):
            with pytest.raises(fa.SequenceError, match="open step"):
                act()
        with pytest.raises(fa.SequenceError, match="open step"):
            engine.cache.step([(seq, [4])])
    assert seq.kv_len == 3
    seq.close()
    for act in (seq.close, seq.fork, seq.suspend, seq.resume, seq.pages, lambda: seq.trim(1)):
        with pytest.raises(fa.SequenceError, match="closed"):
            act()
    with pytest.raises(fa.SequenceError, match="closed"):
        engine.cache.step([(seq, [4])])
    with pytest.raises(fa.SequenceError, match="another cache"):
        made().cache.step([(engine.open([1]), [4])])


def test_a_with_block_that_fails_closes_its_sequence() -> None:
    engine = made()
    with pytest.raises(ZeroDivisionError), engine.cache.open([1, 2]) as seq:
        engine.cache.step([(seq, [1, 2])])
        raise ZeroDivisionError
    assert seq.closed and not engine.cache.sequences
    assert engine.cache.stats().groups[0].free == 32


@pytest.mark.parametrize("copy", ["step.copy_pages", "sequence.save_pages", "sequence.load_pages"])
def test_a_copy_that_fails_changes_nothing(copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a forked child, which cannot use several threads."""
    engine = made()
    seq = run(engine, list(range(10)))
    child = engine.fork(seq)
    away = run(engine, list(range(50, 60)))
    away.suspend()
    acts = {
        "step.copy_pages": lambda: engine.cache.step([(child, [1])]),
        "sequence.save_pages": seq.suspend,
        "sequence.load_pages": away.resume,
    }
    before = contents(engine.cache)

    def fail(*arguments: object) -> None:
        raise fa.LaunchError("no threads")

    with monkeypatch.context() as patch:
        patch.setattr(f"flashattn_jit.kv.{copy}", fail)
        with pytest.raises(fa.LaunchError):
            acts[copy]()
    assert same(before, contents(engine.cache))
    assert away.is_suspended and not seq.is_suspended
    engine.cache.check()
    away.resume()
    engine.step([(child, [1])])
    engine.verify_all()


@pytest.mark.parametrize("first", ["open", "step", "clear"])
def test_another_thread_gets_an_error(first: str) -> None:
    engine = made()
    getattr(engine.cache, first)(*([] if first == "clear" else [[]]))
    errors: list[BaseException] = []

    def other() -> None:
        try:
            engine.cache.open([2])
        except fa.SequenceError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "thread" in str(errors[0])


@pytest.mark.parametrize(
    "tokens",
    [
        [1.5], [[1]], ["a"], 3, [-1], np.array([2**63], np.uint64), torch.ones(2), [None], [True],
        torch.ones(2).bfloat16(), torch.ones(2).long().to_sparse(), {1, 2}, {1: 2}, "12", b"12",
    ],
    ids=repr,
)  # fmt: skip
def test_tokens_that_are_none(tokens: object) -> None:
    engine = made()
    seq = engine.open([])
    with pytest.raises(fa.InputError, match="token_ids"):
        engine.cache.open(tokens)  # type: ignore[arg-type]
    with pytest.raises(fa.InputError, match=r"items\[0\]\[1\]"):
        engine.cache.step([(seq, tokens)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, iter], ids=lambda k: k.__name__
)
def test_kinds_of_tokens(kind: Any) -> None:
    engine = made()
    for tokens in (list(range(9)), range(9)):
        if kind is not iter:
            assert engine.cache.open(kind(tokens)).kv_len in (0, 8)
            engine.cache.step([(engine.open([]), kind(tokens))]).commit()
            continue
        with pytest.raises(fa.InputError, match=r"pass list\(token_ids\)"):
            engine.cache.open(kind(tokens))
        with pytest.raises(fa.InputError, match=r"pass list\(items\[0\]\[1\]\)"):
            engine.cache.step([(engine.open([]), kind(tokens))])


@pytest.mark.parametrize("number", [[1], {}, None, -1, 7, 1.0, "a", True], ids=repr)
def test_numbers_of_layers_and_groups_that_are_none(number: Any) -> None:
    engine = made()
    seq = run(engine, [1, 2, 3])
    for call in (engine.cache.tensors, engine.cache.group_of):
        with pytest.raises(fa.InputError, match="layer"):
            call(number)
    for call in (seq.group_len, seq.pages, engine.cache.spec.page_bytes):
        with pytest.raises(fa.InputError, match="group"):
            call(number)


@pytest.mark.parametrize("layout", ["page", "layer"])
@pytest.mark.parametrize("head_dim", [1, 1 << 8, 1 << 16])
def test_more_pages_than_the_system_has_memory_for(layout: Any, head_dim: int) -> None:
    spec = fa.kv.Spec((fa.kv.Group((0, 1), 1 << 12, head_dim),), 1 << 10)
    with pytest.raises(fa.InputError, match=r"num_pages=1073741824 .* pass fewer"):
        fa.kv.Cache(spec, 1 << 30, max_kv_len=9, layout=layout)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_pages", 0), ("num_pages", [1, 2]), ("max_kv_len", 0), ("max_kv_len", 2**31 - 1),
        ("layout", "flat"),
        ("eviction", fa.kv.LRU), ("lookback", -1), ("spec", None),
        ("device", "foo"), ("device", "meta:0"),
    ],
)  # fmt: skip
def test_caches_that_are_none(name: str, value: object) -> None:
    spec = fa.kv.Spec((fa.kv.Group((0,), 1, 8),))
    given = {"spec": spec, "num_pages": 4, "max_kv_len": 9, name: value}
    with pytest.raises(fa.InputError, match=name):
        fa.kv.Cache(**given)


def test_an_interrupted_commit_leaves_a_sound_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made()
    one, two = engine.open([]), engine.open([])
    publish = fa.kv.Step._publish

    def interrupted(step: fa.kv.Step, seq: fa.kv.Sequence) -> None:
        if seq is two:
            raise KeyboardInterrupt
        publish(step, seq)

    with monkeypatch.context() as patch:
        patch.setattr(fa.kv.Step, "_publish", interrupted)
        with pytest.raises(KeyboardInterrupt), engine.cache.step(
            [(one, range(8)), (two, range(50, 58)), (engine.open([]), range(9))]
        ) as step:  # fmt: skip
            engine.write(step)
            step.commit()
    engine.cache.check()
    assert [seq.kv_len for seq in engine.cache.sequences] == [8, 8, 0]
    for seq in engine.cache.sequences:
        engine.tokens[seq.number] = seq.token_ids.tolist()
    engine.step([(two, [1, 2])])
    engine.verify_all()


def test_several_steps_are_open_at_once_and_the_default_device_is_another() -> None:
    engine = made()
    with torch.device("meta"):
        one, two = engine.cache.open([np.int64(3), 4]), engine.cache.open([])
        engine.tokens.update({one.number: [], two.number: []})
        first, second = engine.cache.step([(one, [3, 4, 5])]), engine.cache.step([(two, [6])])
        engine.cache.clear()
        with torch.device("cpu"):
            engine.write(second)
        second.commit()
        first.abort()
        engine.tokens[two.number] = [6]
        engine.longest[two.number] = 1
        fork = engine.fork(two)
        fork.suspend()
        fork.resume()
        with engine.cache.step([]) as nothing:
            assert nothing.num_tokens == 0 and nothing.paged().page_indptr.tolist() == [0]
            nothing.commit()
    engine.verify_all()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_caches_sequences_and_appends_are_not_copied(duplicate: Any) -> None:
    engine = made()
    seq = engine.open([])
    with engine.cache.step([(seq, [1])]) as step:
        append = fa.plan_append(step.q_indptr, step.paged())
        for value in (engine.cache, seq, step, append):
            with pytest.raises(fa.InputError, match="cannot be copied"):
                duplicate(value)


def test_tokens_are_read_when_the_step_is_made() -> None:
    engine = made()
    seq, buffer = engine.open([]), torch.arange(8)
    with engine.cache.step([(seq, buffer)]) as step:
        buffer.fill_(-3)  # as engines use their buffers again
        engine.tokens[seq.number] = []
        engine.write(step)
        step.commit()
    engine.tokens[seq.number] = list(range(8))
    engine.verify_all()
    assert engine.open(list(range(9))).num_cached == 8


def test_an_interrupted_commit_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made()
    one, two = engine.open([]), engine.open([])
    step = engine.cache.step([(one, range(9)), (two, range(50, 58))])
    engine.write(step)

    def interrupted(step: fa.kv.Step, seq: fa.kv.Sequence) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fa.kv.Step, "_publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.commit()
    step.commit()
    assert (one.kv_len, two.kv_len) == (9, 8)
    assert step.positions.tolist() == [*range(9), *range(8)]
    for seq in (one, two):
        engine.tokens[seq.number] = seq.token_ids.tolist()
    engine.step([(one, [1]), (two, [2])])
    assert engine.open([*range(8), 1]).num_cached == 8, "published with the next commit"
    engine.verify_all()


def test_a_generator_of_items_that_closes_a_sequence() -> None:
    engine = made()
    seq = engine.open([])

    def items() -> Any:
        yield seq, [1]
        seq.close()

    with pytest.raises(fa.SequenceError, match="closed"):
        engine.cache.step(items())
    engine.cache.check()


def test_namespaces_without_pages_are_forgotten() -> None:
    engine = made()
    for i in range(20):
        engine.open([1], namespace=b"%d" % i).close()
    one, two = engine.open([], namespace=b"a"), engine.open([], namespace=b"a")
    one.close()
    engine.step([(two, list(range(9)))])  # from a root that was dropped
    assert engine.open(list(range(9)), namespace=b"a").num_cached == 8
    engine.verify_all()
    for seq in engine.cache.sequences:
        seq.close()
    assert len(list(engine.cache.tree.nodes())) == 2
    engine.cache.clear()
    assert not list(engine.cache.tree.nodes())


def sinks_alone(**options: object) -> Engine:
    """A mask that gives a page up before its first query comes: all but the first four keys."""
    variant = fa.variant(mask_mod=lambda b, h, q, k: (k <= q) & (k < 4))
    group = fa.kv.Group((0,), 1, 4, variant=variant, **options)  # type: ignore[arg-type]
    spec = fa.kv.Spec((group,), 4, torch.float32)
    lookback = 0 if options.get("reclaim") is None else 8
    cache = fa.kv.Cache(spec, 16, max_kv_len=64, lookback=lookback)
    return Engine(cache, [lambda q, k: k <= q and k < 4])


def test_a_trim_does_not_end_in_the_null_page() -> None:
    """New tokens would be written to it."""
    engine = sinks_alone()
    seq = engine.open([])
    engine.step([(seq, list(range(12)))])
    assert seq.pages()[0] and not seq.pages()[1:].any()
    with pytest.raises(fa.InputError, match="too far back"):
        seq.trim(10)
    seq.trim(8)
    engine.tokens[seq.number] = list(range(8))
    engine.step([(seq, [1])])
    engine.verify_all()


@pytest.mark.parametrize("reclaim", ["holes", "compact"])
def test_a_trim_within_lookback_finds_its_page(reclaim: str) -> None:
    engine = sinks_alone(reclaim=reclaim)
    seq = engine.open([])
    engine.step([(seq, list(range(24)))])
    assert np.count_nonzero(seq.pages()) == 3, "the pages of lookback are for new tokens"
    seq.trim(17)
    del engine.tokens[seq.number][17:]
    engine.step([(seq, [1])])
    seq.trim(16)
    del engine.tokens[seq.number][16:]
    engine.verify_all()
    other = engine.open([*range(16), 9])
    assert other.num_cached == 16
    other.trim(9)
    del engine.tokens[other.number][9:]
    engine.step([(other, [1])])
    engine.verify_all()


def test_pages_that_no_group_holds_are_not_published() -> None:
    """Nothing would ever evict them."""
    variant = fa.variant(mask_mod=lambda b, h, q, k: k < 0)
    spec = fa.kv.Spec((fa.kv.Group((0,), 1, 4, variant=variant),), 4, torch.float32)
    engine = Engine(fa.kv.Cache(spec, 16, max_kv_len=64), [lambda q, k: False])
    seq = engine.open([])
    engine.step([(seq, list(range(12)))])
    engine.cache.clear()
    seq.trim(8)
    engine.tokens[seq.number] = list(range(8))
    engine.step([(seq, [1])])
    seq.close()
    assert not list(engine.cache.tree.nodes())


def test_a_sequence_that_is_not_published_is_apart_from_the_prefixes() -> None:
    cache = fa.kv.Cache(fa.kv.Spec((fa.kv.Group((0,), 1, 8),), 4, torch.float32), 20, max_kv_len=64)
    tokens = list(range(12))
    for publish in (True, False, True):
        seq = cache.open(tokens, publish=publish)
        found = seq.num_cached
        with cache.step([(seq, tokens[found:])]) as step:
            step.commit()
        child = seq.fork()
        assert child.publishes == publish
        assert found == (8 if publish and cache.stats().hit_tokens else 0)
        child.close()
        seq.close()
    stats = cache.stats()
    assert (stats.asked_tokens, stats.hit_tokens) == (24, 8)
    assert stats.groups[0].evictable == 3
    cache.check()
