"""`BatchAttention` and `CascadeAttention` with a mesh give what they give in one process."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from tests.distributed.programs import NAMES
from tests.distributed.ranks import in_one_group, on_ranks
from tests.harness import rotation

PROGRAMS = "tests.distributed.mesh_programs:"
FITTING = [name for name in NAMES if name != "gate"]  # reads slots of ragged keys


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pages_are_divided(ranks) -> None:
    names = ["causal", *rotation.some(FITTING, 2, but_not=["causal"])]
    on_ranks(ranks, PROGRAMS + "pages", names=names, divided="pages")


@pytest.mark.parametrize("ranks", [2, 3])
def test_pages_and_heads_are_divided(ranks) -> None:
    names = ["alibi", "sink", *rotation.some(FITTING, 1, but_not=["alibi", "sink"])]
    on_ranks(ranks, PROGRAMS + "pages", names=names, divided="pages_heads")


def test_prompts_over_divided_pages() -> None:
    names = ["window", *rotation.some(FITTING, 1, but_not=["window"])]
    on_ranks(3, PROGRAMS + "pages", names=names, divided="pages", prefill=True)


@pytest.mark.parametrize("divided", ["pages", "pages_heads"])
def test_shared_pages_are_divided(divided) -> None:
    on_ranks(3, PROGRAMS + "cascade", divided=divided)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("divided", "ranks"), [("pages_heads", 3), ("requests_heads", 2), ("requests_heads", 4)]
)
def test_latents_of_more_ranks_than_heads(divided, ranks) -> None:
    on_ranks(ranks, PROGRAMS + "latents", divided=divided)


def test_codes_in_divided_pages() -> None:
    in_one_group(2, [(PROGRAMS + "codes", {"rotate": rotate}) for rotate in (False, True)])


def test_emulated_devices() -> None:
    ways = ("pages", "pages_heads")
    in_one_group(2, [(PROGRAMS + "emulated", {"divided": divided}) for divided in ways])


def test_hooks_see_whole_requests_and_own_slots() -> None:
    on_ranks(3, PROGRAMS + "slots")


BAD_INPUT = {
    "divided": "divided='keys' must be one of",
    "heads": "num_q_heads=3 is not divisible by the 2 ranks",
    "limits": "do not go with a mesh",
    "slots": "of another key than kv_idx",
    "ragged": "storage must be an fa.Paged",
    "sparsity": "Tree does not go with a mesh that divides pages",
    "lengths": "something else than rank 0",
    "levels": "at position 39, which does not begin a page of 16",
    "plan": "run() before plan()",
    "q": "must be [tokens of the batch, num_q_heads, head_dim] = [2, 4, 64]",
    "partial": "partial=True does not go with a mesh",
}


def test_bad_input_is_a_typed_error_on_every_rank() -> None:
    cases = [{"name": name, "words": words} for name, words in BAD_INPUT.items()]
    in_one_group(2, [(PROGRAMS + "refused", case) for case in cases])


def test_what_one_rank_does_wrong_is_an_error_of_all() -> None:
    ways = ("pages", "pages_heads", "requests_heads")
    in_one_group(2, [(PROGRAMS + "one_wrong", {"divided": way}) for way in ways], timeout_s=60)


def test_ranks_that_divide_in_other_ways_are_refused() -> None:
    on_ranks(2, PROGRAMS + "differing_ways", timeout_s=60)


def test_hooks_in_text_and_dims_of_any_name() -> None:
    in_one_group(2, [(PROGRAMS + "text", {}), (PROGRAMS + "named_dims", {})])


@pytest.mark.parametrize(
    ("ranks", "ways"), [(1, ["pages"]), (2, ["pages_heads", "ring", "states"])]
)
def test_params_change_in_kind_after_the_plan(ranks, ways) -> None:
    in_one_group(ranks, [(PROGRAMS + "kinds", {"way": way}) for way in ways])


def test_divided_needs_a_mesh() -> None:
    with pytest.raises(fa.InputError, match="give mesh= too"):
        fa.BatchAttention(
            None, num_q_heads=2, num_kv_heads=1, head_dim=64, q_dtype=torch.float32,
            divided="pages_heads",
        )  # fmt: skip
