"""The ops that users call, registered with torch. `flex`, `sdpa`, `paged` and `append` are
imported on first use."""

from . import op_implementations as op_implementations
from .attention import attention
from .merge import merge_states
from .varlen import varlen_attention

__all__ = ["attention", "merge_states", "varlen_attention"]
