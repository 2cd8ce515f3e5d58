"""Specs: what they accept, and those of Hugging Face configs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.kv.tree import page_digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "layers"), ({"layers": (1, 1)}, "twice"), ({"layers": "ab"}, "layers"),
        ({"num_kv_heads": 0}, "num_kv_heads"), ({"head_dim": -1}, "head_dim"),
        ({"num_q_heads": 3}, "num_q_heads"), ({"variant": lambda b, h, q, k: q >= k}, "variant"),
        ({"reclaim": "all"}, "reclaim"), ({"mask_params": 3}, "mask_params"),
    ],
)  # fmt: skip
def test_groups_that_are_none(change: dict[str, object], message: str) -> None:
    given = {"layers": (0,), "num_kv_heads": 2, "head_dim": 8, **change}
    with pytest.raises(fa.InputError, match=message):
        fa.kv.Group(**given)  # type: ignore[arg-type]


def test_layers_missing_or_twice() -> None:
    one, two = fa.kv.Group((0, 2), 1, 8), fa.kv.Group((2,), 1, 8)
    with pytest.raises(fa.InputError, match=r"missing: \[1\], named twice: none"):
        fa.kv.Spec((one,))
    with pytest.raises(fa.InputError, match=r"missing: \[1\], named twice: \[2\]"):
        fa.kv.Spec((one, two))
    with pytest.raises(fa.InputError, match="dtype"):
        fa.kv.Spec((fa.kv.Group((0,), 1, 8),), dtype=torch.int32)


def test_transforms() -> None:
    plain = fa.kv.Group((0,), 1, 8)
    rotated = fa.kv.Group((0,), 1, 8, transform=fa.RoPE())
    prints = [fa.kv.Spec((g,)).fingerprint for g in (plain, rotated)]
    assert prints[0] != prints[1]
    with pytest.raises(fa.InputError, match="gives keys new positions"):
        fa.kv.Group((0,), 1, 8, transform=fa.RoPE(), reclaim="compact")
    with pytest.raises(fa.InputError, match="changes nothing"):
        fa.kv.Group((0,), 1, 8, transform=fa.Causal())


def test_transforms_of_other_shapes_and_dtypes() -> None:
    with pytest.raises(fa.InputError, match="head_dim=640, but a transform changes rows of 1 to"):
        fa.kv.Group((0,), 1, 640, transform=fa.RoPE())
    with pytest.raises(fa.InputError, match="head_dim_v=577"):
        fa.kv.Group((0,), 1, 8, 577, transform=fa.RoPE())
    with pytest.raises(fa.VariantError, match="head_dim=7"):
        fa.kv.Group((0,), 1, 7, transform=fa.RoPE())
    group = fa.kv.Group((0,), 1, 8, transform=fa.QKNorm())  # whose weights come with appends
    with pytest.raises(fa.InputError, match=r"dtype=torch\.int8, but a group has a transform"):
        fa.kv.Spec((group,), dtype=torch.int8)


class Scaled(fa.Variant):
    """Keys times a number, and a table that has the size of a batch."""

    factor: float = fa.scalar(2.0)
    table: torch.Tensor = fa.tensor("batch", "head_dim", default=None)

    def key_mod(self, row, b, kv_h, kv_idx):  # type: ignore[no-untyped-def]
        return row * self.factor * (1.0 if self.table is None else self.table[b])


@pytest.mark.parametrize("variant", [fa.RoPE(500.0), fa.Causal() & fa.RoPE().named("other")])
def test_a_variant_that_repeats_its_transform(variant: fa.Variant) -> None:
    transform = fa.QKNorm() & fa.RoPE()
    with pytest.raises(fa.InputError, match=r'applied twice: .*without\("key_mod"\)'):
        fa.kv.Group((0,), 1, 8, variant=variant, transform=transform)
    fa.kv.Group((0,), 1, 8, variant=variant.without("key_mod"), transform=transform)
    fa.kv.Group((0,), 1, 8, variant=variant, transform=fa.QKNorm())


def scaled(factor: object) -> fa.Variant:
    return fa.variant(key_mod=lambda row, b, h, i: row * factor, name="scaled")


def test_inverse_functions_are_no_repetition() -> None:
    fa.kv.Group((0,), 1, 8, variant=scaled(0.5), transform=scaled(2.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(2.0), scaled(3.0)),
        (scaled(torch.ones(8)), scaled(torch.arange(8.0))),
        (scaled(2.0), fa.variant(key_mod=lambda row, b, h, i: row + 2.0, name="scaled")),
        (scaled(2.0), fa.variant(value_mod=lambda row, b, h, i: row * 2.0, name="scaled")),
        (fa.RoPE(), fa.RoPE(500.0)),
        (fa.RoPE(), fa.RoPE(interleaved=True)),
        (Scaled(factor=2.0), Scaled(factor=3.0)),
        (Scaled(table=torch.ones(3, 8)), Scaled(table=torch.zeros(3, 8))),
        (fa.RoPE(scaling=fa.DynamicNTKScaling(2.0, 4096)),
         fa.RoPE(scaling=fa.DynamicNTKScaling(4.0, 4096))),
    ],
)  # fmt: skip
def test_fingerprints_tell_transforms_apart(one: fa.Variant, other: fa.Variant) -> None:
    """Of one name, with other hooks or other values."""
    assert one.name == other.name
    prints = [
        fa.kv.Spec((fa.kv.Group((0,), 1, 8, transform=t),)).fingerprint for t in (one, other, one)
    ]
    assert prints[0] != prints[1] and prints[0] == prints[2]


def config(**more: object) -> SimpleNamespace:
    return SimpleNamespace(
        **{"num_hidden_layers": 6, "num_attention_heads": 8, "hidden_size": 512, **more}
    )


def test_from_config() -> None:
    spec = fa.kv.Spec.from_config(config())
    assert [(g.layers, g.num_kv_heads, g.head_dim) for g in spec.groups] == [
        (tuple(range(6)), 8, 64)
    ]
    types = ["sliding_attention"] * 5 + ["full_attention"]
    gemma = config(layer_types=types, sliding_window=512, num_key_value_heads=2, head_dim=256)
    spec = fa.kv.Spec.from_config(gemma, page_size=32, dtype=torch.float16)
    assert [g.layers for g in spec.groups] == [(0, 1, 2, 3, 4), (5,)]
    assert (
        isinstance(spec.groups[0].variant, fa.SlidingWindow)
        and spec.groups[0].variant.window == 512
    )
    assert spec.page_bytes(0) == 5 * 32 * 2 * 2 * 256 * 2
    mistral = config(sliding_window=4096)
    assert isinstance(fa.kv.Spec.from_config(mistral).groups[0].variant, fa.SlidingWindow)
    falcon = config(multi_query=True)
    assert fa.kv.Spec.from_config(falcon).groups[0].num_kv_heads == 1
    falcon = config(multi_query=True, new_decoder_architecture=True)  # repeats its key heads
    assert fa.kv.Spec.from_config(falcon).groups[0].num_kv_heads == 8
    qwen = config(sliding_window=4096, use_sliding_window=False)
    assert isinstance(fa.kv.Spec.from_config(qwen).groups[0].variant, fa.Causal)
    qwen = config(sliding_window=4096, use_sliding_window=True, max_window_layers=4)
    spec = fa.kv.Spec.from_config(qwen)
    assert [g.layers for g in spec.groups] == [(0, 1, 2, 3), (4, 5)]
    assert [type(g.variant) for g in spec.groups] == [fa.Causal, fa.SlidingWindow]
    llama4 = config(layer_types=["chunked_attention"] * 6, attention_chunk_size=8192)
    assert isinstance(fa.kv.Spec.from_config(llama4).groups[0].variant, fa.Chunked)
    assert fa.kv.Spec.from_config(SimpleNamespace(text_config=config())).num_layers == 6


@pytest.mark.parametrize("uses", [False, True])
@pytest.mark.parametrize("full", [0, 3, 6, 28])
def test_windows_of_qwen2_are_those_of_transformers(uses: bool, full: int) -> None:
    transformers = pytest.importorskip("transformers")
    given = {"sliding_window": 64, "use_sliding_window": uses, "max_window_layers": full}
    made = transformers.Qwen2Config(
        num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, hidden_size=512, **given
    )
    ours, theirs = (fa.kv.Spec.from_config(c) for c in (config(**given), made))
    assert made.layer_types
    assert [(g.layers, type(g.variant)) for g in ours.groups] == [
        (g.layers, type(g.variant)) for g in theirs.groups
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 6}, "linear_attention"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types has 5"),
        ({"layer_types": ["sliding_attention"] * 6}, "no sliding_window"),
        ({"kv_lora_rank": 512}, "the config has no qk_nope_head_dim"),
        ({"hidden_size": 513}, "hidden_size=513"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"sliding_window": 8, "max_window_layers": "a"}, "max_window_layers"),
        ({"layer_types": [["a"]] * 6}, r"layer_types\[0\]=<list>; a Spec is made"),
        ({"layer_types": 5}, "layer_types=5, but layer 0 exists"),
        ({"kv_sharing_modes": ["own"]}, "kv_sharing_modes has 1 entries, but layer 1 exists"),
        ({"kv_sharing_modes": ["reuse"] * 6}, "kv_sharing_modes is .* all 6 layers"),
        ({"per_layer_config": [config()] * 2}, "per_layer_config has 2 entries, but layer 2"),
        ({"model_type": ["llama"]}, "model_type=<list> must be a name"),
        ({"num_kv_shared_layers": "a"}, "num_kv_shared_layers='a' must be 0 or more"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 must be .* num_hidden_layers=6"),
    ],
)  # fmt: skip
def test_configs_without_a_spec(changes: dict[str, object], message: str) -> None:
    with pytest.raises(fa.InputError, match=message):
        fa.kv.Spec.from_config(config(**changes))


DIGESTS = """
import numpy as np, flashattn_jit as fa
scale = fa.variant(value_mod=lambda row, b, h, i: row * 2.5)
transform = fa.QKNorm() & fa.RoPE() & scale
spec = fa.kv.Spec((fa.kv.Group((0,), 1, 8, variant=fa.Causal(), transform=transform),), 4)
cache = fa.kv.Cache(spec, 8, max_kv_len=64)
seq = cache.open([])
with cache.step([(seq, range(8))]) as step:
    step.commit()
print(spec.fingerprint.hex(), seq.place.digest.hex())
"""


def test_digests_are_the_same_in_every_process() -> None:
    def printed(seed: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", DIGESTS], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return run.stdout

    assert printed("1") == printed("2")
    fingerprint, digest = printed("3").split()
    assert len(fingerprint) == len(digest) == 64


def test_a_digest_depends_on_what_comes_before() -> None:
    tokens = np.arange(4)
    one, two = page_digest(b"a" * 32, tokens), page_digest(b"b" * 32, tokens)
    assert one != two and one != page_digest(b"a" * 32, tokens + 1)
