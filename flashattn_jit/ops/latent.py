"""Latent attention (MLA): rows of a latent and a rotary part, which all heads share.

A token's row is its latent, from which every head's keys and values are linear, then the rotary
part of its keys. `absorb_mla` has the projections of both ways to attend: absorbed, to the rows
themselves (`BatchAttention` with v_in_k), and expanded, to the keys and values of each head.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..formats import Codes, Stored
from ..variants.ir.dtypes import row_dim
from ..variants.variant import Variant
from .append import append_paged_kv
from .arguments.checks import check_int, check_readable
from .keys.columns import columns, latent_parts
from .keys.paged import Paged


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AbsorbedMLA:
    """The projections between heads and latents; see `absorb_mla`.

    to_keys: [num_q_heads, nope_dim, rank]. to_values: [num_q_heads, v_dim, rank].
    """

    to_keys: Tensor
    to_values: Tensor

    def __repr__(self) -> str:
        heads, nope, rank = self.to_keys.shape
        return f"AbsorbedMLA({heads} heads, {nope} / {self.to_values.shape[1]}, rank {rank})"

    def query(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        """Queries of rows: [..., num_q_heads, rank + rope_dim].

        Args:
            q_nope: [..., num_q_heads, nope_dim] in the weight's dtype, the part without rotary
                positions.
            q_rope: [..., num_q_heads, rope_dim], floating, after the rotation.

        Raises:
            InputError: a shape, dtype, device or layout is wrong.
        """
        _check("q_nope", q_nope, self.to_keys.shape[:2], self.to_keys)
        _check_beside("q_rope", q_rope, "q_nope", q_nope)
        latent = torch.einsum("...hn,hnr->...hr", q_nope, self.to_keys)
        return torch.cat([latent, q_rope], -1)

    def output(self, out: Tensor) -> Tensor:
        """The heads' outputs [..., num_q_heads, v_dim] of attention over rows.

        out: [..., num_q_heads, rank] in the weight's dtype, the weighted sums of latents. Raises
        InputError.
        """
        _check("out", out, (self.to_values.shape[0], self.to_values.shape[2]), self.to_values)
        return torch.einsum("...hr,hvr->...hv", out, self.to_values)

    def expand(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the heads: [..., num_q_heads, nope_dim + rope_dim or v_dim].

        Args:
            latent: [..., rank] in the weight's dtype, normalised as the model stores it.
            k_rope: [..., rope_dim], floating, after the rotation, the same for all heads.

        Raises:
            InputError: a shape, dtype, device or layout is wrong.
        """
        _check("latent", latent, self.to_keys.shape[2:], self.to_keys)
        _check_beside("k_rope", k_rope, "latent", latent)
        nope = torch.einsum("...r,hnr->...hn", latent, self.to_keys)
        rope = k_rope.unsqueeze(-2).expand(*nope.shape[:-1], -1)
        return torch.cat([nope, rope], -1), torch.einsum("...r,hvr->...hv", latent, self.to_values)

    def prefers_absorbed(self, q_len: int, kv_len: int, rope_dim: int) -> bool:
        """Whether a request takes fewer multiplications absorbed than expanded.

        Expanded, each key costs its expansion, ``rank * (nope_dim + v_dim)`` a head, and each pair
        ``nope_dim + rope_dim + v_dim``. Absorbed, the first is of each query and a pair costs
        ``2 * rank + rope_dim``: for a model with 128 / 128 / 64 and rank 512 up to 170 queries
        of a long context. Keys that are expanded already cost nothing more.

        Args:
            q_len, kv_len: queries and keys of a request.
            rope_dim: of the rotary part of rows.

        Raises:
            InputError: a count is no int of at least 0.
        """
        counts = {"q_len": q_len, "kv_len": kv_len, "rope_dim": rope_dim}
        q_len, kv_len, rope_dim = (check_int(name, x, 0) for name, x in counts.items())
        _, nope, rank = self.to_keys.shape
        each = rank * (nope + self.to_values.shape[1])
        absorbed = q_len * each + q_len * kv_len * (2 * rank + rope_dim)
        pair = nope + rope_dim + self.to_values.shape[1]
        return absorbed <= kv_len * each + q_len * kv_len * pair


