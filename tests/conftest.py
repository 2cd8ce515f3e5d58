"""Shared set-up: a private cache for the whole run, fixed seeds, two threads."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

# Kernels built by one test serve the others; a cache of the run's own keeps runs independent.
os.environ.setdefault("FLASHATTN_JIT_CACHE_DIR", tempfile.mkdtemp(prefix="fajit-tests-"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
