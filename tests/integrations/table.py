"""The table of docs/transformers.md: the outcome for every model type.

tests/full/transformers_walk.py writes it.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterable

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "transformers.md"

OUTCOMES = {
    "equal": "Equal to eager",
    "equal or refused": "Equal to eager, or refused by name",
    "refused": "Refused by name",
    "not called": "Stock code, which a warning says",
    "no attention": "No attention layers, or none that these calls reach",
    "not built": "Not built small by the walk",
    "fails": "Fails without saying why",
    "differs": "Different",
}
"""The outcomes in the order of the table, and their headings. The last two must have no rows."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One model type: the class that was called, the outcome, and a remark for the reader."""

    model_type: str
    model: str
    outcome: str
    remark: str


def table_of(rows: Iterable[Row], version: str) -> str:
    """The Markdown of all rows, by outcome."""
    groups: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row.outcome].append(row)
    parts = [f"## The table\n\ntransformers {version}.\n"]
    parts += [f"* {heading}: {len(groups[key])}" for key, heading in OUTCOMES.items()]
    for key, heading in OUTCOMES.items():
        if groups[key]:
            parts.append(f"\n### {heading}\n\n| type | model | remark |\n| --- | --- | --- |")
            parts += [
                f"| {row.model_type} | {row.model} | {row.remark.replace('|', '/')} |"
                for row in sorted(groups[key], key=lambda row: row.model_type)
            ]
    return "\n".join(parts) + "\n"


def read() -> list[Row]:
    """The rows of the committed table."""
    outcome, rows = "", []
    by_heading = {heading: key for key, heading in OUTCOMES.items()}
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("### "):
            outcome = by_heading[line[4:]]
        elif outcome and line.startswith("| ") and not line.startswith(("| type", "| ---")):
            model_type, model, remark = (cell.strip() for cell in line.strip("|").split("|"))
            rows.append(Row(model_type, model, outcome, remark))
    return rows
