"""Ranks that fail, are gone, or were given something else: typed errors everywhere, no hang."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import flashattn_jit as fa
from tests.distributed.ranks import in_one_group, on_ranks
from tests.harness import processes

FAILING = "tests.distributed.failing:"


@pytest.fixture(scope="module")
def kernels() -> None:
    """The kernels of Causal are in the cache: ranks that compile would miss short timeouts."""
    on_ranks(2, FAILING + "compiled")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("when", "way"), [("between", "keys"), ("late", "keys"), ("late", "ring")])
@pytest.mark.usefixtures("kernels")
def test_a_killed_rank_is_an_error_of_the_others(when, way) -> None:
    *said, last = on_ranks(3, FAILING + "killed", timeout_s=8, when=when, way=way)
    assert last == "killed"
    assert all("a rank is gone, or took longer" in words for words in said)


@pytest.mark.usefixtures("kernels")
def test_a_rank_that_does_not_come_is_an_error_after_the_timeout() -> None:
    *said, last = on_ranks(2, FAILING + "absent", timeout_s=3)
    assert last == "late" and all("timeout" in words for words in said)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("ranks", "functions"),
    [
        (1, ["copied", "traced"]),
        (2, ["differing", "one_wrong", "options", "threads", "meshes"]),
        (3, ["differing"]),
    ],
)
def test_errors_of_every_rank(ranks, functions) -> None:
    """The functions run one after another in a group, which an error leaves usable."""
    in_one_group(ranks, [(FAILING + function, {}) for function in functions], timeout_s=60)


def test_a_group_that_is_not_initialised() -> None:
    assert not dist.is_initialized()
    with pytest.raises(fa.InputError, match="init_process_group"):
        fa.ContextParallel(
            fa.Causal(), None, num_q_heads=1, num_kv_heads=1, head_dim=64, q_dtype=torch.float32
        )


def test_a_mesh_of_another_backend() -> None:
    program = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
import flashattn_jit as fa
try:
    fa.ContextParallel(None, init_device_mesh("cpu", (2,)), num_q_heads=1, num_kv_heads=1,
                       head_dim=64, q_dtype=torch.float32)
except fa.InputError as error:
    print(error)
"""
    done = processes.run(["-c", program], check=True)
    assert "backend 'fake'" in done.stdout and "cpu over gloo" in done.stdout
