"""A layer of a 0.5B transformers model with the engine, against torch's SDPA; prefill and decode.

    python -m benchmarks.transformers_layer [--save]

One decoder layer of Qwen2 0.5B's shape (hidden 896, 14 query heads over 2, head dim 64, MLP 4864),
random weights and inputs, in fp32 and bf16. Prefill: one prompt of 2,048 tokens. Decode: one token
per call after 2,048, in a dynamic cache, which is cropped after each call. The share is the time of
the attention function, without masks and projections, over that of the layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.parts.measure import Row, arguments, interleave, median, ratio, report

try:
    import transformers
except ImportError:
    raise SystemExit("this benchmark needs transformers: pip install -e '.[examples]'") from None

from flashattn_jit.integrations.transformers import register

_LENGTH = 2_048
_SHAPE = {
    "vocab_size": 256, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4 * _LENGTH,
}  # fmt: skip


def model_of(implementation: str, dtype: torch.dtype) -> Any:
    """One layer between an embedding and a norm; the same weights for every implementation."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**_SHAPE)
    model = transformers.Qwen2Model._from_config(config, attn_implementation=implementation)
    return model.to(dtype).eval()


def prefill(model: Any) -> Callable[[], torch.Tensor]:
    """A call with the whole prompt."""
    hidden = torch.randn(1, _LENGTH, 896, generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(model.dtype)
    return lambda: model(inputs_embeds=hidden, use_cache=False).last_hidden_state


def decode(model: Any) -> Callable[[], torch.Tensor]:
    """A call with one more token."""
    hidden = torch.randn(1, _LENGTH + 1, 896, generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(model.dtype)
    cache = transformers.DynamicCache(config=model.config)
    model(inputs_embeds=hidden[:, :-1], past_key_values=cache)

    def step() -> torch.Tensor:
        out = model(inputs_embeds=hidden[:, -1:], past_key_values=cache).last_hidden_state
        cache.crop(-1)
        return out

    return step


@contextmanager
def clocked(name: str, seconds: list[float]) -> Iterator[None]:
    """Appends the time of each call of the attention function `name` to `seconds`."""
    table = transformers.AttentionInterface._global_mapping
    inner = table[name]

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = inner(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return out

    table[name] = timed
    try:
        yield
    finally:
        table[name] = inner


def share(name: str, run: Callable[[], object], rounds: int) -> float:
    """Attention's share of a layer's time: the ratio of the medians over `rounds`."""
    attention: list[float] = []
    with clocked(name, attention):
        whole = interleave({f"{name}, attention apart": run}, rounds)
    return median(attention[-rounds:]) / median(next(iter(whole.values())))


@torch.no_grad()
def rows(options: argparse.Namespace) -> list[Row]:
    """Ratios of whole layers, and attention's share of each."""
    ours = register()
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        models = {name: model_of(name, dtype) for name in (ours, "sdpa")}
        for what, make in (("prefill S2048", prefill), ("decode kv2048", decode)):
            runs = {name: make(model) for name, model in models.items()}
            _check(*(run() for run in runs.values()))
            rounds = options.pairs if what.startswith("prefill") else 10 * options.pairs
            times = interleave(runs, rounds)
            value, spread = ratio(times["sdpa"], times[ours])
            shares = {name: share(name, run, rounds) for name, run in runs.items()}
            text = ", ".join(f"{name} {median(times[name]) * 1e3:.2f} ms" for name in runs)
            parts = ", ".join(f"{name} {part:.0%}" for name, part in shares.items())
            label = f"{str(dtype).removeprefix('torch.')} {what}"
            claim = f"{label}: sdpa's time of a layer over ours"
            out.append(Row(claim, None, value, "x", "higher", spread, text))
            claim, percent = f"{label}: attention's share of ours", 100 * shares[ours]
            out.append(Row(claim, None, percent, "%", "lower", None, parts))
    return out


def _check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    worst = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    limit = 1e-4 if ours.dtype == torch.float32 else 5e-2
    if not worst <= limit:
        raise SystemExit(f"the two layers differ by {worst:.1e} of the largest value")


if __name__ == "__main__":
    options = arguments(__doc__)
    report("transformers_layer", rows(options), options)
