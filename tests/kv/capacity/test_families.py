"""Layouts from configs, against what transformers' own cache holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import flashattn_jit as fa
from flashattn_jit.kv.capacity.families import FAMILIES

transformers = pytest.importorskip("transformers")

from tests.kv.layouts import (  # noqa: E402
    LAYOUTS,
    config_of,
    held_by_spec,
    held_by_transformers,
    model_of,
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spec_stores_what_transformers_does(layout: str) -> None:
    config, model = config_of(layout), model_of(layout)
    held = held_by_transformers(model)
    assert len(held) >= 2
    assert held_by_spec(fa.kv.Spec.from_config(config)) == held
    if getattr(config, "is_encoder_decoder", False):
        cross = held_by_transformers(model, cross=True)
        assert held_by_spec(fa.kv.Spec.from_config(config, cross=True)) == cross


def test_released_sizes() -> None:
    """The defaults of config classes that are those of a release."""
    spec = fa.kv.Spec.from_config(transformers.DeepseekV3Config())
    (group,) = spec.groups
    assert (spec.num_layers, group.head_dim, group.head_dim_v, group.num_q_heads) == (
        61, 576, 512, 128,
    )  # fmt: skip
    assert group.v_in_k and group.num_kv_heads == 1
    assert spec.page_bytes(0) == 16 * 70_272
    latents = fa.kv.Format("e4m3", group=128)  # FlashMLA's row
    (group,) = fa.kv.Spec.from_config(transformers.DeepseekV3Config(), kv_format=latents).groups
    assert group.row_bytes(fa.kv.Spec((group,)).dtype) == (512 + 4 * 4, 64 * 2)
    shared = fa.kv.Spec.from_config(transformers.Gemma3nTextConfig())
    assert shared.num_layers == 20  # of 35


def test_an_unknown_family_is_an_error_that_lists_those_known() -> None:
    for name in ("rwkv", "deepseek_v4"):
        with pytest.raises(fa.InputError, match=f"model_type='{name}'") as caught:
            fa.kv.Spec.from_config(transformers.AutoConfig.for_model(name))
        assert all(known in str(caught.value) for known in FAMILIES)
    with pytest.raises(fa.InputError, match=r"cross=True, but model_type='llama'.*bart.*t5"):
        fa.kv.Spec.from_config(transformers.LlamaConfig(), cross=True)
    alone = transformers.BartConfig(is_encoder_decoder=False)
    with pytest.raises(fa.InputError, match="cross=True"):
        fa.kv.Spec.from_config(alone, cross=True)


def test_layers_that_have_no_spec() -> None:
    with pytest.raises(fa.InputError, match="layer 3 is cross-attention"):
        fa.kv.Spec.from_config(transformers.MllamaConfig())
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    modes = SimpleNamespace(**sizes, kv_sharing_modes=[None, "reuse", None])
    with pytest.raises(fa.InputError, match=r"layers \[1\] reuse the keys of others"):
        fa.kv.Spec.from_config(modes)
