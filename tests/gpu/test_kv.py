"""A cache of two groups on a device equals recomputation; keys of one are rotated on the way in."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import varlen_reference
from tests.gpu.place import DEVICE, TARGET
from tests.ops.cases import assert_close

HEADS, KV_HEADS, DIM, VOCABULARY, LAYERS = 8, 2, 64, 40, 4
WHOLE = (fa.RoPE() & fa.Causal(), fa.SlidingWindow(20))
READ = (fa.RoPE().without("key_mod") & fa.Causal(), fa.SlidingWindow(20))
"""The variants of two groups, and what their attention applies: keys of the first are rotated when
they are stored."""


class Model:
    """Layers whose rows depend on the token alone, and their caches."""

    def __init__(self, kind: type, layout: str, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(1)
        heads = (HEADS, KV_HEADS, KV_HEADS)
        self.rows = [
            [torch.randn(VOCABULARY, n, DIM, generator=g).to(dtype) for n in heads]
            for _ in range(LAYERS)
        ]
        groups = tuple(
            fa.kv.Group(
                (i, i + 2), KV_HEADS, DIM, num_q_heads=HEADS, variant=READ[i],
                transform=fa.RoPE() if i == 0 else None,
            )
            for i in range(2)
        )  # fmt: skip
        self.dtype = dtype
        spec = fa.kv.Spec(groups, 8, dtype)
        self.cache = fa.kv.Cache(spec, 64, max_kv_len=256, layout=layout, device=DEVICE)  # type: ignore[arg-type]
        self.attentions = [
            kind(v, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, q_dtype=dtype,
                 device=DEVICE, target=TARGET)
            for v in READ
        ]  # fmt: skip

    def step(self, items: list[tuple[fa.kv.Sequence, list[int]]]) -> None:
        """All layers of a step, each compared with attention over the whole history."""
        with self.cache.step(items) as step:
            for group, attention in enumerate(self.attentions):
                step.plan(attention, group)
            new = torch.from_numpy(step.token_ids).long()
            outs = []
            for layer, tables in enumerate(self.rows):
                q, k, v = (t[new].to(DEVICE) for t in tables)
                step.append(layer, k, v)
                outs.append(self.attentions[layer % 2].run(q, *self.cache.tensors(layer)).cpu())
            q_indptr = step.q_indptr
            step.commit()
        history = [torch.from_numpy(seq.token_ids).long() for seq, _ in items]
        kv_indptr = torch.tensor([0, *map(len, history)]).cumsum(0)
        for layer, (out, (q_rows, k_rows, v_rows)) in enumerate(zip(outs, self.rows, strict=True)):
            k, v = (t[torch.cat(history)] for t in (k_rows, v_rows))
            args = (q_rows[new], k, v, q_indptr.long(), kv_indptr, WHOLE[layer % 2])
            exact = varlen_reference(*args)[0]
            assert_close(out, exact, varlen_reference(*args, dtype=self.dtype)[0])


@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
@pytest.mark.parametrize(
    "layout, dtype", [("page", torch.bfloat16), ("layer", torch.float16)], ids=["page", "layer"]
)
def test_a_cache_equals_recomputation(kind, layout, dtype):
    model = Model(kind, layout, dtype)
    cache = model.cache
    system = [(7 * i) % VOCABULARY for i in range(33)]
    seqs = []
    for own in ([1], [2, 3, 4], [5] * 30):
        seq = cache.open([*system, *own])
        model.step([(seq, [*system, *own][seq.num_cached :])])
        seqs.append(seq)
    assert cache.stats().hit_tokens == 2 * 32
    seqs.append(seqs[1].fork())
    for turn in range(6):
        if turn == 2:
            seqs[2].suspend()
            seqs[2].resume()
        model.step([(seq, [turn + i] * (1 + 3 * (i == turn % 4))) for i, seq in enumerate(seqs)])
    cache.check()
    assert cache.stats().groups[1].reclaimed > 0
