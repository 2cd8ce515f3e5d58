"""`PagedCache`: generate() over pages gives the tokens that it gives with transformers' cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip(
    "transformers", minversion="5.23", reason="needs the extra [examples]"
)

import flashattn_jit as fa  # noqa: E402
from flashattn_jit.errors import InputError, OutOfPages  # noqa: E402
from flashattn_jit.integrations import _latent  # noqa: E402
from flashattn_jit.integrations.transformers import PagedCache  # noqa: E402
from tests.integrations.decoders import DECODERS, VOCABULARY, build  # noqa: E402

FAMILIES = {
    "llama": "grouped heads", "mistral": "a window", "llama4": "chunks", "gpt_oss": "sinks",
    "gemma2": "a soft cap, layers of two kinds", "falcon_mqa": "one key head", "bloom": "ALiBi",
    "gpt2": "positions of its own",
}  # fmt: skip
OPTIONS = {
    "greedy": {}, "beams": {"num_beams": 3}, "sampled": {"do_sample": True, "top_k": 20},
}  # fmt: skip
NEW = 20


@pytest.fixture(scope="module", params=list(FAMILIES))
def models(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    yield build(DECODERS[request.param])


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    return build(DECODERS["llama"])


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows, two of them with padding in front."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, VOCABULARY, (3, 18), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[2, :1] = 0
    return ids, mask


def generated(model: Any, options: dict[str, Any], **more: Any) -> torch.Tensor:
    ids, mask = prompts()
    torch.manual_seed(1)
    tokens = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, **{"use_cache": True, **options, **more}
    )
    assert isinstance(tokens, torch.Tensor)
    return tokens


@pytest.mark.parametrize("options", list(OPTIONS))
def test_generate_gives_the_same_tokens(models: tuple[Any, Any], options: str) -> None:
    eager, ours = models
    cache = PagedCache.for_model(ours, 9 * 40, page_size=4)
    wanted = generated(eager, OPTIONS[options])
    assert torch.equal(generated(ours, OPTIONS[options], past_key_values=cache), wanted)
    cache.pages.check()
    stats = cache.pages.stats().groups
    assert sum(g.used for g in stats) > 0
    if options == "beams":
        assert sum(g.shared for g in stats) > 0  # beams have common pages
    cache.reset()
    cache.pages.check()
    assert not cache.pages.sequences and all(g.used == 0 for g in cache.pages.stats().groups)


def test_windows_give_pages_back_and_padding_has_none(llama: tuple[Any, Any]) -> None:
    _, ours = build(DECODERS["mistral"])
    cache = PagedCache.for_model(ours, 200, page_size=4)
    generated(ours, {}, past_key_values=cache)
    (group,) = cache.pages.stats().groups
    assert group.reclaimed > 10 and group.used < 3 * 5
    cache = PagedCache.for_model(llama[1], 200, page_size=1)
    ids, mask = prompts()
    llama[1](ids, attention_mask=mask, past_key_values=cache)
    assert cache.pages.stats().groups[0].used == int(mask.sum())
    assert [s.kv_len for s in cache.sequences] == mask.sum(1).tolist()


def test_keys_with_scales_of_channels_wait_in_a_tail(llama: tuple[Any, Any]) -> None:
    eager, ours = llama
    form = fa.kv.Format("int8", "channel"), fa.kv.Format("int8")
    spec = fa.kv.Spec.from_config(ours.config, page_size=64, dtype=torch.float32, kv_format=form)

    def made() -> PagedCache:
        return PagedCache(fa.kv.Cache(spec, (20, 20), max_kv_len=256))

    # No page is full: the tokens are those of full precision.
    assert torch.equal(generated(ours, {}, past_key_values=made()), generated(eager, {}))
    ids = torch.randint(2, VOCABULARY, (1, 160), generator=torch.Generator().manual_seed(7))
    wanted, cache = eager(ids).logits, made()
    found = [ours(x, past_key_values=cache).logits for x in ids.split([100, 1, 50, 9], 1)]
    error = (torch.cat(found, 1) - wanted).norm() / wanted.norm()
    assert 1e-5 < error < 0.05
    assert [g.used for g in cache.pages.stats().groups] == [3, 1]
    cache.crop(-20)
    with pytest.raises(InputError, match="trim to a multiple of page_size=64"):
        cache.crop(-40)
    assert cache.get_seq_length() == 140


def test_crop_select_and_repeat(llama: tuple[Any, Any]) -> None:
    """Against transformers' cache, by the logits of the tokens that follow."""
    _, ours = llama
    ids, mask = prompts()
    tail = torch.randint(2, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(6))
    chosen = torch.tensor([1, 3, 5])
    logits = []
    for cache in (PagedCache.for_model(ours, 400, page_size=4), transformers.DynamicCache()):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        ours(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(chosen)
        cache.crop(-6)
        assert cache.get_seq_length() == 12
        kept = torch.cat([mask[:, :12].repeat_interleave(2, 0)[chosen], torch.ones_like(tail)], 1)
        positions = (kept.cumsum(1) - 1)[:, -5:]
        logits.append(ours(tail, attention_mask=kept, position_ids=positions,
                           past_key_values=cache).logits)  # fmt: skip
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.tensor([0.0, 1.7]), r"list of int.* from 3 rows, got \[2\] of torch.float32"),
        (torch.tensor(1), r"from 3 rows, got \[\] of torch.int64"),
        (torch.tensor([[0, 1]]), r"from 3 rows, got \[1, 2\] of torch.int64"),
        (torch.tensor([0, 1, 1], dtype=torch.uint8), r"from 3 rows, got \[3\] of torch.uint8"),
        (torch.empty(2, dtype=torch.int64, device="meta"), r"got \[2\] of torch.int64 on meta"),
        ([0.5], r"got \[1\] of torch.float32"),
        (None, "must be a 1-d tensor, array or list of int.* from 3 rows, got None"),
        ([[0], [1, 2]], "from 3 rows, got <list>"),
        (torch.tensor([0, 3, 1]), r"\[3\] of torch.int64 has row 3 of a cache with 3 rows"),
        ([-4], r"has row -4 of a cache with 3 rows"),
    ],
)
def test_rows_that_no_index_names(llama: tuple[Any, Any], given: Any, message: str) -> None:
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)
    ours(ids, attention_mask=mask, past_key_values=cache)
    before = list(cache.sequences)
    two = torch.tensor([True, False])
    with pytest.raises(InputError, match=f"^indices .*{message}"):
        cache.batch_select_indices(given)
    with pytest.raises(InputError, match=f"^beam_idx .*{message}"):
        cache.reorder_cache(given)
    with pytest.raises(InputError, match=r"^indices is \[2\] of torch.bool, but .* has 3 rows"):
        cache.batch_select_indices(two)
    with pytest.raises(InputError, match=r"^beam_idx must be .* rows, got \[2\] of torch.bool"):
        cache.reorder_cache(two)
    assert cache.sequences == before and cache.length == 18
    cache.pages.check()


