"""Mask mods as users of FlexAttention write them: torch's tests, attention-gym, Hugging Face.

Each maker takes (shape, generator) and returns a bare ``mask_mod(b, h, q_idx, kv_idx)``. The
interval form of the masks of `_EXACT` must be exact, that of the masks of `_SOUND` sound.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import itertools

import torch

from tests.registry.case import Case, Make, Shape, tags


def _simple(fn) -> Make:
    return lambda shape, generator: fn


def and_masks(*masks):
    """A copy of torch.nn.attention.flex_attention's function, whose import takes a second."""

    def all_of(b, h, q, k):
        result = b.new_ones((), dtype=torch.bool)
        for mask in masks:
            result = result & mask(b, h, q, k)
        return result

    return all_of


def or_masks(*masks):
    """A copy of torch.nn.attention.flex_attention's function."""

    def any_of(b, h, q, k):
        result = b.new_zeros((), dtype=torch.bool)
        for mask in masks:
            result = result | mask(b, h, q, k)
        return result

    return any_of


def _lengths(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """`parts` random lengths of at least 1 that sum to `total` (fewer if total is small)."""
    parts = max(1, min(parts, total))
    cuts = torch.randperm(max(total - 1, 0), generator=generator)[: parts - 1] + 1
    edges = [0, *sorted(cuts.tolist()), total]
    return [b - a for a, b in itertools.pairwise(edges)]


def _documents(shape: Shape, generator: torch.Generator, parts: int = 5) -> torch.Tensor:
    lengths = _lengths(max(shape.tokens, 1), parts, generator)
    ids = torch.arange(len(lengths), dtype=torch.int32)
    return ids.repeat_interleave(torch.tensor(lengths))


def _offsets(shape: Shape, generator: torch.Generator, parts: int = 5) -> torch.Tensor:
    lengths = _lengths(max(shape.tokens, 1), parts, generator)
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _noop(b, h, q, k):
    return True


def _noop_tensor(b, h, q, k):
    return b.new_ones((), dtype=torch.bool)


def _causal(b, h, q, k):
    return q >= k


def _inverse_causal(b, h, q, k):
    return q <= k


def _sliding(shape: Shape, generator: torch.Generator):
    window = 17

    def mask(b, h, q, k):
        return (q >= k) & (q - k <= window)

    return mask


def _huggingface_sliding(shape: Shape, generator: torch.Generator):
    """As transformers composes masks: functions, and new_ones as the neutral element of `and`."""
    window = 24

    def overlay(b, h, q, k):
        return k > q - window

    def causal(b, h, q, k):
        return k <= q

    def both(b, h, q, k):
        result = q.new_ones((), dtype=torch.bool)
        for mask in (overlay, causal):
            result = result & mask(b, h, q, k).to(result.device)
        return result

    return both


def _document(shape: Shape, generator: torch.Generator):
    document_id = _documents(shape, generator)
    return lambda b, h, q, k: document_id[q] == document_id[k]


def _document_causal(shape: Shape, generator: torch.Generator):
    document_id = _documents(shape, generator, 7)
    return lambda b, h, q, k: (document_id[q] == document_id[k]) & (q >= k)


def _batch_documents(shape: Shape, generator: torch.Generator):
    rows = [_documents(shape, generator, 3 + b) for b in range(shape.batch)]
    docs = torch.stack(rows)

    def mask(b, h, q, k):
        return (docs[b, q] == docs[b, k]) & (q >= k)

    return mask


def _unsorted_documents(shape: Shape, generator: torch.Generator):
    document_id = torch.randint(0, 4, (max(shape.tokens, 1),), generator=generator)
    return lambda b, h, q, k: document_id[q] == document_id[k]


def _jagged(shape: Shape, generator: torch.Generator):
    """Nested-tensor causal: logical positions inside documents compared on both sides."""
    offsets = _offsets(shape, generator)
    counts = offsets[1:] - offsets[:-1]
    doc = torch.arange(len(counts)).repeat_interleave(counts)

    def mask(b, h, q, k):
        inside = q - offsets[doc[q]] >= k - offsets[doc[k]]
        return (doc[q] == doc[k]) & inside

    return mask


def _jagged_search(shape: Shape, generator: torch.Generator):
    """The documents of `_jagged`, found by a binary search in the offsets."""
    offsets = _offsets(shape, generator)

    def mask(b, h, q, k):
        q_doc = torch.searchsorted(offsets, q, right=True)
        k_doc = torch.searchsorted(offsets, k, right=True)
        return (q_doc == k_doc) & (q >= k)

    return mask


def _batch_offset(shape: Shape, generator: torch.Generator):
    offset = torch.arange(shape.batch)
    return lambda b, h, q, k: q + offset[b] * 16 >= k


def _two_ranges(b, h, q, k):
    return (k < 32) | (k >= 80)


def _masked_rows(shape: Shape, generator: torch.Generator):
    """The last rows see nothing."""
    rows = shape.q_len * 2 // 3
    return lambda b, h, q, k: q < rows


def _masked_rows_and_causal(shape: Shape, generator: torch.Generator):
    rows = shape.q_len // 3
    return lambda b, h, q, k: (q >= rows) & (k <= q)


def _partial(shape: Shape, generator: torch.Generator):
    def mask(b, h, q, k, *, offset):
        return q + offset >= k

    return functools.partial(mask, offset=10)


class _CallableMask:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, b, h, q, k):
        return q + self.offset >= k

    def method(self, b, h, q, k):
        return (q - self.offset <= k) & (k <= q)


