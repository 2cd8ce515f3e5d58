"""Every parameter list at full size on this CPU, against the dense model."""

from __future__ import annotations

import pytest

from tests.batch.lists import ENTRIES, LISTS, Entry
from tests.batch.oracle import check
from tests.batch.runs import attend
from tests.harness import rotation
from tests.ops.cases import HOST_TARGETS


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "entry", rotation.chosen(ENTRIES, 6, lambda e: e.what.name), ids=lambda e: e.name
)
def test_full_size(entry: Entry) -> None:
    batch = entry.batch()
    check(batch, entry.what, *attend(batch, entry.what.variant(batch.heads[0])))


# Few rows, many rows and both, in two dtypes, on a target by turns. tests/full has all lists on all
# targets.
ON_OTHERS = (LISTS["sliding_window"][9], LISTS["sliding_window"][19], LISTS["mixed"][7])


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", rotation.turn(0, HOST_TARGETS[:-1] or HOST_TARGETS))
@pytest.mark.parametrize("entry", ON_OTHERS, ids=lambda e: e.name)
def test_other_targets_of_this_machine(entry: Entry, target: str) -> None:
    batch = entry.batch()
    check(batch, entry.what, *attend(batch, entry.what.variant(batch.heads[0]), target=target))
