"""`fa.ContextParallel` on 1 to 4 ranks gives what `fa.BatchAttention` gives in one process."""

from __future__ import annotations

import pytest

from tests.distributed.programs import NAMES
from tests.distributed.ranks import on_ranks
from tests.harness import rotation
from tests.registry.cases import CASES

PROGRAMS = "tests.distributed.programs:"


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_and_keys_come_together(ranks) -> None:
    """Bit for bit with batch_invariant."""
    names = ["causal", *rotation.some(NAMES, 3 if ranks == 3 else 1, but_not=["causal"])]
    on_ranks(ranks, PROGRAMS + "equal", names=names, bits=True, way="keys")


def test_heads_are_divided() -> None:
    """Bit for bit with batch_invariant."""
    names = ["alibi", *rotation.some(NAMES, 2, but_not=["alibi"])]
    on_ranks(2, PROGRAMS + "equal", names=names, bits=True, way="heads")


@pytest.mark.parametrize("ranks", [3, 4])
def test_fewer_kv_heads_than_ranks(ranks) -> None:
    """Ranks have parts of the q heads of one kv head."""
    on_ranks(ranks, PROGRAMS + "equal", names=["alibi", "rope"], bits=False, way="heads")


@pytest.mark.parametrize("ranks", [2, 3])
def test_states_are_merged(ranks) -> None:
    names = ["causal", *rotation.some(NAMES, 2 if ranks == 3 else 1, but_not=["causal"])]
    on_ranks(ranks, PROGRAMS + "equal", names=names, bits=False, way="states", decode=True)
    on_ranks(ranks, PROGRAMS + "equal", names=["causal"], bits=False, way="states")


@pytest.mark.parametrize("ranks", [2, 3])
def test_keys_arrive_one_rank_after_another(ranks) -> None:
    names = ["causal", "blocks", "gate", *rotation.some(NAMES, 2)]
    on_ranks(ranks, PROGRAMS + "equal", names=names[: 3 * ranks - 1], bits=False, way="ring")


def test_without_batch_invariance() -> None:
    on_ranks(2, PROGRAMS + "equal", names=rotation.some(NAMES, 2), bits=False, way="keys")


@pytest.mark.parametrize(("way", "dtype"), [("keys", "bfloat16"), ("states", "float32")])
def test_error_is_bounded_as_in_one_process(way, dtype) -> None:
    on_ranks(2, PROGRAMS + "error_rule", way=way, dtype=dtype)


def test_cases_of_the_registry() -> None:
    """Masks, closures and built-ins: hooks see the request that rows belong to."""
    fitting = [c for c in CASES if c.scale is None and not c.reaches_nan]
    names = [c.name for c in rotation.some(fitting, 3)]
    on_ranks(2, PROGRAMS + "registry", names=names)


def test_shards_of_any_size_and_dtensors() -> None:
    on_ranks(3, PROGRAMS + "shards")


def test_rows_that_need_no_message_do_not_wait() -> None:
    on_ranks(3, PROGRAMS + "overlapped")


def test_unused_keys_may_be_nan() -> None:
    on_ranks(2, PROGRAMS + "unused_slots")


def test_batches_without_requests_rows_or_keys() -> None:
    on_ranks(3, PROGRAMS + "nothing")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("way", ["keys", "ring", "states", "heads"])
def test_emulated_devices(way) -> None:
    on_ranks(2, PROGRAMS + "emulated", way=way)
