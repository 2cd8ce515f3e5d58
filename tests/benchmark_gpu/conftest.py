"""What the tests of the GPU benchmark share: its compiled rates, the stand-in driver."""

from __future__ import annotations

import pytest

from benchmarks.gpu import pack, rates
from tests.harness.stand_in_driver import driver, stand_in_library  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A pack's folder without kernels."""
    made = tmp_path_factory.mktemp("pack")
    rates.build(made, pack.TARGET)
    (made / pack.ABOUT).write_text('{"commit": "abc"}')
    return made
