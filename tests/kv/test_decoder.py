"""A decoder over the cache gives what it gives without one.

Its layers are of different kinds: full, window, sinks with a window, chunks; with grouped, single
and as many key heads as query heads; with keys rotated when they are stored, with norms of each
layer, when they are read, or never; weights are random. Tokens are drawn greedily, in steps that
mix prompts and single tokens, with forks, trims and suspensions between.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

import flashattn_jit as fa

WIDTH, HEADS, DIM, VOCABULARY = 32, 4, 8, 50
WHOLE = (
    fa.RoPE() & fa.Causal(), fa.SlidingWindow(12),
    fa.QKNorm() & fa.RoPE() & fa.StreamingLLM(window=10, num_sinks=3),
    fa.RoPE(500.0) & fa.Chunked(16),
)  # fmt: skip
STORED = (True, False, True, False)  # whether key_mod is applied on the way into the pages
VARIANTS = tuple(v.without("key_mod") if s else v for v, s in zip(WHOLE, STORED, strict=True))
KV_HEADS = (4, 2, 1, 2)
GROUPS = tuple(
    fa.kv.Group((i, i + 4), n, DIM, num_q_heads=HEADS, variant=v, transform=w if s else None)
    for i, (v, n, w, s) in enumerate(zip(VARIANTS, KV_HEADS, WHOLE, STORED, strict=True))
)
LAYERS = 8
NORMS = ("q_weight", "k_weight")


@dataclass
class Decoder:
    """Pre-norm layers of attention and a gated MLP, in float32."""

    weights: list[dict[str, torch.Tensor]]
    embedding: torch.Tensor

    @classmethod
    def made(cls, seed: int) -> Decoder:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g) / shape[0] ** 0.5

        layers = [
            {
                "q": normal(WIDTH, HEADS * DIM), "o": normal(HEADS * DIM, WIDTH),
                "k": normal(WIDTH, KV_HEADS[i % 4] * DIM),
                "v": normal(WIDTH, KV_HEADS[i % 4] * DIM),
                "up": normal(WIDTH, 2 * WIDTH), "down": normal(2 * WIDTH, WIDTH),
                **({n: torch.rand(DIM, generator=g) + 0.5 for n in NORMS} if i % 4 == 2 else {}),
            }
            for i in range(LAYERS)
        ]  # fmt: skip
        return cls(layers, torch.randn(VOCABULARY, WIDTH, generator=g))

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:  # type: ignore[no-untyped-def]
        """Logits [tokens, VOCABULARY]. attend(layer, q, k, v): attention over packed rows."""
        x = self.embedding[tokens] + torch.sin(positions.float())[:, None] * 0.1
        for i, w in enumerate(self.weights):
            y = torch.nn.functional.rms_norm(x, (WIDTH,))
            q, k, v = ((y @ w[n]).unflatten(1, (-1, DIM)) for n in "qkv")
            x = x + attend(i, q, k, v).flatten(1) @ w["o"]
            y = torch.nn.functional.rms_norm(x, (WIDTH,))
            x = x + torch.nn.functional.silu(y @ w["up"]) @ w["down"]
        return x @ self.embedding.T

    def norms(self, layer: int) -> dict[str, torch.Tensor]:
        """The weights of a layer's norms of queries and keys."""
        return {n: w for n, w in self.weights[layer].items() if n in NORMS}

    def without_a_cache(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the last token, everything computed by the eager reference."""

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = WHOLE[i % 4].reference(*heads, **self.norms(i))
            return out[0].transpose(0, 1).float()

        return self.run(torch.tensor(tokens), torch.arange(len(tokens)), attend)[-1]


class Served:
    """The decoder over a cache: a plan a group, then all layers.

    Attention is in the dtype and on the device of the cache, the rest in float32 on the CPU.
    """

    def __init__(
        self, decoder: Decoder, cache: fa.kv.Cache, kind: type, target: str | None
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.attentions = [
            kind(v, num_q_heads=HEADS, num_kv_heads=n, head_dim=DIM, q_dtype=cache.spec.dtype,
                 device=cache.device, target=target)
            for v, n in zip(VARIANTS, KV_HEADS, strict=True)
        ]  # fmt: skip

    def step(self, items: list[tuple[fa.kv.Sequence, list[int]]]) -> torch.Tensor:
        """Logits of the last new token of each sequence."""
        with self.cache.step(items) as step:
            for group, attention in enumerate(self.attentions):
                step.plan(attention, group)

            def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                q, k, v = (x.to(self.cache.device, self.cache.spec.dtype) for x in (q, k, v))
                norms = {n: w.to(self.cache.device) for n, w in self.decoder.norms(i).items()}
                of_keys = {n: norms.pop(n) for n in [*norms] if n == "k_weight"}
                step.append(i, k, v, **of_keys)
                out = self.attentions[i % 4].run(q, *self.cache.tensors(i), **norms)
                return out.float().cpu()

            logits = self.decoder.run(torch.from_numpy(step.token_ids), step.positions, attend)
            step.commit()
            return logits[step.q_indptr[1:].long() - 1]


def recompute(
    kind: type, layout: str, dtype: torch.dtype = torch.float32, device: str = "cpu",
    target: str | None = None, turns: int = 24,
) -> fa.kv.Stats:  # fmt: skip
    """Compare all logits of random steps with recomputation, in float32 next tokens as well."""
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    pick = random.Random(3)
    decoder = Decoder.made(3)
    spec = fa.kv.Spec(GROUPS, 4, dtype)
    cache = fa.kv.Cache(spec, 60, max_kv_len=256, layout=layout, lookback=3, device=device)  # type: ignore[arg-type]
    served = Served(decoder, cache, kind, target)
    system = [pick.randrange(VOCABULARY) for _ in range(13)]
    prompts = [system + [pick.randrange(VOCABULARY) for _ in range(n)] for n in (1, 6, 17)]
    prompts += [[pick.randrange(VOCABULARY) for _ in range(9)]]
    seqs: list[fa.kv.Sequence] = []
    for prompt in prompts:
        seq = cache.open(prompt)
        served.step([(seq, prompt[seq.num_cached :])])
        seqs.append(seq)
    assert cache.stats().hit_tokens == 2 * 12
    for turn in range(turns):
        if turn == turns // 4:
            seqs.append(seqs[1].fork())
        if turn == turns * 3 // 8:
            seqs[2].suspend()
            seqs[2].resume()
        if turn == turns // 2:
            seqs[0].trim(seqs[0].kv_len - 3)
        if turn == turns * 5 // 8:
            seqs.pop(3).close()
        chosen = pick.sample(seqs, pick.randrange(1, len(seqs) + 1))
        items = [
            (s, [pick.randrange(VOCABULARY) for _ in range(pick.choice([1, 1, 5]))]) for s in chosen
        ]
        logits = served.step(items)
        for (seq, _), row in zip(items, logits, strict=True):
            wanted = decoder.without_a_cache(seq.token_ids.tolist())
            torch.testing.assert_close(row, wanted, rtol=tolerance, atol=tolerance)
            assert dtype != torch.float32 or int(row.argmax()) == int(wanted.argmax())
        cache.check()
    return cache.stats()


@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
@pytest.mark.parametrize("layout", ["page", "layer"])
def test_equals_recomputation(kind: type, layout: str) -> None:
    stats = recompute(kind, layout)
    assert sum(g.reclaimed for g in stats.groups) > 10
