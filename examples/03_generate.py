"""Continuous batching over a paged KV cache: requests come and go, prompts share a prefix.

python examples/03_generate.py    (trains a small character model first: 500 steps, or as given)
"""

import sys
import time

import char_model as net
import torch
from paged_requests import PageTable, Request

import flashattn_jit as fa

PAGE, CHUNK, AT_ONCE, NEW = 16, 48, 4, 100  # page size, tokens a chunk, requests a step, new tokens
SYSTEM = "Python has a word for this, and the manual says what it means:\n\n"
TOPICS = "The with statement", "A class", "Lists", "An import", "The loop", "Exceptions", "Names"


class LocalRoPE(fa.Variant):
    """RoPE inside a causal sliding window. The cache holds keys without RoPE; hooks rotate them."""

    cos: torch.Tensor = fa.tensor("positions", "pairs")
    sin: torch.Tensor = fa.tensor("positions", "pairs")
    window: int = fa.scalar(net.WINDOW)

    def query_mod(self, row, b, h, q_idx):
        cos, sin, (x, y) = self.cos[q_idx], self.sin[q_idx], row.chunk(2)
        return torch.cat([x * cos - y * sin, y * cos + x * sin])

    def key_mod(self, row, b, kv_h, kv_idx):
        return self.query_mod(row, b, kv_h, kv_idx)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window)


def serve(model, requests):
    """Run requests to their ends, AT_ONCE of them or fewer in a step; returns the steps' plans."""
    attention = fa.CascadeAttention(
        LocalRoPE(net.COS, net.SIN), num_q_heads=net.Q_HEADS, num_kv_heads=net.KV_HEADS,
        head_dim=net.HEAD_DIM, q_dtype=torch.float32,
    )  # fmt: skip
    table = PageTable(num_pages=64, page_size=PAGE)
    cache = torch.full((net.LAYERS, 2, 64, PAGE, net.KV_HEADS, net.HEAD_DIM), torch.nan)
    waiting, running, plans = list(requests), [], []
    while waiting or running:
        if waiting and len(running) < AT_ONCE:  # one arrives in each step
            running.append(table.admit(waiting.pop(0)))
        new = [table.extend(r, CHUNK) for r in running]  # a chunk of the prompt, or one token
        q_indptr, paged = table.batch(running, new)
        plans.append(attention.plan(fa.cascade_levels(q_indptr, paged)))  # shared pages: read once

        def attend(layer, q, k, v, q_indptr=q_indptr, paged=paged):
            fa.append_paged_kv(k, v, *cache[layer], q_indptr, paged)
            return attention.run(q, *cache[layer])

        logits = model(torch.cat(new), attend)[q_indptr[1:] - 1]  # of each request's last token
        running = table.finish_step(running, logits.argmax(-1).tolist())
    return plans


torch.manual_seed(0)
model = net.train(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 500)
requests = [Request(net.encode(SYSTEM + topic), NEW) for topic in TOPICS]
serve(model, [Request(r.prompt, 2) for r in requests[:2]])  # compiles the kernels
times = [time.perf_counter()]
plans = serve(model, requests)
times.append(time.perf_counter())
expected = [net.recompute(model, r.prompt, NEW) for r in requests]
times.append(time.perf_counter())
assert [r.tokens for r in requests] == expected
print(*(repr(net.decode(r.tokens)[len(SYSTEM) :]) for r in requests), sep="\n")
cached, whole = (len(requests) * NEW / (times[i + 1] - times[i]) for i in range(2))
print(
    f"{len(plans)} steps; the tokens of all {len(requests)} requests equal those of recomputation"
)
print(f"with the KV cache {cached:.0f} tokens/s, without {whole:.0f}")
print(plans[2].explain())
plans[2].plot("plan.png")
