"""The ops that users call, registered with torch. `flex` and `sdpa` are imported on first use."""

from . import _graph_ops as _graph_ops
from . import _register as _register
from .append import append_paged_kv
from .attention import attention
from .merge import merge_states
from .paged import Paged
from .varlen import varlen_attention

__all__ = ["Paged", "append_paged_kv", "attention", "merge_states", "varlen_attention"]
