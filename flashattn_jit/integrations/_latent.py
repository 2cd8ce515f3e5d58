"""Latent attention (MLA) of transformers: layers hand their latents over instead of expanding them.

Layers with `expand_kv` keep latents in their cache and expand all of them to keys and values of
each head in every step. With this engine `expand_kv` gives a `Latents` instead, and attention
expands them only where that takes fewer multiplications: for prefill, not for decoding. Latents in
the pages of an `fa.kv.Cache` are never read to be expanded: only prompts from their first token on
are, whose latents come with the call.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flashattn_jit.codegen.spec import MAX_HEAD_DIM, device_target
from flashattn_jit.errors import InputError
from flashattn_jit.integrations._own_attention import IMPLEMENTATIONS, model_types
from flashattn_jit.integrations._paged_rows import PagedRows
from flashattn_jit.ops.latent import AbsorbedMLA, absorb_mla
from flashattn_jit.planner.cuda_tiles import has_tiles

_SERVED = frozenset({
    "AXK1Attention", "BailingHybridAttention", "DeepseekV2Attention", "DeepseekV3Attention",
    "Glm4MoeLiteAttention", "KimiLinearAttention", "LongcatFlashMLA", "MiniCPM3Attention",
    "Mistral4Attention", "YoutuAttention",
})  # fmt: skip
"""Layers that pass the results of `expand_kv` on to attention as they are."""

_verdicts: weakref.WeakKeyDictionary[nn.Module, tuple[Any, bool]] = weakref.WeakKeyDictionary()
"""Of each layer: the kind of weight that was looked at, and whether it expands as DeepSeek's do."""


class Latents:
    """The keys and values of a layer: latents [batch, 1, kv_len, rank] and k_rope beside them, as
    tensors or as handles of an `fa.kv.Cache`."""

    def __init__(
        self,
        projections: AbsorbedMLA,
        expand: Any,
        latent: Tensor | PagedRows,
        k_rope: Tensor | PagedRows,
    ) -> None:
        self.projections, self._expand = projections, expand
        self._latent, self._k_rope = latent, k_rope

    def handles(self) -> tuple[PagedRows, PagedRows] | None:
        """Those of latents and k_rope in pages, else None."""
        if isinstance(self._latent, PagedRows) and isinstance(self._k_rope, PagedRows):
            return self._latent, self._k_rope
        return None

    def expanded(self) -> tuple[Tensor, Tensor]:
        """What `expand_kv` would have given; of latents in pages, those that come with the call."""
        found = self.handles()
        parts = (self._latent, self._k_rope) if found is None else [x.rows for x in found]
        key, value = self._expand(*parts)
        return key, value

    def are_absorbed_for(self, query: Tensor) -> bool:
        """Whether queries [batch, num_q_heads, q_len, dim] attend to latents themselves."""
        rank, rope = self._latent.shape[-1], self._k_rope.shape[-1]
        if (found := self.handles()) is not None:
            new = found[0].owner.new_prompts(query.shape[2])
            return not new or self.projections.prefers_absorbed(new, new, rope)
        if query.is_cuda and not has_tiles((rank + rope, rank), device_target(query.device.index)):
            return False
        lengths = query.shape[2], self._latent.shape[2]
        return self.projections.prefers_absorbed(*lengths, rope)

    def absorbed_query(self, query: Tensor) -> Tensor:
        """Queries of latents, for queries [batch, num_q_heads, q_len, dim]."""
        nope = self.projections.to_keys.shape[1]
        heads_last = query.transpose(1, 2)
        absorbed = self.projections.query(heads_last[..., :nope], heads_last[..., nope:])
        return absorbed.transpose(1, 2)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of `absorbed_query`: latents with k_rope, and latents. Not in pages."""
        assert isinstance(self._latent, Tensor) and isinstance(self._k_rope, Tensor)
        rows = torch.cat([self._latent, self._k_rope], -1)
        return rows, rows[..., : self._latent.shape[-1]]


def prepare_family(config: Any) -> bool:
    """`prepare` for the layers of a config's models; whether there are any of transformers."""
    found = False
    for name in model_types(config):
        module = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        for kind in (getattr(module, layer, None) for layer in _SERVED):
            if kind is not None:
                prepare(kind)
                found = True
    return found


