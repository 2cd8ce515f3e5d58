"""Frequencies of rotary embeddings against the published formulas.

The formulas below follow ROPE_INIT_FUNCTIONS of Hugging Face transformers line by line, in
float64; the figures at the end are of published configurations.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.library import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    YarnScaling,
    rope_scaling_from_config,
    rope_tables,
)


def plain(dim: int, base: float) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))


def llama3(dim: int, base: float, factor: float, low: float, high: float, old: int):
    inv_freq = plain(dim, base)
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > old / low, inv_freq / factor, inv_freq)
    smooth = (old / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelen < old / high) & ~(wavelen > old / low)
    return torch.where(medium, smoothed, scaled)


def yarn(dim: int, base: float, factor: float, old: int, truncate: bool):
    def correction_dim(rotations: float) -> float:
        return (dim * math.log(old / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = correction_dim(32), correction_dim(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    pos_freqs = base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return (1 / (factor * pos_freqs)) * (1 - extrapolated) + (1 / pos_freqs) * extrapolated


@pytest.mark.parametrize("dim", [2, 16, 64, 128, 256])
@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6])
def test_every_scaling_equals_the_published_formula(dim: int, base: float) -> None:
    cases = [
        (NoScaling(), plain(dim, base)),
        (LinearScaling(8.0), plain(dim, base) / 8.0),
        (Llama3Scaling(), llama3(dim, base, 8.0, 1.0, 4.0, 8192)),
        (Llama3Scaling(32.0), llama3(dim, base, 32.0, 1.0, 4.0, 8192)),
        (YarnScaling(4.0, 32768), yarn(dim, base, 4.0, 32768, True)),
        (YarnScaling(32.0, 4096, truncate=False), yarn(dim, base, 32.0, 4096, False)),
    ]
    for scaling, expected in cases:
        got = scaling.inv_freq(dim, base, 1 << 17)
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-13, err_msg=str(scaling))


def test_dynamic_ntk_grows_the_base_beyond_the_trained_length() -> None:
    scaling = DynamicNTKScaling(factor=2.0, original_max_position=2048)
    for length in (100, 2048):
        got = scaling.inv_freq(64, 1e4, length)
        np.testing.assert_allclose(got, plain(64, 1e4).numpy(), rtol=1e-14)
    for length in (2049, 4096, 30000):
        base = 1e4 * ((2.0 * length / 2048) - 1.0) ** (64 / 62)
        expected = plain(64, base).numpy()
        np.testing.assert_allclose(scaling.inv_freq(64, 1e4, length), expected, rtol=1e-12)
    assert scaling.effective_length(7) == scaling.effective_length(2048) == 2048
    assert scaling.effective_length(5000) == 5000
    with pytest.raises(VariantError, match="rotary dim over 2"):
        scaling.inv_freq(2, 1e4, 4096)


def test_longrope_switches_lists_at_the_trained_length() -> None:
    short, long = (1.0, 1.5, 2.0, 2.5), (4.0, 8.0, 16.0, 32.0)
    scaling = LongRopeScaling(short, long, 4096, factor=32.0)
    expected = plain(8, 1e4) / torch.tensor(short, dtype=torch.float64)
    np.testing.assert_allclose(scaling.inv_freq(8, 1e4, 4096), expected.numpy(), rtol=1e-13)
    expected = plain(8, 1e4) / torch.tensor(long, dtype=torch.float64)
    np.testing.assert_allclose(scaling.inv_freq(8, 1e4, 4097), expected.numpy(), rtol=1e-13)
    assert scaling.effective_length(1) == scaling.effective_length(4096) == 4096
    assert scaling.effective_length(4097) == scaling.effective_length(10**6) == 4097
    assert scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    with pytest.raises(VariantError, match="long_factor needs one factor for each of the 8"):
        scaling.inv_freq(16, 1e4, 9999)


def test_attention_factors_of_published_configurations() -> None:
    assert YarnScaling(4.0, 32768).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    deepseek = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert deepseek.attention_factor == 1.0
    deepseek_v2 = YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=1.0)
    ratio = (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert deepseek_v2.attention_factor == pytest.approx(ratio)
    assert YarnScaling(4.0, 32768, attention=1.25).attention_factor == 1.25
    assert YarnScaling(1.0, 32768).attention_factor == 1.0
    assert LongRopeScaling((1.0,), (1.0,), 4096).attention_factor == 1.0
    for scaling in (NoScaling(), LinearScaling(2.0), DynamicNTKScaling(2.0, 8), Llama3Scaling()):
        assert scaling.attention_factor == 1.0


def test_configs_name_their_scaling() -> None:
    assert rope_scaling_from_config({"rope_type": "default"}, 8192) == NoScaling()
    assert rope_scaling_from_config({"type": "linear", "factor": 8}, 8192) == LinearScaling(8.0)
    dynamic = rope_scaling_from_config({"rope_type": "dynamic", "factor": 2.0}, 4096)
    assert dynamic == DynamicNTKScaling(2.0, 4096)
    llama = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert rope_scaling_from_config(llama, 131072) == Llama3Scaling(32.0)
    gpt_oss = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    assert rope_scaling_from_config(gpt_oss, 131072) == YarnScaling(32.0, 4096, truncate=False)
    phi = {
        "type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0],
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    expected = LongRopeScaling((1.0, 2.0), (3.0, 4.0), 4096, factor=32.0)
    assert rope_scaling_from_config(phi, 131072) == expected
    with pytest.raises(VariantError, match="need the entry 'factor'"):
        rope_scaling_from_config({"rope_type": "linear"}, 8192)
    with pytest.raises(VariantError, match="rope_type is 'xpos'"):
        rope_scaling_from_config({"rope_type": "xpos"}, 8192)


def test_whole_configs_are_read() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    expected = YarnScaling(4.0, 32768)
    for name in ("rope_parameters", "rope_scaling"):
        fields = {"max_position_embeddings": 32768, name: yarn}
        assert rope_scaling_from_config(fields) == expected
        assert rope_scaling_from_config(SimpleNamespace(**fields)) == expected
        assert rope_scaling_from_config({"text_config": fields, "model_type": "x"}) == expected
        plain_config = {"max_position_embeddings": 32768, "vocab_size": 100, name: None}
        assert rope_scaling_from_config(plain_config) == NoScaling()
        assert rope_scaling_from_config(SimpleNamespace(**plain_config)) == NoScaling()
    assert rope_scaling_from_config({"vocab_size": 100, "rope_theta": 1e4}) == NoScaling()
    phi = SimpleNamespace(
        max_position_embeddings=131072, original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [3.0]},
    )  # fmt: skip
    expected_phi = LongRopeScaling((1.0,), (3.0,), 4096, factor=32.0)
    assert rope_scaling_from_config(phi) == expected_phi
    assert rope_scaling_from_config({"rope_type": "linear", "factor": 8}) == LinearScaling(8.0)


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(VariantError, match=r"need the entry 'max_position_emb.*whole config"):
        rope_scaling_from_config({"rope_type": "yarn", "factor": 4.0})
    for wrong in (None, 3, "llama", SimpleNamespace(vocab_size=3)):
        with pytest.raises(VariantError, match="expected a config of transformers, its dict"):
            rope_scaling_from_config(wrong)
    layers = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
    for config in (layers, SimpleNamespace(rope_parameters=layers)):
        with pytest.raises(VariantError, match=r"type of layer, full_attention, sliding_attention"):
            rope_scaling_from_config(config)


def test_configs_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    llama = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    config = transformers.LlamaConfig(rope_parameters=llama, max_position_embeddings=131072)
    assert rope_scaling_from_config(config) == Llama3Scaling(32.0)
    assert rope_scaling_from_config(config.to_dict()) == Llama3Scaling(32.0)
    assert rope_scaling_from_config(transformers.LlamaConfig()) == NoScaling()


def test_tables_are_exact_at_long_positions() -> None:
    """A float32 angle at position 200,000 is off by up to 0.008; ours are rounded once."""
    cos, sin = rope_tables(64, 200_001, 500000.0)
    position = 200_000
    for pair, freq in enumerate(plain(64, 500000.0).tolist()):
        assert cos[position, pair].item() == pytest.approx(math.cos(position * freq), abs=1e-7)
        assert sin[position, pair].item() == pytest.approx(math.sin(position * freq), abs=1e-7)
    scaled, _ = rope_tables(64, 10, scaling=YarnScaling(4.0, 32768))
    assert scaled[0, 0].item() == pytest.approx(0.1 * math.log(4) + 1)
