"""One process for each mode: every subject twice under the mode, then once without.

    python -m tests.modes.worker

reads lines `MODE<tab>FILE`, forks a process for each, which writes {subject: outcome} to FILE, and
answers with its exit code. A process that has imported torch and the package and called nothing
has no state, so that state which the mode leaves behind shows in the plain calls after it; one that
imports the package under a mode is started anew: `python -m tests.modes.worker MODE FILE`.
Results are compared with those of a process without any mode (`plain`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Listens(TorchFunctionMode):
    """A mode of torch functions that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Watches(TorchDispatchMode):
    """A mode of operators that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class ZeroingFunctions(TorchFunctionMode):
    """A mode of torch functions that changes the values of results; none of them may be kept."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is not Tensor or not result.is_floating_point():
            return result
        return torch.zeros_like(result)


class Zeroes(TorchDispatchMode):
    """A mode of operators that changes the values of results; none of them may be kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "flashattn_jit" in str(func) or not isinstance(result, Tensor):
            return result
        return torch.zeros_like(result) if result.is_floating_point() else result


@contextlib.contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: _default_device("meta"),
    "default device cpu": lambda: _default_device("cpu"),
    "default dtype float64": _default_dtype,
    "function mode": Listens,
    "dispatch mode": Watches,
    "two modes": lambda: _both(torch.device("meta"), Watches()),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "profiler": torch.profiler.profile,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: _deterministic(),
    # Without CUDA, making a tensor without a device is an error.
    "default device cuda": lambda: _default_device("cuda"),
    "zeroing mode": Zeroes,
    "zeroing functions": ZeroingFunctions,
    "fake tensors": FakeTensorMode,
}
CHANGING = (
    "zeroing mode", "zeroing functions", "fake tensors", "autocast", "default dtype float64",
)  # fmt: skip
"""Modes under which results are not the plain ones."""


@contextlib.contextmanager
def _both(*modes: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def flat(result: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]


def outcome(run: Callable[[], Any], expected: Any) -> str:
    """ "equal", or what is different, or the class and text of an error."""
    try:
        found = flat(run())
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    if expected is None:
        return "equal"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.device != b.device or a.dtype != b.dtype or a.shape != b.shape:
            return f"result {i} is {a.dtype} {list(a.shape)} on {a.device}, not {b.shape}"
        if type(a) is not Tensor:
            return f"result {i} is a {type(a).__name__}"
        if not torch.equal(a, b):
            return f"result {i} is off by {(a - b).abs().max()}"
    return "equal"


def main() -> None:
    if len(sys.argv) == 3:
        attempt(sys.argv[1], Path(sys.argv[2]))
        return
    # Imported before the forks: each child would take a second for them.
    from torch import _dynamo  # noqa: F401
    from torch.nn.attention import flex_attention  # noqa: F401

    from tests.modes import subjects  # noqa: F401

    for line in sys.stdin:
        mode, file = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                attempt(mode, Path(file))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def attempt(mode: str, file: Path) -> None:
    """Runs every subject under a mode and writes the outcomes to a file."""
    before = None
    if mode != "plain":
        before = torch.load(file.with_name("plain.pt"))
    early = mode.startswith("import under ")
    with MODES[mode.removeprefix("import under ")]() if early else contextlib.nullcontext():
        from tests.modes.subjects import subjects
    outcomes, results = {}, {}
    for subject in subjects():
        subject.prepare()
        wanted = None if before is None else before[subject.name]
        with MODES[mode.removeprefix("import under ")]():
            seen = [outcome(subject.run, wanted) for _ in range(2)]
        seen.append(outcome(subject.run, wanted))
        outcomes[subject.name] = seen
        if mode == "plain":
            results[subject.name] = flat(subject.run())
    if mode == "plain":
        torch.save(results, file.with_name("plain.pt"))
    torch.save(outcomes, file)


if __name__ == "__main__":
    main()
