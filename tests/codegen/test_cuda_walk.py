"""The walk over the key tiles of a work item: which it visits, and how often it classifies.

The kernels here are a walk and nothing else. Their mask is a state of each 16 keys, of which the
interval form gives the hull; it counts how often a warp evaluates it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flashattn_jit.variants.interval.terms import EMPTY, FULL, PARTIAL
from tests.codegen.cuda_unit import Unit
from tests.harness.abi import TensorParam
from tests.harness.toolkit import needs_nvcc

pytestmark = needs_nvcc

UNIT = 16
SEEDS = 2

WALKS = {"prefill": (64, 64), "wide": (128, 128), "narrow": (16, 16), "few_row": (16, 64)}
"""Keys of a tile and the distance of tiles."""

SOURCE = """
#include <fajit/cuda/common/kv_walk.h>
using namespace fajit;
using ptx::lane_index;

struct Call {
  fajit_tensor states;
  const int32_t* items;  // begin, end, the place of its first state
  int32_t* tiles;        // of an item: begin, end and full of each
  int32_t* counts;       // of an item: tiles, evaluations
  uint8_t* blocks;
  int32_t most;
};
template <bool kBlocks> struct Config {
  static constexpr bool kBlockMask = kBlocks, kSparse = false, kMixedRows = false;
};
struct State { int32_t begin, first, *evaluations; const Call* call; };
// kRough: the form proves less of some boxes, whether they are large or small.
template <bool kIsMask, bool kRough> struct Hooks {
  static constexpr bool kMask = kIsMask, kLine = false;
  FAJIT_FN static int classify(const Context& c, Interval, Interval, Interval, Interval k) {
    const State& s = *static_cast<const State*>(c.uniforms);
    if (lane_index() == 0) ++*s.evaluations;
    const auto* states = static_cast<const uint8_t*>(s.call->states.ptr) + s.first;
    if (kRough && (k.lo / 16 * 7 + k.hi / 16 * 5) % 3 == 0) return FAJIT_TILE_PARTIAL;
    const int state = states[(k.lo - s.begin) / 16];
    for (int64_t i = (k.lo - s.begin) / 16; i <= (k.hi - s.begin) / 16; ++i)
      if (states[i] != state) return FAJIT_TILE_PARTIAL;
    return state;
  }
};
template <class Config, class Hooks, int kKeys, int kStep>
__device__ __forceinline__ void walk(const Call& p, bool runs) {
  __shared__ __align__(16) unsigned char shared[64];
  const int32_t i = blockIdx.x, begin = p.items[3 * i], end = p.items[3 * i + 1];
  State state{begin, p.items[3 * i + 2], p.counts + 2 * i + 1, &p};
  int32_t zero = 0;
  fajit_args args{};
  args.q_offset = &zero;
  args.block_mask.states = p.blocks + state.first / 8;
  args.block_mask.strides[3] = 1;
  args.block_mask.kv_block = 128;
  args.block_mask.q_block = 128;
  const Context c(&args, nullptr, nullptr, &state);
  const fajit_work item{0, 0, 1, 0, 1, begin, end, -1};
  const cuda::KeyDivisors divisors{};
  const cuda::KvWalk<Config, Hooks, kKeys, kStep> keys(c, divisors, item, begin, end, shared);
  static_assert(keys.kSharedBytes <= sizeof(shared));
  int32_t* to = p.tiles + int64_t{i} * p.most * 3;
  int32_t n = 0;
  const auto put = [&](int32_t a, int32_t b, bool full) {
    if (lane_index() == 0 && n < p.most) to[3 * n] = a, to[3 * n + 1] = b, to[3 * n + 2] = full;
    ++n;
  };
  if (!runs) {
    for (cuda::KvTile t = keys.next(); t.valid(); t = keys.next()) put(t.begin, t.end, t.full);
    if (keys.next().valid()) n = -1;
  } else {
    keys.start_runs();
    for (;;) {
      const bool found = keys.found_begin() >= 0;
      const cuda::KvRun run = keys.take_run();
      if (found != run.valid()) n = -1000000;
      if (!run.valid()) break;
      for (int32_t at = run.begin;; at += kStep) {
        put(at, cuda::cut(at, kKeys, run.end), run.full);
        if (run.end - at <= kStep) break;
      }
    }
    if (keys.take_run().valid()) n = -1;
  }
  if (lane_index() == 0) p.counts[2 * i] = n;
}
"""


class _Call(ctypes.Structure):
    _fields_ = [
        ("states", TensorParam), ("items", ctypes.c_void_p), ("tiles", ctypes.c_void_p),
        ("counts", ctypes.c_void_p), ("blocks", ctypes.c_void_p), ("most", ctypes.c_int32),
    ]  # fmt: skip


States = NDArray[np.uint8]
Visit = tuple[int, int, int]
Item = tuple[int, int, States]
"""Begin, end, and the state of each 16 keys."""


class Walks:
    """The kernels; `kinds`: of the mask."""

    kinds = ("mask", "rough", "blocks", "both", "none")

    def __init__(self, folder: Path) -> None:
        hooks = {"mask": (0, 1, 0), "rough": (0, 1, 1), "blocks": (1, 0, 0), "both": (1, 1, 0),
                 "none": (0, 0, 0)}  # fmt: skip
        text = [SOURCE]
        for name, (keys, step) in WALKS.items():
            for kind in self.kinds:
                block, mask, rough = hooks[kind]
                for runs in (0, 1) if keys == step else (0,):
                    text.append(
                        f'extern "C" __global__ void {name}_{kind}_{runs}(const __grid_constant__ '
                        f"Call p) {{ walk<Config<{block}>, Hooks<{mask}, {rough}>, {keys}, {step}>"
                        f"(p, {runs}); }}\n"
                    )
        self.unit = Unit("".join(text), folder)

    def visits(
        self, walk: str, kind: str, items: list[Item], runs: bool = False
    ) -> tuple[list[list[Visit]], list[int]]:
        """The visited tiles (begin, end, full) of items, and the evaluations for each."""
        step = WALKS[walk][1]
        most = max(-(-(end - begin) // step) for begin, end, _ in items) + 2
        table, parts, at = [], [], 0
        for begin, end, states in items:
            table.append((begin, end, at))
            parts.append(np.pad(states, (0, -len(states) % 8), mode="edge"))
            at += len(parts[-1])
        units = torch.from_numpy(np.concatenate(parts))
        memory = {
            "states": units, "items": torch.tensor(table, dtype=torch.int32),
            "tiles": torch.zeros(len(items), most, 3, dtype=torch.int32),
            "counts": torch.zeros(len(items), 2, dtype=torch.int32),
            "blocks": units[::8].clone(),
        }  # fmt: skip
        call = _Call(most=most)
        call.states.describe(units)
        for name in ("items", "tiles", "counts", "blocks"):
            setattr(call, name, memory[name].data_ptr())
        self.unit.run(f"{walk}_{kind}_{int(runs)}", bytes(call), memory, ("tiles", "counts"),
                      blocks=(len(items), 1, 1))  # fmt: skip
        counts = memory["counts"].tolist()
        found = [
            [tuple(tile) for tile in tiles[: max(count, 0)]]
            for tiles, (count, _) in zip(memory["tiles"].tolist(), counts, strict=True)
        ]
        assert all(0 <= count <= most for count, _ in counts)
        return found, [evaluations for _, evaluations in counts]


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Walks:
    return Walks(tmp_path_factory.mktemp("walks"))


def tile_states(walk: str, item: Item) -> list[tuple[int, int, int]]:
    """Begin, end and state of each tile of an item."""
    keys, step = WALKS[walk]
    begin, end, states = item
    tiles = []
    for first in range(begin, end, step):
        last = min(first + keys, end)
        units = states[(first - begin) // UNIT : -(-(last - begin) // UNIT)]
        tiles.append((first, last, int(units[0]) if (units == units[0]).all() else PARTIAL))
    return tiles


def expected(walk: str, item: Item) -> list[Visit]:
    """The visits of a walk whose form is exact for every box of whole tiles."""
    keys = WALKS[walk][0]
    return [(a, b, int(state == FULL and b - a == keys))
            for a, b, state in tile_states(walk, item) if state != EMPTY]  # fmt: skip


def stretches(random: np.random.Generator, count: int) -> States:
    """States in stretches of a random length, which differ in scale from one item to another."""
    scale = float(random.choice([1.5, 6, 40, 300]))
    odds = random.dirichlet([0.6] * 3)
    parts: list[States] = []
    while sum(map(len, parts)) < count:
        length = 1 + int(random.exponential(scale))
        parts.append(np.full(length, random.choice(3, p=odds), np.uint8))
    return np.concatenate(parts)[:count]


def random_items(walk: str, seed: int) -> list[Item]:
    """Items of 0 to 2200 tiles, some with one key, some that end at the last position."""
    random, step = np.random.default_rng(seed), WALKS[walk][1]
    items: list[Item] = []
    for most in (3, 33, 64, 65, 66, 128, 250, 520, 1024, 1025, 2200):
        for whole in (False, True):
            length = int(random.integers(most // 2, most + 1)) * step
            length = length if whole else max(1, length - int(random.integers(0, step)))
            last = random.choice([2**31 - 1, length + 128 * 40])
            begin = int(last) - length if random.random() < 0.5 else int(random.integers(0, 9)) * 16
            items.append((begin, begin + length, stretches(random, -(-max(length, 1) // UNIT))))
    return [*items, (64, 64, np.zeros(1, np.uint8))]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("walk", WALKS)
def test_tiles_that_are_not_empty_are_visited_once_in_order(walks: Walks, walk: str) -> None:
    for seed in range(SEEDS):
        items = random_items(walk, seed)
        for runs in (False, True) if walk != "few_row" else (False,):
            found, _ = walks.visits(walk, "mask", items, runs)
            for item, visits in zip(items, found, strict=True):
                assert visits == expected(walk, item), (seed, item[:2])
            found, _ = walks.visits(walk, "none", items, runs)
            for (begin, end, states), visits in zip(items, found, strict=True):
                assert visits == expected(walk, (begin, end, np.full_like(states, FULL)))


@pytest.mark.parametrize("walk", WALKS)
def test_a_form_that_proves_more_of_a_chunk_than_of_its_tiles(walks: Walks, walk: str) -> None:
    for seed in range(SEEDS):
        items = random_items(walk, seed + 10)
        for runs in (False, True) if walk != "few_row" else (False,):
            found, _ = walks.visits(walk, "rough", items, runs)
            for item, visits in zip(items, found, strict=True):
                states = {a: (b, state) for a, b, state in tile_states(walk, item)}
                assert [a for a, _, _ in visits] == sorted({a for a, _, _ in visits})
                assert all(states[a][0] == b for a, b, _ in visits)
                assert all(states[a][1] == FULL for a, _, full in visits if full)
                assert {a for a, (_, s) in states.items() if s != EMPTY} <= {a for a, *_ in visits}


@pytest.mark.parametrize("kind", ["blocks", "both"])
@pytest.mark.parametrize("walk", WALKS)
def test_block_masks(walks: Walks, walk: str, kind: str) -> None:
    """Blocks of 128 keys; the mask, which applies in partial ones, has the same states."""
    items: list[Item] = []
    for begin, end, states in random_items(walk, 20):
        if begin % 128 == 0 and begin + 10**6 < 2**31:
            items.append((0, end - begin, np.repeat(states[::8], 8)))
    assert len(items) >= 4
    for runs in (False, True) if walk != "few_row" else (False,):
        found, _ = walks.visits(walk, kind, items, runs)
        for (begin, end, states), visits in zip(items, found, strict=True):
            kept = states if kind == "both" else np.where(states == EMPTY, EMPTY, FULL)
            assert visits == expected(walk, (begin, end, kept)), (begin, end)


Stretch = tuple[int, int, int]
"""First tile, the tile after the last one, state."""


@pytest.mark.parametrize("walk", ["prefill", "few_row"])
def test_tiles_are_classified_only_where_chunks_are_partial(walks: Walks, walk: str) -> None:
    def count(tiles: int, *stretches: Stretch) -> int:
        """The evaluations for an item of `tiles` tiles, which are empty elsewhere."""
        step = WALKS[walk][1]
        states = np.full(tiles, EMPTY, np.uint8)
        for first, end, state in stretches:
            states[first:end] = state
        item = (0, tiles * step, np.repeat(states, step // UNIT))
        (visits,), (evaluations,) = walks.visits(walk, "mask", [item], walk != "few_row")
        assert visits == expected(walk, item)
        return evaluations

    assert count(32) == count(32, (0, 32, PARTIAL)) == 1, "as without chunks"
    assert count(64) == count(64, (0, 64, PARTIAL)) == 2
    assert count(256) == count(1024) == 1, "32 chunks cover it"
    assert count(256, (0, 256, FULL)) == count(1024, (0, 1024, FULL)) == 1
    assert count(2048) == count(2048, (0, 2048, FULL)) == 2
    # A document of 22 tiles; a causal mask's diagonal.
    assert count(256, (85, 106, FULL), (106, 107, PARTIAL)) == 2
    assert count(256, (0, 200, FULL), (200, 202, PARTIAL)) == 2
    # Chunks here and there: each needs an evaluation of its own.
    assert count(256, (3, 4, PARTIAL), (100, 101, PARTIAL), (255, 256, FULL)) == 4
    assert count(256, (0, 256, PARTIAL)) == 9, "one more than without chunks"
