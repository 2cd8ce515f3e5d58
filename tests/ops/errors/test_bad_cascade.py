"""Wrong levels of cascades, and page tables that have none: errors that change nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError, VariantError
from tests.ops.errors.batch_calls import KV_INDPTR, LIMITS, OPTIONS, PAGED, Q_INDPTR


def level(rows: list[int], pages_: list[int], tokens: Any = None, size: int = 4) -> fa.CascadeLevel:
    count = len(rows) - 1
    each = len(pages_) // max(1, count)
    storage = fa.Paged(
        torch.arange(count + 1) * each, torch.tensor(pages_, dtype=torch.int32),
        torch.full((count,), 4), size,
    )  # fmt: skip
    return fa.CascadeLevel(torch.tensor(rows), storage, tokens)


OWN = level([0, 1, 2], [1, 2])


def test_a_cascade_planned_with_page_tables() -> None:
    text = r"CascadeAttention.plan\(\) takes one .*, got 2; .* fa.cascade_levels\(q_indptr, paged\)"
    with pytest.raises(InputError, match=text):
        fa.CascadeAttention(fa.Causal(), **OPTIONS).plan(Q_INDPTR, PAGED)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        ([], "levels must be a sequence of at least one fa.CascadeLevel"),
        (Q_INDPTR, r"own last; fa.cascade_levels\(q_indptr, paged\) makes them"),
        (3, "levels must be a sequence of at least one fa.CascadeLevel"),
        ([level([0, 2], [-1]), OWN], r"level 0: page_indices\[0\]=-1, a page of group 0, is neg"),
        ([level([0, 2], [0], size=6), OWN], "level 0: page_size=6 is no multiple of 4, the smalle"),
        ([level([0, 2], [0]), level([0, 1, 2], [1, -1], size=8), OWN],
         r"level 1: page_indices\[1\]=-1, a page of group 1, is negative"),
        ([level([0, 2], [0]), replace(OWN, storage=replace(OWN.storage, page_size=8, last_page_len=
         torch.tensor([8, 9]))), OWN], r"last_page_len of level 1\[1\]=9: group 1 of level 1 has"),
        ([level([0, 2], [0]), fa.CascadeLevel(OWN.q_indptr, replace(OWN.storage, page_size=8,
         last_page_len=torch.tensor([8, 9])))], r"last_page_len\[1\]=9: request 1 has 1 pages"),
        ([level([0, 2], [0], size=2), OWN], "last_page_len of level 0.0.=4.* to page_size=2"),
        ([PAGED, OWN], r"levels\[0\] must be an fa.CascadeLevel, got Paged"),
        ([level([0, 2], [0], torch.tensor([0, 2])), OWN], r"tokens of level 0\[1\]=2 in group 0"),
        ([level([0, 3], [0]), OWN], "q_indptr of level 0 ends at 3, but there are 2 packed tokens"),
        ([level([0, 2], [0], torch.tensor([0, 0])), OWN], "token 0|tokens of request 0"),
        ([OWN, level([0, 1, 2], [1, 2], torch.tensor([0, 1]))], "last level is the requests' own"),
    ],
)  # fmt: skip
def test_levels_that_cannot_be(levels: list[Any], text: str) -> None:
    made = fa.CascadeAttention(None, **OPTIONS)
    made.plan([level([0, 2], [0]), OWN])
    q, k, v = torch.randn(2, 4, 16), torch.randn(3, 4, 2, 16), torch.randn(3, 4, 2, 16)
    before = made.run(q, k, v)
    with pytest.raises(InputError, match=text):
        made.plan(levels)
    assert torch.equal(made.run(q, k, v), before)


@pytest.mark.parametrize("name", ["q_indptr", "tokens", "last_page_len"])
def test_lists_in_place_of_tensors(name: str) -> None:
    """The remedy names the argument without its level."""
    outer = level([0, 2], [0], torch.tensor([0, 1]))
    if name == "last_page_len":
        outer = replace(outer, storage=replace(outer.storage, last_page_len=[4]))
    else:
        outer = replace(outer, **{name: [0, 1]})
    text = rf"^level 0: {name} must be .* got list; make one: torch\.tensor\({name}, dtype=torch"
    with pytest.raises(InputError, match=text):
        fa.CascadeAttention(fa.Causal(), **OPTIONS).plan([outer, OWN])


_ENDS = """
import resource, sys, time
import torch
import flashattn_jit as fa