@pytest.mark.parametrize("form", ["tensor", "int32", "array", "list"])
def test_rows_are_selected_by_integers_and_by_bools(llama: tuple[Any, Any], form: str) -> None:
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)
    forms = {"tensor": torch.tensor, "array": np.array, "list": list}
    forms["int32"] = lambda x: torch.tensor(x, dtype=None if True in x else torch.int32)
    cache.batch_select_indices([4])  # no row yet, and nothing to select
    ours(ids, attention_mask=mask, past_key_values=cache)
    rows = list(cache.sequences)
    cache.reorder_cache(forms[form]([2, -2, 0]))
    assert cache.sequences == [rows[2], rows[1], rows[0]]
    cache.batch_select_indices(forms[form]([True, False, True]))
    assert cache.sequences == [rows[2], rows[0]]
    cache.batch_select_indices(forms[form]([2 - 1]))
    assert cache.sequences == [rows[0]]
    cache.batch_select_indices([])
    assert not cache.sequences and cache.length == 0
    cache.pages.check()


def test_a_cache_is_cropped_to_nothing_and_used_again(llama: tuple[Any, Any]) -> None:
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)
    first = ours(ids, attention_mask=mask, past_key_values=cache).logits
    cache.crop(0)
    assert cache.length == 18
    cache.crop(-18)
    assert cache.length == 0 and all(s.kv_len == 0 for s in cache.sequences)
    again = ours(ids, attention_mask=mask, past_key_values=cache).logits
    assert torch.equal(first[mask.bool()], again[mask.bool()])
    cache.reset()
    one = ours(ids[:1], past_key_values=cache).logits
    torch.testing.assert_close(one, ours(ids[:1], use_cache=False).logits, rtol=1e-4, atol=1e-4)
    cache.pages.check()


