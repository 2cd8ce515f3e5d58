"""Every library variant, compositions of them, row hooks and built-ins, as cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import flashattn_jit as fa
import flashattn_jit.variants.library as lib
from flashattn_jit.variants.variant import Variant
from tests.registry.case import Case, Make, Params, Shape, no_params, tags


def _lib(name: str, kinds: str, make: Any, params: Params = no_params, **more: Any) -> Case:
    """make: () -> Variant; library variants take their tensors as params of the call."""
    made: Make = lambda shape, generator: make()  # noqa: E731
    return Case(name, made, params, tags=tags(f"library {kinds}"), **more)


def _sized(name: str, kinds: str, make: Make, params: Params = no_params, **more: Any) -> Case:
    """make: (shape, generator) -> Variant, for variants whose numbers depend on the shape."""
    return Case(name, make, params, tags=tags(f"library {kinds}"), **more)


# --- params -------------------------------------------------------------------------------------


def _ints(generator: torch.Generator, low: int, high: int, *sizes: int) -> torch.Tensor:
    values = torch.randint(low, max(high, low + 1), sizes, generator=generator)
    return values.to(torch.int32)


def _normal(generator: torch.Generator, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=generator)


def _prefix(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    return {"prefix_len": _ints(generator, 0, shape.kv_len, shape.batch)}


def _documents(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    starts = torch.rand(shape.batch, max(shape.tokens, 1), generator=generator) < 0.08
    return {"documents": starts.cumsum(-1).to(torch.int32)}


def _unsorted(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    return {"documents": _ints(generator, 0, 3, shape.batch, max(shape.tokens, 1)).long()}


def _padding(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    left = _ints(generator, 0, shape.kv_len // 2, shape.batch, 1)
    return {"keep": torch.arange(shape.kv_len).expand(shape.batch, -1) >= left}


def _tree(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    trees = []
    for _ in range(shape.batch):
        parents = [-1]
        for token in range(1, max(shape.q_len, 1)):
            parents.append(int(torch.randint(-1, token, (), generator=generator)))
        trees.append(lib.tree_bits(parents))
    prefix = torch.full((shape.batch,), shape.kv_len - shape.q_len, dtype=torch.int32)
    return {"prefix_len": prefix, "bits": torch.cat(trees)}


def _bias(batch: bool, heads: bool, dtype: torch.dtype = torch.float32) -> Params:
    def params(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
        b = shape.batch if batch else 1
        h = shape.num_q_heads if heads else 1
        return {"bias": _normal(generator, b, h, shape.q_len, shape.kv_len).to(dtype)}

    return params


def _t5(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    return {"table": _normal(generator, 32, shape.num_q_heads)}


def _distances(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    return {"table": _normal(generator, shape.num_q_heads, 41)}


def _sink(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    return {"sink": _normal(generator, shape.num_q_heads)}


def _norm_weights(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
    return {
        "q_weight": _normal(generator, shape.head_dim) * 0.1 + 1.0,
        "k_weight": _normal(generator, shape.head_dim) * 0.1 + 1.0,
    }


def _gate(layout: str) -> Params:
    def params(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
        b, h, n, d = shape.batch, shape.num_q_heads, shape.q_len, shape.head_dim_v
        sizes = {"dense": (b, h, n, d), "packed": (b * n, h, d), "head": (b * n, h)}[layout]
        return {"gate": _normal(generator, *sizes)}

    return params


def _both(*parts: Params) -> Params:
    def params(shape: Shape, generator: torch.Generator) -> Mapping[str, object]:
        return {k: v for part in parts for k, v in part(shape, generator).items()}

    return params


# --- what fits ------------------------------------------------------------------------------------


def _self_attention(shape: Shape) -> bool:
    return shape.q_len == shape.kv_len


def _decoding(shape: Shape) -> bool:
    return 0 < shape.q_len <= shape.kv_len


def _even(shape: Shape) -> bool:
    return shape.head_dim % 2 == 0


def _quarters(shape: Shape) -> bool:
    return shape.head_dim % 8 == 0


def _natten1(shape: Shape, generator: torch.Generator) -> Variant:
    return lib.Natten(max(shape.tokens, 7), 7)


def _natten2(shape: Shape, generator: torch.Generator) -> Variant:
    width = 12
    return lib.Natten((max(-(-shape.tokens // width), 5), width), (5, 7))


def _block_diffusion(shape: Shape, generator: torch.Generator) -> Variant:
    return lib.BlockDiffusion(length=max(1, shape.tokens // 2), block=8)


def _longrope(shape: Shape, generator: torch.Generator) -> Variant:
    pairs = shape.head_dim // 2
    short = tuple(1.0 + 0.01 * i for i in range(pairs))
    long = tuple(1.0 + 0.5 * i for i in range(pairs))
    return lib.RoPE(scaling=lib.LongRopeScaling(short, long, 64, factor=32.0))


def _row_lookup(shape: Shape, generator: torch.Generator) -> Any:
    """Queries as entries of a codebook of their head; indices beyond it are clamped."""
    table = torch.randn(shape.num_q_heads, 16, generator=generator)
    return fa.variant(
        query_mod=lambda row, b, h, q_idx: table[h, (row * 6.0).to(torch.int32) + 8] + row * 0.1
    )


_MASKS: tuple[Case, ...] = (
    _lib("full", "", lib.Full),
    _lib("causal", "mask", lib.Causal, interval="exact"),
    _lib("causal_end", "mask", lib.Causal, interval="exact", q_offset="end"),
    _lib("sliding_window", "mask", lambda: lib.SlidingWindow(24), interval="exact"),
    _lib(
        "sliding_window_end", "mask", lambda: lib.SlidingWindow(24), interval="exact",
        q_offset="end",
    ),
    _lib(
        "sliding_window_bidirectional", "mask", lambda: lib.SlidingWindow(20, causal=False),
        interval="exact",
    ),
    _lib("chunked", "mask", lambda: lib.Chunked(32), interval="exact"),
    _lib("dilated", "mask", lambda: lib.Dilated(50, 8), interval="exact"),
    _lib(
        "dilated_bidirectional", "mask", lambda: lib.Dilated(50, 8, causal=False), interval="exact"
    ),
    _lib("prefix_lm", "mask", lib.PrefixLM, _prefix, interval="exact"),
    _lib("streaming_llm", "mask", lambda: lib.StreamingLLM(24, 4), interval="exact"),
    _lib("block_causal", "mask", lambda: lib.BlockCausal(16), interval="exact"),
    _sized("block_diffusion", "mask", _block_diffusion, interval="exact"),
    _lib("document", "mask", lib.DocumentMask, _documents, interval="exact"),
    _lib("document_unsorted", "mask", lib.DocumentMask, _unsorted, interval="sound"),
    _lib("padding", "mask", lib.PaddingMask, _padding, interval="exact"),
    _lib(
        "tree", "mask", lib.TreeMask, _tree, interval="sound", q_offset="end", causal_ok=True,
        shape=Shape(2, 4, 2, 70, 130, 64, 64), fits=_decoding,
    ),
    _sized("natten_1d", "mask", _natten1, interval="exact", fits=_self_attention),
    # A tile covers parts of image rows, for which x = i % width is no interval.
    _sized("natten_2d", "mask", _natten2, interval="sound", fits=_self_attention),
)  # fmt: skip

_SCORES: tuple[Case, ...] = (
    _lib("alibi", "score", lib.ALiBi),
    _lib("alibi_symmetric", "score", lambda: lib.ALiBi(symmetric=True)),
    _lib("soft_cap", "score", lambda: lib.SoftCap(20.0)),
    _lib("soft_cap_approximate", "score approximate", lambda: lib.SoftCap(2.0, approximate=True)),
    _lib("additive_bias", "score", lib.AdditiveBias, _bias(True, True)),
    _lib("additive_bias_batch", "score", lib.AdditiveBias, _bias(True, False)),
    _lib("additive_bias_heads_bf16", "score", lib.AdditiveBias, _bias(False, True, torch.bfloat16)),
    _lib("additive_bias_shared_end", "score", lib.AdditiveBias, _bias(False, False),
         q_offset="end"),
    _lib("t5_bias", "score", lib.RelativeBias, _t5, scale=1.0),
    _lib("t5_bias_causal", "score", lambda: lib.RelativeBias(bidirectional=False), _t5, scale=1.0),
    _lib("relative_table", "score", lambda: lib.RelativeTable(reach=20), _distances),
)  # fmt: skip

_NORMALIZERS: tuple[Case, ...] = (
    _lib("sink", "normalizer sink", lib.Sink, _sink),
    _lib("softmax_off_by_one", "normalizer sink", lib.SoftmaxOffByOne),
    _lib("sigmoid", "normalizer pointwise", lib.Sigmoid),
    _lib("sigmoid_bias", "normalizer pointwise", lambda: lib.Sigmoid(bias=-2.0)),
    _lib("relu_squared", "normalizer pointwise", lib.ReluSquared),
)

_ROWS: tuple[Case, ...] = (
    _lib("temperature_tuning", "row", lambda: lib.TemperatureTuning(floor_scale=16.0)),
    _lib("log_n", "row", lambda: lib.LogN(32)),
    _lib("rope", "row", lib.RoPE, fits=_even),
    _lib("rope_end", "row", lib.RoPE, fits=_even, q_offset="end"),
    _lib("rope_interleaved", "row", lambda: lib.RoPE(interleaved=True), fits=_even),
    _lib("rope_partial", "row", lambda: lib.RoPE(partial=0.25), fits=_quarters),
    _lib(
        "rope_tail_interleaved", "row",
        lambda: lib.RoPE(partial=0.5, start=4, interleaved=True),
        fits=lambda s: s.head_dim % 4 == 0 and s.head_dim >= 8,
    ),
    _lib("rope_computed", "row", lambda: lib.RoPE(tables=False), fits=_even),
    _lib("rope_linear", "row", lambda: lib.RoPE(scaling=lib.LinearScaling(4.0)), fits=_even),
    _lib(
        "rope_dynamic_ntk", "row", lambda: lib.RoPE(scaling=lib.DynamicNTKScaling(2.0, 32)),
        fits=lambda s: s.head_dim % 2 == 0 and s.head_dim > 2,
    ),
    _lib(
        "rope_llama3", "row",
        lambda: lib.RoPE(500000.0, scaling=lib.Llama3Scaling(original_max_position=64)),
        fits=_even,
    ),
    _lib("rope_yarn", "row", lambda: lib.RoPE(scaling=lib.YarnScaling(4.0, 64)), fits=_even),
    _sized("rope_longrope", "row", _longrope, fits=_even),
    _lib("qk_norm", "row", lib.QKNorm, _norm_weights),
    _lib("qk_norm_default_weights", "row", lib.QKNorm),
    _lib("qk_norm_l2", "row", lambda: lib.QKNorm("l2"), scale=8.0),
    _lib("gated_output", "row", lib.GatedOutput, _gate("dense")),
    _lib("gated_output_packed", "row", lambda: lib.GatedOutput("packed"), _gate("packed")),
    _lib("gated_output_head", "row", lambda: lib.GatedOutput("head"), _gate("head")),
    Case("row_lookup", _row_lookup, tags=tags("closure row")),
)  # fmt: skip


def _composed(name: str, kinds: str, make: Any, params: Params = no_params, **more: Any) -> Case:
    made: Make = lambda shape, generator: make()  # noqa: E731
    return Case(name, made, params, tags=tags(f"composition {kinds}"), causal_ok=False, **more)


_COMPOSITIONS: tuple[Case, ...] = (
    _composed("mix_alibi_causal", "mask score", lambda: lib.ALiBi() & lib.Causal(),
              interval="exact"),
    _composed("mix_gemma2", "mask score", lambda: lib.SoftCap(50.0) & lib.SlidingWindow(33),
              interval="exact"),
    _composed("mix_cap_then_alibi", "score", lambda: lib.SoftCap(10.0) & lib.ALiBi()),
    _composed("mix_alibi_then_cap", "score", lambda: lib.ALiBi() & lib.SoftCap(10.0)),
    _composed("mix_document_causal", "mask", lambda: lib.DocumentMask() & lib.Causal(), _documents,
              interval="exact"),
    _composed("mix_window_or_prefix", "mask", lambda: lib.SlidingWindow(20) | lib.PrefixLM(),
              _prefix, interval="exact"),
    _composed("mix_not_causal", "mask", lambda: ~lib.Causal(), interval="exact"),
    _composed("mix_two_windows", "mask",
              lambda: lib.SlidingWindow(40) & ~lib.SlidingWindow(8).named("near"),
              interval="exact"),
    _composed("mix_gpt_oss", "mask row normalizer sink",
              lambda: lib.RoPE(scaling=lib.YarnScaling(32.0, 64, truncate=False))
              & lib.SlidingWindow(32) & lib.Sink(),
              _sink, interval="exact", fits=_even),
    _composed("mix_qwen3", "mask row", lambda: lib.QKNorm() & lib.RoPE(1e6) & lib.Causal(),
              _norm_weights, interval="exact", fits=_even, q_offset="end"),
    _composed("mix_qwen3_next", "mask row",
              lambda: lib.QKNorm() & lib.RoPE(partial=0.25) & lib.Causal() & lib.GatedOutput(),
              _both(_norm_weights, _gate("dense")), interval="exact", fits=_quarters),
    _composed("mix_llama4", "mask row",
              lambda: lib.Chunked(32) & lib.RoPE(interleaved=True)
              & lib.TemperatureTuning(floor_scale=8.0),
              interval="exact", fits=_even),
    _composed("mix_causal_sigmoid", "mask score normalizer pointwise",
              lambda: lib.ALiBi() & lib.Causal() & lib.Sigmoid(), interval="exact",),
    _composed("mix_padding_relu2", "mask normalizer pointwise",
              lambda: lib.PaddingMask() & lib.ReluSquared(), _padding, interval="exact",),
    _composed("mix_sink_softcap_window", "mask score normalizer sink",
              lambda: lib.SoftCap(15.0) & lib.SlidingWindow(16, causal=False) & lib.Sink(), _sink,
              interval="exact"),
)  # fmt: skip

_NEGATIVE_POSITIONS = (
    _lib(
        "document_before_keys", "mask", lib.DocumentMask, _documents, interval="exact",
        q_offset=-33,
    ),
    _lib("rope_before_keys", "row", lib.RoPE, fits=_even, q_offset=-33),
)  # fmt: skip

LIBRARY_CASES: tuple[Case, ...] = (
    *_MASKS, *_SCORES, *_NORMALIZERS, *_ROWS, *_COMPOSITIONS, *_NEGATIVE_POSITIONS,
)  # fmt: skip
"""Every library variant and the compositions, and a codebook."""
