"""Text tables for reports."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Rows under a header, columns aligned; columns that are empty throughout are left out."""
    used = [i for i, name in enumerate(header) if any(row[i] for row in rows) or not rows]
    lines = [[line[i] for i in used] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        indent + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], indent + "  ".join("-" * w for w in widths), *text[1:]])


_PREFIXES = (
    (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"),
    (1e-9, "n"),
)  # fmt: skip


def si(value: float, unit: str) -> str:
    """Such as ``1.5 TFLOP/s`` or ``12 us``: three digits and a decimal prefix."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