def test_crop_past_what_a_window_keeps_is_an_error_and_changes_nothing() -> None:
    _, ours = build(DECODERS["mistral"])
    ids, mask = prompts()
    for lookback, fits in ((0, False), (9, True)):
        cache = PagedCache.for_model(ours, 400, page_size=1, lookback=lookback)
        ours(ids, attention_mask=mask, past_key_values=cache)
        if fits:
            cache.crop(-9)
            assert cache.length == 9
        else:
            with pytest.raises(InputError, match="lookback"):
                cache.crop(-9)
            assert cache.length == 18 and [s.kv_len for s in cache.sequences] == [18, 11, 17]
    for wrong in (1, -19, 0.5):
        with pytest.raises(InputError, match="tokens_to_remove"):
            cache.crop(wrong)  # type: ignore[arg-type]


def test_a_forward_pass_that_fails_leaves_the_cache_as_it_was(llama: tuple[Any, Any]) -> None:
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)
    ours(ids, attention_mask=mask, past_key_values=cache)
    used = cache.pages.stats().groups[0].used

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    token = torch.tensor([[3], [4], [5]])
    longer = torch.cat([mask, torch.ones_like(token)], 1)
    hook = ours.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        ours(token, attention_mask=longer, past_key_values=cache)
    hook.remove()
    assert cache.length == 18
    wanted = ours(token, attention_mask=longer, past_key_values=cache).logits
    assert cache.length == 19 and cache.pages.stats().groups[0].used >= used
    fresh = PagedCache.for_model(ours, 400, page_size=4)
    ours(ids, attention_mask=mask, past_key_values=fresh)
    assert torch.equal(ours(token, attention_mask=longer, past_key_values=fresh).logits, wanted)
    small = PagedCache.for_model(ours, 32, page_size=4)
    with pytest.raises(OutOfPages):
        ours(ids, attention_mask=mask, past_key_values=small)
    small.pages.check()
    assert small.length == 0 and not small.pages.sequences  # nor is the number of rows fixed
    ours(ids[:1, :9], past_key_values=small)
    assert small.length == 9


def test_a_first_forward_pass_that_fails_leaves_no_sequences(llama: tuple[Any, Any]) -> None:
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = ours.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        ours(ids, attention_mask=mask, past_key_values=cache)
    hook.remove()
    wanted = ours(ids[:1], use_cache=False).logits
    torch.testing.assert_close(ours(ids[:1], past_key_values=cache).logits, wanted)
    assert cache.batch_size == 1 and len(cache.pages.sequences) == 1
    hook = ours.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        ours(ids[:1], past_key_values=cache)
    hook.remove()
    cache.reset()
    cache.pages.check()
    assert not cache.pages.sequences and cache.pages.stats().groups[0].used == 0


