"""A fake engine: it writes who and what a row is into pages, and reads all live rows again.

Keys and values of a token hold its (prefix, position, layer, head), where prefix is a hash of all
tokens up to it, as keys of a model depend on all of them. So a page which is shared, copied, moved
or reused wrongly shows in its contents, whatever the bookkeeping says.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import flashattn_jit as fa

Keep = Callable[[int, int], bool]
"""Whether a query at the first position reads the key at the second, in some head."""


class Engine:
    """A cache, and beside it lists of tokens as the model of its sequences.

    keeps: for each group its mask as plain Python, None for causal masks without a window.
    """

    def __init__(self, cache: fa.kv.Cache, keeps: list[Keep | None]) -> None:
        self.cache, self.keeps = cache, keeps
        self.tokens: dict[int, list[int]] = {}
        self.longest: dict[int, int] = {}

    def open(self, prompt: list[int], **options: object) -> fa.kv.Sequence:
        seq = self.cache.open(prompt, **options)  # type: ignore[arg-type]
        assert seq.num_cached <= max(0, len(prompt) - 1)
        assert seq.num_cached % self.cache.spec.page_size == 0
        self.tokens[seq.number] = prompt[: seq.num_cached]
        self.longest[seq.number] = seq.num_cached
        self.verify(seq)
        return seq

    def write(self, step: fa.kv.Step, layers: int | None = None) -> None:
        """Append the rows of a step, in the first `layers` layers alone where a failure follows."""
        counts = step.counts()
        new = np.split(step.token_ids, np.cumsum([count for _, count in counts]))
        tails = [
            prefixes([*self.tokens[seq.number], *tokens])[seq.kv_len :]
            for (seq, _), tokens in zip(counts, new, strict=False)
        ]
        tokens = torch.tensor([x for tail in tails for x in tail]).float()
        positions = step.positions.float()
        spec = self.cache.spec
        for layer in range(spec.num_layers if layers is None else layers):
            group = spec.groups[self.cache.group_of(layer)]
            k = rows(tokens, positions, layer, group.num_kv_heads, group.head_dim)
            v = -rows(tokens, positions, layer, group.num_kv_heads, group.head_dim_v or 0)
            step.append(layer, k.to(self.cache.device), v.to(self.cache.device))

    def step(self, items: list[tuple[fa.kv.Sequence, list[int]]]) -> None:
        with self.cache.step(items) as step:
            self.write(step)
            step.commit()
        for seq, new in items:
            self.tokens[seq.number] += new
            self.longest[seq.number] = max(self.longest[seq.number], seq.kv_len)

    def fork(self, seq: fa.kv.Sequence) -> fa.kv.Sequence:
        child = seq.fork()
        self.tokens[child.number] = list(self.tokens[seq.number])
        self.longest[child.number] = self.longest[seq.number]
        return child

    def verify(self, seq: fa.kv.Sequence) -> None:
        """Every live row of a sequence is what was written, and every row a query reads is live."""
        tokens = self.tokens[seq.number]
        assert seq.token_ids.tolist() == tokens
        cache, size = self.cache, self.cache.spec.page_size
        for g, group in enumerate(cache.spec.groups):
            table = seq.pages(g)
            if seq.removed[g]:
                continue  # positions have moved: see test_compaction.py
            assert len(table) == -(-len(tokens) // size)
            live = np.flatnonzero(table)
            self._check_live(g, table, len(tokens))
            at = np.concatenate([np.arange(p * size, (p + 1) * size) for p in live] or [[]])
            at = at[at < len(tokens)].astype(int)
            page, slot = torch.from_numpy(table[at // size].astype(np.int64)), at % size
            hashes = prefixes(tokens)
            wanted_tokens = torch.tensor([hashes[x] for x in at], dtype=torch.float32)
            for layer in group.layers:
                for cached, sign in zip(cache.tensors(layer), (1, -1), strict=True):
                    cached, dim = cached.cpu(), cached.shape[-1]
                    wanted = rows(
                        wanted_tokens, torch.from_numpy(at).float(), layer, group.num_kv_heads, dim
                    )
                    assert torch.equal(cached[page, torch.from_numpy(slot)], sign * wanted), (
                        f"layer {layer} of {seq}"
                    )

    def _check_live(self, group: int, table: np.ndarray, kv_len: int) -> None:
        keep, size = self.keeps[group], self.cache.spec.page_size
        if keep is None:
            assert table.all(), "a page of a group whose mask gives up none"
            return
        for page in np.flatnonzero(table == 0):
            for q in range(kv_len, self.cache.max_kv_len):
                for key in range(page * size, (page + 1) * size):
                    assert not keep(q, key), f"query {q} reads key {key} of a page given up"

    def verify_all(self) -> None:
        for seq in self.cache.sequences:
            if not seq.is_suspended:
                self.verify(seq)
        self.cache.check()


def prefixes(tokens: list[int]) -> list[int]:
    """A hash of the tokens up to each one, small enough for a float32."""
    found, value = [], 0
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
        found.append(value)
    return found


def rows(
    tokens: torch.Tensor, positions: torch.Tensor, layer: int, heads: int, dim: int
) -> torch.Tensor:
    """[tokens, heads, dim]: prefix, position, layer and head of each row, repeated."""
    out = torch.empty(len(tokens), heads, dim)
    out[..., 0::4] = tokens[:, None, None]
    out[..., 1::4] = positions[:, None, None]
    out[..., 2::4] = layer
    out[..., 3::4] = torch.arange(heads, dtype=torch.float32)[None, :, None]
    return out


def contents(cache: fa.kv.Cache) -> list[torch.Tensor]:
    """All bytes of a cache and its bookkeeping, to compare before and after."""
    memory = [t.clone().view(torch.uint8) for pool in cache.pools for t in pool.memory]
    state = [torch.from_numpy(x.copy()) for p in cache.pools for x in (p.refs, p.owner)]
    tables = [
        torch.from_numpy(table.view.copy()) for seq in cache.sequences for table in seq.tables
    ]
    return [*memory, *state, *tables]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Whether two `contents` are equal, byte for byte."""
    return len(before) == len(after) and all(
        a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(before, after, strict=True)
    )