def _combined(shape: Shape, generator: torch.Generator):
    window = 13

    def sliding(b, h, q, k):
        return q - k <= window

    return and_masks(_causal, sliding)


def _never(shape: Shape, generator: torch.Generator):
    return and_masks(_causal, lambda b, h, q, k: q < k)


def _everything(shape: Shape, generator: torch.Generator):
    return or_masks(_causal, lambda b, h, q, k: q < k)


def _or_of_ands(shape: Shape, generator: torch.Generator):
    prefix = torch.randint(0, max(shape.kv_len, 1), (shape.batch,), generator=generator)

    def sliding(b, h, q, k):
        return q - k < 20

    return or_masks(and_masks(_causal, sliding), lambda b, h, q, k: k < prefix[b])


def _dependent_bidirectional(shape: Shape, generator: torch.Generator):
    bidirectional = torch.randint(1, max(shape.tokens, 2), (shape.batch,), generator=generator)
    return lambda b, h, q, k: (q >= k) | ((q <= bidirectional[b]) & (k <= bidirectional[b]))


def _sink_window(b, h, q, k):
    return (k <= q) & ((q - k < 16) | (k < 4))


def _dilated(shape: Shape, generator: torch.Generator):
    window, dilation = 40, 4

    def mask(b, h, q, k):
        ahead = q - k
        return (ahead >= 0) & (ahead <= window) & (ahead % dilation == 0)

    return mask


def _global_sliding(shape: Shape, generator: torch.Generator):
    window, num_global = 16, 4
    return lambda b, h, q, k: (torch.abs(q - k) <= window) | (q < num_global) | (k < num_global)


def _shared_prefix(shape: Shape, generator: torch.Generator):
    """Several continuations of one prefix, packed behind it."""
    prefix = shape.tokens // 3
    docs = _documents(shape, generator, 6)

    def mask(b, h, q, k):
        return (q >= k) & ((k < prefix) | (docs[q] == docs[k]))

    return mask


def _media(shape: Shape, generator: torch.Generator):
    """Flamingo: text sees the image that precedes it; ids of images by key, of text by query."""
    media = _documents(shape, generator, 4)
    image_of = torch.arange(max(shape.kv_len, 1), dtype=torch.int32) // 16
    return lambda b, h, q, k: media[q] == image_of[k]


def _natten(shape: Shape, generator: torch.Generator):
    height = width = max(1, int(max(shape.tokens, 1) ** 0.5))
    kernel = 2

    def mask(b, h, q, k):
        q_y, q_x = q // width, q % width
        k_y, k_x = k // width, k % width
        center_y = q_y.clamp(kernel, height - 1 - kernel)
        center_x = q_x.clamp(kernel, width - 1 - kernel)
        return ((center_y - k_y).abs() <= kernel) & ((center_x - k_x).abs() <= kernel)

    return mask


