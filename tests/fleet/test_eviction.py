"""Old kernels are evicted while processes run; their calls still succeed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fleet.fleet import Fleet, entries, until


def age(fleet: Fleet) -> None:
    """Sets atimes and mtimes of all entries far back."""
    for entry in entries(fleet.cache):
        for path in (*entry.iterdir(), entry):
            os.utime(path, (1_000_000_000, 1_000_000_000))


def collect(fleet: Fleet, **arguments: object) -> int:
    """Evicts all kernels that may be evicted; returns their number."""
    full = {"root": str(fleet.cache), "max_bytes": 0, "grace_s": 0.0, **arguments}
    return int(fleet.start("collect", arguments=full).good()["removed"])


def test_what_a_process_uses_stays_and_what_ended_goes(warm: Fleet) -> None:
    mark, gate = warm.root / "mark", warm.root / "gate"
    user = warm.start(
        "attend_twice", arguments={"dims": [8, 8], "mark": str(mark), "gate": str(gate)}
    )
    until(mark.exists, "the first call")
    warm.start(arguments={"dim": 12}).good()
    age(warm)
    (used, other) = sorted(entries(warm.cache), key=lambda path: "compiler" in str(path))
    assert len(entries(warm.cache)) == 2
    assert collect(warm) == 1
    (left,) = entries(warm.cache)
    assert left in (used, other)
    gate.touch()
    assert user.good()["first"]["mapped"] == [str(left / "artifact.so")]
    age(warm)
    assert collect(warm) == 1
    assert entries(warm.cache) == []


def test_a_stopped_process_keeps_what_it_uses(warm: Fleet) -> None:
    mark, gate = warm.root / "mark", warm.root / "gate"
    user = warm.start(
        "attend_twice", arguments={"dims": [8, 12], "mark": str(mark), "gate": str(gate)}
    )
    until(mark.exists, "the first call")
    user.signal(signal.SIGSTOP)
    age(warm)
    assert collect(warm) == 0
    user.signal(signal.SIGCONT)
    gate.touch()
    assert user.good()["second"]["source"] == "compiler"


def test_a_new_kernel_is_not_removed(warm: Fleet) -> None:
    """Another process may be about to load it."""
    warm.start(arguments={"dim": 12}).good()
    assert collect(warm, grace_s=600.0) == 0


def test_loading_while_kernels_are_removed(warm: Fleet) -> None:
    """Whatever the order of loads and removals, every call gets a sound kernel."""
    gate = warm.root / "gate"
    users = [
        warm.start("attend_until", arguments={"gate": str(gate), "dims": [8, 12]}) for _ in range(3)
    ]
    removed = collect(warm, rounds=100)
    gate.touch()
    results = [user.good() for user in users]
    assert all(result["rounds"] > 1 for result in results)
    # No entry was taken for a corrupt one: it is there or it is not.
    assert sum(result["corrupt"] for result in results) == 0
    assert not list(warm.cache.glob("v1/.quarantine/*"))
    assert removed >= 0


def test_what_killed_builders_left_is_removed_in_time(fleet: Fleet) -> None:
    fleet.compiler.hold()
    builder = fleet.start()
    fleet.compiler.until_compiling()
    builder.signal(signal.SIGKILL)
    until(lambda: builder.poll() is not None, "its end")
    fleet.compiler.release()
    (left,) = fleet.cache.glob("v1/.staging/*")
    collect(fleet)
    assert left.exists()  # a build may take a while
    for path in (*left.rglob("*"), left):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    collect(fleet)
    assert not left.exists()


def test_a_cap_is_kept_while_processes_compile(fleet: Fleet) -> None:
    """FLASHATTN_JIT_CACHE_MAX_BYTES; kernels of the last minutes stay whatever they take."""
    env = {"FLASHATTN_JIT_CACHE_MAX_BYTES": "1"}
    assert fleet.start(env=env).good()["source"] == "compiler"
    age(fleet)
    (first,) = entries(fleet.cache)
    assert fleet.start(env=env, arguments={"dim": 12}).good()["source"] == "compiler"
    (second,) = entries(fleet.cache)
    assert second != first


@pytest.mark.parametrize("victim", ["used", "unused"])
def test_the_folder_of_another_process_is_seen_by_its_maps(warm: Fleet, victim: str) -> None:
    """A process that uses a kernel writes nothing: its memory maps show the use."""
    (entry,) = entries(warm.cache)
    age(warm)
    if victim == "used":
        mark, gate = warm.root / "mark", warm.root / "gate"
        warm.start("attend_twice", arguments={"dims": [8, 8], "mark": str(mark), "gate": str(gate)})
        until(mark.exists, "the first call")
        assert collect(warm) == 0
        assert Path(entry).is_dir()
    else:
        warm.start().good()
        assert collect(warm) == 1
        assert not Path(entry).exists()
