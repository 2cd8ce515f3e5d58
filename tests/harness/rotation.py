"""What a test run takes by turns: second axes of matrices, random calls, another target.

tests/conftest.py chooses a seed, which all workers of a run share, and prints it in the header of
the run. `FAJIT_TEST_SEED=123456` repeats a run's choices, `FAJIT_TEST_TARGET=cpu:avx2` chooses the
other target, and `FAJIT_TEST_TURNS=all` runs everything, as `.ci/full` does.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeVar

import pytest

from flashattn_jit.codegen.spec import host_target, host_targets

SEED_VARIABLE = "FAJIT_TEST_SEED"
TARGET_VARIABLE = "FAJIT_TEST_TARGET"
TURNS_VARIABLE = "FAJIT_TEST_TURNS"

T = TypeVar("T")


def seed() -> int:
    """The seed of the run's choices; 0 outside of pytest."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def takes_all() -> bool:
    """Whether the run takes everything."""
    return os.environ.get(TURNS_VARIABLE) == "all"


def chosen(
    items: Sequence[T], share: int, kind: Callable[[T], Hashable] = lambda item: None
) -> list[T]:
    """One in `share` of the items of each kind by turns, at least one of each kind, in order."""
    if takes_all():
        return list(items)
    by_kind: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        by_kind.setdefault(kind(item), []).append(index)
    indices = [
        index
        for group in by_kind.values()
        for index in _generator("chosen", group[0], share).sample(group, -(-len(group) // share))
    ]
    return [items[index] for index in sorted(indices)]


def some(items: Sequence[T], count: int, but_not: Collection[T] = ()) -> list[T]:
    """`count` of the items by turns, in order, none of `but_not`; all items where `takes_all`."""
    if takes_all():
        return list(items)
    items = [item for item in items if item not in but_not]
    if count >= len(items):
        return items
    indices = _generator("some", len(items), count).sample(range(len(items)), count)
    return [items[index] for index in sorted(indices)]


def covering(cases: Sequence[Mapping[str, int]], share: int, name: str) -> set[int]:
    """One in `share` of a test's cases by turns, and more until all values of parameters appear.

    cases: for each parameter which of its values a case has. A parameter of which each case has a
    value of its own is not counted. Returns indices of `cases`.
    """
    axes = {axis for case in cases for axis in case}
    axes = {axis for axis in axes if len({case[axis] for case in cases}) < len(cases)}
    missing = {(axis, case[axis]) for case in cases for axis in axes}
    order = list(range(len(cases)))
    _generator("covering", name, share).shuffle(order)
    taken: set[int] = set()
    while missing or len(taken) < -(-len(cases) // share):
        # The first one, in random order, that adds most.
        best = max(order, key=lambda i: len(missing & set(cases[i].items())))
        order.remove(best)
        taken.add(best)
        missing -= set(cases[best].items())
    return taken


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Cases of tests with the mark `by_turns(share)` that this run does not take."""
    if takes_all():
        return set()
    tests: dict[tuple[str, int], list[tuple[pytest.Item, Mapping[str, int]]]] = defaultdict(list)
    for item in items:
        mark, case = item.get_closest_marker("by_turns"), getattr(item, "callspec", None)
        if mark is not None and case is not None:
            (share,) = mark.args
            tests[item.nodeid.split("[")[0], share].append((item, case.indices))
    left = set()
    for (name, share), cases in tests.items():
        taken = covering([indices for _, indices in cases], share, name)
        left |= {item for i, (item, _) in enumerate(cases) if i not in taken}
    return left


def turn(number: int, among: Sequence[T]) -> list[T]:
    """The one of `among` that test `number` takes in this run; all of them where `takes_all`."""
    return list(among) if takes_all() else [_generator("turn", number, len(among)).choice(among)]


def _generator(*choice: object) -> random.Random:
    """The generator of one choice, independent of the run's other choices."""
    return random.Random(f"{seed()} {choice}")


def other_target() -> str:
    """A target that the host runs besides its own, by turns; its own where there is none."""
    if named := os.environ.get(TARGET_VARIABLE):
        return named
    others = [target for target in host_targets() if target != host_target()]
    return _generator("target").choice(others) if others else host_target()


def words() -> str:
    """The variables that repeat this run's choices."""
    turns = f" {TURNS_VARIABLE}=all" if takes_all() else ""
    return f"{SEED_VARIABLE}={seed()} {TARGET_VARIABLE}={other_target()}{turns}"
