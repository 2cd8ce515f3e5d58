"""What a run of the tests takes by turns: the seed of random calls, and a target beside the host's.

tests/conftest.py chooses a seed, which every worker of a run shares, and prints both in the header
of the run. `FAJIT_TEST_SEED=123456` takes one again; `FAJIT_TEST_TARGET=cpu:avx2` another target.
"""

from __future__ import annotations

import os

from flashattn_jit.codegen.target import CPU_TARGETS, host_target

SEED_VARIABLE = "FAJIT_TEST_SEED"
TARGET_VARIABLE = "FAJIT_TEST_TARGET"


def seed() -> int:
    """Of what varies from run to run."""
    return int(os.environ[SEED_VARIABLE])


def other_target() -> str:
    """A target below the host's, in turns; the host's own where there is none below it."""
    if chosen := os.environ.get(TARGET_VARIABLE):
        return chosen
    lower = CPU_TARGETS[: CPU_TARGETS.index(host_target())]
    return lower[seed() % len(lower)] if lower else host_target()


def words() -> str:
    """Both, as the environment variables that repeat them."""
    return f"{SEED_VARIABLE}={seed()} {TARGET_VARIABLE}={other_target()}"
