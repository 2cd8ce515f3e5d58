"""Over many seeds turns reach every combination, and choices are independent of each other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from tests.harness import rotation

SEEDS = range(600)


class Item(SimpleNamespace):
    """A stand-in for an item of pytest."""

    __hash__ = object.__hash__


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


def test_cases_cover_the_values_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = [{"target": t, "variant": v} for t in range(3) for v in range(8)]
    rows = [{"row": i} for i in range(10)]
    seen: set[int] = set()
    for seed in SEEDS:
        monkeypatch.setenv(rotation.SEED_VARIABLE, str(seed))
        taken = rotation.covering(grid, 4, "test")
        assert {grid[i]["variant"] for i in taken} == set(range(8))
        assert {grid[i]["target"] for i in taken} == set(range(3))
        assert len(taken) == 8
        seen |= taken
        assert len(rotation.covering(rows, 4, "test")) == 3
    assert seen == set(range(len(grid)))


def test_cases_of_marked_tests_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def item(name: str, case: int | None, *shares: int) -> Item:
        marks = [SimpleNamespace(args=(share,)) for share in shares]
        item = Item(
            nodeid=name if case is None else f"{name}[{case}]",
            get_closest_marker=lambda name: marks[0] if marks else None,
        )
        if case is not None:
            item.callspec = SimpleNamespace(indices={"case": case})
        return item

    marked = [item("marked", i, 3) for i in range(9)]
    others = [item("other", i) for i in range(9)] + [item("single", None, 3)]
    left = rotation.left_out([*marked, *others])
    assert len(left) == 6 and left < set(marked)
    monkeypatch.setenv(rotation.TURNS_VARIABLE, "all")
    assert not rotation.left_out([*marked, *others])
