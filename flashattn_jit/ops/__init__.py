"""The ops that users call, registered with torch."""

from . import _register as _register
from .attention import attention
from .flex import flex_attention
from .merge import merge_states
from .sdpa import scaled_dot_product_attention
from .varlen import varlen_attention

__all__ = [
    "attention",
    "flex_attention",
    "merge_states",
    "scaled_dot_product_attention",
    "varlen_attention",
]
