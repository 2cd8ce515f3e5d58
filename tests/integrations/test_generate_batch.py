"""`generate_batch`: each prompt gets the tokens that transformers generates for it alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip(
    "transformers", minversion="5.23", reason="needs the extra [examples]"
)

import flashattn_jit as fa  # noqa: E402
from flashattn_jit.errors import InputError, SequenceError  # noqa: E402
from flashattn_jit.integrations.transformers import (  # noqa: E402
    BatchGenerator,
    generate_batch,
    register,
)
from tests.integrations.decoders import DECODERS, VOCABULARY, Family, build  # noqa: E402
from tests.integrations.test_paged_cache import FAMILIES  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.9},
    "penalised": {"repetition_penalty": 1.3, "min_new_tokens": 5, "eos_token_id": [2, 3, 7, 9]},
}  # fmt: skip
NEW = 16


def prompts() -> list[list[int]]:
    """Six prompts with 13 tokens in common, and two short ones."""
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()  # type: ignore[no-any-return]

    system = some(13)
    return [*(system + some(n) for n in (1, 5, 9, 2, 14, 3)), [5], [7, 8]]


def alone(model: Any, options: dict[str, Any]) -> list[list[int]]:
    found = []
    for prompt in prompts():
        torch.manual_seed(1)
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, use_cache=True, **options
        )
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def cache_of(model: Any, pages: int, page_size: int = 4) -> fa.kv.Cache:
    spec = fa.kv.Spec.from_config(model.config, page_size=page_size, dtype=torch.float32)
    return fa.kv.Cache(spec, pages, max_kv_len=64)


@pytest.fixture(scope="module", params=list(FAMILIES))
def models(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    yield build(DECODERS[request.param])


@pytest.fixture(scope="module")
def ours() -> Any:
    return build(DECODERS["llama"])[1]


@pytest.mark.parametrize("options", list(OPTIONS))
def test_tokens_equal_those_of_each_prompt_alone(models: tuple[Any, Any], options: str) -> None:
    """Also where the pages do not suffice, so that requests are suspended, and in small steps."""
    eager, ours = models
    wanted = alone(eager, OPTIONS[options])
    for pages, most in ((200, 512), (22, 24)):
        cache = cache_of(ours, pages)
        results = generate_batch(
            ours, prompts(), max_new_tokens=NEW, cache=cache, max_step_tokens=most, seed=1,
            **OPTIONS[options],
        )  # fmt: skip
        assert [r.tokens for r in results] == wanted
        assert all(r.finish and r.first_s > 0 for r in results)
        if pages == 22:
            assert sum(r.preempted for r in results) > 0
        cache.check()
        assert not cache.sequences


def test_common_tokens_are_computed_once(ours: Any) -> None:
    cache = cache_of(ours, 200)
    first = generate_batch(ours, prompts(), max_new_tokens=2, cache=cache, max_step_tokens=24)
    assert [r.num_cached for r in first] == [0, 12, 12, 12, 12, 12, 0, 0]
    again = generate_batch(ours, prompts(), max_new_tokens=2, cache=cache)
    assert [r.num_cached for r in again] == [12, 16, 20, 12, 24, 12, 0, 0]
    assert [r.tokens for r in again] == [r.tokens for r in first]
    # In one step they would all compute them: requests wait for the first one.
    alone = generate_batch(ours, prompts(), max_new_tokens=2, cache=cache_of(ours, 200))
    assert [r.num_cached for r in alone] == [0, 12, 12, 12, 12, 12, 0, 0]


def test_tokens_are_streamed_and_end_tokens_stop(ours: Any) -> None:
    plain = generate_batch(ours, prompts(), max_new_tokens=NEW)
    first = plain[0].tokens
    end = next(t for i, t in enumerate(first) if i > 1 and t not in first[:i])
    streamed: list[list[int]] = [[] for _ in prompts()]
    results = generate_batch(
        ours, prompts(), max_new_tokens=[NEW - i for i in range(8)], eos_token_id=end,
        on_token=lambda i, token: streamed[i].append(token),
    )  # fmt: skip
    assert [r.tokens for r in results] == streamed
    assert results[0].finish == "stop" and 2 < len(results[0].tokens) < NEW
    for i, (result, whole) in enumerate(zip(results, plain, strict=True)):
        wanted = whole.tokens[: NEW - i]
        if end in wanted:
            wanted = wanted[: wanted.index(end) + 1]
        assert result.tokens == wanted


@pytest.mark.parametrize("kind", ["int", "list", "tensor", "list of tensors", "array"])
def test_end_tokens_in_every_form(ours: Any, kind: str) -> None:
    first = generate_batch(ours, prompts()[:1], max_new_tokens=NEW)[0].tokens
    end = first[3]
    given = {
        "int": end, "list": [end], "tensor": torch.tensor(end),
        "list of tensors": [torch.tensor(end)], "array": np.array([end]),
    }[kind]  # fmt: skip
    (found,) = generate_batch(ours, prompts()[:1], max_new_tokens=np.int64(NEW), eos_token_id=given)
    assert found.tokens == first[: first.index(end) + 1] and found.finish == "stop"


def test_steps_chunks_and_the_bar(ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    batch = BatchGenerator(ours, prompts(), max_new_tokens=3, max_step_tokens=7, max_requests=2)
    sizes: list[int] = []
    forward = ours.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs["input_ids"].shape[1])
        assert kwargs["input_ids"].shape == kwargs["position_ids"].shape
        return forward(*args, **kwargs)

    counted.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    ours.forward = counted
    try:
        results = batch.run(progress=True)
    finally:
        del ours.forward
    assert max(sizes) <= 7 and len(sizes) == batch.steps
    assert 0 < batch.seconds["model"] < batch.seconds["all"]
    assert "24/24" in capsys.readouterr().err
    assert [r.tokens for r in results] == [
        r.tokens for r in generate_batch(ours, prompts(), max_new_tokens=3)
    ]
    (plan,) = batch.packed.paged.plans.values()
    assert "cpu" in plan.explain()


@pytest.mark.parametrize("failure", [ValueError("of the callback"), KeyboardInterrupt()])
def test_whatever_ends_it_nothing_is_left_open(ours: Any, failure: BaseException) -> None:
    cache = cache_of(ours, 22)
    count = 0

    def on_token(*_: int) -> None:
        nonlocal count
        count += 1
        if count == 30:
            raise failure

    with pytest.raises(type(failure)):
        generate_batch(ours, prompts(), max_new_tokens=NEW, cache=cache, on_token=on_token)
    cache.check()
    assert not cache.sequences
    hook = ours.model.layers[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate_batch(ours, prompts(), max_new_tokens=NEW, cache=cache)
    hook.remove()
    cache.check()
    assert not cache.sequences
    wanted = generate_batch(ours, prompts(), max_new_tokens=NEW)
    results = generate_batch(ours, prompts(), max_new_tokens=NEW, cache=cache)
    assert [r.tokens for r in results] == [r.tokens for r in wanted]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_step_that_fails_is_repeated(ours: Any) -> None:
    """Whether the model or the callback failed; tokens are neither lost nor computed twice."""
    wanted = [r.tokens for r in generate_batch(ours, prompts(), max_new_tokens=NEW)]
    cache = cache_of(ours, 22)
    failures, streamed = 0, [[] for _ in prompts()]  # type: ignore[var-annotated]

    def fail_at_times(*_: Any) -> None:
        nonlocal failures
        failures += 1
        if failures % 3 == 0:
            raise ValueError("at times")

    def on_token(prompt: int, token: int) -> None:
        streamed[prompt].append(token)
        fail_at_times()

    batch = BatchGenerator(
        ours, prompts(), max_new_tokens=NEW, cache=cache, max_step_tokens=24, on_token=on_token
    )
    hook = ours.model.layers[1].register_forward_pre_hook(fail_at_times)
    with torch.inference_mode():
        while batch.is_running:
            try:
                batch.step()
            except ValueError:
                cache.check()
    hook.remove()
    assert failures > 40 and [r.tokens for r in batch.results] == wanted == streamed
    assert not cache.sequences


@pytest.mark.parametrize("method", ["close", "step", "run"])
def test_the_callback_may_not_call_its_generator(ours: Any, method: str) -> None:
    cache = cache_of(ours, 50)

    def on_token(*_: int) -> None:
        getattr(batch, method)()

    batch = BatchGenerator(ours, prompts(), max_new_tokens=NEW, cache=cache, on_token=on_token)
    with pytest.raises(SequenceError, match=r"in the middle of a step; raise an exception"):
        batch.run()
    cache.check()
    assert not cache.sequences and not batch.is_running


@pytest.mark.parametrize("what", ["close", "step"])
def test_the_callback_uses_sequences_of_the_call(ours: Any, what: str) -> None:
    """An error of `fa.kv`, and no sequence is left open."""
    cache = cache_of(ours, 50)

    def on_token(*_: int) -> None:
        if what == "close":
            cache.sequences[-1].close()
        else:
            cache.step([(cache.sequences[0], [3])])

    with pytest.raises(SequenceError):
        generate_batch(ours, prompts(), max_new_tokens=NEW, cache=cache, on_token=on_token)
    cache.check()
    assert not cache.sequences


def test_the_last_token_needs_no_room(ours: Any) -> None:
    """prompt + new tokens = max_kv_len + 1, and a page less than for all of them."""
    prompt = prompts()[0][:9]
    wanted = generate_batch(ours, [prompt], max_new_tokens=8)
    spec = fa.kv.Spec.from_config(ours.config, page_size=4, dtype=torch.float32)
    cache = fa.kv.Cache(spec, 4, max_kv_len=16)
    results = generate_batch(ours, [prompt], max_new_tokens=8, cache=cache)
    assert results[0].tokens == wanted[0].tokens and len(wanted[0].tokens) == 8
    with pytest.raises(InputError, match="max_kv_len=16"):
        generate_batch(ours, [prompt], max_new_tokens=9, cache=cache)


def test_the_number_of_new_tokens_is_that_of_the_generation_config(ours: Any) -> None:
    config = transformers.GenerationConfig(max_new_tokens=5)
    (result,) = generate_batch(ours, [[5, 6]], generation_config=config)
    assert len(result.tokens) == 5
    (result,) = generate_batch(ours, [[5, 6]], max_new_tokens=3, generation_config=config)
    assert len(result.tokens) == 3
    (result,) = generate_batch(ours, [[5, 6]])
    assert len(result.tokens) == 64


@pytest.mark.parametrize(
    "options",
    [
        {"forced_eos_token_id": 7}, {"encoder_repetition_penalty": 0.5},
        {"encoder_no_repeat_ngram_size": 1}, {"exponential_decay_length_penalty": (3, 2.0)},
    ],
)  # fmt: skip
def test_options_that_depend_on_the_prompt(ours: Any, options: dict[str, Any]) -> None:
    options = {"eos_token_id": 7, **options}
    results = generate_batch(ours, prompts(), max_new_tokens=NEW, **options)
    assert [r.tokens for r in results] == alone(ours, options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": [[3], []]}, r"prompts\[1\] is empty"),
        ({"prompts": [[3, -1]]}, r"prompts\[0\]\[1\]=-1 is negative"),
        ({"prompts": ["text"]}, r"prompts\[0\] must be 1-D ints"),
        ({"prompts": [[3] * 60]}, r"prompts\[0\] has 60 tokens and up to 16 new .* max_kv_len=64"),
        ({"pages": 5}, r"prompts\[0\] has .* 8 pages of 4, but group 0 of the cache has 5"),
        ({"max_new_tokens": 0}, r"max_new_tokens\[0\]=0"),
        ({"prompts": 5}, "prompts must be lists of token ids, got 5"),
        ({"prompts": [[10**6]]}, r"prompts\[0\] has token 1000000, but the model's ids end at"),
        ({"max_new_tokens": 3.0}, r"max_new_tokens\[0\] must be an int, got float"),
        ({"on_token": "x"}, "on_token='x' must be a function"),
        ({"max_new_tokens": [1, 2]}, "max_new_tokens has 2 entries for 8 prompts"),
        ({"max_requests": 0}, "max_requests=0"), ({"max_step_tokens": -1}, "max_step_tokens=-1"),
        ({"num_beams": 2}, "num_beams=2: generate_batch makes one sequence"),
        ({"stop_strings": ["a"]}, "stop_strings is not supported"),
        ({"prompt_lookup_num_tokens": 1}, "prompt_lookup_num_tokens is not supported"),
        ({"max_time": 1}, "max_time is not supported"),
        ({"output_scores": True}, "output_scores is not supported"),
        ({"token_healing": True}, "token_healing is not supported"),
        ({"penalty_alpha": 0.6}, "penalty_alpha is not supported"),
        ({"max_length": 20}, "max_length is not supported by generate_batch; give max_new_tokens"),
        ({"use_cache": False}, "use_cache=False: generate_batch needs its cache"),
        ({"assistant_model": 1}, "assistant_model are not known"),
        ({"stopping_criteria": []}, "stopping_criteria are not known"),
        ({"temprature": 1.0}, "temprature"),
    ],
)  # fmt: skip
def test_what_it_refuses(ours: Any, given: dict[str, Any], message: str) -> None:
    options = {"max_new_tokens": NEW, **given}
    cache = cache_of(ours, options.pop("pages", 50))
    with pytest.raises((InputError, ValueError), match=message):
        generate_batch(ours, options.pop("prompts", prompts()), cache=cache, **options)
    cache.check()
    assert not cache.sequences


def test_models_that_it_refuses(ours: Any) -> None:
    with pytest.raises(InputError, match=r"attn_implementation is 'eager'; .*register"):
        generate_batch(build(DECODERS["llama"])[0], prompts())
    with pytest.raises(InputError, match="attn_implementation is None"):
        generate_batch("llama", prompts())
    ours.train()
    with pytest.raises(InputError, match="training mode"):
        generate_batch(ours, prompts())
    ours.eval()
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32,
                                   num_layers=1, num_heads=4)  # fmt: skip
    t5 = transformers.T5ForConditionalGeneration._from_config(
        config, attn_implementation=register()
    )
    with pytest.raises(InputError, match=r"encoder|does not serve"):
        generate_batch(t5.eval(), prompts())
    spec = fa.kv.Spec((fa.kv.Group((0, 1), 2, 16, variant=fa.Full()),), 4, torch.float32)
    wrong = fa.kv.Cache(spec, 50, max_kv_len=64)
    with pytest.raises(InputError, match="layer 0: the model's mask hides key"):
        generate_batch(ours, prompts(), max_new_tokens=NEW, cache=wrong)
    wrong.check()
    assert not wrong.sequences
    assert generate_batch(ours, [], max_new_tokens=3) == []


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_the_continuous_batching_of_transformers(name: str) -> None:
    """Over its own cache; names with the prefix mean the same."""
    _, model = build(DECODERS[name])
    config = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=24, page_size=16
    )
    found = []
    for implementation in ("sdpa", "attn_jit", "paged|attn_jit"):
        model.set_attn_implementation(implementation)
        outputs = model.generate_batch(
            inputs=prompts(), generation_config=config, progress_bar=False,
            continuous_batching_config=batching,
        )  # fmt: skip
        assert implementation.endswith(model.config._attn_implementation)
        found.append([outputs[key].generated_tokens for key in sorted(outputs)])
    assert found[0] == found[1] == found[2] and all(len(x) == 12 for x in found[0])


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "pad_token_id": 0,
         "num_attention_heads": 4, "intermediate_size": 32, "num_key_value_heads": 4}  # fmt: skip
BART = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 32,
        "decoder_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "message"),
    [
        *((DECODERS[name], "its layers do not pass continuous batching's cache to attention")
          for name in ("bloom", "mpt", "falcon", "falcon_alibi", "gptj")),
        (Family("BartConfig", "BartForCausalLM", BART), "takes no position_ids"),
        (Family("NemotronConfig", "NemotronForCausalLM", SIZES),
         r"layers\.0 does not pass continuous batching's cache on"),
        (Family("DiffLlamaConfig", "DiffLlamaForCausalLM", SIZES), "attends twice"),
        (Family("DogeConfig", "DogeForCausalLM", SIZES), "compute with their masks"),
    ],
    ids=["bloom", "mpt", "falcon", "falcon_alibi", "gptj", "bart", "nemotron", "diffllama", "doge"],
)  # fmt: skip
def test_models_that_continuous_batching_would_serve_wrongly(family: Family, message: str) -> None:
    config = getattr(transformers, family.config)(**family.values)
    model = getattr(transformers, family.model)._from_config(config, attn_implementation=register())
    with pytest.raises(InputError, match=message):
        model.eval().generate_batch(inputs=prompts(), progress_bar=False)
