"""Groups with tails: appends of every size, bytes, trims, prefixes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from flashattn_jit.ops.plan import Plan
from tests.kv.engine import contents, same

HEADS, DIM, DIM_V, SIZE = 2, 24, 16, 64
Format = fa.kv.Format
KIVI = Format("int4", "channel", zero=True), Format("int4", group=8, scale_dtype=torch.float16)
PAIRS: list[Any] = [
    KIVI, (Format("nf4", "channel", torch.float16), None), (None, Format("int8", "channel")),
    (Format("e4m3", "channel", rotate=True), Format("int8", "channel", zero=True)),
]  # fmt: skip


def group(formats: Any = KIVI, **more: Any) -> fa.kv.Group:
    given = {"variant": fa.Causal(), "kv_format": formats, **more}
    return fa.kv.Group((0, 1), HEADS, DIM, DIM_V, 2 * HEADS, **given)


def made(
    formats: Any = KIVI, num_pages: Any = (40, 8), page_size: int = SIZE, **more: Any
) -> fa.kv.Cache:
    options = {name: more.pop(name) for name in ("lookback", "layout", "device") if name in more}
    spec = fa.kv.Spec(group(formats, **more), page_size, torch.float32)
    return fa.kv.Cache(spec, num_pages, max_kv_len=1024, **options)


def rows(layer: int, part: int, begin: int, end: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * layer + part)
    return torch.randn(1024, HEADS, (DIM, DIM_V)[part], generator=generator)[begin:end]


def grow(cache: fa.kv.Cache, seq: fa.kv.Sequence, *counts: int) -> None:
    """Token n has row n of `rows`."""
    for count in counts:
        begin = seq.kv_len
        with cache.step([(seq, list(range(begin, begin + count)))]) as step:
            for layer in (0, 1):
                step.append(layer, *(rows(layer, i, begin, begin + count) for i in (0, 1)))
            step.commit()
        cache.check()


def check_rows(cache: fa.kv.Cache, seq: fa.kv.Sequence, wanted: Any = rows) -> None:
    """Full pages are what `Format.quantize` makes of their rows; the last rows are as they were."""
    size = cache.spec.page_size
    full = seq.kv_len // size * size
    table, tail = (torch.from_numpy(t.view.astype(int)) for t in seq.tables)
    for layer in (0, 1):
        for part, form in enumerate(cache.spec.groups[0].formats):
            own = wanted(layer, part, 0, seq.kv_len)
            pages = own[:full].unflatten(0, (-1, size))
            held = cache.tensors(layer)[part]
            if form is not None:
                pages, held = form.quantize(pages).dequantize(), held.dequantize()
            torch.testing.assert_close(held[table[: full // size]], pages, rtol=0, atol=0)
            if full < seq.kv_len:
                held = cache.tails(layer)[part][tail[-1], : seq.kv_len - full]
                torch.testing.assert_close(held, own[full:], rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["page", "layer"])
@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("page_size", [64, 128])
def test_pages_are_quantised_when_they_are_full(formats, layout, page_size) -> None:
    cache = made(formats, layout=layout, page_size=page_size)
    for counts in ((63, 1, 1), (64,), (0, 65, 63, 0, 1), (1000,), (10, 300, 5)):
        with cache.open([0], publish=False) as seq:
            for count in counts:
                grow(cache, seq, count)
                check_rows(cache, seq)
                assert cache.stats().groups[1].used == (seq.kv_len % page_size > 0)
    for number, pool in enumerate(cache.pools):
        num_bytes = sum(m.nbytes for m in pool.memory)
        assert num_bytes == (pool.num_pages + 1) * cache.spec.page_bytes(number)


@pytest.mark.parametrize("formats", PAIRS)
def test_a_cache_made_in_inference_mode_is_written_outside_of_it(formats) -> None:
    with torch.inference_mode():
        cache = made(formats)
        inside = cache.open([0], publish=False)
        grow(cache, inside, 70)
    grow(cache, inside, 30, 60)
    check_rows(cache, inside)


def test_rows_are_changed_by_the_transform_before_they_wait() -> None:
    rope = fa.RoPE()
    cache = made((Format("int8", "channel"), None), transform=rope)
    seq = cache.open([0])
    grow(cache, seq, 30, 200, 1, 20, 5)
    table = fa.Paged(torch.tensor([0, 1]), torch.zeros(1).int(), torch.tensor([256]), 256)
    changed = {}
    for layer in (0, 1):
        k, v = torch.zeros(1, 256, HEADS, DIM), torch.zeros(1, 256, HEADS, DIM_V)
        given = rows(layer, 0, 0, 256), rows(layer, 1, 0, 256)
        fa.append_paged_kv(*given, k, v, torch.tensor([0, 256]), table, transform=rope)
        changed[layer] = k[0], v[0]
    assert not torch.equal(changed[0][0], rows(0, 0, 0, 256))
    check_rows(cache, seq, lambda layer, part, a, b: changed[layer][part][a:b])


def test_an_aborted_step_leaves_the_tail() -> None:
    cache = made()
    seq = cache.open([0])
    grow(cache, seq, 100)
    for count in (3, 28, 90, 400):
        with cache.step([(seq, [7] * count)]) as step:
            for layer in (0, 1):
                step.append(layer, torch.ones(count, HEADS, DIM), torch.ones(count, HEADS, DIM_V))
        cache.check()
        check_rows(cache, seq)
    grow(cache, seq, 28, 1)
    check_rows(cache, seq)


def test_wrong_rows_write_nothing() -> None:
    cache = made()
    seq = cache.open([0])
    grow(cache, seq, 60)
    for count in (10, 200):  # through the tail, and beside it
        with cache.step([(seq, [1] * count)]) as step:
            before = contents(cache)
            good = torch.ones(count, HEADS, DIM), torch.ones(count, HEADS, DIM_V)
            for k, v in ((good[0][1:], good[1]), (good[0].double(), good[1]), (good[1], good[0])):
                with pytest.raises(InputError):
                    step.append(0, k, v)
                assert same(before, contents(cache))


def test_forks_have_tails_of_their_own() -> None:
    cache = made()
    seq = cache.open([0])
    grow(cache, seq, 100)
    child = seq.fork()
    assert cache.stats().groups[1].used == 1
    with cache.step([(child, [7] * 30)]) as step:
        for layer in (0, 1):
            step.append(layer, torch.ones(30, HEADS, DIM), torch.ones(30, HEADS, DIM_V))
        step.commit()
    assert cache.stats().groups[1].copied == 1 and cache.stats().groups[1].used == 2
    check_rows(cache, seq)
    ones = torch.ones(30, HEADS, 64)

    def both(layer: int, part: int, a: int, b: int) -> torch.Tensor:
        own = rows(layer, part, 0, 100)
        return torch.cat([own, ones[..., : own.shape[2]]])[a:b]

    check_rows(cache, child, both)
    seq.suspend()
    assert cache.stats().groups[1].used == 1
    seq.resume()
    check_rows(cache, seq)
    grow(cache, seq, 28)
    check_rows(cache, seq)


def test_trims() -> None:
    cache = made(lookback=5)
    seq = cache.open([0])
    grow(cache, seq, 130)
    seq.trim(125)  # the page before is still in the tail
    check_rows(cache, seq)
    grow(cache, seq, 3)
    check_rows(cache, seq)
    grow(cache, seq, 10)
    before = contents(cache)
    remedy = "trim to a multiple of page_size=64, or make the cache with a larger lookback than 5"
    with pytest.raises(InputError, match=f"kv_len=120 is in .* group 0 has not kept: {remedy}"):
        seq.trim(120)
    assert same(before, contents(cache))
    seq.trim(64)
    assert cache.stats().groups[1].used == 0
    grow(cache, seq, 100)
    check_rows(cache, seq)
    other = cache.open([*range(128), 3])
    assert other.num_cached == 128
    with pytest.raises(InputError, match=r"of pages that open\(\) found there are no rows"):
        other.trim(127)


def test_a_cache_of_one_page_trims_anywhere() -> None:
    spec = fa.kv.Spec(group(), SIZE, torch.float32)
    cache = fa.kv.Cache(spec, (4, 4), max_kv_len=SIZE)
    seq = cache.open([0])
    grow(cache, seq, SIZE)
    check_rows(cache, seq)
    seq.trim(20)
    grow(cache, seq, SIZE - 20)
    check_rows(cache, seq)


def test_prefixes_are_full_pages() -> None:
    cache = made()
    first = cache.open([0])
    grow(cache, first, 200)
    other = cache.open(list(range(250)))
    assert other.num_cached == 192 and cache.stats().groups[0].shared == 3
    assert cache.stats().groups[1].used == 1  # that of the first
    check_rows(cache, other)
    grow(cache, other, 10)
    check_rows(cache, other)
    first.close()
    check_rows(cache, other)
    other.suspend()
    third = cache.open(list(range(65)))
    assert third.num_cached == 64
    other.resume()
    check_rows(cache, other)


def test_pages_run_out() -> None:
    cache = made(num_pages=(8, 2))
    first, second = cache.open([0], publish=False), cache.open([0], publish=False)
    grow(cache, first, 64, 1)
    grow(cache, second, 63)
    with pytest.raises(fa.OutOfPages, match="the tail of group 0 needs 1 more pages") as raised:
        grow(cache, second, 2)  # its page of the tail stays until the commit
    assert raised.value.group == 1 and second.kv_len == 63
    grow(cache, second, 1, 1)
    first.suspend()
    grow(cache, second, 130)
    check_rows(cache, second)


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("variant", [fa.Causal(), fa.SlidingWindow(100), fa.Chunked(48)])
def test_estimates_are_the_bytes_of_a_real_cache(formats, variant) -> None:
    groups = group(formats, variant=variant & fa.Causal()), fa.kv.Group((2,), 1, 8)
    spec = fa.kv.Spec(groups, SIZE, torch.float16)
    hook = variant.hooks()["mask_mod"]
    for kv_len in (0, 1, 63, 64, 65, 200, 256):
        found = fa.kv.estimate(spec, kv_len, batch=2)
        if kv_len:
            cache = fa.kv.Cache(spec, found.num_pages, max_kv_len=512)
            num_bytes = sum(m.nbytes for p in cache.pools for m in p.memory)
            assert found.cache_bytes == num_bytes
            sequences = [cache.open([0], publish=False) for _ in range(2)]
            for n in range(kv_len):
                with cache.step([(seq, [n]) for seq in sequences]) as step:
                    step.commit()
            fewer = (*found.num_pages[:2], found.num_pages[2] - 1)
            cache = fa.kv.Cache(spec, fewer, max_kv_len=512, device="meta")
            sequences = [cache.open([0], publish=False) for _ in range(2)]
            with pytest.raises(fa.OutOfPages), cache.step([(seq, [0]) for seq in sequences]):
                pass
        codes, _, tail = found.groups
        full = kv_len // SIZE * SIZE
        zero, keys = torch.tensor(0), torch.arange(kv_len)
        seen = torch.as_tensor(hook(zero, zero, torch.tensor(kv_len - 1), keys)).expand(kv_len)
        assert codes.keys == int(seen[:full].sum()) and tail.keys == int(seen[full:].sum())
        assert tail.kind == "tail" and "tail" in str(found)
        if kv_len and isinstance(variant, fa.Causal):
            used = 2 * (kv_len // SIZE) * spec.page_bytes(0) + 2 * (kv_len % SIZE) * (
                spec.page_bytes(2) // SIZE
            )
            plain = 2 * kv_len * spec.page_bytes(1) // SIZE
            assert found.held_bytes - found.rounding_bytes == used + plain


def test_channel_formats_are_options_of_a_recommendation() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=128
    )
    workload = [fa.kv.Request(100, 60) for _ in range(20)]
    found = fa.kv.recommend(config, 4 << 20, workload, formats=[KIVI], page_sizes=[64], max_batch=8)
    (option,) = found.options
    assert option.replay.fits and len(option.num_pages) == 2
    assert option.cache_bytes <= 4 << 20 and "int4, by channel / int4:8" in str(found)
    fa.kv.Cache(option.spec, option.num_pages, max_kv_len=256)


def attention(kind: Any = fa.CascadeAttention) -> Any:
    return kind(
        fa.Causal(), num_q_heads=2 * HEADS, num_kv_heads=HEADS, head_dim=DIM, head_dim_v=DIM_V,
        q_dtype=torch.float32,
    )  # fmt: skip


def test_attentions_of_one_group_may_have_other_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made((Format("int8", "channel"), None))
    first = cache.open([0])
    grow(cache, first, 200)
    second = cache.open(list(range(201)))
    one, two = attention(), attention()
    times = iter([2.0, 1.0, 1.0, 2.0])  # a cascade is faster for one, and slower for the other
    monkeypatch.setattr(Plan, "predicted_ns", property(lambda plan: next(times)))
    with cache.step([(first, [1]), (second, [2])]) as step:
        step.plan(one)
        step.plan(two)
        assert [len(step.tensors(0, x)[0]) for x in (one, two, None)] == [3, 2, 2]
        step.append(0, *(rows(0, part, 200, 202) for part in (0, 1)))
        q = torch.randn(2, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1))
        outs = [x.run(q, *step.tensors(0, x)) for x in (one, two)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_what_a_step_refuses() -> None:
    cache = made()
    seq = cache.open([0])
    with cache.step([(seq, [1, 2])]) as step:
        with pytest.raises(
            InputError, match=r"group 0 is not planned yet: call plan\(attention, 0"
        ):
            step.tensors(0)
        with pytest.raises(InputError, match=r"newest keys are a level .* an fa.CascadeAttention"):
            step.plan(attention(fa.BatchAttention))
    with pytest.raises(InputError, match="layer 0 has no tail"):
        fa.kv.Cache(fa.kv.Spec(fa.kv.Group((0,), 2, 8)), 4, max_kv_len=64).tails(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(page_size=48), "page_size=48, but a group has scales of channels.*=64 or a"),
        (lambda: made(num_pages=40), "num_pages=40, but the spec has 1 groups and 1 tails: pass"),
        (lambda: made(num_pages=[40]), "num_pages has 1 entries, but the spec has 1 groups and"),
        (lambda: group(reclaim="compact"), 'reclaim="compact", which moves keys, does not go with'),
        (
            lambda: fa.kv.Group((0,), 1, 24, 16, v_in_k=True, kv_format=Format("int8", "channel")),
            "v_in_k=True does not go with scale='channel'",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()
