"""The cases of `verify`: shapes at the edges of tiles, and inputs that reveal faulty kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ...variants.params import Dims

Layout = Literal["contiguous", "transposed", "sliced", "expanded"]
Lengths = Literal["all", "ragged"]
Offset = Literal["zero", "int", "end", "tensor"]

GROUP_SIZES = (1, 2, 4, 5, 7, 8)
SPLIT_THREADS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison of the kernel with the reference.

    lengths "ragged": a kv_len tensor with a full, an empty and a short request, NaN past the ends.
    masked: the variant with every third row and every fifth key masked out as well, with NaN in K
    of those keys. group: the case tests its numbers of heads, so `fallbacks` keeps them.
    """

    name: str
    dims: Dims
    layout: Layout = "contiguous"
    lengths: Lengths = "all"
    offset: Offset = "zero"
    extreme: bool = False
    masked: bool = False
    packed: bool = False
    threads: int | None = None
    group: bool = False


def cases(base: Dims, tile_q: int, tile_kv: int) -> Iterator[Case]:
    """All cases for one dtype. `tile_q` and `tile_kv` are the prefill kernel's."""
    rows, keys = base.q_len, base.kv_len

    def dims(q_len: int, kv_len: int, heads: tuple[int, int] | None = None, batch: int = 0) -> Dims:
        q_heads, kv_heads = heads or (base.num_q_heads, base.num_kv_heads)
        return base._replace(
            batch=batch or base.batch, num_q_heads=q_heads, num_kv_heads=kv_heads,
            q_len=q_len, kv_len=kv_len,
        )  # fmt: skip

    ragged = dims(tile_q // 2 + 7, 2 * tile_kv - 1)
    decode = dims(1, 5 * tile_kv + 3)
    yield Case("as given", base)
    yield Case("ragged tails", ragged)
    yield Case("one past a tile", dims(tile_q + 1, tile_kv + 1))
    yield Case("whole tiles", dims(2 * tile_q, 2 * tile_kv))
    yield Case("one row, one key", dims(1, 1))
    yield Case("one row, many keys", decode, offset="end")
    yield Case("three rows", dims(3, 2 * tile_kv + 5), offset="end")
    yield Case("many rows, few keys", dims(tile_q + 9, 3))
    yield Case("no rows", dims(0, keys))
    yield Case("no keys", dims(rows, 0))
    yield Case("no keys, one row", dims(1, 0))

    for q_heads, kv_heads in group_sizes(base):
        for q_len, what in ((1, "one row"), (tile_q // 3 + 5, "many rows")):
            name = f"group size {q_heads // kv_heads}, {what}"
            case = dims(q_len, tile_kv + 37, (q_heads, kv_heads))
            yield Case(name, case, offset="end", group=True)

    yield Case("requests of different kv_len, NaN past them", ragged._replace(batch=3),
               lengths="ragged")  # fmt: skip
    yield Case("the same, one row", decode._replace(batch=3), lengths="ragged", offset="end")
    yield Case("q_offset 37", ragged, offset="int")
    yield Case('q_offset "end"', dims(29, 2 * tile_kv + 11), offset="end")
    yield Case("a q_offset each request", ragged._replace(batch=3), offset="tensor")
    yield Case("packed requests", ragged._replace(batch=3), packed=True)
    yield Case("scores of 1e4", ragged, extreme=True)
    yield Case("scores of 1e4, one row", decode, offset="end", extreme=True)
    yield Case("transposed views", ragged, layout="transposed")
    yield Case("rows 16 bytes do not divide", ragged, layout="sliced")
    yield Case("rows 16 bytes do not divide, one row", decode, offset="end", layout="sliced")
    yield Case("k and v shared by the batch", ragged, layout="expanded")
    long = dims(1, 4096 + 77, batch=1)
    yield Case("keys split over threads", long, offset="end", threads=SPLIT_THREADS)
    yield Case("keys of many rows split", dims(tile_q // 4 + 1, 2048 + 33, batch=1), offset="end",
               threads=SPLIT_THREADS)  # fmt: skip
    yield Case("one thread", ragged, threads=1)


def extra_kernels(base: Dims, tile_q: int, tile_kv: int) -> Iterator[Case]:
    """Cases that need further kernels: run with one dtype only."""
    ragged = base._replace(q_len=tile_q // 2 + 7, kv_len=2 * tile_kv - 1)
    decode = base._replace(q_len=1, kv_len=tile_kv + 37)
    for case, what in ((ragged, ""), (decode, ", one row")):
        yield Case(f"masked rows, NaN in masked keys{what}", case, offset="end", masked=True)
        odd = case._replace(head_dim=36, head_dim_v=20)
        yield Case(f"head dims 36 and 20{what}", odd, offset="end", group=True)


def group_sizes(base: Dims) -> list[tuple[int, int]]:
    """(num_q_heads, num_kv_heads) of every group size, also with the given num_q_heads."""
    free = [(g * (1 if g > 4 else 2), 1 if g > 4 else 2) for g in GROUP_SIZES]
    heads = base.num_q_heads
    kept = [(heads, heads // g) for g in GROUP_SIZES if heads % g == 0]
    return list(dict.fromkeys(free + kept))


def fallbacks(case: Case, base: Dims) -> Iterator[Case]:
    """The case, then the most similar ones that fit params for the sizes `base`."""
    yield case
    if case.group:
        return
    dims = case.dims._replace(
        num_q_heads=base.num_q_heads, num_kv_heads=base.num_kv_heads, batch=base.batch
    )
    yield replace(case, dims=dims)
    dims = dims._replace(q_len=min(dims.q_len, base.q_len), kv_len=min(dims.kv_len, base.kv_len))
    yield replace(case, dims=dims, offset="zero" if case.offset == "int" else case.offset)
    yield replace(case, dims=dims._replace(kv_len=base.kv_len))
    yield replace(case, dims=dims._replace(q_len=base.q_len, kv_len=base.kv_len))
