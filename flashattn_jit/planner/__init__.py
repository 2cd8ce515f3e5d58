"""From a problem to a plan: operational intensity, tile kind and tile, schedule.

Compile-time choices (`tiles`) depend only on the variant, dtypes, head dims, target and a class of
packed rows, so the kernels that a variant can ever need are a short list (`reachable`). Cache
sizes, thread count and lengths decide run-time values only (`schedule`).
"""

from .hardware import Hardware, host_hardware
from .problem import Problem, RooflinePoint, roofline
from .tiles import TileChoice, candidates, choose, fallbacks, reachable

__all__ = [
    "Hardware",
    "Problem",
    "RooflinePoint",
    "TileChoice",
    "candidates",
    "choose",
    "fallbacks",
    "host_hardware",
    "reachable",
    "roofline",
]
