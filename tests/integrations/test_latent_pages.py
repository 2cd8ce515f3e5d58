"""Models with latent attention over pages: latents are stored, and decoding attends to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from flashattn_jit.integrations import _paged_rows
from flashattn_jit.integrations.transformers import PagedCache, generate_batch, register
from tests.integrations.test_latent_models import PROMPT, pair
from tests.ops.batches.test_latent import HEADS, MODELS, NOPE, RANK, ROPE

transformers = pytest.importorskip("transformers")

NEW = 10


@pytest.fixture
def heads_of_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(rows of queries, key heads, head_dim) of each layer's attention."""
    found: list[tuple[int, int, int]] = []
    for cls in (_paged_rows.BatchAttention, _paged_rows.CascadeAttention):
        run = cls.run

        def recording(self: Any, q: Any, k: Any, *args: Any, run: Any = run, **given: Any) -> Any:
            found.append((len(q), k.shape[-2], q.shape[-1]))
            return run(self, q, k, *args, **given)

        monkeypatch.setattr(cls, "run", recording)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_over_pages_equal_those_of_eager_code(
    name: str, heads_of_runs: list[tuple[int, int, int]]
) -> None:
    eager, ours = pair(name)
    mask = torch.ones_like(PROMPT)
    mask[1, :4] = 0  # padding on the left
    given = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": NEW, "do_sample": False}
    cache = PagedCache.for_model(ours, 64)
    found = ours.generate(PROMPT, past_key_values=cache, **given)
    assert torch.equal(found, eager.generate(PROMPT, **given))
    assert cache.pages.spec.groups[0].v_in_k
    # The prompt's keys are those of each head; later ones are the latents.
    layers, rows = len(ours.model.layers), int(mask.sum())
    assert heads_of_runs[:layers] == [(rows, HEADS, NOPE + ROPE)] * layers
    assert set(heads_of_runs[layers:]) == {(2, 1, RANK + ROPE)}


def test_beams_and_prompts_in_parts() -> None:
    eager, ours = pair("v3")
    given = {"pad_token_id": 0, "max_new_tokens": NEW, "do_sample": False, "num_beams": 3}
    cache = PagedCache.for_model(ours, 256)
    found = ours.generate(PROMPT, past_key_values=cache, **given)
    assert torch.equal(found, eager.generate(PROMPT, **given))
    cache.reset()
    with torch.no_grad():
        for part in PROMPT.split(4, dim=1):
            logits = ours(part, past_key_values=cache, use_cache=True).logits
        expected = eager(PROMPT).logits[:, -logits.shape[1] :]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_generate_batch(name: str, heads_of_runs: list[tuple[int, int, int]]) -> None:
    eager, ours = pair(name)
    prompts = [PROMPT[0].tolist(), [*PROMPT[0, :8].tolist(), 9, 3], [5], PROMPT[1].tolist() * 2]
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = [
        eager.generate(x, attention_mask=torch.ones_like(x), **given)
        for x in (torch.tensor([prompt]) for prompt in prompts)
    ]
    found = generate_batch(ours, prompts, max_new_tokens=NEW, do_sample=False, max_step_tokens=16)
    for prompt, one, other in zip(prompts, found, expected, strict=True):
        assert one.tokens == other[0, len(prompt) :].tolist()
    assert {heads for _, heads, _ in heads_of_runs} == {1, HEADS}


def test_a_format_of_latents() -> None:
    eager, ours = pair("v2")
    both = (fa.kv.Format("int8", group=ROPE),) * 2
    spec = fa.kv.Spec.from_config(ours.config, page_size=16, dtype=torch.float32, kv_format=both)
    cache = PagedCache(fa.kv.Cache(spec, 16, max_kv_len=64))
    with torch.no_grad():
        ours(PROMPT, past_key_values=cache, use_cache=True)
        logits = ours(PROMPT[:, :1], past_key_values=cache, use_cache=True).logits
        expected = eager(torch.cat([PROMPT, PROMPT[:, :1]], 1)).logits[:, -1:]
    assert (logits - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_projections_that_are_no_plain_layers_are_refused() -> None:
    _, ours = pair("v3")
    ours.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    cache = PagedCache.for_model(ours, 64)
    with pytest.raises(InputError, match="kv_b_proj must be a plain linear layer"):
        ours(PROMPT, past_key_values=cache, use_cache=True)
    assert not cache.sequences


def test_rows_of_two_formats() -> None:
    """FlashMLA's rows: prompts expand their own latents, decoding reads what pages hold."""
    config = transformers.DeepseekV2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, first_k_dense_replace=2,
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64,
        v_head_dim=24, max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    eager = transformers.DeepseekV2ForCausalLM(config).eval().bfloat16()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(register())
    form = fa.kv.Format("e4m3", group=128)
    spec = fa.kv.Spec.from_config(ours.config, kv_format=form)
    cache = PagedCache(fa.kv.Cache(spec, 16, max_kv_len=64))
    assert cache.pages.latents(0).shape[-1] == 656
    with torch.no_grad():
        ours(PROMPT, past_key_values=cache, use_cache=True)
        logits = ours(PROMPT[:, :1], past_key_values=cache, use_cache=True).logits
        expected = eager(torch.cat([PROMPT, PROMPT[:, :1]], 1)).logits[:, -1:]
    assert (logits - expected).abs().mean() < 0.1 * expected.abs().mean()
    given = {"max_new_tokens": NEW, "do_sample": False}
    prompts = [PROMPT[0].tolist(), PROMPT[1, :7].tolist()]
    found = generate_batch(ours, prompts, cache=fa.kv.Cache(spec, 16, max_kv_len=64), **given)
    for prompt, one in zip(prompts, found, strict=True):
        cache.reset()
        ids = torch.tensor([prompt])
        alone = ours.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, pad_token_id=0, **given
        )
        assert one.tokens == alone[0, len(prompt) :].tolist()
