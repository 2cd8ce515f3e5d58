"""Models with latent attention: decoding attends to latents, which are not expanded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flashattn_jit.errors import GradError
from flashattn_jit.integrations import transformers as integration
from tests.ops.batches.test_latent import MODELS, RANK, ROPE, model_of

PROMPT = torch.arange(2 * 11).view(2, 11) * 5 % 64


def pair(name: str) -> tuple[Any, Any]:
    eager = model_of(name)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(integration.register())
    return eager, ours


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_eager_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, ours = pair(name)
    widths: list[tuple[int, int]] = []
    attention = integration.attention

    def recording(q: Any, k: Any, *args: Any, **given: Any) -> Any:
        widths.append((q.shape[2], k.shape[-1]))
        return attention(q, k, *args, **given)

    monkeypatch.setattr(integration, "attention", recording)
    given = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True,
             "output_logits": True}  # fmt: skip
    mask = torch.ones_like(PROMPT)
    mask[1, :4] = 0  # padding on the left
    expected = eager.generate(PROMPT, attention_mask=mask, pad_token_id=0, **given)
    found = ours.generate(PROMPT, attention_mask=mask, pad_token_id=0, **given)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
    # The first layer of a class, in its first call, is expanded.
    assert {width for rows, width in widths[2:] if rows == 1} == {RANK + ROPE}
    assert {rows for rows, _ in widths} == {1, PROMPT.shape[1]}


@torch.no_grad()
def test_other_implementations_expand_as_before() -> None:
    eager, ours = pair("v3 yarn")
    expected = eager(PROMPT).logits
    torch.testing.assert_close(ours(PROMPT).logits, expected, rtol=1e-3, atol=1e-3)
    ours.set_attn_implementation("eager")
    assert torch.equal(ours(PROMPT).logits, expected)


@pytest.mark.parametrize("how", ["replaced", "swapped", "in place"])
def test_weights_that_change_are_read_again(how: str) -> None:
    eager, ours = pair("v3")
    ours.generate(PROMPT, max_new_tokens=2, pad_token_id=0)
    for model in (eager, ours):
        for layer in model.model.layers:
            weight = layer.self_attn.kv_b_proj.weight
            if how == "replaced":
                layer.self_attn.kv_b_proj.weight = torch.nn.Parameter(weight.detach() * -0.7)
            elif how == "swapped":
                weight.data = weight.data * -0.7
            else:
                weight.data.mul_(-0.7)
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(PROMPT, **given), eager.generate(PROMPT, **given))


def test_other_dtypes_and_autocast() -> None:
    eager, ours = pair("v3")
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ours.generate(PROMPT, **given)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.generate(PROMPT, **given).shape == (2, 15)
    assert torch.equal(
        ours.to(torch.float64).to(torch.float32).generate(PROMPT, **given),
        eager.generate(PROMPT, **given),
    )
    assert ours.to(torch.bfloat16).generate(PROMPT, **given).shape == (2, 15)


def test_gradients_are_not_lost() -> None:
    _, ours = pair("v3")
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_("kv_b_proj" in name)
    with torch.no_grad():
        past = ours(PROMPT, use_cache=True).past_key_values
    with pytest.raises(GradError, match="requires grad"):
        ours(PROMPT[:, :1], past_key_values=past, use_cache=True)


def test_calls_that_are_replaced_expand() -> None:
    eager, ours = pair("v3")
    ours.generate(PROMPT, max_new_tokens=2, pad_token_id=0)
    for model in (eager, ours):
        for layer in model.model.layers:
            linear = layer.self_attn.kv_b_proj
            linear.forward = lambda x, own=linear.forward: own(x) * -0.5
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(PROMPT, **given), eager.generate(PROMPT, **given))


def test_projections_that_are_no_plain_layers_expand() -> None:
    """A hook on kv_b_proj would not be called for latents that are not expanded."""
    _, ours = pair("v2")
    calls = []
    for layer in ours.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *_: calls.append(1))
    ours.generate(PROMPT, max_new_tokens=3, pad_token_id=0)
    assert len(calls) == 3 * len(ours.model.layers)
