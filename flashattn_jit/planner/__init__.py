"""From a problem to a plan: operational intensity, tile kind and tile, schedule.

Compile-time choices (`tiles`) depend only on the variant, dtypes, head dims, target and a class of
packed rows, so the kernels that a variant can ever need are a short list (`reachable`). Cache
sizes, thread count and lengths decide run-time values only (`schedule`).
"""

from .costs import Hardware, RooflinePoint, Slots, host_hardware, min_chunk, roofline, slots
from .devices import DEVICES, Device, device_hardware, named_hardware, typical_hardware
from .reachable import FORMATS, reachable, retarget, utilities
from .tiles import Problem, TileChoice, candidates, choose, fallbacks, placed

__all__ = [
    "DEVICES",
    "FORMATS",
    "Device",
    "Hardware",
    "Problem",
    "RooflinePoint",
    "Slots",
    "TileChoice",
    "candidates",
    "choose",
    "device_hardware",
    "fallbacks",
    "host_hardware",
    "min_chunk",
    "named_hardware",
    "placed",
    "reachable",
    "retarget",
    "roofline",
    "slots",
    "typical_hardware",
    "utilities",
]