def prepare(kind: Any) -> None:
    """Lets layers of this class hand over their latents from now on.

    Changes the class, once; under other implementations its layers do what they did.
    """
    if kind.__name__ in _SERVED:
        expand_kv = getattr(kind, "expand_kv", None)
        if expand_kv is not None and not hasattr(expand_kv, "_hands_over"):
            kind.expand_kv = _handing_over(expand_kv)


def _handing_over(expand_kv: Any) -> Any:
    @functools.wraps(expand_kv)
    def expanding(self: Any, latent: Any, k_rope: Any) -> Any:
        expand = functools.partial(expand_kv, self)
        # A subclass may do more with what it inherits.
        own = vars(type(self)).get("expand_kv") is expanding
        ours = self.config._attn_implementation in IMPLEMENTATIONS
        if own and ours and not torch.compiler.is_compiling():
            projections = _projections_of(self, expand, latent)
            if projections is not None:
                latents = Latents(projections, expand, latent, k_rope)
                return latents, latents
        if isinstance(latent, PagedRows):
            raise InputError(
                f"{type(self).__name__} would expand latents that lie in pages: over pages its "
                "kv_b_proj must be a plain linear layer without hooks, in the dtype of the cache "
                "and without gradients, and its model not compiled; use a cache of transformers"
            )
        return expand(latent, k_rope)

    expanding._hands_over = True  # type: ignore[attr-defined]
    return expanding


def _projections_of(layer: Any, expand: Any, latent: Any) -> AbsorbedMLA | None:
    """The projections in the layer's weight, which may be another one in each call.

    None where the weight is not as in DeepSeek's models, where something else happens in its layer,
    or where what is computed with it has another dtype or a gradient.
    """
    linear = layer.kv_b_proj
    if type(linear) is not nn.Linear or linear.bias is not None or _is_watched(linear):
        return None
    weight = linear.weight
    if type(weight) is not nn.Parameter or weight.dtype != latent.dtype:
        return None
    if torch.is_grad_enabled() and weight.requires_grad:
        return None
    if torch.is_autocast_enabled(weight.device.type):
        return None
    nope, v_dim, rope = layer.qk_nope_head_dim, layer.v_head_dim, layer.qk_rope_head_dim
    rank = weight.shape[1]
    if rank + rope > MAX_HEAD_DIM or weight.is_meta or weight.shape[0] % (nope + v_dim):
        return None
    projections = absorb_mla(weight.detach(), weight.shape[0] // (nope + v_dim), nope, v_dim)
    kind = weight.shape, weight.dtype, weight.device
    found = _verdicts.get(layer)
    if found is None or found[0] != kind:
        found = _verdicts[layer] = kind, _expand_alike(projections, expand, rope)
    return projections if found[1] else None


def _is_watched(linear: nn.Linear) -> bool:
    """Whether a call of a layer does more than multiply by its weight."""
    everywhere = torch.nn.modules.module
    return "forward" in vars(linear) or any((
        linear._forward_hooks, linear._forward_pre_hooks, everywhere._global_forward_hooks,
        everywhere._global_forward_pre_hooks,
    ))  # fmt: skip


@torch.no_grad()
def _expand_alike(projections: AbsorbedMLA, expand: Any, rope_dim: int) -> bool:
    """Whether the projections expand two rows as `expand_kv` does."""
    weight = projections.to_keys
    generator = torch.Generator(device="cpu").manual_seed(0)
    latent, k_rope = (
        torch.randn(1, 1, 2, n, generator=generator, device="cpu").to(weight)
        for n in (weight.shape[2], rope_dim)
    )
    own = projections.expand(latent[:, 0], k_rope[:, 0])
    for one, other in zip(expand(latent, k_rope), own, strict=True):
        other = other.transpose(1, 2)
        if one.shape != other.shape:
            return False
        if not (one - other).abs().max() <= 0.02 * other.abs().max():
            return False
    return True
