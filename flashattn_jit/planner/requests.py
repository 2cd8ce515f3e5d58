"""The requests that a spec becomes: itself, then the same kernel on smaller tiles."""

from __future__ import annotations

from ..codegen.requests import AnySpec, Request, request_of
from ..codegen.spec import KernelSpec
from .tiles import fallbacks


def requests_of(spec: AnySpec) -> tuple[Request, ...]:
    """What `load_stepping` is asked for: `spec`, then what takes its place where it spills.

    Only attention kernels of CUDA targets have others.
    """
    others = fallbacks(spec) if isinstance(spec, KernelSpec) else ()
    return tuple(request_of(s) for s in (spec, *others))
