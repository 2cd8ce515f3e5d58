"""Copies of the package that differ in one thing each, measured in turn.

    python -m benchmarks.gpu.steps [--case TEXT ...] [--turns N] FOLDER FOLDER ...

A folder is a checkout of the package, its extension built, with a change of its own: another
schedule, another order of work, another header. Each runs in a process of its own, which compiles
its kernels and then waits; the measured process is asked, the others are idle. torch's flash and
cuDNN backends take their turn too. A folder may be followed by a tile: ``FOLDER:128x96`` (rows x
keys). Writes results/<device>-steps-<date>.json (--out).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flashattn_jit as fa
from benchmarks.gpu import mods, peers
from benchmarks.gpu.compute import WINDOW
from benchmarks.gpu.kernels import last_kernel
from benchmarks.gpu.machine import Emulated, Gpu, Machine
from benchmarks.parts.measure import RESULTS, Row, ratio, save, table
from benchmarks.parts.planned_otherwise import clear_plans, on_tile, planned
from benchmarks.parts.work import attention_flops, pairs_causal, pairs_window

_TOKENS, _HIDDEN, _CALLS = 16384, 2048, 12
HOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "full": lambda slopes: None,
    "causal": lambda slopes: fa.Causal(),
    "ALiBi": mods.alibi,
    "soft cap": lambda slopes: mods.softcap(30.0),
    "approximate soft cap": lambda slopes: fa.SoftCap(30.0, approximate=True),
    "window": lambda slopes: mods.window(WINDOW),
}
CASES = [f"D{d} S{s} {hook}" for d in (128, 64, 256) for s in (16384, 4096, 1024) for hook in HOOKS]


def flops_of(case: str) -> float:
    """Floating-point operations of a case."""
    head_dim, length, hook = parsed(case)
    pairs = {"causal": pairs_causal(length), "window": pairs_window(length, WINDOW)}
    return attention_flops(
        pairs.get(hook, length**2), _TOKENS // length, _HIDDEN // head_dim, head_dim
    )


def parsed(case: str) -> tuple[int, int, str]:
    """head_dim, length and hook of a case such as ``D128 S4096 soft cap``."""
    head_dim, length, hook = case.split(" ", 2)
    return int(head_dim[1:]), int(length[1:]), hook


def _calls(machine: Machine, case: str, tile: str) -> dict[str, Callable[[], object]]:
    """What a process measures of a case: this package's call; where tile is "peers", theirs."""
    head_dim, length, hook = parsed(case)
    length = machine.pick(length, 160)
    shape = (machine.pick(_TOKENS // length, 1), machine.pick(_HIDDEN // head_dim, 2), length)
    q, k, v = (machine.random(*shape, head_dim) for _ in range(3))
    if tile == "peers":
        plain = hook in ("full", "causal")
        return peers.sdpa_peers(machine, q, k, v, hook == "causal") if plain else {}
    variant = HOOKS[hook](torch.rand(shape[1], device=machine.device))
    call = partial(fa.attention, q, k, v, variant, target=machine.target)
    if not tile:
        clear_plans()
        call()
        return {"ours": call}
    rows, keys = map(int, tile.split("x"))
    return {"ours": planned(call, on_tile(tile_q=rows, tile_kv=keys))[0]}


def serve(machine: Machine, tile: str) -> None:
    """Answers requests on standard input, a line each: {"case": ...} by the seconds of calls, or by
    an error; {"compile": [...]} by compiling."""
    torch.manual_seed(0)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object] = {}
        try:
            if "compile" in request:
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(lambda case: _calls(machine, case, tile), request["compile"]))
            else:
                for name, call in _calls(machine, request["case"], tile).items():
                    call()
                    machine.synchronize()
                    times = [machine.seconds(call) for _ in range(machine.pick(_CALLS, 1))]
                    answer[name] = statistics.median(times)
                if tile != "peers":
                    answer["kernel"] = last_kernel()
        except Exception as error:  # of any kind: of a kernel, of a peer
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=sys.__stdout__, flush=True)


class Server:
    """A process that measures one copy."""

    def __init__(self, name: str, dry_run: bool) -> None:
        folder, _, tile = name.partition(":")
        command = [sys.executable, "-m", "benchmarks.gpu.steps", "--serve", tile or "default"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(folder).resolve()), os.environ.get("PYTHONPATH", "")])
        )}  # fmt: skip
        self.process = subprocess.Popen(
            command + ["--dry-run"] * dry_run, cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, **request: object) -> dict[str, Any]:
        """The answer to a request."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "the process has ended"}
        return found


def measure(case: str, servers: dict[str, Server], turns: int) -> list[Row]:
    """One row a copy: its rate over the first one's, and its rate; of peers alike."""
    times: dict[str, list[float]] = {}
    words: dict[str, str] = {}
    rows: list[Row] = []
    failed: set[str] = set()
    for _ in range(turns):
        for name in [n for n in servers if n not in failed]:
            answer = servers[name].ask(case=case)
            if "error" in answer:
                failed.add(name)
                rows.append(Row(f"{case}, {name}: FAILED", 0.0, 1.0, "errors", "lower",
                                detail=answer["error"]))  # fmt: skip
                continue
            words[name] = answer.pop("kernel", "")
            for what, seconds in answer.items():
                times.setdefault(name if what == "ours" else what, []).append(seconds)
    times = {name: taken for name, taken in times.items() if name not in failed}
    if not times:
        return rows
    first = times.get(next(iter(servers))) or next(iter(times.values()))
    for name, taken in times.items():
        value, spread = ratio(first, taken)
        rate = flops_of(case) / statistics.median(taken) / 1e12
        rows.append(Row(f"{case}, {name}", None, value, "x", "higher", spread,
                        f"{rate:.0f} TFLOP/s; {words.get(name, '')}"))  # fmt: skip
    return rows


def main() -> None:
    """Parses arguments; measures or serves."""
    parser = argparse.ArgumentParser(
        "benchmarks.gpu.steps", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--case", action="append", choices=CASES, metavar="TEXT")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", metavar="TILE", help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="in the emulator")
    options = parser.parse_args()
    if options.serve:
        machine = Emulated() if options.dry_run else Gpu()
        with contextlib.redirect_stdout(sys.stderr):
            serve(machine, options.serve.replace("default", ""))
        return
    if not options.folders:
        parser.error("name a folder that holds a checkout")
    cases = options.case or CASES
    servers = {name: Server(name, options.dry_run) for name in options.folders}
    with ThreadPoolExecutor(len(servers)) as pool:
        for name, answer in zip(
            servers, pool.map(lambda s: s.ask(compile=cases), servers.values()), strict=True
        ):
            if "error" in answer:
                print(f"{name}: {answer['error']}", flush=True)
    servers[f"{options.folders[0]}:peers"] = Server(f"{options.folders[0]}:peers", options.dry_run)
    machine = Emulated() if options.dry_run else Gpu()
    rows = []
    for case in cases:
        found = measure(case, servers, options.turns)
        print(table(found), flush=True)
        rows += found
        save("gpu steps", f"{machine.name()}-steps", machine.describe(), rows, options.out)
    for server in servers.values():
        server.process.kill()


if __name__ == "__main__":
    main()
