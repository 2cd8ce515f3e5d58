"""A module of a user's with settings that hooks read as attributes."""

import torch

WINDOW = 4
TABLE = torch.arange(8.0)
ENABLED = True


def helper(x):  # type: ignore[no-untyped-def]
    """Reads its own globals."""
    return x + WINDOW
