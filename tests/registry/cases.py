"""The registry: every variant that tests and benchmarks run, and the shapes they run on.

`CASES` drives the reference checks, the CPU kernels, the interval form, `make_fx` and the
benchmarks. A new variant is one entry in library.py, scores.py or masks.py.
`pairs` gives (case, shape) pairs for a parametrised test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.registry.case import DEFAULT_SHAPE, Case, Shape
from tests.registry.library import LIBRARY_CASES
from tests.registry.masks import MASK_CASES
from tests.registry.scores import SCORE_CASES

__all__ = ["CASES", "DEFAULT_SHAPE", "SHAPES", "Case", "Shape", "by_name", "pairs", "select"]

CASES: tuple[Case, ...] = (*LIBRARY_CASES, *SCORE_CASES, *MASK_CASES)
"""Every case; names are unique."""

SHAPES: tuple[Shape, ...] = (
    # batch, num_q_heads, num_kv_heads, q_len, kv_len, head_dim, head_dim_v
    Shape(1, 1, 1, 1, 1, 1, 1),
    Shape(2, 2, 2, 64, 64, 64, 64),  # whole tiles
    Shape(1, 2, 2, 129, 129, 128, 128),  # one past a tile
    Shape(2, 4, 1, 37, 101, 80, 80),  # group 4
    Shape(1, 5, 1, 70, 70, 40, 40),  # group 5
    Shape(1, 7, 1, 33, 47, 17, 17),  # group 7, odd head dim
    Shape(2, 16, 2, 19, 65, 96, 96),  # group 8
    Shape(1, 71, 1, 3, 50, 64, 64),  # group 71
    Shape(2, 8, 1, 1, 300, 128, 128),  # few rows: decode
    Shape(3, 10, 2, 1, 130, 64, 64),  # decode, group 5
    Shape(1, 2, 1, 5, 513, 64, 64),  # few rows: speculative
    Shape(1, 1, 1, 31, 63, 121, 121),
    Shape(1, 2, 2, 45, 77, 192, 128),  # head_dim_v smaller
    Shape(1, 2, 1, 40, 40, 24, 136),  # head_dim_v larger
    Shape(1, 2, 1, 33, 65, 256, 256),
    Shape(1, 2, 2, 90, 17, 64, 64),  # more queries than keys
    Shape(2, 2, 1, 0, 16, 64, 64),  # no queries
    Shape(2, 2, 1, 5, 0, 64, 64),  # no keys: every row is empty
    Shape(1, 1, 1, 257, 300, 64, 64),  # several tiles
)  # fmt: skip
"""Shapes with partial tiles, every group size, head dims up to 256, and empty shapes."""


def select(*wanted: str) -> list[Case]:
    """The cases that have all of the tags."""
    return [c for c in CASES if c.tags.issuperset(wanted)]


def by_name(name: str) -> Case:
    """The case of that name; KeyError when there is none."""
    return {c.name: c for c in CASES}[name]


def pairs(
    cases: Sequence[Case] = CASES, shapes: Sequence[Shape] = SHAPES, every: int = 1
) -> Iterator[tuple[Case, Shape]]:
    """(case, shape) pairs: for each case, every `every`-th of the shapes that fit it.

    every=1 is the full matrix. With every=n the cases start at different shapes, so that each shape
    is paired with some case. A case with a shape of its own is paired with that one too.
    """
    for number, case in enumerate(cases):
        fitting = [s for s in shapes if case.fits(s)]
        chosen = fitting[number % every :: every]
        if case.shape != DEFAULT_SHAPE or not chosen:
            chosen = [*chosen, case.shape]
        for shape in chosen:
            yield case, shape