def test_a_mask_without_the_cached_tokens_and_no_use_of_the_cache(llama: tuple[Any, Any]) -> None:
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)
    with pytest.raises(InputError, match="use_cache=False with a PagedCache"):
        generated(ours, {}, past_key_values=cache, use_cache=False)
    ours(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(InputError, match="attention_mask has 1 positions for 18 cached and 1 new"):
        ours(ids[:, :1], attention_mask=mask[:, -1:], past_key_values=cache)
    assert cache.length == 18
    cache.reset()
    cache.pages.check()


def test_what_a_paged_cache_refuses(llama: tuple[Any, Any]) -> None:
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)
    right = mask.flip(1)
    ours(ids, attention_mask=right, past_key_values=cache)  # padding behind a prompt, so far
    after = torch.cat([right, torch.ones(3, 1, dtype=torch.int64)], 1)
    with pytest.raises(InputError, match="row 1 has padding between its tokens"):
        ours(ids[:, :1], attention_mask=after, past_key_values=cache)
    cache.reset()
    holes = mask.clone()
    holes[0, 5] = 0
    with pytest.raises(InputError, match="row 0 has padding between its tokens"):
        ours(ids, attention_mask=holes, past_key_values=cache)
    ours(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(InputError, match="the batch has 2 rows, but the cache holds 3"):
        ours(ids[:2], past_key_values=cache)
    with pytest.raises(InputError, match="row 3 of a cache with 3 rows"):
        cache.reorder_cache(torch.tensor([0, 3, 1]))
    with pytest.raises(InputError, match="cannot be copied or pickled"):
        __import__("copy").deepcopy(cache)
    spec = fa.kv.Spec((fa.kv.Group(range(2), 2, 16, variant=fa.SlidingWindow(8)),), 4,
                      torch.float32)  # fmt: skip
    wrong = PagedCache(fa.kv.Cache(spec, 50, max_kv_len=128))
    with pytest.raises(InputError, match=r"layer 0: the model's mask keeps key .* SlidingWindow"):
        ours(ids, past_key_values=wrong)
    wrong.reset()
    wrong.pages.check()
    for given, message in (("x", "cache must be an fa.kv.Cache"), (None, "got NoneType")):
        with pytest.raises(InputError, match=message):
            PagedCache(given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="model must be a model of transformers"):
        PagedCache.for_model("gpt2", 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_latent, "_SERVED", frozenset())
        with pytest.raises(InputError, match="latent attention of DeepseekV3"):
            PagedCache.for_model(build(DECODERS["deepseek_v3"])[1], 100)


def test_a_mask_that_changes_what_was_padding(llama: tuple[Any, Any]) -> None:
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)
    ours(ids, attention_mask=mask, past_key_values=cache)
    token = torch.tensor([[3], [4], [5]])
    longer = torch.cat([mask, torch.ones_like(token)], 1)
    for row, position, words in ((0, 6, "hides"), (1, 6, "keeps")):
        changed = longer.clone()
        changed[row, position] ^= 1
        with pytest.raises(InputError, match=f"mask {words} position {position} of row {row}"):
            ours(token, attention_mask=changed, past_key_values=cache)
    with pytest.raises(InputError, match="attention_mask keeps position 0 of row 1"):
        ours(token, past_key_values=cache)
    assert [s.kv_len for s in cache.sequences] == mask.sum(1).tolist()
    ours(token, attention_mask=longer, past_key_values=cache)


