"""A language model served by `generate_batch`, against transformers' own generation.

    python -m benchmarks.serving [--only batch step prefix share] [--dtype bf16] [--save]

A random model of SmolLM2-135M's shape: 30 layers, 9 query heads over 3, head_dim 64; greedy, no end
token. All parts take about five minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import flashattn_jit as fa
from benchmarks.parts.measure import (
    Row,
    arguments,
    interleave,
    median,
    quartiles,
    ratio,
    report,
)
from flashattn_jit.integrations.transformers import NAME, BatchGenerator, generate_batch, register

_CONTEXT, _NEW, _REQUESTS = 2048, 48, 8
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_of(options: argparse.Namespace) -> Any:
    """The model, made once."""
    if not hasattr(options, "model"):
        register()
        config = transformers.LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
            rope_theta=100000.0, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        options.model = model.to(_DTYPES[options.dtype]).eval()
    return options.model


def _prompt(count: int) -> list[int]:
    found: list[int] = torch.randint(2, 49152, (count,)).tolist()
    return found


def _cache(model: Any, num_tokens: int) -> fa.kv.Cache:
    spec = fa.kv.Spec.from_config(model.config, dtype=model.dtype)
    return fa.kv.Cache(spec, num_tokens // spec.page_size, max_kv_len=4096)


def _padded(model: Any, prompts: list[list[int]], new: int) -> None:
    """transformers, in one batch with padding in front."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.set_attn_implementation("sdpa")
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    assert out.shape[1] == longest + new


def _served(model: Any, prompts: list[list[int]], new: int) -> BatchGenerator:
    model.set_attn_implementation(NAME)
    batch = BatchGenerator(
        model, prompts, max_new_tokens=new, cache=_cache(model, 1 << 15), max_step_tokens=2048
    )
    assert all(len(r.tokens) == new for r in batch.run())
    return batch


