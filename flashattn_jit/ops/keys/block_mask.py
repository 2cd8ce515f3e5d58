"""FlexAttention's `BlockMask` as the byte map that kernels read. FlexAttention is not imported.

A `BlockMask` lists, for each query block, the key blocks to visit: partial ones, where its
``mask_mod`` is evaluated, and full ones, where it is not. Blocks that are not listed are not
visited, whatever ``mask_mod`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...errors import InputError, TorchInputError
from ...torch_modes import is_capturing, on_host
from ...variants.interval.terms import EMPTY, FULL, PARTIAL
from ..arguments.checks import check_readable

_WHOLE = 1 << 30  # FlexAttention's block size of a mask that is one block for any length
_ATTRIBUTE = "_flashattn_jit_states"
_FLEX_MODULE = "torch.nn.attention.flex_attention"

Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices."""


class Blocks(NamedTuple):
    """The content of a BlockMask.

    states: uint8 [batch, num_q_heads, q blocks, kv blocks], stride 0 in dims that it does not vary
    over, or None if every block is visited with the mask. size: (q_block, kv_block). mask_mod: None
    if it is always True.
    """

    states: torch.Tensor | None
    size: tuple[int, int]
    mask_mod: Callable[..., Any] | None


class _Kept(NamedTuple):
    """The map of a mask, and the lists that it was made from."""

    lists: Lists
    versions: tuple[int | None, ...]
    num_blocks: tuple[int, int]
    stream: int  # CUDA: the stream that made it; other streams are not ordered after it
    states: torch.Tensor | None


