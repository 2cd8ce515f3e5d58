"""Workloads replayed through caches without memory, and which cache is chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.kv.capacity.replay import _Replay

Request = fa.kv.Request
SIZES = SimpleNamespace(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    hidden_size=64, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
FULL = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=64)
ROW = 2 * 2 * 4 * 16 * 2
"""Bytes of a token of FULL in bf16."""
INT8 = fa.kv.Format("int8")


def replay(num_pages: int, requests: list[Request], **options: int) -> fa.kv.Replay:
    """On a cache with memory, of pages of 4 tokens."""
    spec = fa.kv.Spec.from_config(FULL, page_size=4)
    given = {"max_batch": 8, "max_step_tokens": 64, **options}
    cache = fa.kv.Cache(spec, num_pages, max_kv_len=200)
    found = _Replay(cache, requests, **given).run()
    cache.check()
    assert not cache.sequences or not found.fits
    return found


def test_steps_of_a_workload_with_room() -> None:
    """A prompt's last chunk has the first output, each later one takes a step."""
    assert replay(99, [Request(8, 4)]).num_steps == 4
    assert replay(99, [Request(1, 1)]).num_steps == 1
    assert replay(99, [Request(20, 4)], max_step_tokens=8).num_steps == 3 + 3
    found = replay(99, [Request(8, 4)] * 3)
    assert (found.num_steps, found.peak_batch, found.mean_batch) == (4, 3, 3.0)
    assert found.peak_bytes == 3 * 3 * 4 * ROW  # 11 keys each
    assert (found.preemptions, found.recomputed_tokens, found.hit_tokens) == (0, 0, 0)
    found = replay(99, [Request(8, 4)] * 3, max_batch=1, max_step_tokens=8)
    assert (found.num_steps, found.peak_batch) == (12, 1)
    later = [Request(8, 4), Request(8, 4, arrival_step=100)]  # nothing runs in between
    assert replay(99, later).num_steps == 8
    assert replay(99, [later[0], Request(8, 4, arrival_step=2)]).num_steps == 6


def test_prompts_that_share_a_prefix() -> None:
    one, two = Request(13, 2, prefix_len=10), Request(13, 2, prefix_len=10, arrival_step=5)
    other = Request(13, 2, prefix_len=10, prefix=1, arrival_step=5)
    assert replay(99, [one, two]).hit_tokens == 8  # whole pages
    assert replay(99, [one, other]).hit_tokens == 0
    assert replay(99, [one, Request(13, 2, arrival_step=5)]).hit_tokens == 0


def test_sequences_that_are_closed_for_room() -> None:
    requests = [Request(8, 12)] * 3  # 19 keys, 5 pages each
    found = replay(10, requests)
    assert found.fits and found.preemptions >= 1 and found.num_steps > 12
    assert found.peak_bytes <= 10 * 4 * ROW
    assert found.recomputed_tokens <= found.preemptions * 19
    assert replay(15, requests).preemptions == 0
    assert not replay(4, requests).fits
    assert replay(5, requests).num_steps <= 36


def test_every_option_is_a_cache_within_the_budget() -> None:
    requests = [Request(30 + i, 10, prefix_len=16, arrival_step=i) for i in range(12)]
    given = {"page_sizes": (4, 8), "max_batch": 8, "max_step_tokens": 16}
    found = fa.kv.recommend(SIZES, 100_000, requests, formats=(None, INT8), **given)
    assert [(x.kv_format, x.spec.page_size) for x in found.options] == [
        (None, 4), (None, 8), (INT8, 4), (INT8, 8),
    ]  # fmt: skip
    assert found.max_kv_len == 50
    for option in found.options:
        cache = fa.kv.Cache(option.spec, option.num_pages, max_kv_len=found.max_kv_len)
        num_bytes = sum(m.nbytes for p in cache.pools for m in p.memory)
        assert num_bytes == option.cache_bytes <= 100_000
        assert num_bytes > 80_000
        assert _Replay(cache, requests, 8, 16).run() == option.replay
        assert option.replay.peak_bytes <= num_bytes and option.replay.hit_tokens
    assert "*" in str(found) and "int8" in str(found)


