"""What a run of the tests takes by turns: second axes of matrices, random calls, another target.

tests/conftest.py chooses a seed, which every worker of a run shares, and prints it in the header of
the run. `FAJIT_TEST_SEED=123456` repeats a run's choices, `FAJIT_TEST_TARGET=cpu:avx2` takes
another target, and `FAJIT_TEST_TURNS=all` leaves nothing out, as `.ci/full` does.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

from flashattn_jit.codegen.spec import host_target
from flashattn_jit.codegen.targets import included

SEED_VARIABLE = "FAJIT_TEST_SEED"
TARGET_VARIABLE = "FAJIT_TEST_TARGET"
TURNS_VARIABLE = "FAJIT_TEST_TURNS"

T = TypeVar("T")


def seed() -> int:
    """Of what varies from run to run; 0 outside of pytest."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def takes_all() -> bool:
    """Whether nothing is left to another run."""
    return os.environ.get(TURNS_VARIABLE) == "all"


def chosen(
    items: Sequence[T], share: int, kind: Callable[[T], Hashable] = lambda item: None
) -> list[T]:
    """One in `share` of the items of each kind, by turns, and at least one of each; in order."""
    if takes_all():
        return list(items)
    by_kind: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        by_kind.setdefault(kind(item), []).append(place)
    places = [
        place
        for group in by_kind.values()
        for place in _dice("chosen", group[0], share).sample(group, -(-len(group) // share))
    ]
    return [items[place] for place in sorted(places)]


def some(items: Sequence[T], count: int, but_not: Collection[T] = ()) -> list[T]:
    """`count` of the items by turns, in order, none of `but_not`; all where nothing is left out."""
    if takes_all():
        return list(items)
    items = [item for item in items if item not in but_not]
    if count >= len(items):
        return items
    places = _dice("some", len(items), count).sample(range(len(items)), count)
    return [items[place] for place in sorted(places)]


def turn(number: int, among: Sequence[T]) -> list[T]:
    """The one of `among` that a numbered test takes in this run; all where nothing is left out."""
    return list(among) if takes_all() else [_dice("turn", number, len(among)).choice(among)]


def _dice(*choice: object) -> random.Random:
    """Of one choice: whatever else a run chooses says nothing of this one."""
    return random.Random(f"{seed()} {choice}")


def other_target() -> str:
    """A target below the host's, in turns; the host's own where there is none below it."""
    if named := os.environ.get(TARGET_VARIABLE):
        return named
    lower = included(host_target())[:-1]
    return _dice("target").choice(lower) if lower else host_target()


def words() -> str:
    """What repeats this run's choices."""
    turns = f" {TURNS_VARIABLE}=all" if takes_all() else ""
    return f"{SEED_VARIABLE}={seed()} {TARGET_VARIABLE}={other_target()}{turns}"
