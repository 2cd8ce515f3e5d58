"""Every parameter list at full size on this CPU, against the dense model."""

from __future__ import annotations

import pytest

from tests.batch.lists import ENTRIES, Entry
from tests.batch.oracle import check
from tests.batch.runs import attend


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_full_size(entry: Entry) -> None:
    batch = entry.batch()
    check(batch, entry.what, *attend(batch, entry.what.variant(batch.heads[0])))
