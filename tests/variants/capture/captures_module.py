"""Stands in for a user's module, whose settings hooks read as attributes."""

import torch

WINDOW = 4
TABLE = torch.arange(8.0)
ENABLED = True


def helper(x):  # type: ignore[no-untyped-def]
    """Reads its own globals."""
    return x + WINDOW
