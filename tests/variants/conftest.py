"""A fixture that counts traces."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import types

import pytest

from flashattn_jit.variants import binding


@pytest.fixture
def traces(monkeypatch):
    """Counts, in `n`, how often a variant was traced."""
    count = types.SimpleNamespace(n=0)
    real = binding.trace_variant

    def counting(*args):
        count.n += 1
        return real(*args)

    monkeypatch.setattr(binding, "trace_variant", counting)
    binding.clear()
    return count