def absorb_mla(kv_b_weight: Tensor, num_q_heads: int, nope_dim: int, v_dim: int) -> AbsorbedMLA:
    """The projections of latent attention from a model's ``kv_b_proj`` weight.

    Queries times the key part of the weight attend to latents directly, and the value part applies
    to their sums: no key or value of a head exists.

    Args:
        kv_b_weight: [num_q_heads * (nope_dim + v_dim), rank], of a floating dtype of at least 16
            bits; head by head, keys first.
        num_q_heads: query heads.
        nope_dim: of the part of a head's keys without rotary positions.
        v_dim: of a head's values.

    Returns:
        Views of the weight, in its dtype and on its device.

    Raises:
        InputError: the weight has another shape, or a dtype or layout that torch cannot multiply.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.

    Example:
        >>> w = fa.absorb_mla(layer.kv_b_proj.weight, num_q_heads=16, nope_dim=128, v_dim=128)
        >>> batch = fa.BatchAttention(fa.Causal(), num_q_heads=16, num_kv_heads=1, head_dim=576,
        ...                           head_dim_v=512, v_in_k=True, q_dtype=torch.bfloat16)
        >>> out = w.output(batch.run(w.query(q_nope, q_rope), pages, scale=192**-0.5))
    """
    sizes = {"num_q_heads": num_q_heads, "nope_dim": nope_dim, "v_dim": v_dim}
    num_q_heads, nope_dim, v_dim = (check_int(name, x, 1) for name, x in sizes.items())
    rows = num_q_heads * (nope_dim + v_dim)
    floating = isinstance(kv_b_weight, Tensor) and kv_b_weight.is_floating_point()
    if not floating or kv_b_weight.dim() != 2 or len(kv_b_weight) != rows:
        shape = list(getattr(kv_b_weight, "shape", ()))
        raise InputError(
            "kv_b_weight must be floating [num_q_heads * (nope_dim + v_dim), rank] = "
            f"[{rows}, rank], got {shape}"
        )
    _check_dense("kv_b_weight", kv_b_weight)
    if not _computes(kv_b_weight):
        raise InputError(
            f"kv_b_weight is {kv_b_weight.dtype}, in which torch does not multiply; pass it "
            "dequantised, with its scales applied, such as in torch.bfloat16"
        )
    heads = kv_b_weight.view(num_q_heads, nope_dim + v_dim, -1)
    return AbsorbedMLA(heads[:, :nope_dim], heads[:, nope_dim:])


