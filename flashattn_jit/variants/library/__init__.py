"""The variants that come with the package, by subject. CONTRIBUTING.md says how to add one."""

from flashattn_jit.variants.library.biases import AdditiveBias, ALiBi, SoftCap, alibi_slopes
from flashattn_jit.variants.library.epilogue import GatedOutput
from flashattn_jit.variants.library.masks import (
    BlockCausal,
    BlockDiffusion,
    Causal,
    Chunked,
    Dilated,
    Full,
    PrefixLM,
    SlidingWindow,
    StreamingLLM,
)
from flashattn_jit.variants.library.neighborhood import Natten
from flashattn_jit.variants.library.normalizers import (
    ReluSquared,
    Sigmoid,
    Sink,
    SoftmaxOffByOne,
)
from flashattn_jit.variants.library.norms import QKNorm
from flashattn_jit.variants.library.packed_masks import DocumentMask, PaddingMask, document_ids
from flashattn_jit.variants.library.relative import RelativeBias, RelativeTable, t5_buckets
from flashattn_jit.variants.library.rope import RoPE, rope_tables, rotate
from flashattn_jit.variants.library.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    RopeScaling,
    YarnScaling,
    rope_scaling_from_config,
)
from flashattn_jit.variants.library.scaling import LogN, TemperatureTuning
from flashattn_jit.variants.library.tree import TreeMask, pack_bits, tree_bits

__all__ = [
    "ALiBi",
    "AdditiveBias",
    "BlockCausal",
    "BlockDiffusion",
    "Causal",
    "Chunked",
    "Dilated",
    "DocumentMask",
    "DynamicNTKScaling",
    "Full",
    "GatedOutput",
    "LinearScaling",
    "Llama3Scaling",
    "LogN",
    "LongRopeScaling",
    "Natten",
    "NoScaling",
    "PaddingMask",
    "PrefixLM",
    "QKNorm",
    "RelativeBias",
    "RelativeTable",
    "ReluSquared",
    "RoPE",
    "RopeScaling",
    "Sigmoid",
    "Sink",
    "SlidingWindow",
    "SoftCap",
    "SoftmaxOffByOne",
    "StreamingLLM",
    "TemperatureTuning",
    "TreeMask",
    "YarnScaling",
    "alibi_slopes",
    "document_ids",
    "pack_bits",
    "rope_scaling_from_config",
    "rope_tables",
    "rotate",
    "t5_buckets",
    "tree_bits",
]