@pytest.mark.parametrize("family", ["llama", "llama4"])
def test_forward_passes_of_padding_alone(family: str) -> None:
    """The chunks of llama4 begin at the first token, which such a pass does not have."""
    eager, ours = build(DECODERS[family])
    ids, _ = prompts()
    mask = torch.zeros_like(ids)
    mask[0, 9:] = mask[1, 4:] = mask[2, 10:] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = PagedCache.for_model(ours, 400, page_size=4)
    got = []
    for begin, end in ((0, 1), (1, 4), (4, 18)):
        result = ours(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache,
                      position_ids=positions[:, begin:end])  # fmt: skip
        got.append(result.logits)
    wanted = eager(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    real = mask.bool()
    torch.testing.assert_close(torch.cat(got, 1)[real], wanted[real], rtol=1e-4, atol=1e-4)
    assert [s.kv_len for s in cache.sequences] == [9, 14, 8]
    cache.reset()
    spec = fa.kv.Spec((fa.kv.Group(range(2), 2, 16, variant=fa.SlidingWindow(8)),), 4,
                      torch.float32)  # fmt: skip
    wrong = PagedCache(fa.kv.Cache(spec, 50, max_kv_len=128))
    ours(ids[:, :4], attention_mask=torch.zeros_like(ids[:, :4]), past_key_values=wrong)
    with pytest.raises(InputError, match="the model's mask"):  # checked once there is a token
        ours(ids[:, 4:], attention_mask=mask, past_key_values=wrong)


def test_rows_that_end_before_others(llama: tuple[Any, Any]) -> None:
    """Padding behind the last token of a row, which `crop` takes back first."""
    _, ours = llama
    ids, mask = prompts()
    cache = PagedCache.for_model(ours, 400, page_size=4)
    ours(ids, attention_mask=mask, past_key_values=cache)
    longer = torch.cat([mask, torch.ones(3, 2, dtype=torch.int64)], 1)
    longer[1, -2:] = 0
    ours(ids[:, :2], attention_mask=longer, past_key_values=cache)
    assert [s.kv_len for s in cache.sequences] == [20, 11, 19]
    cache.crop(-1)
    assert [s.kv_len for s in cache.sequences] == [19, 11, 18]
    cache.crop(-2)
    assert [s.kv_len for s in cache.sequences] == [17, 10, 16]
    ours(ids[:, :1], attention_mask=mask, past_key_values=cache)
    assert [s.kv_len for s in cache.sequences] == [18, 11, 17]
    cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    ours(ids[:1], past_key_values=cache)
    assert [s.kv_len for s in cache.sequences] == [18]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": fa.Causal() & fa.SoftCap(20.0)}, r"SoftCap .* group 0 has score_mod"),
        ({"transform": fa.RoPE()}, "group 0 of the cache transforms keys"),
    ],
)
def test_groups_that_do_more_than_mask(
    llama: tuple[Any, Any], change: dict[str, Any], message: str
) -> None:
    spec = fa.kv.Spec.from_config(llama[1].config, page_size=16, dtype=torch.float32)
    group = dataclasses.replace(spec.groups[0], **change)
    cache = fa.kv.Cache(dataclasses.replace(spec, groups=(group,)), 20, max_kv_len=64)
    with pytest.raises(InputError, match=message):
        PagedCache(cache)


def test_keys_in_pages_are_no_tensors(llama: tuple[Any, Any]) -> None:
    """With another implementation, whose attention computes with them."""
    eager, _ = llama
    ids, _ = prompts()
    cache = PagedCache.for_model(eager, 400)
    with pytest.raises(InputError, match="keys or values, which lie in pages"):
        eager(ids, past_key_values=cache)
    key, _ = cache.rows(torch.zeros(3, 2, 4, 16), torch.zeros(3, 2, 4, 16), 0)
    assert key.shape == (3, 2, 4, 16) and key.dtype == torch.float32 and key.dim() == 4
    assert repr(key) == "PagedRows(layer=0)"
    assert not hasattr(key, "unsqueeze")
    for use in (lambda: key + 1, lambda: key[0], lambda: torch.cat([key, key]), lambda: key.sum()):
        with pytest.raises(InputError, match="lie in pages"):
            use()


def test_tokens_from_the_prompt_are_tried_and_taken_back(llama: tuple[Any, Any]) -> None:
    """Assisted generation crops what was not accepted."""
    eager, ours = llama
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    options = {"max_new_tokens": 20, "prompt_lookup_num_tokens": 3, "use_cache": True}
    cache = PagedCache.for_model(ours, 100, page_size=4)
    got = ours.generate(ids, past_key_values=cache, do_sample=False, **options)
    assert torch.equal(got, eager.generate(ids, do_sample=False, **options))
    cache.pages.check()


def test_a_compiled_model_breaks_its_graph_at_the_cache(llama: tuple[Any, Any]) -> None:
    _, ours = llama
    ids, mask = prompts()
    wanted = ours(ids, attention_mask=mask, past_key_values=PagedCache.for_model(ours, 400)).logits
    cache = PagedCache.for_model(ours, 400)
    compiled = torch.compile(ours, backend="eager")
    got = compiled(ids, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()])
    assert cache.length == 18