def append_paged_latent(
    latent: Tensor,
    k_rope: Tensor,
    pages: Codes,
    q_indptr: Tensor,
    paged: Paged,
    *,
    positions: Tensor | None = None,
    transform: Variant | None = None,
    target: str | None = None,
) -> None:
    """Write the newest latent rows of each request to the ends of their pages.

    A row of pages is the latent, then the rotary part: what `BatchAttention` with v_in_k reads.

    Args:
        latent: [num_tokens, rank].
        k_rope: [num_tokens, rope_dim].
        pages: [num_pages, page_size, 1, rank + rope_dim], written to. An `fa.kv.Stored` quantises
            rows: its format needs groups of channels that divide both rank and rope_dim, so that
            each part has scales of its own. Of uint8 the latent rows of FlashMLA's fp8 cache,
            [num_pages, page_size, 1, 656] of rank 512 and rope_dim 64; see `fa.kv.latent_parts`.
        q_indptr, paged, positions, target: as for `append_paged_kv`.
        transform: a variant whose key_mod changes latents and whose value_mod changes rotary parts.

    Raises:
        InputError: a shape is wrong, or a group of channels has both parts.
        GradError, TargetError, LaunchError: as for `append_paged_kv`.

    Example:
        >>> fa.append_paged_latent(latent, k_rope, pages, q_indptr, paged)
    """
    for name, rows in (("latent", latent), ("k_rope", k_rope)):
        if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.shape[1]:
            raise InputError(f"{name} must be a tensor [num_tokens, its width]")
    rank, rope = latent.shape[1], k_rope.shape[1]
    if isinstance(pages, Stored) and pages.group is None and pages.has_own_scales:
        raise InputError(
            "pages have one scale for a whole row, of which the latent and the rotary part are "
            "appended one by one: use a format with a group that divides both"
        )
    whole = pages.codes if isinstance(pages, Stored) else pages
    if not isinstance(whole, Tensor) or whole.dim() != 4 or row_dim(whole) != rank + rope:
        raise InputError(
            f"pages must be [num_pages, page_size, 1, {rank + rope}], as latent has {rank} columns "
            f"and k_rope {rope}; got {list(getattr(whole, 'shape', ()))}"
        )
    if whole.dtype is torch.uint8 and not isinstance(pages, Stored):
        parts: tuple[Codes, Codes] = latent_parts(whole)
    else:
        parts = columns(pages, 0, rank), columns(pages, rank, rope)
    append_paged_kv(
        latent.unsqueeze(1), k_rope.unsqueeze(1), *parts, q_indptr, paged, positions=positions,
        transform=transform, target=target,
    )  # fmt: skip


def _check(name: str, tensor: object, last: tuple[int, ...] | torch.Size, weight: Tensor) -> None:
    """Raises InputError for a tensor that cannot be multiplied by the weight.

    last: its last dims.
    """
    tensor = _check_dense(name, tensor)
    if tuple(tensor.shape[-len(last) :]) != tuple(last):
        dims = ", ".join(map(str, last))
        raise InputError(f"{name} must be [..., {dims}], got {list(tensor.shape)}")
    if tensor.dtype != weight.dtype and not _autocast(tensor, weight):
        raise InputError(
            f"{name} is {tensor.dtype}, but kv_b_weight is {weight.dtype}; pass "
            f"{name}.to({weight.dtype})"
        )
    _check_device(name, tensor, "kv_b_weight", weight)


def _autocast(tensor: Tensor, weight: Tensor) -> bool:
    """Whether torch.autocast gives both one dtype."""
    return torch.is_autocast_enabled(weight.device.type) and all(
        x.is_floating_point() and x.dtype is not torch.float64 for x in (tensor, weight)
    )


def _check_beside(name: str, tensor: object, other_name: str, other: Tensor) -> None:
    """Raises InputError for a rotary part that does not go with the other part of its rows."""
    tensor = _check_dense(name, tensor)
    if not tensor.dim() or tensor.shape[:-1] != other.shape[:-1]:
        raise InputError(
            f"{name} {list(tensor.shape)} and {other_name} {list(other.shape)} differ before their "
            "last dim"
        )
    if not _computes(tensor):
        raise InputError(
            f"{name} is {tensor.dtype}, but {other_name} is {other.dtype}; pass "
            f"{name}.to({other.dtype})"
        )
    _check_device(name, tensor, other_name, other)


def _check_dense(name: str, tensor: object) -> Tensor:
    """The value, a tensor of strided layout. Raises InputError."""
    if not isinstance(tensor, Tensor) or (
        tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized
    ):
        check_readable(name, tensor)
    assert isinstance(tensor, Tensor)
    return tensor


def _computes(tensor: Tensor) -> bool:
    """Whether torch computes in the dtype, which is floating: those of 8 and 4 bits are codes."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise InputError(
            f"{name} is on {tensor.device}, but {other_name} on {other.device}; move it with "
            f".to({str(other.device)!r})"
        )
