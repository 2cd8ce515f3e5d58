"""Every family that `Spec.from_config` knows stores what transformers' own cache of it does."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.kv.capacity.families import FAMILIES

transformers = pytest.importorskip("transformers")

from tests.integrations import tiny_models  # noqa: E402
from tests.kv.layouts import held_by_spec, held_by_transformers  # noqa: E402

WITHOUT_MODEL = {
    "kimi_k2": "deepseek_v3's layout; the class comes with the model",
    "gpt-sw3": "gpt2's model",
    "emu3_text_model": "within emu3", "mllama_text_model": "within mllama",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES - set(WITHOUT_MODEL)))
def test_a_family_stores_what_transformers_does(family: str) -> None:
    torch.manual_seed(0)
    reasons = []
    for tiny in tiny_models.candidates(family):
        if tiny.config is None:
            reasons.append(tiny.failure)
            continue
        try:
            held = held_by_transformers(tiny.build("eager"))
        except (RuntimeError, ValueError, KeyError) as error:
            reasons.append(str(error))
            continue
        assert held
        assert held_by_spec(fa.kv.Spec.from_config(tiny.config)) == held
        return
    pytest.fail(f"no model of {family} was built: {reasons}")
