"""A CUDA target with a suffix, added to the tables of targets."""

from __future__ import annotations

import sys

import pytest

from flashattn_jit.codegen.targets import CODE_TARGETS, CUDA_TARGETS, EMULATED, EMULATED_TARGETS

TARGET = "sm_100a"


def add_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds `TARGET` behind ``sm_100`` wherever the package has imported the table."""
    index = CUDA_TARGETS.index("sm_100") + 1
    longer = {
        "CUDA_TARGETS": (*CUDA_TARGETS[:index], TARGET, *CUDA_TARGETS[index:]),
        "EMULATED_TARGETS": (*EMULATED_TARGETS, EMULATED + TARGET),
        "CODE_TARGETS": (*CODE_TARGETS, TARGET),
    }
    for name, module in list(sys.modules.items()):
        for table, row in longer.items():
            if name.startswith("flashattn_jit.") and hasattr(module, table):
                monkeypatch.setattr(module, table, row)
