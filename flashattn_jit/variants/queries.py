"""What a variant's hooks read, for callers that cannot serve every variant."""

from __future__ import annotations

from .ir import VariantIR


def keys_read_request(variant: VariantIR) -> bool:
    """Whether `key_mod` or `value_mod` reads its request b, `fa.kv_len(b)` included.

    Keys that several requests share are changed once for all of them, with b the number of the
    group: a result that depends on b would be of no request.
    """
    graphs = (variant.hook(h) for h in ("key_mod", "value_mod"))
    return any(g is not None and g.uses("b") for g in graphs)
