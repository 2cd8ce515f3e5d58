"""Many processes compile a kernel once, also where the process that compiles it is killed."""

from __future__ import annotations

import signal
import time

import pytest

from tests.fleet.fleet import Fleet, entries, tree, until


def test_sixteen_processes_compile_a_kernel_once(fleet: Fleet) -> None:
    fleet.compiler.hold()
    marks = [fleet.root / f"ready-{i}" for i in range(16)]
    processes = [fleet.start(arguments={"mark": str(mark)}) for mark in marks]
    until(lambda: all(mark.exists() for mark in marks), "16 processes")
    fleet.compiler.until_compiling()
    time.sleep(0.3)  # the others wait for the lock by now, or have begun a second compile
    fleet.compiler.release()
    results = [process.good() for process in processes]
    assert fleet.compiler.compiles == 1
    assert sorted(r["source"] for r in results) == ["compiler", *["disk"] * 15]
    assert sum(r["counters"]["compiles"] for r in results) == 1
    assert len(entries(fleet.cache)) == 1
    # All of them have mapped the same file.
    assert len({path for r in results for path in r["mapped"]}) == 1


def test_different_kernels_are_compiled_side_by_side(fleet: Fleet) -> None:
    fleet.compiler.hold()
    processes = [fleet.start(arguments={"dim": dim}) for dim in (8, 12)]
    fleet.compiler.until_compiling(2)
    fleet.compiler.release()
    assert [process.good()["source"] for process in processes] == ["compiler", "compiler"]


@pytest.mark.parametrize("with_compiler", [True, False], ids=["and its compiler", "alone"])
def test_after_a_builder_is_killed_the_next_one_does_not_wait(
    fleet: Fleet, with_compiler: bool
) -> None:
    fleet.compiler.hold()
    builder = fleet.start()
    fleet.compiler.until_compiling()
    builder.signal(signal.SIGKILL, with_children=with_compiler)
    until(lambda: builder.poll() is not None, "the builder's end")
    fleet.compiler.release()
    result = fleet.start(env={"FLASHATTN_JIT_LOCK_WAIT_S": "60"}).good()
    assert result["source"] == "compiler"
    assert result["counters"]["lock_wait_s"] < 0.5
    assert fleet.compiler.compiles == 2
    assert fleet.start().good()["source"] == "disk"


def test_one_that_waits_goes_on_as_soon_as_the_builder_is_killed(fleet: Fleet) -> None:
    fleet.compiler.hold()
    builder = fleet.start()
    fleet.compiler.until_compiling()
    waiting = fleet.start(arguments={"mark": str(fleet.root / "waiting")})
    until((fleet.root / "waiting").exists, "the second process")
    time.sleep(0.3)
    builder.signal(signal.SIGKILL)
    fleet.compiler.until_compiling(2)
    fleet.compiler.release()
    result = waiting.good()
    assert result["source"] == "compiler"
    assert result["counters"]["lock_wait_s"] < 30


def test_a_stopped_builder_is_waited_for_with_a_bound(fleet: Fleet) -> None:
    fleet.compiler.hold()
    builder = fleet.start()
    fleet.compiler.until_compiling()
    builder.signal(signal.SIGSTOP)
    fleet.compiler.release()
    waiting = fleet.start(env={"FLASHATTN_JIT_LOCK_WAIT_S": "0.5"})
    result = waiting.good()
    assert result["source"] == "compiler"
    assert 0.5 <= result["counters"]["lock_wait_s"] < 20
    assert f"process {builder.pid} on" in waiting.log()
    # Its entry is published, so no process waits any more, and the stopped builder can continue.
    assert fleet.start(env={"FLASHATTN_JIT_LOCK_WAIT_S": "60"}).good()["source"] == "disk"
    (entry,) = entries(fleet.cache)
    before = tree(entry)
    builder.signal(signal.SIGCONT)
    assert builder.good()["source"] == "compiler"
    assert tree(entry) == before


def test_the_first_of_racing_publishers_wins_and_all_go_on(fleet: Fleet) -> None:
    fleet.compiler.hold()
    at_once = {"FLASHATTN_JIT_LOCK_WAIT_S": "0"}
    processes = [fleet.start(env=at_once) for _ in range(4)]
    fleet.compiler.until_compiling(4)
    fleet.compiler.release()
    results = [process.good() for process in processes]
    assert {r["source"] for r in results} == {"compiler"}
    assert fleet.compiler.compiles == 4
    (entry,) = entries(fleet.cache)
    assert list(fleet.cache.glob("v1/.staging/*")) == []
    # Every process runs what was published, not its own.
    assert {tuple(r["mapped"]) for r in results} == {(str(entry / "artifact.so"),)}
    assert fleet.start().good()["source"] == "disk"


def test_a_failed_compile_fails_for_who_asked_and_for_nobody_after(fleet: Fleet) -> None:
    fleet.compiler.hold()
    fleet.compiler.fail()
    processes = [fleet.start(), fleet.start()]
    fleet.compiler.until_compiling()
    fleet.compiler.release()
    for process in processes:
        result = process.result()
        assert result["error"] == "CompileError"
        assert "told to fail" in result["message"]
    assert entries(fleet.cache) == []
    assert list(fleet.cache.glob("v1/.staging/*")) == []
    fleet.compiler.fail(False)
    assert fleet.start().good()["source"] == "compiler"


def test_threads_of_one_process_compile_once(fleet: Fleet) -> None:
    result = fleet.start("threads", arguments={"count": 8}).good()
    assert result["answers"] == 8
    assert result["counters"]["compiles"] == 1
    assert fleet.compiler.compiles == 1


def test_a_child_forked_in_mid_compile_compiles_for_itself(fleet: Fleet) -> None:
    """The child has neither the parent's compiling thread nor the locks that it holds."""
    fleet.compiler.hold()
    blocked, gate = fleet.root / "blocked", fleet.root / "forked"
    process = fleet.start(
        "fork_while_compiling", arguments={"blocked": str(blocked), "gate": str(gate)}
    )
    fleet.compiler.until_compiling()
    blocked.touch()
    until(gate.exists, "the child")
    fleet.compiler.until_compiling(2)
    fleet.compiler.release()
    result = process.good()
    assert result["status"] == 0
    assert result["parent"] == "compiler"
    # The child compiles one kernel and takes the other from disk when the parent has built it.
    assert result["child"] == ["compiler", "disk"]
    assert fleet.compiler.compiles == 2
