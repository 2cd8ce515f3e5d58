"""Key lists: which key blocks each block row of queries visits, for every list sparsity.

A list head is a kv head with lists of its own, or 0 if all kv heads share them. List number
``s * rows + i``, of list head s and block row i (rows of all requests, in order), is the
``counts[s * rows + i]`` entries of ``key_blocks`` from ``begins[s * rows + i]`` on. Token lists are
blocks of one key; blocks of several sizes become blocks of their greatest common divisor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import InputError
from ..arguments.calls import Array, host_array
from ..arguments.checks import check_host_integers, check_int, shown
from .mask_bits import MAX_MAP_ENTRIES, block_words
from .sparsity import BlockSparse, TokenSparse
from .storage import checks_values, read_indices

Ints = NDArray[Any]


class Lengths(NamedTuple):
    """The lengths and heads of a batch. q_len, kv_len: one entry per request. longest: the largest
    kv_len of this plan, or of any plan within the limits."""

    q_len: Sequence[int]
    kv_len: Sequence[int]
    num_q_tokens: int
    num_q_heads: int
    num_kv_heads: int
    device: torch.device
    longest: int


class KeyLists(NamedTuple):
    """Lists as the planner and the kernels take them; see the module's docstring.

    key_blocks: int32 on the device of the keys. params: the params of `BlockBits`, empty without
    bits. room: the capacity of key_blocks that kernels get, if later plans reuse its memory.
    """

    q_block: int
    key_block: int
    per_head: bool
    begins: torch.Tensor
    counts: torch.Tensor
    key_blocks: torch.Tensor
    params: dict[str, Any]
    room: int = 0

    @property
    def entries(self) -> int:
        """Entries of key_blocks, the reserved ones included."""
        return max(self.room, self.key_blocks.shape[0])

    def native(self) -> tuple[int, int, bool, Array, Array, int]:
        """As `_C.BatchPlan` takes them; the tensors must outlive its use of their addresses."""
        begin = host_array("begins", self.begins)[0]
        count = host_array("counts", self.counts)[0]
        return self.q_block, self.key_block, self.per_head, begin, count, self.entries


def key_lists(sparsity: BlockSparse | TokenSparse, batch: Lengths) -> KeyLists:
    """The lists of a batch. Raises InputError."""
    if isinstance(sparsity, TokenSparse):
        return _token_lists(sparsity, batch)
    if not isinstance(sparsity.block_size, tuple) or len(sparsity.block_size) != 2:
        raise InputError(f"block_size must be (Br, Bc), got {shown(sparsity.block_size)}")
    if any(isinstance(size, torch.Tensor) for size in sparsity.block_size):
        return _variable_lists(sparsity, batch)
    return _block_lists(sparsity, batch)


# --- lists of tokens ------------------------------------------------------------------------------


def _token_lists(sparsity: TokenSparse, batch: Lengths) -> KeyLists:
    indices = read_indices("TokenSparse.indices", sparsity.indices, batch.device)
    per_head = indices.dim() == 3
    if indices.dim() not in (2, 3) or indices.shape[0] != batch.num_q_tokens or (
        per_head and indices.shape[1] != batch.num_kv_heads
    ):  # fmt: skip
        raise InputError(
            f"TokenSparse.indices must be [num_q_tokens={batch.num_q_tokens}, topk] or "
            f"[num_q_tokens, num_kv_heads={batch.num_kv_heads}, topk], got {list(indices.shape)}"
        )
    topk, heads = indices.shape[-1], indices.shape[1] if per_head else 1
    if indices.numel() and checks_values(indices):
        _check_tokens(indices, batch)
    rows = batch.num_q_tokens
    begin = torch.arange(rows * heads, dtype=torch.int32, device="cpu").mul_(topk)
    if per_head:
        begin = begin.view(rows, heads).t().reshape(-1)
    return KeyLists(
        1, 1, per_head, begin, torch.full_like(begin, topk),
        indices.to(torch.int32).contiguous().view(-1), {},
    )  # fmt: skip


def _check_tokens(indices: torch.Tensor, batch: Lengths) -> None:
    flat = indices.flatten(1)
    limits = np.repeat(np.asarray(batch.kv_len, np.int64), np.asarray(batch.q_len, np.int64))
    wrong = (flat < -1) | (flat >= torch.from_numpy(limits).to(flat.device)[:, None])
    if not bool(wrong.any()):
        return
    token, at = (int(x) for x in wrong.nonzero()[0])
    request = _owner(token, np.cumsum(batch.q_len))
    raise InputError(
        f"TokenSparse.indices of token {token} holds {int(flat[token, at])}, but request {request} "
        f"has kv_len={batch.kv_len[request]}; entries are positions below it, or -1"
    )


def _owner(item: int, ends: Ints) -> int:
    return int(np.searchsorted(ends, item, side="right"))


# --- blocks of one size ---------------------------------------------------------------------------


def _block_lists(sparsity: BlockSparse, batch: Lengths) -> KeyLists:
    q_block, key_block = (_size(n, x) for n, x in zip("rc", sparsity.block_size, strict=True))
    if sparsity.bits is None:
        # Work is counted in whole blocks: positions past the last key would count as work.
        key_block = min(key_block, max(1, batch.longest))
    rows = -(-np.asarray(batch.q_len, np.int64) // q_block)
    indices = read_indices("BlockSparse.indices", sparsity.indices, batch.device)
    if indices.dim() != 1:
        raise InputError(f"BlockSparse.indices must be [nnz], got {list(indices.shape)}")
    starts = _read_indptr(sparsity.indptr, int(rows.sum()), indices.shape[0], batch, rows)
    if checks_values(indices):
        limits = -(-np.asarray(batch.kv_len, np.int64) // key_block)
        _check_blocks(indices, starts, np.repeat(limits, rows), rows)
    params = {}
    if sparsity.bits is not None:
        params = _bits_params(sparsity.bits, indices, starts, rows, (q_block, key_block), batch)
    begin, count = _begin_and_count(starts)
    return KeyLists(
        q_block, key_block, starts.shape[0] > 1, begin, count,
        indices.to(torch.int32).contiguous(), params,
    )  # fmt: skip


def _begin_and_count(starts: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    """`begins` and `counts` (flat int32) of starts [list heads, rows + 1]."""
    begin = np.ascontiguousarray(starts[:, :-1], np.int32).reshape(-1)
    count = np.diff(starts, axis=1).astype(np.int32).reshape(-1)
    return torch.from_numpy(begin), torch.from_numpy(count)


def _size(side: str, value: object) -> int:
    return check_int(
        f"block_size: B{side}", value, 1, rule="must be an int of at least 1 or a tensor"
    )


def _read_indptr(indptr: object, rows: int, nnz: int, batch: Lengths, per_request: Ints) -> Ints:
    """The starts as int64 [list heads, rows + 1], checked."""
    indptr = check_host_integers("BlockSparse.indptr", indptr, "batches")
    heads = batch.num_kv_heads
    if indptr.dim() not in (1, 2) or indptr.shape[-1] != rows + 1 or (
        indptr.dim() == 2 and indptr.shape[0] != heads
    ):  # fmt: skip
        raise InputError(
            f"BlockSparse.indptr must be [block rows + 1 = {rows + 1}] or [num_kv_heads={heads}, "
            f"{rows + 1}], got {list(indptr.shape)}; request b has ceil(q_len / Br) block rows"
        )
    starts = np.atleast_2d(indptr.resolve_neg().numpy()).astype(np.int64)
    wrong = starts[:, 1:] < starts[:, :-1]  # differences of any int64 wrap around
    if wrong.any():
        head, row = (int(x) for x in np.argwhere(wrong)[0])
        raise InputError(
            f"BlockSparse.indptr must not descend; block row {row} (request "
            f"{_owner(row, np.cumsum(per_request))}) has "
            f"[{starts[head, row]}, {starts[head, row + 1]}]"
        )
    if starts.size and (starts[:, 0].min() < 0 or starts[:, -1].max() > nnz):
        raise InputError(
            f"BlockSparse.indptr runs from {starts[:, 0].min()} to {starts[:, -1].max()}, but "
            f"indices has {nnz} entries"
        )
    return starts


def _check_blocks(indices: torch.Tensor, starts: Ints, limits: Ints, rows: Ints) -> None:
    """Raises InputError for an entry that is no key block of its row's request.

    limits: the number of key blocks, for each row. rows: the number of rows of each request.
    """
    values = indices.cpu().numpy()
    for head in range(starts.shape[0]):
        used = values[starts[head, 0] : starts[head, -1]]
        bound = np.repeat(limits, np.diff(starts[head]))
        wrong = (used < 0) | (used >= bound)
        if not wrong.any():
            continue
        at = int(np.flatnonzero(wrong)[0]) + int(starts[head, 0])
        row = _owner(at, starts[head, 1:])
        raise InputError(
            f"BlockSparse.indices[{at}]={values[at]}, a key block of block row {row}, is outside "
            f"of [0, {limits[row]}): request {_owner(row, np.cumsum(rows))} has {limits[row]} key "
            "blocks"
        )


def _bits_params(
    bits: torch.Tensor,
    indices: torch.Tensor,
    starts: Ints,
    rows: Ints,
    size: tuple[int, int],
    batch: Lengths,
) -> dict[str, Any]:
    """The params of `BlockBits`."""
    q_block, key_block = size
    words = block_words(bits, indices.shape[0], q_block, key_block)
    blocks = max(1, -(-max(batch.kv_len, default=0) // key_block))
    shape = (starts.shape[0], max(1, int(rows.sum())), blocks)
    if np.prod(shape, dtype=np.int64) > MAX_MAP_ENTRIES:
        raise InputError(
            f"BlockSparse.bits: {shape[1]} block rows x {shape[2]} key blocks are more than "
            f"{MAX_MAP_ENTRIES}, the limit of the map to bits; use larger blocks, or no bits"
        )
    # Lists may share entries of `indices`; each list has a row of the map for itself.
    lists = [np.repeat(np.arange(s.size - 1), np.diff(s)) + i * shape[1]
             for i, s in enumerate(starts)]  # fmt: skip
    entries = np.concatenate([np.arange(s[0], s[-1]) for s in starts])
    device = indices.device
    row = torch.from_numpy(np.concatenate(lists)).to(device)
    entry = torch.from_numpy(entries).to(device)
    places = torch.zeros(shape[0] * shape[1] * blocks, dtype=torch.int32, device=device)
    column = indices[entry].long().clamp(0, blocks - 1)
    places[row * blocks + column] = entry.int()
    q_len = np.asarray(batch.q_len, np.int64)
    first = np.cumsum(rows) - rows
    inside = np.arange(q_len.sum()) - np.repeat(np.cumsum(q_len) - q_len, q_len)
    token = np.stack([np.repeat(first, q_len) + inside // q_block, inside % q_block], 1)
    if not token.size:
        token = np.zeros((1, 2), np.int64)
    return {
        "sparsity_row": torch.from_numpy(token.astype(np.int32)).to(device),
        "sparsity_map": places.view(shape),
        "sparsity_bits": words,
        "sparsity_key_block": key_block,
        "sparsity_heads": batch.num_q_heads // shape[0],
    }


# --- blocks of several sizes ----------------------------------------------------------------------


def _variable_lists(sparsity: BlockSparse, batch: Lengths) -> KeyLists:
    if len(batch.q_len) != 1:
        raise InputError(
            f"BlockSparse with sizes of single blocks takes one request, the batch has "
            f"{len(batch.q_len)}; use one block size, or plan each request separately"
        )
    if sparsity.bits is not None:
        raise InputError("BlockSparse.bits need one block size (Br, Bc), these blocks have several")
    q_edges = _edges("r", sparsity.block_size[0], batch.q_len[0], "q_len", batch)
    key_edges = _edges("c", sparsity.block_size[1], batch.kv_len[0], "kv_len", batch)
    indices = read_indices("BlockSparse.indices", sparsity.indices, batch.device)
    if indices.device.type != "cpu":
        raise InputError("BlockSparse.indices of blocks of several sizes must be a cpu tensor")
    rows = q_edges.shape[1] - 1
    starts = _read_indptr(
        sparsity.indptr, rows, indices.shape[0], batch, np.asarray([rows], np.int64)
    )
    limits = np.full(rows, key_edges.shape[1] - 1, np.int64)
    _check_blocks(indices, starts, limits, np.asarray([rows]))
    heads = max(starts.shape[0], q_edges.shape[0], key_edges.shape[0])
    q_block, key_block = _common(q_edges), _common(key_edges)
    values, lists = indices.numpy(), []
    fine: list[Ints] = []
    base = 0
    for head in range(heads):
        own = starts[head % starts.shape[0]]
        edges = key_edges[head % key_edges.shape[0]]
        used = values[own[0] : own[-1]].astype(np.int64)
        first, last = edges[used] // key_block, -(-edges[used + 1] // key_block)
        ends = np.cumsum(last - first)
        fine.append(np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - last, last - first))
        # `begins`: of each given row, its first entry in `fine`. `row`: the given row that each
        # row of q_block queries is in.
        begins = np.concatenate([[0], ends])[own - own[0]] + base
        q_edge = q_edges[head % q_edges.shape[0]]
        row = np.searchsorted(q_edge[1:], np.arange(0, batch.q_len[0], q_block), side="right")
        lists.append((begins[row], begins[row + 1] - begins[row]))
        base += fine[-1].size
    begin, count = (np.concatenate(x).astype(np.int32) for x in zip(*lists, strict=True))
    blocks = torch.from_numpy(np.concatenate(fine).astype(np.int32)).to(batch.device)
    return KeyLists(
        q_block, key_block, heads > 1, torch.from_numpy(begin), torch.from_numpy(count), blocks, {}
    )


def _edges(side: str, sizes: object, length: int, name: str, batch: Lengths) -> Ints:
    """The positions at which blocks begin and end, int64 [1 or num_kv_heads, blocks + 1]."""
    if not isinstance(sizes, torch.Tensor):
        size = _size(side, sizes)
        edges = np.append(np.arange(0, length, size), length)
        return edges[None]
    check_host_integers(f"block_size: B{side}", sizes, "batches")
    if sizes.dim() not in (1, 2) or sizes.dim() == 2 and sizes.shape[0] != batch.num_kv_heads:
        raise InputError(
            f"block_size: B{side} must be [blocks] or [num_kv_heads={batch.num_kv_heads}, blocks], "
            f"got {list(sizes.shape)}"
        )
    rows = np.atleast_2d(sizes.resolve_neg().numpy()).astype(np.int64)
    # Sums of any int64 wrap around; those of the message are of Python's ints.
    if (rows < 0).any() or (rows > length).any() or (rows.sum(1) != length).any():
        raise InputError(
            f"block_size: B{side} must be sizes of at least 0 that add up to {name}={length} of "
            f"request 0, they add up to {[sum(x) for x in rows.tolist()]}"
        )
    return np.concatenate([np.zeros((rows.shape[0], 1), np.int64), np.cumsum(rows, 1)], 1)


def _common(edges: Ints) -> int:
    """The largest block size of which every edge but the last is a multiple."""
    inner = edges[:, :-1]
    found = int(np.gcd.reduce(inner, axis=None))
    return found or max(1, int(edges[:, -1].max()))
