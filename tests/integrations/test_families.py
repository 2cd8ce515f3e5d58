"""Model families of transformers: twelve of all model types by turns, and the ways to choose the
engine for each kind of family."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip(
    "transformers",
    minversion="5.23",
    reason="needs the extra [examples]",
)

from flashattn_jit.errors import InputError  # noqa: E402
from flashattn_jit.integrations import _own_attention, _registration, _sources  # noqa: E402
from flashattn_jit.integrations import transformers as integration  # noqa: E402
from tests.harness import rotation  # noqa: E402
from tests.integrations import table, tiny_models, walk  # noqa: E402

NAME = integration.register()
SERVED = ("bloom", "codegen", "falcon", "gptj", "mpt")
"""Families that have their own attention code and that the engine serves."""

BY_TYPE = {row.model_type: row for row in table.read()}
SLOW = frozenset(
    """
    bailing_hybrid blt clvp falcon_h1 fastspeech2_conformer_with_hifigan glm5_next glm5_next_text
    kimi_linear muse_spark nemotron_h sam2_hiera_det_model sam3 sam3_lite_text textnet vits yolos
    """.split()
)
"""Types that take ten seconds to two minutes, most of it in their own code."""

IN_TURN = rotation.some(
    [row.model_type for row in BY_TYPE.values() if row.outcome != "not built"], 12, but_not=SLOW
)


@pytest.mark.filterwarnings("ignore:.*this engine is not called for them")
@pytest.mark.parametrize("model_type", IN_TURN)
def test_a_model_type_does_what_the_table_says(model_type: str) -> None:
    outcome = walk.outcome(model_type)
    assert outcome.row() == BY_TYPE[model_type], outcome.checks


def test_no_type_of_the_table_differs_or_fails() -> None:
    assert len(BY_TYPE) > 700
    assert not [row for row in BY_TYPE.values() if row.outcome in ("differs", "fails")]
    for model_type in (*SERVED, "llama", "gemma3", "gpt_oss", "doge", "bert", "t5"):
        assert BY_TYPE[model_type].outcome == "equal", model_type
    for model_type in ("minimax_m3_vl", "inkling2", "deepseek_v32"):
        assert BY_TYPE[model_type].outcome == "refused", model_type


@pytest.mark.parametrize(
    ("model_type", "argument"),
    [("minimax_m3_vl", "block_indices"), ("inkling2", "sinks"), ("deepseek_v32", "indices")],
)
@pytest.mark.filterwarnings("ignore:.*this engine is not called for them")
def test_what_a_family_asks_for_and_the_engine_lacks_is_named(
    model_type: str, argument: str
) -> None:
    model = tiny(model_type, NAME)
    assert any(f"passes {argument}=" in layer.reason for layer in integration.served(model))
    with torch.no_grad(), pytest.raises(InputError, match=f"{argument}=|slices its attention mask"):
        model(input_ids=ids())


def tiny(model_type: str, implementation: str) -> Any:
    return next(tiny_models.candidates(model_type)).build(implementation)


def ids() -> torch.Tensor:
    return torch.randint(tiny_models.FIRST_WORD, tiny_models.VOCABULARY, (2, 12))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


@pytest.mark.parametrize("model_type", ["llama", *SERVED])
def test_every_way_to_choose_the_engine_has_the_same_outcome(
    model_type: str, tmp_path: Path
) -> None:
    eager, tokens = tiny(model_type, "eager"), ids()
    eager.save_pretrained(tmp_path)
    config = copy.deepcopy(eager.config)
    loaded = type(eager).from_pretrained(tmp_path, attn_implementation=NAME).eval()
    configured = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    configured.load_state_dict(eager.state_dict())
    changed = copy.deepcopy(eager)
    changed.set_attn_implementation(NAME)
    with walk.engine_calls() as served:
        results = [logits(model.eval(), tokens) for model in (loaded, configured, changed)]
    assert len(served) == 3 * eager.config.num_hidden_layers
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], logits(eager, tokens), rtol=1e-4, atol=1e-4)
    assert all(layer.served for layer in integration.served(changed))
    changed.set_attn_implementation("eager")
    assert not any(layer.served for layer in integration.served(changed))
    assert torch.equal(logits(changed, tokens), logits(eager, tokens))


@pytest.mark.parametrize("now", ["eager", NAME])
@pytest.mark.parametrize("model_type", SERVED)
def test_a_served_family_stays_where_transformers_lets_it(model_type: str, now: str) -> None:
    """Instances of these families change their implementation only to and from ours."""
    model, tokens = tiny(model_type, now), ids()
    expected = logits(model, tokens)
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == now
    assert torch.equal(logits(model, tokens), expected)


def test_stock_models_and_models_made_for_flash_attention_are_not_changed() -> None:
    stock = next(tiny_models.candidates("falcon")).build("sdpa")
    stock.set_attn_implementation("eager")
    assert stock.config._attn_implementation == "sdpa"
    model = tiny("falcon", "eager")
    model.config._attn_implementation_internal = "flash_attention_2"
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "flash_attention_2"


def test_dicts_of_implementations_and_parts_of_models() -> None:
    model, tokens = tiny("bloom", "eager"), ids()
    expected = logits(model, tokens)
    model.set_attn_implementation({"": NAME})
    assert all(layer.served for layer in integration.served(model))
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-4, atol=1e-4)
    both = tiny("llava", "eager")
    both.set_attn_implementation({"text_config": NAME})
    by_part = {layer.name.split(".")[1]: layer.served for layer in integration.served(both)}
    assert by_part == {"vision_tower": False, "language_model": True}


class OwnConfig(transformers.DogeConfig):
    model_type = "doge_of_my_own"


def test_a_config_made_from_a_family_is_of_the_family() -> None:
    """Doge computes with its masks, also under a config class derived from its own."""
    family = next(tiny_models.candidates("doge"))
    values = family.config.to_dict()
    values.pop("model_type")
    tokens, models = ids(), []
    for name in ("eager", NAME):
        made = family.model_class._from_config(OwnConfig(**values), attn_implementation=name)
        models.append(tiny_models.enlarge(made.eval()))
    models[1].load_state_dict(models[0].state_dict())
    torch.testing.assert_close(
        logits(models[1], tokens), logits(models[0], tokens), rtol=1e-4, atol=1e-4
    )


class PlainConfig(transformers.PreTrainedConfig):
    model_type = "plain_of_my_own"


class PlainAttention(torch.nn.Module):
    """Reads its mask if that is a tensor, as code older than the attention interface does."""

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        scores = x @ x.transpose(1, 2)
        if isinstance(mask, torch.Tensor):
            scores = scores + mask[:, 0]
        return scores.softmax(-1) @ x


class PlainModel(transformers.PreTrainedModel):
    config_class = PlainConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = PlainAttention()
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = transformers.masking_utils.create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None
        )
        return self.inner(x, mask)


def test_code_of_a_users_own_gets_a_mask_that_it_can_read() -> None:
    x = torch.randn(2, 7, 8)
    with pytest.warns(UserWarning, match="PlainAttention: has attention code of its own"):
        ours = PlainModel._from_config(PlainConfig(), attn_implementation=NAME)
    eager = PlainModel._from_config(PlainConfig(), attn_implementation="eager")
    assert torch.equal(ours(x), eager(x))
    assert not torch.equal(ours(x), ours.inner(x, None))


class Overriding(transformers.models.llama.modeling_llama.LlamaAttention):
    """A family's attention with a `forward` by the user."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return hidden_states, None


