"""Masks that are a formula of positions alone: causal, windows, chunks, prefixes, blocks.

i is the query's logical position (`q_idx`), j the key's (`kv_idx`); a pair is kept where the
formula holds. Sizes are runtime scalars. The formulas compare differences of positions with sizes,
not positions with sums: no size overflows them, and interval analysis of them is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_jit.variants.library.limits import limited
from flashattn_jit.variants.variant import Variant, scalar, tensor

_NO_WINDOW = "without a window, leave fa.SlidingWindow out, or pass fa.Causal()"
_BLOCK = "1 is the smallest block; give the number of its tokens"


class Full(Variant):
    """Every query sees every key.

    BERT, ViT, Whisper's encoder, cross attention.
    """


class Causal(Variant):
    """Keep ``j <= i``.

    Every decoder. With ``q_offset="end"`` the last query row sees every key (bottom-right
    alignment), with the dense default 0 row i sees keys 0..i.
    """

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``j <= i``."""
        return kv_idx <= q_idx


class SlidingWindow(Variant):
    """Keep ``i - window < j <= i`` if causal, else ``|i - j| <= window`` (inclusive).

    window: runtime int, at least 1 (0 if not causal); there is no number for "no window": leave the
    variant out. causal: compiled in.
    Causal (window keys, the row's own among them): Mistral 7B v0.1 (4096), Gemma 2 and 3 local
    layers, gpt-oss (128), Phi-3, Cohere 2. Bidirectional: ModernBERT (64 to each side), T5Gemma's
    encoder, EmbeddingGemma. Beltagy et al. 2020, Longformer; Jiang et al. 2023, Mistral 7B.

    >>> fa.SlidingWindow(4096), fa.SlidingWindow(64, causal=False)
    """

    window: int = limited(1, _NO_WINDOW, where_not=("causal", 0))
    causal: bool = scalar(True)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``0 <= i - j < window``, or ``-window <= i - j <= window``."""
        ahead = q_idx - kv_idx
        if self.causal:
            return (ahead >= 0) & (ahead < self.window)
        return (ahead <= self.window) & (kv_idx - q_idx <= self.window)


class Chunked(Variant):
    """Keep ``j <= i`` within the same chunk: ``i // chunk == j // chunk``.

    chunk: runtime int, at least 1.
    Llama 4 (8192, on the layers with RoPE).
    """

    chunk: int = limited(1, "without chunks, pass fa.Causal()")

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``(i // chunk == j // chunk) and (j <= i)``."""
        return (q_idx // self.chunk == kv_idx // self.chunk) & (kv_idx <= q_idx)


class Dilated(Variant):
    """Keep every `dilation`-th key of a window: ``(i - j) % dilation == 0`` and
    ``0 <= i - j <= window`` if causal, else ``|i - j| <= window``.

    window (at least 0), dilation (at least 1): runtime ints. causal: compiled in.
    LongNet, DiNAT, the dilated heads of Longformer (Beltagy et al. 2020, section 3.1).
    """

    window: int = limited(0, "0 keeps the row's own key; without a window, leave fa.Dilated out")
    dilation: int = limited(1, "1 keeps every key of the window")
    causal: bool = scalar(True)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``(i - j) % dilation == 0`` inside the window."""
        ahead = q_idx - kv_idx
        # The largest kept difference. With `window` as the bound, interval analysis would not find
        # tiles empty whose differences are all between the two.
        reach = self.window - self.window % self.dilation
        inside = ahead >= 0 if self.causal else kv_idx - q_idx <= reach
        return inside & (ahead <= reach) & (ahead % self.dilation == 0)


class PrefixLM(Variant):
    """Keep ``j <= i`` or ``j < prefix_len[b]``: bidirectional in the prefix, causal after it.

    prefix_len: int tensor ``[batch]``.
    T5 as prefix LM, GLM, PaliGemma and Gemma 3 (image tokens), UniLM. Raffel et al. 2020, section
    3.2.1.
    """

    prefix_len: Tensor = tensor("batch")

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``(j <= i) or (j < prefix_len[b])``."""
        return (kv_idx <= q_idx) | (kv_idx < self.prefix_len[b])


class StreamingLLM(Variant):
    """Keep the first `num_sinks` keys and a causal window: ``0 <= i - j`` and
    (``i - j < window`` or ``j < num_sinks``).

    window (at least 1), num_sinks (at least 0): runtime ints.
    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; the A-shape of
    MInference.
    """

    window: int = limited(1, "without a window, pass fa.Causal()")
    num_sinks: int = limited(0, "0 keeps the window alone", 4)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``(j <= i) and ((i - j < window) or (j < num_sinks))``."""
        return (kv_idx <= q_idx) & ((q_idx - kv_idx < self.window) | (kv_idx < self.num_sinks))


class BlockCausal(Variant):
    """Keep ``j // block <= i // block``: bidirectional inside a block, causal between blocks.

    block: runtime int, at least 1.
    Block-diffusion decoding (LLaDA, BD3-LM, Fast-dLLM): clean blocks in the cache, the block being
    denoised sees itself. Video models that generate frame after frame.
    """

    block: int = limited(1, _BLOCK)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """``j // block <= i // block``."""
        return kv_idx // self.block <= q_idx // self.block


class BlockDiffusion(Variant):
    """The mask of block-diffusion training, over a sequence of `length` noised tokens followed by
    the same `length` clean ones. With ``blk(x) = (x mod length) // block``, keep

    * noised i, noised j: ``blk(i) == blk(j)`` (block diagonal),
    * noised i, clean j: ``blk(i) > blk(j)`` (offset block causal),
    * clean i, clean j: ``blk(i) >= blk(j)`` (block causal).

    length (at least 0), block (at least 1): runtime ints; length is half of q_len and of kv_len. A
    query at a negative position is noised, in a block without keys, and sees none.
    Arriola et al. 2025, "Block Diffusion" (BD3-LM), section 3; LLaDA-style training.
    """

    length: int = limited(0, "give half of q_len")
    block: int = limited(1, _BLOCK)

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The union of the three parts."""
        q_clean, kv_clean = q_idx >= self.length, kv_idx >= self.length
        q_block = torch.where(q_clean, q_idx - self.length, q_idx) // self.block
        kv_block = torch.where(kv_clean, kv_idx - self.length, kv_idx) // self.block
        diagonal = ~q_clean & ~kv_clean & (q_block == kv_block)
        offset = ~q_clean & kv_clean & (q_block > kv_block)
        clean = q_clean & kv_clean & (q_block >= kv_block)
        return diagonal | offset | clean
