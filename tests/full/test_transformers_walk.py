"""Every model type of transformers, built small, against its eager code and the committed table."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="needs the extra [examples]")

from tests.full import transformers_walk
from tests.integrations import table


def test_every_model_type_does_what_the_table_says() -> None:
    known = {row.model_type: row for row in table.read()}
    rows = list(transformers_walk.walk(transformers_walk.all_types()))
    wrong = [row for row in rows if row.outcome in ("differs", "fails")]
    assert not wrong
    # What could not be built depends on the libraries and the memory that a machine has.
    built = [row for row in rows if row.outcome != "not built"]
    changed = [
        row for row in built if known[row.model_type].outcome not in (row.outcome, "not built")
    ]
    assert not changed, "python -m tests.full.transformers_walk --write writes the table"
    assert len(built) > 400
