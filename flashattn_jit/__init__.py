"""flashattn_jit: attention variants written in Python, run as fused kernels.

>>> import flashattn_jit as fa
>>> out = fa.attention(q, k, v, fa.Causal())

The library's variants, the drop-in functions and the inspection tools are imported when they are
first used: importing the package takes under 150 ms beyond the import of torch. In the process of
the command line the package imports neither torch nor its own modules before they are used.
"""

from __future__ import annotations

import gc
import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import errors, variants
from . import forwards as forwards
from ._extension import require_extension
from ._version import __version__ as __version__
from .errors import *  # noqa: F403

if TYPE_CHECKING:
    from .deploy.manifest.recording import record_manifest
    from .deploy.pack.pack import pack
    from .deploy.pack.unpack import unpack
    from .deploy.pack.wheel import pack_wheel
    from .deploy.warm.ray_executor import RayExecutor
    from .deploy.warm.warm import warm
    from .distributed.context_parallel import ContextParallel
    from .distributed.parallel_plan import ParallelPlan
    from .inspect.cache import cache_info, last_kernel_source
    from .inspect.doctor.report import doctor
    from .ops.append import AppendPlan, append_paged_kv, plan_append
    from .ops.arguments.limits import Limits
    from .ops.attention import attention
    from .ops.batch import BatchAttention
    from .ops.cascade import CascadeAttention, cascade_levels
    from .ops.flex import flex_attention
    from .ops.keys.level_pages import CascadeLevel
    from .ops.keys.paged import Paged
    from .ops.keys.sparsity import Bits, BlockSparse, TokenSparse, Tree
    from .ops.keys.storage import Ragged
    from .ops.latent import AbsorbedMLA, absorb_mla, append_paged_latent
    from .ops.merge import merge_states
    from .ops.plan import Plan
    from .ops.sdpa import scaled_dot_product_attention
    from .ops.varlen import varlen_attention
    from .variants.builtins import kv_len, kv_slot, q_len, q_row
    from .variants.functions import tanh_approx
    from .variants.library import *  # noqa: F403
    from .variants.variant import Pointwise, Softmax, Variant, cpp, scalar, tensor, variant

_CORE = {
    "ops": ("attention", "merge_states", "varlen_attention"),
    "variants.builtins": ("kv_len", "kv_slot", "q_len", "q_row"),
    "variants.functions": ("tanh_approx",),
    "variants.variant": ("Pointwise", "Softmax", "Variant", "cpp", "scalar", "tensor", "variant"),
}
"""Names that are imported with the package. Importing them registers the torch ops."""

_LAZY = {
    "deploy.manifest.recording": ("record_manifest",),
    "deploy.pack.pack": ("pack",),
    "deploy.pack.unpack": ("unpack",),
    "deploy.pack.wheel": ("pack_wheel",),
    "deploy.warm.ray_executor": ("RayExecutor",),
    "deploy.warm.warm": ("warm",),
    "distributed.context_parallel": ("ContextParallel",),
    "distributed.parallel_plan": ("ParallelPlan",),
    "inspect.cache": ("cache_info", "last_kernel_source"),
    "inspect.doctor.report": ("doctor",),
    "ops.append": ("AppendPlan", "append_paged_kv", "plan_append"),
    "ops.arguments.limits": ("Limits",),
    "ops.batch": ("BatchAttention",),
    "ops.cascade": ("CascadeAttention", "cascade_levels"),
    "ops.flex": ("flex_attention",),
    "ops.keys.level_pages": ("CascadeLevel",),
    "ops.keys.paged": ("Paged",),
    "ops.keys.sparsity": ("Bits", "BlockSparse", "TokenSparse", "Tree"),
    "ops.keys.storage": ("Ragged",),
    "ops.latent": ("AbsorbedMLA", "absorb_mla", "append_paged_latent"),
    "ops.plan": ("Plan",),
    "ops.sdpa": ("scaled_dot_product_attention",),
}
"""Names that are imported when they are first used."""

_MODULES = {name: module for module, names in {**_CORE, **_LAZY}.items() for name in names}

__all__ = [
    "AbsorbedMLA",
    "AppendPlan",
    "BatchAttention",
    "Bits",
    "BlockSparse",
    "CascadeAttention",
    "CascadeLevel",
    "ContextParallel",
    "Limits",
    "Paged",
    "ParallelPlan",
    "Plan",
    "Pointwise",
    "Ragged",
    "RayExecutor",
    "Softmax",
    "TokenSparse",
    "Tree",
    "Variant",
    "absorb_mla",
    "append_paged_kv",
    "append_paged_latent",
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
    "plan_append",
    "q_len",
    "q_row",
    "record_manifest",
    "scalar",
    "scaled_dot_product_attention",
    "tanh_approx",
    "tensor",
    "unpack",
    "variant",
    "variants",
    "varlen_attention",
    "warm",
]
__all__ += errors.__all__
__all__.sort()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    elif name.startswith("_"):
        raise AttributeError(name)
    elif find_spec(f"{__name__}.{name}") is not None:
        return import_module(f".{name}", __name__)
    else:
        library = import_module(".variants.library", __name__)
        if name not in library.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(library, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *import_module(".variants.library", __name__).__all__})


class _LazyExtension(ModuleType):
    """`_C`, imported when it is used: after torch, whose OpenMP runtime it needs."""

    def __getattr__(self, name: str) -> Any:
        import torch  # noqa: F401

        extension = import_module(f"{__name__}._C")
        self.__dict__.update(vars(extension))  # later uses do not call __getattr__
        return getattr(extension, name)


def _is_command_line() -> bool:
    """Whether the process is `flashattn-jit` or `python -m flashattn_jit`."""
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] == "-m":  # until Python has found the module to run
        given = sys.orig_argv[-len(arguments) :]
        return len(given) == len(arguments) and given[0].removeprefix("-m") == __name__
    return Path(arguments[0]).name == "flashattn-jit"


def _import_core() -> None:
    # Imports leave no garbage, but allocate so many objects that the collector would run, which
    # takes 0.1 s for all of torch's objects.
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in (name for names in _CORE.values() for name in names):
            __getattr__(name)
    finally:
        if collects:
            gc.enable()


def _start() -> None:
    """Apply the environment variables for the log level and recording.

    An invalid value is logged, so that it does not stop a service.
    """
    from . import env

    log = logging.getLogger(__name__)
    try:
        env.apply_log_level()
    except errors.FlashAttnJitError as error:
        log.error("%s", error)
    try:
        if env.record_path() is not None:
            from .deploy.manifest.recording import record_process

            record_process()
    except errors.FlashAttnJitError as error:
        log.error("FLASHATTN_JIT_RECORD: nothing is recorded: %s", error)


require_extension(Path(__file__).parent)
if _is_command_line():
    globals()["_C"] = _LazyExtension(f"{__name__}._C")
else:
    _import_core()
_start()
