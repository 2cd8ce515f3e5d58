"""Ray's tasks as an executor, for `fa.warm`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RayExecutor(Executor):
    """An executor over the Ray cluster that this process is connected to.

    Args:
        **options: of every task, as for ``ray.remote``: num_cpus, resources, runtime_env, ... By
            default a task takes one CPU. Workers must be able to import this package.

    Raises:
        ImportError: Ray is not installed.

    Example:
        >>> ray.init()
        >>> fa.warm("Causal", executor=fa.RayExecutor())
    """

    def __init__(self, **options: Any) -> None:
        import ray

        self._remote = ray.remote(**options) if options else ray.remote

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Run a function in a task of the cluster."""
        future: Future[_R] = self._remote(fn).remote(*args, **kwargs).future()
        return future