def batch_rows(options: argparse.Namespace) -> list[Row]:
    """Eight prompts of 1,024 to 2,048 tokens: all of it, and what follows the prefill."""
    model = model_of(options)
    prompts = [_prompt(_CONTEXT * (8 + i) // 15) for i in range(_REQUESTS)]
    runs = {
        name: lambda run=run, new=new: run(model, prompts, new)
        for new in (1, _NEW)
        for name, run in ((f"sdpa {new}", _padded), (f"ours {new}", _served))
    }
    times = interleave(runs, max(2, options.pairs // 5), warm_up=1)
    whole = [times[f"{who} {_NEW}"] for who in ("sdpa", "ours")]
    value, spread = ratio(*whole)
    rate = _REQUESTS * _NEW / median(whole[1])
    claim = (
        f"8 prompts up to {_CONTEXT}, {_NEW} tokens each: sdpa, DynamicCache and padding over us"
    )
    rows = [Row(claim, 1.5, value, "x", "higher", spread, f"{rate:.0f} tokens/s")]
    decode = [
        [a - b for a, b in zip(times[f"{who} {_NEW}"], times[f"{who} 1"], strict=True)]
        for who in ("sdpa", "ours")
    ]
    value, spread = ratio(*decode)
    rate = _REQUESTS * (_NEW - 1) / median(decode[1])
    rows.append(
        Row("the tokens after the first", None, value, "x", "higher", spread, f"{rate:.0f}/s")
    )
    return rows


def _decode_steps(model: Any) -> Iterator[dict[str, float]]:
    """The seconds of each decode step of all of eight prompts."""
    model.set_attn_implementation(NAME)
    prompts = [_prompt(_CONTEXT) for _ in range(_REQUESTS)]
    batch = BatchGenerator(
        model, prompts, max_new_tokens=26, cache=_cache(model, 1 << 15), max_step_tokens=2048
    )
    with torch.inference_mode():
        while not any(result.finish for result in batch.results):
            before = dict(batch.seconds)
            batch.step()
            if batch.steps > _REQUESTS + 2:
                yield {name: batch.seconds[name] - before[name] for name in before}
    batch.close()


def step_rows(options: argparse.Namespace) -> list[Row]:
    """What a decode step takes besides the model: choosing requests, pages, plans, tokens."""
    model, plan = model_of(options), fa.kv.Step.plan
    planning = 0.0

    def timed(*args: Any, **params: Any) -> Any:
        nonlocal planning
        begin = time.perf_counter()
        try:
            return plan(*args, **params)
        finally:
            planning += time.perf_counter() - begin

    shares = []
    fa.kv.Step.plan = timed  # type: ignore[method-assign]
    try:
        for seconds in _decode_steps(model):
            shares.append((seconds["all"] - seconds["model"] + planning) / seconds["all"])
            planning = 0.0
    finally:
        fa.kv.Step.plan = plan  # type: ignore[method-assign]
    claim = "bookkeeping, plan() and choosing tokens, of a decode step, 8 x 2,048"
    return [Row(claim, 0.05, median(shares), "", "lower", quartiles(shares))]


def prefix_rows(options: argparse.Namespace) -> list[Row]:
    """The first token of a request whose system prompt seven others had."""
    model = model_of(options)
    model.set_attn_implementation(NAME)
    ratios = []
    for _ in range(3):
        cache, system = _cache(model, 1 << 14), _prompt(1024)
        first = [
            generate_batch(model, [system + _prompt(32)], max_new_tokens=2, cache=cache)[0].first_s
            for _ in range(_REQUESTS)
        ]
        ratios.append(first[-1] / first[0])
    claim = "first token after a shared prompt of 1,024: the 8th request over the first"
    return [Row(claim, 0.3, median(ratios), "x", "lower", quartiles(ratios))]


def share_rows(options: argparse.Namespace) -> list[Row]:
    """Attention's share of a decode step, with the growth of the cache."""
    model, rows = model_of(options), []
    prompts = [_prompt(_CONTEXT) for _ in range(_REQUESTS)]
    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent += time.perf_counter() - begin

        return run

    interface: Any = AttentionInterface()
    masks: Any = AttentionMaskInterface()
    update = DynamicCache.update
    AttentionInterface.register("timed", timed(interface["sdpa"]))
    AttentionMaskInterface.register("timed", masks["sdpa"])
    DynamicCache.update = timed(update)  # type: ignore[method-assign]
    try:
        model.set_attn_implementation("timed")
        cache = DynamicCache(config=model.config)
        ids = torch.tensor(prompts)
        model(ids, past_key_values=cache, logits_to_keep=1)
        shares = []
        for _ in range(24):
            spent, begin = 0.0, time.perf_counter()
            model(ids[:, :1], past_key_values=cache)
            shares.append(spent / (time.perf_counter() - begin))
        rows.append(Row("attention and cache in a decode step, 8 x 2,048: sdpa", None,
                        median(shares), "", "lower", quartiles(shares)))  # fmt: skip
    finally:
        DynamicCache.update = update  # type: ignore[method-assign]
    ours = interface[NAME]
    AttentionInterface.register(NAME, timed(ours))
    try:
        shares, spent = [], 0.0
        for seconds in _decode_steps(model):
            shares.append(spent / seconds["model"])
            spent = 0.0
        rows.append(Row("attention and cache in a decode step, 8 x 2,048: ours", None,
                        median(shares[1:]), "", "lower", quartiles(shares[1:])))  # fmt: skip
    finally:
        AttentionInterface.register(NAME, ours)
    return rows


PARTS = {"batch": batch_rows, "step": step_rows, "prefix": prefix_rows, "share": share_rows}

if __name__ == "__main__":
    chosen = arguments(
        __doc__,
        lambda parser: (
            parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS)),
            parser.add_argument("--dtype", choices=_DTYPES, default="fp32"),
        ),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        found = [row for name in chosen.only for row in PARTS[name](chosen)]
    report(f"serving-{chosen.dtype}", found, chosen)