def read_block_mask(mask: Any, batch: int, num_q_heads: int, q_len: int, kv_len: int) -> Blocks:
    """Checks a BlockMask against a call and converts it; the map is kept on the mask.

    Raises:
        InputError: it is no BlockMask, was made for other dims, or lists a block that does not
            exist or one twice.
        TorchInputError: it is a slice whose mask_mod was not set again.
    """
    size, mask_mod = _check_block_mask(mask, batch, num_q_heads, q_len, kv_len)
    states = _states(mask, (-(-q_len // size[0]), -(-kv_len // size[1])))
    if states is not None:
        states = states.expand(batch, num_q_heads, -1, -1)
    return Blocks(states, size, mask_mod)


def _check_block_mask(
    mask: Any, batch: int, num_q_heads: int, q_len: int, kv_len: int
) -> tuple[tuple[int, int], Callable[..., Any] | None]:
    """Block size and mask_mod of a BlockMask, whose dims must be the call's."""
    for name in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "shape", "mask_mod"):
        if not hasattr(mask, name):
            raise InputError(
                f"block_mask must be a {_FLEX_MODULE}.BlockMask, got {type(mask).__name__}; "
                "create_block_mask makes one from a mask_mod"
            )
    mask_mod = own_mask_mod(mask.mask_mod)
    q_block, kv_block = mask.BLOCK_SIZE
    if q_block < 1 or kv_block < 1:
        raise InputError(f"block_mask.BLOCK_SIZE={mask.BLOCK_SIZE} must be positive")
    shape = tuple(mask.shape)
    if (q_block, kv_block) != (_WHOLE, _WHOLE):
        _check_lengths(shape, q_len, kv_len)
    for d, name, wanted in ((-4, "batch", batch), (-3, "num_q_heads", num_q_heads)):
        if len(shape) >= -d and shape[d] not in (1, wanted):
            raise InputError(
                f"block_mask has {name}={shape[d]}, but q has {name}={wanted}; create it for that "
                "number, or with None for one mask that all share"
            )
    return (q_block, kv_block), mask_mod


def check_mask_device(mask: Any, device: torch.device) -> None:
    """Raises InputError if a list of a BlockMask is not on the call's device."""
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        tensor = getattr(mask, name, None)
        if isinstance(tensor, torch.Tensor) and tensor.device != device:
            raise InputError(
                f"block_mask.{name} is on {tensor.device}, but q is on {device}; move the mask "
                f"with block_mask.to({str(device)!r})"
            )


def own_mask_mod(mask_mod: Any) -> Callable[..., Any] | None:
    """The mask_mod; None for FlexAttention's `noop_mask`. Raises for the stub that slices have."""
    if mask_mod is None:
        return None
    if not callable(mask_mod):
        raise InputError(f"block_mask.mask_mod must be callable, got {type(mask_mod).__name__}")
    if getattr(mask_mod, "__module__", "") == _FLEX_MODULE:
        name = getattr(mask_mod, "__name__", "")
        if name == "_sliced_mask_mod_error":
            raise TorchInputError(
                "Cannot use mask_mod from a sliced BlockMask: set it again, such as "
                "`sliced.mask_mod = original.mask_mod`, with the slice's offset applied"
            )
        if name == "noop_mask":
            return None
    return mask_mod  # type: ignore[no-any-return]


def _check_lengths(shape: tuple[int, ...], q_len: int, kv_len: int) -> None:
    """FlexAttention's rule, with its messages: the mask's lengths must equal the call's."""
    if (q_len, kv_len) == shape[-2:]:
        return
    message = (
        f"block_mask was created for block_mask.shape={shape} but got q_len={q_len} and "
        f"kv_len={kv_len}. "
    )
    if q_len > shape[-2] or kv_len > shape[-1]:
        raise InputError(
            f"{message}As the block mask was created for a smaller length than you're using it "
            "for, you likely need to create a new block mask."
        )
    raise InputError(
        f"{message}As the block mask was created for a larger length than you're using it for, "
        "you can either 1. create a new block mask with the correct length, or 2. 'adjust' the "
        "existing block mask to the correct length by calling block_mask._adjust(q_len, kv_len). "
        "This essentially 'crops' the block mask to the upper left corner, which does not work for "
        "all mask_mods!"
    )


def lists_of(mask: Any) -> Lists:
    """The four lists of a BlockMask; the full ones may be absent."""
    return (
        mask.kv_num_blocks,
        mask.kv_indices,
        getattr(mask, "full_kv_num_blocks", None),
        getattr(mask, "full_kv_indices", None),
    )


@on_host
def _states(mask: Any, num_blocks: tuple[int, int]) -> torch.Tensor | None:
    """The map of a mask, made again only if its lists have changed; None if all is partial.

    A map on a device is made without a device-to-host copy.
    """
    lists = lists_of(mask)
    present = [x for x in lists if isinstance(x, torch.Tensor)]
    # Tensors made under inference_mode have no version counter: changes would not be detected.
    on_device = any(x.is_cuda for x in present)
    keep = not any(x.is_inference() for x in present)
    # A map that is made during a graph's capture lives in that graph's memory.
    keep = keep and not (on_device and is_capturing(present[0].device))
    stream = torch.cuda.current_stream(present[0].device).cuda_stream if on_device else 0
    versions = tuple(x._version for x in present) if keep else ()
    kept: _Kept | None = getattr(mask, _ATTRIBUTE, None)
    if (
        keep
        and kept is not None
        and kept.versions == versions
        and kept.num_blocks == num_blocks
        and kept.stream == stream
        and all(a is b for a, b in zip(kept.lists, lists, strict=True))
    ):
        return kept.states
    states: torch.Tensor | None = block_states(*lists, *num_blocks)
    if states is not None and not on_device and bool((states == PARTIAL).all()):
        states = None
    if keep:
        setattr(mask, _ATTRIBUTE, _Kept(lists, versions, num_blocks, stream, states))
    return states


def keep_states(mask: Any, before: Any) -> None:
    """Give `mask` the map that was made for the mask `before`; `_states` checks it before use."""
    kept = getattr(before, _ATTRIBUTE, None)
    if kept is not None:
        setattr(mask, _ATTRIBUTE, kept)


def block_states(
    kv_num_blocks: torch.Tensor,
    kv_indices: torch.Tensor,
    full_kv_num_blocks: torch.Tensor | None,
    full_kv_indices: torch.Tensor | None,
    q_blocks: int,
    kv_blocks: int,
) -> torch.Tensor:
    """The byte map [batch or 1, heads or 1, q_blocks, kv_blocks] of a BlockMask's lists.

    A batch or head dim over which the map does not vary becomes 1: heads then share key tiles.
    Lists on a CUDA device are not read by the host: there a dim becomes 1 only if the lists have
    size 1, blocks that do not exist are ignored, and a block listed as partial and full is full.

    Raises:
        InputError: a list is too short, or (on the CPU) contains a block that does not exist, or a
            block twice.
    """
    states, listed = _one_list(kv_num_blocks, kv_indices, PARTIAL, "kv", q_blocks, kv_blocks)
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        full, more = _one_list(
            full_kv_num_blocks, full_kv_indices, FULL, "full_kv", q_blocks, kv_blocks
        )
        if states.is_cuda:
            return torch.maximum(states, full).contiguous()
        states, listed = states + full, listed + more
    if states.is_cuda:
        return states.contiguous()
    if bool(((states != EMPTY).sum(-1) != listed).any()) or bool((states > FULL).any()):
        raise InputError("block_mask lists a key block twice for one query block")
    for d in (0, 1):
        if states.shape[d] > 1 and bool((states == states.narrow(d, 0, 1)).all()):
            states = states.narrow(d, 0, 1)
    return states.contiguous()


def _one_list(
    counts: torch.Tensor,
    indices: torch.Tensor,
    state: int,
    name: str,
    q_blocks: int,
    kv_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The map with the listed blocks set to `state`, and how many each query block lists."""
    for tensor, label in ((counts, f"{name}_num_blocks"), (indices, f"{name}_indices")):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
            raise InputError(f"block_mask.{label} must be an int32 or int64 tensor")
        check_readable(f"block_mask.{label}", tensor)
    if not 2 <= indices.dim() <= 4 or counts.shape != indices.shape[:-1]:
        raise InputError(
            f"block_mask.{name}_indices must be [batch, heads, q blocks, kv blocks] and "
            f"{name}_num_blocks one dim less, got {list(indices.shape)} and {list(counts.shape)}"
        )
    while indices.dim() < 4:
        counts, indices = counts.unsqueeze(0), indices.unsqueeze(0)
    if indices.shape[2] < q_blocks:
        raise InputError(
            f"block_mask lists {indices.shape[2]} query blocks, but q_len takes {q_blocks}; create "
            "it for this length, or slice as many query blocks as q has"
        )
    counts, indices = counts[:, :, :q_blocks].to(torch.int64), indices[:, :, :q_blocks]
    room = indices.shape[-1]
    on_cpu = not counts.is_cuda
    if on_cpu and counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= room:
        raise InputError(f"block_mask.{name}_num_blocks must be in [0, {room}], the room of a list")
    used = torch.arange(room, device=counts.device) < counts.unsqueeze(-1)
    wrong = used & ((indices < 0) | (indices >= kv_blocks))
    if on_cpu and bool(wrong.any()):
        raise InputError(
            f"block_mask.{name}_indices lists key block {int(indices[wrong][0])}, but kv_len takes "
            f"{kv_blocks} blocks"
        )
    # Entries past a list's count are undefined: they go to a last column, which is cut off.
    columns = torch.where(used & ~wrong, indices.to(torch.int64), kv_blocks)
    states = torch.zeros(
        (*columns.shape[:-1], kv_blocks + 1), dtype=torch.uint8, device=columns.device
    )
    states.scatter_(-1, columns, state)
    return states[..., :kv_blocks], counts
