"""The work of a problem: floating-point operations, bytes, pairs that a mask keeps."""

from __future__ import annotations

from collections.abc import Sequence


def pairs_causal(length: int) -> int:
    """Pairs (query, key <= query) of one sequence."""
    return length * (length + 1) // 2


def pairs_window(length: int, window: int) -> int:
    """Pairs of a causal sliding window that keeps `window` keys, the query's own included."""
    full = max(0, length - window)
    return pairs_causal(min(length, window)) + full * window


def pairs_documents(lengths: Sequence[int]) -> int:
    """Pairs of a causal mask inside documents."""
    return sum(pairs_causal(n) for n in lengths)


def attention_flops(pairs: int, batch: int, num_q_heads: int, head_dim: int) -> float:
    """Floating-point operations of both products over the kept pairs; a multiply-add is two."""
    return 4.0 * pairs * batch * num_q_heads * head_dim


def kv_bytes(tokens: int, num_kv_heads: int, head_dim: int, item: int = 2) -> int:
    """Bytes of K and V."""
    return 2 * tokens * num_kv_heads * head_dim * item


def decode_bytes(
    batch: int, kv_len: int, num_q_heads: int, num_kv_heads: int, head_dim: int, item: int = 2
) -> int:
    """Bytes that decoding one token per request must move: K, V, q and out."""
    ends = 2 * batch * num_q_heads * head_dim * item
    return kv_bytes(batch * kv_len, num_kv_heads, head_dim, item) + ends


def copy_bytes(nbytes: int) -> int:
    """Bytes that a device-to-device copy of `nbytes` moves: read and written."""
    return 2 * nbytes


def batch_for_kv(nbytes: int, kv_len: int, num_kv_heads: int, head_dim: int, item: int = 2) -> int:
    """The least batch whose K and V are at least `nbytes`."""
    one = kv_bytes(kv_len, num_kv_heads, head_dim, item)
    return -(-nbytes // one)


def document_lengths(total: int, parts: int) -> list[int]:
    """`parts` lengths that differ (about 1 : 2 : 3 ...) and add up to `total`."""
    weights = [1 + i % 5 for i in range(parts)]
    lengths = [total * w // sum(weights) for w in weights]
    lengths[-1] += total - sum(lengths)
    return lengths
