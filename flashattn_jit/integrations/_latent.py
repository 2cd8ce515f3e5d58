"""Latent attention (MLA) of transformers: layers hand their latents over instead of expanding them.

Layers with `expand_kv` keep latents in their cache and expand all of them to keys and values of
each head in every step. With this engine `expand_kv` gives a `Latents` instead, and attention
expands them only where that takes fewer multiplications: for prefill, not for decoding.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flashattn_jit.codegen.spec import device_target
from flashattn_jit.integrations._own_attention import IMPLEMENTATIONS
from flashattn_jit.ops.latent import AbsorbedMLA, absorb_mla
from flashattn_jit.planner.cuda_tiles import has_tiles

_SERVED = frozenset({
    "AXK1Attention", "BailingHybridAttention", "DeepseekV2Attention", "DeepseekV3Attention",
    "Glm4MoeLiteAttention", "KimiLinearAttention", "LongcatFlashMLA", "MiniCPM3Attention",
    "Mistral4Attention", "YoutuAttention",
})  # fmt: skip
"""Layers that pass the results of `expand_kv` on to attention as they are."""

_projections: weakref.WeakKeyDictionary[nn.Module, tuple[Tensor, AbsorbedMLA | None]] = (
    weakref.WeakKeyDictionary()
)
"""Of each layer: the weight that they are views of, and None where latents are not used."""


class Latents:
    """The keys and values of a layer: latents [batch, 1, kv_len, rank] and k_rope beside them."""

    def __init__(
        self, projections: AbsorbedMLA, expand: Any, latent: Tensor, k_rope: Tensor
    ) -> None:
        self.projections, self._expand = projections, expand
        self._latent, self._k_rope = latent, k_rope

    def expanded(self) -> tuple[Tensor, Tensor]:
        """What `expand_kv` would have given."""
        key, value = self._expand(self._latent, self._k_rope)
        return key, value

    def are_absorbed_for(self, query: Tensor) -> bool:
        """Whether queries [batch, num_q_heads, q_len, dim] attend to latents themselves."""
        rank, rope = self._latent.shape[-1], self._k_rope.shape[-1]
        if query.is_cuda and not has_tiles((rank + rope, rank), device_target(query.device.index)):
            return False
        lengths = query.shape[2], self._latent.shape[2]
        return self.projections.prefers_absorbed(*lengths, rope)

    def absorbed(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The operands of attention over latents, for queries [batch, num_q_heads, q_len, dim]."""
        nope = self.projections.to_keys.shape[1]
        heads_last = query.transpose(1, 2)
        absorbed = self.projections.query(heads_last[..., :nope], heads_last[..., nope:])
        rows = torch.cat([self._latent, self._k_rope], -1)
        return absorbed.transpose(1, 2), rows, rows[..., : self._latent.shape[-1]]


def prepare(layer: nn.Module) -> None:
    """Lets layers of this class hand over their latents from now on.

    Changes the class, once; under other implementations its layers do what they did.
    """
    kind: Any = type(layer)
    if kind.__name__ in _SERVED:
        expand_kv = getattr(kind, "expand_kv", None)
        if expand_kv is not None and not hasattr(expand_kv, "_hands_over"):
            kind.expand_kv = _handing_over(expand_kv)


def _handing_over(expand_kv: Any) -> Any:
    @functools.wraps(expand_kv)
    def expanding(self: Any, latent: Tensor, k_rope: Tensor) -> Any:
        expand = functools.partial(expand_kv, self)
        ours = self.config._attn_implementation in IMPLEMENTATIONS
        if ours and not torch.compiler.is_compiling():
            projections = _projections_of(self, expand)
            if projections is not None:
                latents = Latents(projections, expand, latent, k_rope)
                return latents, latents
        return expand(latent, k_rope)

    expanding._hands_over = True  # type: ignore[attr-defined]
    return expanding


def _projections_of(layer: Any, expand: Any) -> AbsorbedMLA | None:
    """The projections in the layer's weight; None where it is not as in DeepSeek's models."""
    linear = layer.kv_b_proj
    weight = getattr(linear, "weight", None)
    if type(linear) is not nn.Linear or linear.bias is not None or _is_watched(linear):
        return None
    held = _projections.get(layer)
    if held is None or held[0] is not weight:
        held = _projections[layer] = weight, _checked(layer, weight, expand)
    return held[1]


def _is_watched(linear: nn.Linear) -> bool:
    return bool(linear._forward_hooks or linear._forward_pre_hooks)


def _checked(layer: Any, weight: Any, expand: Any) -> AbsorbedMLA | None:
    """The projections, if they expand two rows as `expand_kv` does."""
    nope, v_dim, rope = layer.qk_nope_head_dim, layer.v_head_dim, layer.qk_rope_head_dim
    if weight.is_meta or weight.shape[0] % (nope + v_dim):
        return None
    with torch.no_grad():
        found = absorb_mla(weight.detach(), weight.shape[0] // (nope + v_dim), nope, v_dim)
        generator = torch.Generator().manual_seed(0)
        latent, k_rope = (
            torch.randn(1, 1, 2, n, generator=generator, device="cpu").to(weight)
            for n in (weight.shape[1], rope)
        )
        key, value = expand(latent, k_rope)
        own_key, own_value = found.expand(latent[:, 0], k_rope[:, 0])
        close = functools.partial(torch.allclose, rtol=2e-2, atol=2e-2)
        same = key.shape == own_key.transpose(1, 2).shape
        if not same or not close(key, own_key.transpose(1, 2)):
            return None
        return found if close(value, own_value.transpose(1, 2)) else None
