"""flashattn_jit: attention variants written in Python, run as fused kernels.

>>> import flashattn_jit as fa
>>> out = fa.attention(q, k, v, fa.Causal())

The library's variants, the drop-in functions and the inspection tools are imported when they are
first used: importing the package costs under 150 ms beyond torch's own import.
"""

from __future__ import annotations

import gc
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imports leave no garbage, but their many objects make the collector look through all of torch's
# in their midst, for 0.1 s.
_collects = gc.isenabled()
gc.disable()
try:
    from . import env, variants
    from ._version import __version__ as __version__
    from .errors import (
        AbiError,
        CacheError,
        CompileError,
        EmulatorError,
        EmulatorFault,
        FlashAttnJitError,
        GradError,
        InputError,
        LaunchError,
        ManifestError,
        MissingKernelError,
        PackError,
        ParamError,
        TargetError,
        TraceError,
        UnsafeCacheError,
        VariantError,
        VerificationError,
        WarmError,
    )
    from .ops import attention, merge_states, varlen_attention
    from .variants.builtins import kv_len, kv_slot, q_len, q_row
    from .variants.spec import Pointwise, Softmax, Variant, cpp, scalar, tensor, variant
finally:
    if _collects:
        gc.enable()

if TYPE_CHECKING:
    from .deploy.pack import pack
    from .deploy.recording import record_manifest
    from .deploy.unpack import unpack
    from .deploy.warm import warm
    from .deploy.wheel import pack_wheel
    from .inspect.cache import cache_info, last_kernel_source
    from .inspect.doctor import doctor
    from .ops.append import append_paged_kv
    from .ops.batch import BatchAttention, Plan
    from .ops.cascade import CascadeAttention, CascadeLevel, cascade_levels
    from .ops.flex import flex_attention
    from .ops.limits import Limits
    from .ops.paged import Paged
    from .ops.sdpa import scaled_dot_product_attention
    from .ops.sparsity import BlockSparse, TokenSparse, Tree
    from .ops.storage import Ragged
    from .variants.library import *  # noqa: F403

_LAZY = {
    "BatchAttention": "ops.batch",
    "BlockSparse": "ops.sparsity",
    "CascadeAttention": "ops.cascade",
    "CascadeLevel": "ops.cascade",
    "Limits": "ops.limits",
    "Paged": "ops.paged",
    "Plan": "ops.batch",
    "Ragged": "ops.storage",
    "TokenSparse": "ops.sparsity",
    "Tree": "ops.sparsity",
    "append_paged_kv": "ops.append",
    "cascade_levels": "ops.cascade",
    "flex_attention": "ops.flex",
    "scaled_dot_product_attention": "ops.sdpa",
    "cache_info": "inspect.cache",
    "doctor": "inspect.doctor",
    "last_kernel_source": "inspect.cache",
    "pack": "deploy.pack",
    "pack_wheel": "deploy.wheel",
    "record_manifest": "deploy.recording",
    "unpack": "deploy.unpack",
    "warm": "deploy.warm",
}

__all__ = [
    "AbiError",
    "BatchAttention",
    "BlockSparse",
    "CacheError",
    "CascadeAttention",
    "CascadeLevel",
    "CompileError",
    "EmulatorError",
    "EmulatorFault",
    "FlashAttnJitError",
    "GradError",
    "InputError",
    "LaunchError",
    "Limits",
    "ManifestError",
    "MissingKernelError",
    "PackError",
    "Paged",
    "ParamError",
    "Plan",
    "Pointwise",
    "Ragged",
    "Softmax",
    "TargetError",
    "TokenSparse",
    "TraceError",
    "Tree",
    "UnsafeCacheError",
    "Variant",
    "VariantError",
    "VerificationError",
    "WarmError",
    "append_paged_kv",
    "attention",
    "cache_info",
    "cascade_levels",
    "cpp",
    "doctor",
    "flex_attention",
    "kv_len",
    "kv_slot",
    "last_kernel_source",
    "merge_states",
    "pack",
    "pack_wheel",
    "q_len",
    "q_row",
    "record_manifest",
    "scalar",
    "scaled_dot_product_attention",
    "tensor",
    "unpack",
    "variant",
    "variants",
    "varlen_attention",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    elif name.startswith("__"):
        raise AttributeError(name)
    else:
        library = import_module(".variants.library", __name__)
        if name not in library.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(library, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *import_module(".variants.library", __name__).__all__})


def _start() -> None:
    """Does what variables ask of the import. A service must not die of one that is wrong."""
    log = logging.getLogger(__name__)
    try:
        env.apply_log_level()
    except FlashAttnJitError as error:
        log.error("%s", error)
    try:
        if env.record_path() is not None:
            from .deploy.recording import record_process

            record_process()
    except FlashAttnJitError as error:
        log.error("FLASHATTN_JIT_RECORD: nothing is recorded: %s", error)


_start()