@pytest.mark.parametrize(
    ("budget", "gain", "wanted", "serves"),
    [(200_000, 1.0, None, True), (60_000, 1.9, INT8, True), (60_000, 2.0, None, False),
     (16_000, 9.0, INT8, False)],
)  # fmt: skip
def test_a_less_precise_format_must_save_steps(
    budget: int, gain: float, wanted: fa.kv.Format | None, serves: bool
) -> None:
    """4 requests of 40 keys: 82 KB in bf16, 51 KB in int8, which takes half the steps at 60 KB."""
    requests = [Request(31, 10)] * 4
    found = fa.kv.recommend(
        FULL, budget, requests, formats=(None, INT8), page_sizes=(4, 8), gain=gain
    )
    assert found.best.kv_format is wanted and found.best.serves is serves
    assert found.best.replay.fits
    of_format = [x for x in found.options if x.kv_format is wanted and x.replay.fits]
    assert found.best.replay.num_steps == min(x.replay.num_steps for x in of_format)
    assert found.best in found.options


def test_latent_attention_and_its_formats() -> None:
    config = SimpleNamespace(
        num_hidden_layers=2, num_attention_heads=4, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    e4m3 = fa.kv.Format("e4m3", group=8)
    found = fa.kv.recommend(config, 80_000, [Request(31, 10)] * 2, formats=(None, e4m3))
    assert [x.spec.page_bytes(0) for x in found.options[::3]] == [
        2 * 16 * 40 * 2, 2 * 16 * (32 + 4 * 4 + 16),
    ]  # fmt: skip
    names = [x.kv_format for x in fa.kv.recommend(config, 80_000, [Request(31, 10)]).options[::3]]
    assert names == [None, INT8, fa.kv.Format("int4", group=32)]


def test_a_budget_for_more_pages_than_a_cache_can_have() -> None:
    few, many = (fa.kv.recommend(FULL, size, [Request(9, 3)] * 3) for size in (1 << 24, 1 << 60))
    assert many.best.num_pages == (2**31 - 2,)
    assert [x.replay for x in many.options] == [x.replay for x in few.options]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget_bytes": 0}, "budget_bytes=0"), ({"budget_bytes": 900}, "no room for the longest"),
        ({"workload": []}, "workload"), ({"workload": [3]}, "workload"),
        ({"formats": ()}, "formats"), ({"page_sizes": 16}, "page_sizes"),
        ({"page_sizes": (0,)}, "page_size=0"), ({"max_batch": 0}, "max_batch=0"),
        ({"gain": 0.9}, "gain=0.9"), ({"gain": "a"}, "gain"), ({"gain": float("nan")}, "gain"),
        ({"max_step_tokens": 7, "max_batch": 8}, "max_step_tokens=7"),
        ({"formats": ("int8",)}, "kv_format"), ({"config": SimpleNamespace()}, "num_hidden_layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_recommended(change: dict[str, object], message: str) -> None:
    given = {"config": FULL, "budget_bytes": 1 << 20, "workload": [Request(9, 3)], **change}
    with pytest.raises(fa.InputError, match=message):
        fa.kv.recommend(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"prompt_len": 0}, {"output_len": 0}, {"prefix_len": 10}, {"prefix_len": -1},
     {"prefix": -1}, {"arrival_step": -1}, {"prompt_len": 2.5}],
    ids=str,
)  # fmt: skip
def test_requests_that_are_none(change: dict[str, object]) -> None:
    with pytest.raises(fa.InputError, match=next(iter(change))):
        Request(**{"prompt_len": 9, "output_len": 3, **change})  # type: ignore[arg-type]


def test_under_another_default_device() -> None:
    requests = [Request(31, 10)] * 4
    wanted = fa.kv.recommend(SIZES, 40_000, requests)
    with torch.device("meta"):
        found = fa.kv.recommend(SIZES, 40_000, requests)
    assert str(found) == str(wanted)
