"""The kernels of the library: every variant, as the wheel `flashattn-jit-kernels-cpu` ships it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...codegen.document import Line, line_of
from ...variants import library as lib
from ...variants.variant import Variant
from ..wanted.arguments import parse_dtypes, parse_head_dims, parse_targets
from ..wanted.structures import specs_of
from .file import merged

_Q_HEADS, _TOKENS = 2, 4


class Form(NamedTuple):
    """A variant, and the params that it needs: their dtypes and ranks decide the kernel only."""

    variant: Variant
    params: Mapping[str, torch.Tensor] = {}


def library_forms(head_dim: int) -> Iterator[Form]:
    """Every variant of the library, in each form whose kernels differ, for values of `head_dim`.

    Numbers such as a window are params of a kernel, tables of a scaled RoPE are its tensors. Params
    are contiguous: int32 for positions and documents, fp32 for others, `keep` of a `PaddingMask`
    bool, `bits` as `tree_bits` makes them.
    """
    ints = partial(torch.zeros, dtype=torch.int32, device="cpu")
    floats = partial(torch.zeros, dtype=torch.float32, device="cpu")
    bits = torch.cat([lib.tree_bits([-1, 0])] * 2)
    both = (False, True)
    # Masks
    yield from map(Form, (lib.Full(), lib.Causal(), lib.Chunked(1024), lib.StreamingLLM(1024)))
    yield from (Form(lib.SlidingWindow(1024, causal=causal)) for causal in both)
    yield from (Form(lib.Dilated(1024, 2, causal=causal)) for causal in both)
    yield from map(Form, (lib.BlockCausal(128), lib.BlockDiffusion(1024, 128)))
    yield from map(Form, (lib.Natten(1024, 7), lib.Natten((32, 32), 7)))
    yield Form(lib.PrefixLM(), {"prefix_len": ints(2)})
    yield Form(lib.DocumentMask(), {"documents": ints(2, _TOKENS)})
    yield Form(lib.PaddingMask(), {"keep": torch.ones(2, _TOKENS, dtype=torch.bool, device="cpu")})
    yield Form(lib.TreeMask(), {"prefix_len": ints(2), "bits": bits})
    # Scores and normalisers
    yield from (Form(lib.ALiBi(symmetric=symmetric)) for symmetric in both)
    yield from (Form(lib.SoftCap(approximate=approximate)) for approximate in both)
    yield from map(Form, (lib.SoftmaxOffByOne(), lib.ReluSquared()))
    yield from (Form(lib.Sigmoid(bias=bias)) for bias in (None, -2.0))
    yield Form(lib.AdditiveBias(), {"bias": floats(2, _Q_HEADS, _TOKENS, _TOKENS)})
    yield Form(lib.RelativeBias(), {"table": floats(32, _Q_HEADS)})
    yield Form(lib.RelativeTable(reach=2), {"table": floats(_Q_HEADS, 5)})
    yield Form(lib.Sink(), {"sink": floats(_Q_HEADS)})
    # Rows of queries, keys and the output
    for interleaved in both:
        yield Form(lib.RoPE(interleaved=interleaved))
        yield Form(lib.RoPE(interleaved=interleaved, tables=False))
    yield from (Form(lib.RoPE(partial=part)) for part in (0.5, 0.25))
    yield from map(Form, (lib.QKNorm(), lib.QKNorm("l2"), lib.TemperatureTuning(), lib.LogN(1024)))
    yield Form(lib.GatedOutput(), {"gate": floats(2, _Q_HEADS, _TOKENS, head_dim)})
    yield Form(lib.GatedOutput("packed"), {"gate": floats(_TOKENS, _Q_HEADS, head_dim)})
    yield Form(lib.GatedOutput("head"), {"gate": floats(_TOKENS, _Q_HEADS)})


def library_lines(
    *,
    head_dims: Any = (64, 128),
    dtypes: Any = ("fp32", "bf16"),
    targets: str | Sequence[str] = "cpu",
) -> tuple[Line, ...]:
    """The lines of a manifest of all of `library_forms`, for calls of the format `dense`.

    Arguments as for `warm`; raises what that raises for them.
    """
    found: list[Line] = []
    chosen = parse_targets(targets, to_build=True)
    for dims in parse_head_dims(head_dims):
        for variant, params in library_forms(dims[1]):
            heads = (_Q_HEADS, _Q_HEADS) if params else None
            specs = specs_of([variant], [dims], parse_dtypes(dtypes), chosen, ("dense",),
                             heads, params)  # fmt: skip
            found += [line_of(spec) for spec in specs]
    return merged(found)
