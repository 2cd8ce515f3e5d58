"""Python processes for tests, forked from a server that has imported torch.

Importing torch takes two seconds of CPU time or more, and many tests need a fresh process. `run`
forks it from a server, one for each test worker, that has imported torch and nothing of the
package. A test that depends on how an interpreter starts (its flags, its hash seed, the modules
that it imports) needs `subprocess`. `run` starts a new interpreter by itself where a variable
differs that torch or a shared library reads when it is loaded.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Read by the interpreter, torch, OpenMP, BLAS, libc or the dynamic linker when they start.
_READ_AT_START = (
    "PYTHON", "TORCH_", "ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_",
    "CUDA_VISIBLE_", "LD_", "MALLOC_", "GLIBC_", "LANG", "LC_",
)  # fmt: skip

_AT_IMPORT = dict(os.environ)
"""The server's environment, copied before any test could change it."""

_lock = threading.Lock()
_server: subprocess.Popen[str] | None = None


def _forget() -> None:
    """Runs in forked children: the server belongs to the parent."""
    global _lock, _server
    _lock, _server = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def run(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    check: bool = False,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`.

    `arguments` begin with `-c`, `-m` or the path of a script. Standard input is empty. Output that
    children of the process write after its end is lost.
    """
    words = [str(argument) for argument in arguments]
    environment = dict(os.environ if env is None else env)
    if words[0] not in ("-c", "-m") and words[0].startswith("-"):
        raise ValueError(f"a forked process takes no option {words[0]} of the interpreter")
    if _at_start(environment) != _at_start(_AT_IMPORT):
        done = subprocess.run(
            [sys.executable, *words], env=environment, cwd=cwd, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    else:
        done = _fork(words, environment, str(cwd or Path.cwd()), timeout)
    if check:
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return done


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_READ_AT_START)}


def _fork(
    words: list[str], environment: dict[str, str], cwd: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    global _server
    umask = os.umask(0o77)
    os.umask(umask)
    with _lock, tempfile.TemporaryDirectory() as folder:
        request = {
            "arguments": words, "env": environment, "cwd": cwd, "umask": umask, "folder": folder,
            "timeout": timeout,
        }  # fmt: skip
        server = _running()
        assert server.stdin is not None and server.stdout is not None
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            code, late = json.loads(server.stdout.readline())
        except BaseException:  # its answer stays unread, and the next request would get it
            server.kill()
            server.communicate()
            _server = None
            raise
        output, errors = (Path(folder, name).read_text() for name in ("output", "errors"))
    if late:
        raise subprocess.TimeoutExpired(words, timeout, output, errors)
    return subprocess.CompletedProcess([sys.executable, *words], code, output, errors)


def _running() -> subprocess.Popen[str]:
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=_AT_IMPORT,
        )  # fmt: skip
        atexit.register(_end, _server, os.getpid())
    return _server


def _end(server: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() == owner:
        try:
            server.communicate(timeout=10)  # closes its input, which ends the server
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()


def _serve() -> dict[str, Any] | None:
    """Forks a process for each line of the input.

    Returns the request in the forked process, None in the server at the end of its input.
    """
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        ended = os.pidfd_open(child)
        late = not select.select([ended], [], [], request["timeout"])[0]
        os.close(ended)
        if late:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, late]), flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    """Runs the request's program in this process as an interpreter would with its command line."""
    folder = Path(request["folder"])
    for number, path in enumerate((Path(os.devnull), folder / "output", folder / "errors")):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["env"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    kind, *rest = request["arguments"]
    sys.orig_argv = [sys.executable, kind, *rest]
    sys.argv = [kind, *rest]
    if kind == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    elif kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, request["cwd"])
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # tests/harness: its modules would hide others of the same names
    import torch  # noqa: F401 - forked processes have it

    gc.freeze()
    if (asked := _serve()) is not None:
        _become(asked)