end, dim = int(sys.argv[1]), int(sys.argv[2])
made = fa.CascadeAttention(
    fa.Causal(), num_q_heads=2, num_kv_heads=2, head_dim=dim, q_dtype=torch.float32
)
one = fa.CascadeLevel(torch.tensor([0, 5]), fa.Ragged(torch.tensor([0, 5])))
made.plan([one, one])
wild = fa.CascadeLevel(torch.tensor([0, end]), fa.Ragged(torch.tensor([0, 5])))
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**29
resource.setrlimit(resource.RLIMIT_AS, (room, room))
begin = time.perf_counter()
try:
    made.plan([wild, wild])
except fa.InputError as error:
    print(time.perf_counter() - begin < 5, error)
"""


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("end", "dim", "text"),
    [
        (2**31 - 1, 32, "request 0 has q_len=2147483647 x 1 heads per kv head, which does not fit"),
        (2**31 - 2, 256, "q_indptr ends at 2147483646 packed tokens, but the memory of the device"),
        (2**28, 1, "q_indptr ends at 268435456 packed tokens: the host has no memory left to plan"),
    ],
)
def test_ends_of_q_indptr_that_no_q_has(end: int, dim: int, text: str) -> None:
    """The arrays of tokens are not allocated: address space is bounded to 512 MiB more."""
    arguments = [sys.executable, "-c", _ENDS, str(end), str(dim)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith(f"True {text}"), done


def test_more_levels_than_a_graph_has() -> None:
    made = fa.CascadeAttention(fa.Causal(), limits=LIMITS, cuda_graph=True, **OPTIONS)
    made.plan([OWN])
    with pytest.raises(InputError, match="fixes the number of shared levels: it has 0, this plan"):
        made.plan([level([0, 2], [0]), OWN])


def test_pages_of_levels_that_do_not_fit() -> None:
    made = fa.CascadeAttention(None, **OPTIONS)
    made.plan([level([0, 2], [0, 5]), OWN])
    q, k, v = torch.randn(2, 4, 16), torch.randn(3, 4, 2, 16), torch.randn(3, 4, 2, 16)
    with pytest.raises(
        InputError, match=r"level 0: page_indices\[1\]=5, a page of group 0, is out"
    ):
        made.run(q, k, v)


def test_hooks_that_shared_keys_cannot_serve() -> None:
    weights = torch.ones(2)
    variant = fa.variant(key_mod=lambda row, b, kv_h, kv_idx: row * weights[b])
    made = fa.CascadeAttention(variant, **OPTIONS)
    with pytest.raises(VariantError, match="reads the request b, but the keys of a cascade are of"):
        made.plan([level([0, 2], [0]), OWN])
    made.plan([OWN])  # nothing is shared


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((Q_INDPTR, PAGED, 0), "min_shared_pages=0 must be at least 1"),
        ((Q_INDPTR, PAGED, 1.0), "min_shared_pages must be an int, got float"),
        ((Q_INDPTR[:3], PAGED), "page_indptr has 5 entries, q_indptr 3"),
        ((torch.tensor([0, 2, 1, 3, 3]), PAGED), "q_indptr descends at request 1"),
        ((Q_INDPTR, fa.Ragged(KV_INDPTR)), "paged must be an fa.Paged, got Ragged"),
        (
            (Q_INDPTR, replace(PAGED, page_indptr=torch.tensor([0, 2**63 - 1, -(2**63), 0, 0]))),
            "page_indptr descends at request 1",
        ),
        ((torch.tensor([0, 2**63 - 1, -(2**63), 0, 0]), PAGED), "q_indptr descends at request 1"),
        ((torch.tensor([0, 2, 3, 3, 2**40]), PAGED), "q_indptr ends at 1099511627776, which does"),
        (
            (Q_INDPTR, replace(PAGED, page_indices=None)),
            "page_indices must be an int32 or int64 tensor",
        ),
        ((Q_INDPTR, replace(PAGED, page_indices=torch.arange(9))), "page_indptr ends at 11, but"),
    ],
)
def test_page_tables_without_levels(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InputError, match=text):
        fa.cascade_levels(*arguments)