class Calling(transformers.models.llama.modeling_llama.LlamaAttention):
    """A family's attention with a `forward` by the user that calls the family's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class DerivedConfig(transformers.LlamaConfig):
    model_type = "llama_of_my_own"


@pytest.mark.filterwarnings("ignore:MultiheadAttention. has attention code of its own")
@torch.no_grad()
def test_a_pooling_head_that_repeats_the_mask() -> None:
    """That of SigLIP 2, for images of several sizes."""
    config = transformers.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        patch_size=2, num_patches=16,
    )  # fmt: skip
    pixels, there = torch.randn(2, 16, 12), torch.ones(2, 16, dtype=torch.int64)
    there[1, 12:] = 0
    sizes = torch.tensor([[4, 4], [3, 4]])
    model = transformers.Siglip2VisionModel(config).eval()
    wanted = model(pixels, there, sizes).pooler_output
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(model(pixels, there, sizes).pooler_output, wanted)


def test_code_that_runs_is_judged_and_not_what_it_is_made_from() -> None:
    assert _sources.calls_the_interface(Calling)
    assert not _sources.calls_the_interface(Overriding)
    assert _own_attention.computes_with_masks(DerivedConfig())
    assert not _own_attention.computes_with_masks(transformers.LlamaConfig())
    assert not _own_attention.computes_with_masks(None)


class MyBloom(transformers.BloomForCausalLM):
    """A user's class of a served family."""


def test_a_model_class_made_from_a_served_family_is_served() -> None:
    config, tokens = next(tiny_models.candidates("bloom")).config, ids()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MyBloom._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        expected = logits(model, tokens)
        model.set_attn_implementation(NAME)
    assert all(layer.served for layer in integration.served(model))
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.parametrize("model_type", rotation.some(SERVED, 2))
def test_compiled_models_break_their_graph_and_keep_their_results(model_type: str) -> None:
    model, tokens = tiny(model_type, NAME), ids()
    expected = logits(model, tokens)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, tokens), expected, rtol=1e-5, atol=1e-5)


def test_a_call_that_asks_for_weights_leaves_the_cache_as_it_was() -> None:
    for model_type in ("llama", "bloom", "gpt2"):
        model, tokens = tiny(model_type, NAME), ids()
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=cache)
            with pytest.raises(InputError, match="output_attentions"):
                model(input_ids=tokens[:, :3], past_key_values=cache, output_attentions=True)
        lengths = [cache.get_seq_length(layer) for layer in range(2)]
        assert lengths == [tokens.shape[1]] * 2, model_type


