"""A forked process of `tests.harness.processes` behaves like one that an interpreter starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.harness import processes

STATE = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ.get("PROCESS_TEST"), sys.stdin.read() == "")
print(sorted(m for m in sys.modules if m.startswith(("flashattn_jit", "tests"))))
print(len(os.listdir("/proc/self/task")), __name__)
sys.stderr.write("told")
sys.exit(3)
"""


def test_it_knows_torch_and_nothing_of_the_package(tmp_path: Path) -> None:
    environment = {**os.environ, "PROCESS_TEST": "x"}
    done = processes.run(["-c", STATE, "a", "b"], cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (3, "told")
    assert done.stdout.splitlines() == [f"['a', 'b'] {tmp_path} x True", "[]", "1 __main__"]
    assert processes.run(["-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -9


def test_a_variable_that_is_read_at_the_start_takes_a_new_interpreter() -> None:
    told = "import sys; print('torch' in sys.modules)"
    assert processes.run(["-c", told], check=True).stdout == "True\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "7"}
    assert processes.run(["-c", told], env=environment, check=True).stdout == "False\n"


def test_programs_are_compiled_as_the_interpreter_does() -> None:
    """Without the `from __future__` imports of the module that compiles them."""
    done = processes.run(["-c", "class A:\n    x: int\nprint(A.__annotations__)"], check=True)
    assert done.stdout == "{'x': <class 'int'>}\n"
    assert processes.run(["-c", "def f(x: undefined): pass"]).returncode == 1


def test_processes_that_end_at_once_are_answered() -> None:
    for _ in range(50):
        assert processes.run(["-c", "import os; os._exit(7)"], timeout=30.0).returncode == 7


def test_an_interrupted_run_or_a_dead_server_leaves_the_next_run_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    processes.run(["-c", "pass"], check=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(processes.json, "loads", interrupted)
        processes.run(["-c", "print(1)"])
    assert processes.run(["-c", "print(2)"], check=True).stdout == "2\n"
    assert processes._server is not None
    processes._server.kill()
    processes._server.wait()
    assert processes.run(["-c", "print(3)"], check=True).stdout == "3\n"


def test_the_umask_is_that_of_the_caller(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        told = processes.run(["-c", "import os; print(oct(os.umask(0)))"], check=True).stdout
    finally:
        os.umask(before)
    assert told == "0o27\n"
    gone = processes.run(["-c", "pass"], cwd=tmp_path / "absent")
    assert gone.returncode == 1 and "absent" in gone.stderr


def test_one_that_hangs_is_killed_and_the_next_one_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run(["-c", "import time; time.sleep(60)"], timeout=0.5)
    assert processes.run(["-c", "print(1)"], check=True).stdout == "1\n"


def test_scripts_and_modules_see_what_they_see_elsewhere(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour; print(__name__, sys.argv[1:])")
    tmp_path.joinpath("neighbour.py").touch()
    assert processes.run([script, "x"], check=True).stdout == "__main__ ['x']\n"
    done = processes.run(["-m", "script", "y"], cwd=tmp_path, check=True)
    assert done.stdout == "__main__ ['y']\n"
