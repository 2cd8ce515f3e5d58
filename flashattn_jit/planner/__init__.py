"""From a problem to a kernel: tile kind and tile, the costs of its work, and hardware figures.

Compile-time choices (`tiles`) depend only on the variant, dtypes, head dims, target and a class of
packed rows, so the kernels that a variant can ever need are a short list (`reachable`). Cache
sizes, thread count and lengths decide run-time values only (`csrc/scheduler`).
"""