def _tiled_natten(shape: Shape, generator: torch.Generator):
    """attention-gym's tiled NATTEN: pixels reordered tile by tile."""
    width, tile, kernel = 8, 4, 2
    per_tile, per_row = tile * tile, width // tile

    def coordinates(i):
        t, inside = i // per_tile, i % per_tile
        return (t // per_row) * tile + inside // tile, (t % per_row) * tile + inside % tile

    def mask(b, h, q, k):
        q_y, q_x = coordinates(q)
        k_y, k_x = coordinates(k)
        return ((q_y - k_y).abs() <= kernel) & ((q_x - k_x).abs() <= kernel)

    return mask


def _morton_natten(shape: Shape, generator: torch.Generator):
    """attention-gym's Morton-order NATTEN: coordinates by bit interleaving."""
    kernel = 2

    def compact(x):
        x = x & 0x55555555
        x = (x | (x >> 1)) & 0x33333333
        x = (x | (x >> 2)) & 0x0F0F0F0F
        x = (x | (x >> 4)) & 0x00FF00FF
        return (x | (x >> 8)) & 0x0000FFFF

    def mask(b, h, q, k):
        dx = (compact(q) - compact(k)).abs()
        dy = (compact(q >> 1) - compact(k >> 1)).abs()
        return (dx <= kernel) & (dy <= kernel)

    return mask


def _sliding_tile(shape: Shape, generator: torch.Generator):
    """STA in two dimensions: windows of whole tiles."""
    width, tile, window = 32, 16, 1

    def mask(b, h, q, k):
        q_t, k_t = q // tile, k // tile
        per_row = width // tile
        rows = (q_t // per_row - k_t // per_row).abs() <= window
        columns = (q_t % per_row - k_t % per_row).abs() <= window
        return rows & columns

    return mask


def _spatial_head(shape: Shape, generator: torch.Generator):
    """SVG's spatial mask: frames near each other, and the text after the video."""
    frame, frames, near = 16, max(1, shape.tokens * 3 // 4 // 16), 1
    text = frame * frames

    def mask(b, h, q, k):
        inside = (q // frame - k // frame).abs() <= near
        return ((q < text) & (k < text) & inside) | (q >= text) | (k >= text)

    return mask


def _temporal_head(shape: Shape, generator: torch.Generator):
    """SVG's temporal mask: the same position in every frame."""
    frame, width = 16, 2
    return lambda b, h, q, k: (q % frame - k % frame).abs() <= width


def _block_diffusion(shape: Shape, generator: torch.Generator):
    n, block = max(1, shape.tokens // 2), 8

    def mask(b, h, q, k):
        clean_q, clean_k = q >= n, k >= n
        block_q = torch.where(clean_q, (q - n) // block, q // block)
        block_k = torch.where(clean_k, (k - n) // block, k // block)
        diagonal = (block_q == block_k) & (clean_q == clean_k)
        offset = (block_q > block_k) & clean_k & ~clean_q
        return diagonal | offset | ((block_q >= block_k) & clean_k & clean_q)

    return mask


def _ancestors(shape: Shape, generator: torch.Generator):
    """A tree of draft tokens as a dense table of ancestors."""
    n = max(1, shape.q_len)
    seen = torch.eye(n, dtype=torch.bool)
    for token in range(1, n):
        parent = int(torch.randint(0, token, (), generator=generator))
        seen[token] |= seen[parent]
    prefix = max(0, shape.kv_len - n)

    def mask(b, h, q, k):
        return (k < prefix) | seen[q, torch.clamp(k - prefix, 0, n - 1)]

    return mask


def _key_padding(shape: Shape, generator: torch.Generator):
    lengths = torch.arange(1, shape.batch + 1) * shape.kv_len // (shape.batch + 1)
    pad = torch.arange(max(shape.kv_len, 1)) >= lengths[:, None]
    return lambda b, h, q, k: pad[b, k]


def _key_lengths(shape: Shape, generator: torch.Generator):
    lengths = torch.randint(0, shape.kv_len + 1, (shape.batch,), generator=generator)
    return lambda b, h, q, k: (k < lengths[b]) & (k <= q)


def _chunked(shape: Shape, generator: torch.Generator):
    chunk = 32
    left_padding = torch.arange(shape.batch) * 3

    def mask(b, h, q, k):
        same = (q - left_padding[b]) // chunk == (k - left_padding[b]) // chunk
        return same & (k <= q)

    return mask


def _tensor_offset(shape: Shape, generator: torch.Generator):
    offset = torch.tensor(7)
    return lambda b, h, q, k: q + offset >= k


def _position_tables(shape: Shape, generator: torch.Generator):
    n = max(shape.tokens, 1)
    offset_q = torch.randint(0, 3, (n,), generator=generator)
    offset_kv = torch.randint(0, 3, (n,), generator=generator)
    return lambda b, h, q, k: q + offset_q[q] >= k + offset_kv[k]


def _head_dependent(shape: Shape, generator: torch.Generator):
    return lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, (q - k).abs() < 16)


def _head_windows(shape: Shape, generator: torch.Generator):
    windows = torch.randint(4, 48, (shape.num_q_heads,), generator=generator, dtype=torch.int16)
    return lambda b, h, q, k: (k <= q) & (q - k < windows[h])


def _blocks(shape: Shape, generator: torch.Generator):
    """A block-sparse layout as a captured table of blocks."""
    block = 16
    n = max(shape.tokens, 1) // block + 1
    kept = torch.rand(n, n, generator=generator) < 0.4
    return lambda b, h, q, k: kept[q // block, k // block]


def _vertical_slash(shape: Shape, generator: torch.Generator):
    """MInference: some columns and some diagonals."""
    n = max(shape.tokens, 1)
    vertical = torch.rand(n, generator=generator) < 0.05
    slash = torch.rand(n, generator=generator) < 0.1
    return lambda b, h, q, k: (k <= q) & (vertical[k] | slash[q - k])


def _new_zeros_index(shape: Shape, generator: torch.Generator):
    rows = torch.tensor([shape.kv_len // 2])
    return lambda b, h, q, k: k < rows[h.new_zeros(h.shape)]


def _modular(b, h, q, k):
    return (q + k) % 3 != 0


def _any_of(shape: Shape, generator: torch.Generator):
    edges = _offsets(shape, generator)

    def mask(b, h, q, k):
        return ((edges[:-1] <= q) & (q < edges[1:]) & (edges[:-1] <= k) & (k < edges[1:])).any()

    return mask


def _entry(name: str, make: Make, interval="exact", **more) -> Case:
    return Case(f"flex_{name}", make, tags=tags("mask closure"), interval=interval, **more)


_EXACT = {
    "noop": _simple(_noop), "noop_tensor": _simple(_noop_tensor), "causal": _simple(_causal),
    "inverse_causal": _simple(_inverse_causal), "sliding": _sliding,
    "huggingface_sliding": _huggingface_sliding, "document": _document,
    "document_causal": _document_causal, "batch_documents": _batch_documents,
    "jagged": _jagged,
    "batch_offset": _batch_offset, "two_ranges": _simple(_two_ranges),
    "masked_rows": _masked_rows, "masked_rows_and_causal": _masked_rows_and_causal,
    "partial_mask": _partial, "callable_object": lambda s, g: _CallableMask(5),
    "bound_method": lambda s, g: _CallableMask(9).method, "combined": _combined,
    "never": _never, "everything": _everything, "or_of_ands": _or_of_ands,
    "dependent_bidirectional": _dependent_bidirectional, "sink_window": _simple(_sink_window),
    "global_sliding": _global_sliding, "block_diffusion": _block_diffusion,
    "key_padding": _key_padding, "key_lengths": _key_lengths, "chunked": _chunked,
    "tensor_offset": _tensor_offset, "head_dependent": _head_dependent,
    "head_windows": _head_windows, "dilated": _dilated, "spatial_head": _spatial_head,
    "new_zeros_index": _new_zeros_index,
}  # fmt: skip
# Bounds of these are sound, not exact: two-dimensional layouts whose tiles cover parts of image
# rows, tables indexed by both coordinates, bit operations, and unordered values of rows and keys.
_SOUND = {
    "unsorted_documents": _unsorted_documents, "jagged_search": _jagged_search,
    "shared_prefix": _shared_prefix, "media": _media,
    "natten": _natten, "tiled_natten": _tiled_natten, "morton_natten": _morton_natten,
    "sliding_tile": _sliding_tile, "temporal_head": _temporal_head, "ancestors": _ancestors,
    "position_tables": _position_tables, "blocks": _blocks, "vertical_slash": _vertical_slash,
    "modular": _simple(_modular), "any_of": _any_of,
}  # fmt: skip

MASK_CASES: tuple[Case, ...] = (
    *(_entry(name, make) for name, make in _EXACT.items()),
    *(_entry(name, make, "sound") for name, make in _SOUND.items()),
)
"""Every mask mod as a case."""
