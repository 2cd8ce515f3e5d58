"""Over many seeds turns reach every combination, and choices are independent of each other."""

from __future__ import annotations

import itertools

import pytest

from tests.harness import rotation

SEEDS = range(600)


@pytest.fixture(autouse=True)
def _by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rotation.TURNS_VARIABLE, raising=False)
    monkeypatch.delenv(rotation.TARGET_VARIABLE, raising=False)


def test_every_item_meets_every_way_on_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    items, ways, seen = [f"case {i}" for i in range(12)], ("a", "b", "c", "d"), set()
    targets = set()
    for seed in SEEDS:
        monkeypatch.setenv(rotation.SEED_VARIABLE, str(seed))
        target = rotation.other_target()
        targets.add(target)
        for item in rotation.chosen(items, 3):
            (way,) = rotation.turn(items.index(item), ways)
            seen.add((item, way, target))
    assert seen == set(itertools.product(items, ways, targets))


def test_a_share_of_each_kind_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [("mask", i) for i in range(9)] + [("sink", 0), ("row", 0), ("row", 1)]
    for seed in SEEDS:
        monkeypatch.setenv(rotation.SEED_VARIABLE, str(seed))
        chosen = rotation.chosen(items, 4, lambda item: item[0])
        assert chosen == sorted(chosen, key=items.index)
        counts = [sum(kind == k for k, _ in chosen) for kind in ("mask", "sink", "row")]
        assert counts == [3, 1, 1]


def test_a_seed_repeats_its_choices_and_all_leaves_nothing_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = list(range(40))
    assert rotation.chosen(items, 5) == rotation.chosen(items, 5)
    assert rotation.turn(3, items) == rotation.turn(3, items)
    monkeypatch.setenv(rotation.TURNS_VARIABLE, "all")
    assert rotation.chosen(items, 5) == rotation.turn(3, items) == items
