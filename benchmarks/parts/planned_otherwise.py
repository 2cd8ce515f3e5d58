"""Calls planned otherwise than the planner would: on another tile, or without splits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from benchmarks.parts.measure import Run
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.ops.launching import launches
from flashattn_jit.ops.planning import batch_plan
from flashattn_jit.planner.tiles import build_request


@contextlib.contextmanager
def _replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    before = {name: vars(batch_plan)[name] for name in functions}
    vars(batch_plan).update(functions)
    clear_plans()
    try:
        yield
    finally:
        vars(batch_plan).update(before)
        clear_plans()


def clear_plans() -> None:
    """Forgets the plans of dense and packed calls."""
    launches.forget_launches()
    launches._kernels.clear()


@contextlib.contextmanager
def on_tile(**tile: Any) -> Iterator[None]:
    """Inside of it every new plan uses this tile (fields of a spec), even if its kernel spills."""
    choose: Callable[..., KernelSpec] = vars(batch_plan)["choose_rows"]

    def choose_this(*args: object, **options: object) -> KernelSpec:
        return replace(choose(*args, **options), **tile)

    with _replaced(choose_rows=choose_this, build_requests=lambda spec: (build_request(spec),)):
        yield


@contextlib.contextmanager
def without_splits() -> Iterator[None]:
    """Inside of it no new plan splits keys: a merge would cost too much."""
    with _replaced(merge_cost=lambda target: 1e15):
        yield


def planned(run: Run, where: AbstractContextManager[None]) -> tuple[Run, list[KernelSpec]]:
    """A dense or packed call planned inside of `where`: the call with that plan, and its kernels.

    The returned function does not plan.
    """
    clear_plans()
    with where:
        run()
        plans = dict(launches._launches)
    kernels = [k.spec for plan, _ in plans.values() for k in plan.kernels if k is not None]

    def run_planned() -> object:
        launches.forget_launches()
        launches._launches.update(plans)
        return run()

    return run_planned, kernels
