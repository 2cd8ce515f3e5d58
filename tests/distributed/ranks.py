"""Runs functions on every rank of a gloo group, each rank a forked process of one thread.

`on_ranks(2, "tests.distributed.programs:equal")` calls the function with the rank's mesh. A group
takes seconds to start: `in_one_group` calls several functions one after another. Where a rank
raises or is killed, its traceback or signal is in the message, with the call that raised.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.harness import processes

LIMIT_S = 240
"""A test fails where its ranks take longer."""

GROUP_TIMEOUT_S = 200
"""How long a rank waits for others, unless the test says."""


def on_ranks(
    num_ranks: int, function: str, *, timeout_s: float = GROUP_TIMEOUT_S, **given: Any
) -> list[str]:
    """What each rank's function returned, as text; "killed" of a rank that called `die`.

    Raises AssertionError unless all others end without an error, in time.
    """
    return in_one_group(num_ranks, [(function, given)], timeout_s=timeout_s)


def in_one_group(
    num_ranks: int,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    timeout_s: float = GROUP_TIMEOUT_S,
) -> list[str]:
    """As `on_ranks`, for calls of functions with what is given to them: the texts of the last."""
    request = {"ranks": num_ranks, "calls": calls, "timeout_s": timeout_s}
    done = processes.run(
        ["-m", "tests.distributed.ranks", json.dumps(request)], timeout=LIMIT_S + 30
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    printed: list[str] = json.loads(done.stdout.splitlines()[-1])
    return printed


def _rank(request: Mapping[str, Any], rank: int, store: str) -> str:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=request["ranks"],
        timeout=timedelta(seconds=request["timeout_s"]),
    )  # fmt: skip
    mesh, words = init_device_mesh("cpu", (request["ranks"],)), None
    for function, given in request["calls"]:
        module, _, name = function.partition(":")
        torch.manual_seed(0)
        try:
            words = getattr(import_module(module), name)(mesh, **given)
        except BaseException as error:
            error.add_note(f"in {function} of {given}")
            raise
    return "" if words is None else str(words)


def _main() -> int:
    request = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        store, children = str(Path(folder, "store")), []
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                _child(request, rank, store, Path(folder, f"said{rank}"))
            children.append(child)
        ended: dict[int, int] = {}
        until = time.monotonic() + LIMIT_S
        while len(ended) < len(children) and time.monotonic() < until:
            for rank, child in enumerate(children):
                if rank not in ended:
                    done, status = os.waitpid(child, os.WNOHANG)
                    if done:
                        ended[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        for rank, child in enumerate(children):
            if rank not in ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        said = []
        for rank in range(request["ranks"]):
            path = Path(folder, f"said{rank}")
            said.append(path.read_text() if path.exists() else "")
        wrong = {
            rank: ended.get(rank, "did not end")
            for rank in range(request["ranks"])
            if ended.get(rank) != 0 and not (ended.get(rank) == -9 and said[rank] == "killed")
        }
    for rank, code in wrong.items():
        print(f"rank {rank}: {code}\n{said[rank]}")
    print(json.dumps(said))
    return 1 if wrong else 0


def _child(request: Mapping[str, Any], rank: int, store: str, path: Path) -> None:
    code = 1
    try:
        os.environ["FAJIT_TEST_SAID"] = str(path)
        words = _rank(request, rank, store)
        path.write_text(words)
        code = 0
    except BaseException:
        path.write_text(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die() -> None:
    """Ends the rank by SIGKILL, which the test expects."""
    Path(os.environ["FAJIT_TEST_SAID"]).write_text("killed")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_main())