def test_the_walk_sees_what_is_not_a_number() -> None:
    eager = tiny("llama", "eager")

    def run(model: Any) -> torch.Tensor:
        return torch.tensor([1.0, float("nan") if model is not eager else 2.0])

    assert walk._compared(eager, object(), run).startswith("differs")


@pytest.mark.parametrize("model_type", ["xlnet", "gpt_neo", "git"])
def test_a_family_that_keeps_its_code_says_so_however_it_is_chosen(model_type: str) -> None:
    eager, tokens = tiny(model_type, "eager"), ids()
    with pytest.warns(UserWarning, match=r"Attention: has attention code of its own.*not called"):
        built = tiny(model_type, NAME)
    changed = copy.deepcopy(eager)
    with pytest.warns(UserWarning, match=r"Attention: has attention code of its own.*not called"):
        changed.set_attn_implementation(NAME)
    for model in (built, changed):
        assert torch.equal(logits(model, tokens), logits(eager, tokens))
    assert any("code of its own" in layer.reason for layer in integration.served(built))


@pytest.mark.parametrize("model_type", ["llama", "bloom", "gpt2"])
def test_a_family_that_is_served_warns_of_nothing(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny(model_type, NAME)
        model.set_attn_implementation("eager")
        model.set_attn_implementation(NAME)


@pytest.mark.parametrize("model_type", [*SERVED, "llama", "gpt2", "opt", "siglip_vision_model"])
@pytest.mark.filterwarnings("ignore:.*this engine is not called for them")
def test_attention_weights_are_refused(model_type: str) -> None:
    model, eager = tiny(model_type, NAME), tiny(model_type, "eager")
    inputs = {"input_ids": ids()}
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    with torch.no_grad(), pytest.raises(InputError, match="output_attentions=True asks"):
        model(**inputs, output_attentions=True)
    assert len(eager(**inputs, output_attentions=True).attentions) == 2


@pytest.mark.parametrize("model_type", SERVED)
def test_dropout_in_training_is_refused(model_type: str) -> None:
    family = next(tiny_models.candidates(model_type))
    names = ("attention_dropout", "attn_pdrop")
    for part in (family.config, getattr(family.config, "attn_config", None)):
        for name in names:
            if hasattr(part, name):
                setattr(part, name, 1 if model_type == "mpt" else 0.1)
    if model_type == "falcon":
        family.config.alibi = True  # its rotary layers drop nothing
    model = family.build(NAME).train()
    with torch.no_grad(), pytest.raises(InputError, match=r"dropout=.*this engine is inference"):
        model(input_ids=ids())


@pytest.mark.parametrize("model_type", SERVED)
def test_served_families_in_bfloat16_are_as_near_to_fp32_as_their_own_code(model_type: str) -> None:
    tokens = ids()
    exact = logits(tiny(model_type, "eager"), tokens)
    errors = [
        float((logits(tiny(model_type, name).bfloat16(), tokens).float() - exact).pow(2).mean())
        for name in (NAME, "eager")
    ]
    assert errors[0] <= 1.5 * errors[1]


def test_mpt_beyond_its_alibi_is_refused_before_its_cache_changes() -> None:
    model = tiny("mpt", NAME)
    tokens = torch.randint(tiny_models.FIRST_WORD, 256, (1, model.config.max_seq_len + 1))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), pytest.raises(InputError, match=r"more than MptConfig\.max_seq_len=128"):
        model(input_ids=tokens, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_bloom_with_the_rounding_of_tensor_parallel_layouts_is_refused() -> None:
    family = next(tiny_models.candidates("bloom"))
    family.config.pretraining_tp, family.config.slow_but_exact = 2, True
    with torch.no_grad(), pytest.raises(InputError, match="slow_but_exact"):
        family.build(NAME)(input_ids=ids())


def test_served_lists_layers_with_reasons() -> None:
    assert str(integration.served(tiny("llama", NAME))).splitlines() == [
        "served  model.layers.0.self_attn  LlamaAttention",
        "served  model.layers.1.self_attn  LlamaAttention",
    ]
    lines = str(integration.served(tiny("llama", "sdpa"))).splitlines()
    assert (
        lines[0]
        == "stock   model.layers.0.self_attn  LlamaAttention: attn_implementation is 'sdpa'"
    )
    assert str(integration.served(torch.nn.Linear(2, 2))) == "no attention layer was found"


def test_register_checks_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ".".join(transformers.__version__.split(".")[:2])
    monkeypatch.setattr(_registration, "TESTED", ("99.1",))
    with pytest.raises(
        ImportError, match=rf"needs Hugging Face transformers 99\.1 or later.*{found}"
    ):
        integration.register()
    monkeypatch.setattr(_registration, "TESTED", ("5.1", "5.2"))
    with pytest.warns(
        UserWarning, match=rf"tested with transformers 5\.1, 5\.2, and this is {found}"
    ):
        integration.register()
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.register()
    assert _registration._release("6.0rc1") == (6, 0)
    assert _registration._release("5.23.0.dev0") == (5, 23)


def test_registering_twice_changes_nothing() -> None:
    before = transformers.PreTrainedModel.set_attn_implementation
    integration.register()
    assert transformers.PreTrainedModel.set_attn_implementation is before
