"""The planner against the choices of FlashAttention 2 and 3 and FlashInfer in their sources.

FlashAttention 2: tiles of `csrc/flash_attn/src` by head_dim and device. FlashInfer 0.6:
`FA2DetermineCtaTileQ` and the keys of a tile from shared memory and registers. Splits:
`hopper/heuristics.h` of FlashAttention 3 and FlashInfer's decode plan. Where ours differ the test
names the difference and why.
"""

from __future__ import annotations

import math

import pytest

from flashattn_jit.codegen.budget import LIMITS, accumulator_registers, ctas_per_sm, shared_bytes
from flashattn_jit.ops.planning.batch_plan import native_kind
from flashattn_jit.planner.devices import named_hardware
from flashattn_jit.planner.tiles import Problem, choose, coefficients, merge_cost, slots
from flashattn_jit.variants.ir.ir import VariantIR

from .batch_plans import Dense, Planned, make

PLAIN = VariantIR(())
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90")


def chosen(rows: int, head_dim: int, target: str, wgmma: bool = False):
    p = Problem((rows,), (8192,), 1, 1, head_dim, head_dim, *("float16",) * 3)
    return choose(PLAIN, p, target, tma=wgmma)


# --- tiles ----------------------------------------------------------------------------------------


def flash_attention_2(head_dim: int, target: str) -> tuple[int, int, int]:
    """(rows, keys, warps) of its full-attention forward kernel."""
    consumer = target in ("sm_86", "sm_89")
    if head_dim <= 64:
        return 128, 128, 4
    if head_dim <= 96:
        return 128, 64, 4
    if head_dim <= 128:
        return (128, 32, 4) if consumer else (128, 64, 4)
    if head_dim <= 192:
        return 128, 64, 8
    return (128, 64, 8) if target == "sm_80" else (64, 64, 4)


FEWER_KEYS = {
    # Two buffers of twice the keys do not fit the shared memory: see planner/cuda_tiles.py.
    **{(64, t): 64 for t in ("sm_86", "sm_89")},
    # Rows of 96 values are padded against bank conflicts: two blocks of 64 keys do not fit.
    **{(96, t): 32 for t in ("sm_86", "sm_89")},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_prefill_tiles_are_those_of_flash_attention_2(head_dim, target):
    spec = chosen(4096, head_dim, target)
    rows, keys, warps = flash_attention_2(head_dim, target)
    keys = FEWER_KEYS.get((head_dim, target), keys)
    assert (spec.tile_q, spec.tile_kv, spec.num_warps) == (rows, keys, warps)


def flashinfer_tile_q(packed_rows: int, head_dim: int, target: str) -> int:
    """`FA2DetermineCtaTileQ` for 16-bit keys."""
    if packed_rows > 64 and head_dim < 256:
        return 128
    if target == "sm_75":
        return 64
    if packed_rows > 16:
        return 64
    needed = 16 * head_dim * 2 + 2 * head_dim * 64 * 2
    return 16 if needed <= LIMITS[target].shared_per_block else 64


@pytest.mark.parametrize("target", ("sm_75", *TARGETS))
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64, 65, 4096])
def test_rows_of_a_tile_are_those_of_flashinfer(rows, head_dim, target):
    ours, theirs = chosen(rows, head_dim, target).tile_q, flashinfer_tile_q(rows, head_dim, target)
    if target == "sm_75":
        # Decoding has a kernel of its own on Turing too; many rows get 64, since registers carry
        # the next tile where there is no asynchronous copy.
        assert ours == (16 if rows <= 16 else 64)
    elif target == "sm_80" and head_dim == 256 and rows > 64:
        assert (ours, theirs) == (128, 64)  # FlashAttention 2's: 8 warps share 128 rows
    else:
        assert ours == theirs


def flashinfer_blocks(tile_q: int, head_dim: int, target: str) -> int:
    """Its rule for the blocks of a multiprocessor: two if two with the least keys fit, else one."""
    warps_kv = 4 if tile_q == 16 else 1
    least = tile_q * head_dim * 2 + 2 * head_dim * 16 * warps_kv * 2
    return 2 if LIMITS[target].shared_per_sm >= 2 * least else 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 50, 4096])
def test_a_multiprocessor_holds_no_fewer_warps_than_flashinfer_gives_it(rows, head_dim, target):
    spec = chosen(rows, head_dim, target)
    theirs = 4 * flashinfer_blocks(spec.tile_q, head_dim, target)  # 4 warps a block
    if spec.tile_kind == "few_row":
        # What counts is bytes under way; theirs has one buffer of K and V a block, two blocks.
        stage = 2 * head_dim * 2 * spec.tile_kv
        assert ctas_per_sm(spec) * (spec.num_stages - 1) * stage >= 16 << 10
        assert ctas_per_sm(spec) >= 2
    else:
        assert ctas_per_sm(spec) * spec.num_warps >= min(theirs, 8) or (
            # 96 KiB of the 100: FlashAttention 2's choice, whose keys a smaller tile would halve.
            head_dim == 256 and target in ("sm_86", "sm_89")
        )


def test_the_published_point_of_the_h100():
    """hd128: 128 rows, two blocks of 128 threads and 255 registers a multiprocessor."""
    spec = chosen(4096, 128, "sm_90")
    assert (spec.tile_q, spec.num_warps, ctas_per_sm(spec)) == (128, 4, 2)
    assert shared_bytes(spec) <= 2 * (64 << 10)
    assert accumulator_registers(spec) < 255


FLASH_ATTENTION_3 = {
    # head_dim: rows and keys, theirs and ours. The producer evaluates masks, and leaves fewer
    # registers for consumers than theirs. Ours has two groups of 64 rows, theirs up to three. With
    # more than 128 keys at head dim 128, short prompts were slower and long ones no faster.
    64: ((192, 192), (128, 192)),
    96: ((192, 144), (128, 128)),
    128: ((128, 176), (128, 128)),
    192: ((128, 112), (128, 112)),
    256: ((128, 80), (128, 64)),
}


@pytest.mark.parametrize("head_dim", FLASH_ATTENTION_3)
def test_wgmma_tiles_are_those_of_flash_attention_3(head_dim):
    spec = chosen(4096, head_dim, "sm_90", wgmma=True)
    theirs, ours = FLASH_ATTENTION_3[head_dim]
    assert spec.tile_kind == "prefill_wgmma"
    assert (spec.tile_q, spec.tile_kv) == ours
    assert ours[0] * ours[1] >= 0.59 * theirs[0] * theirs[1]


# --- splits ---------------------------------------------------------------------------------------


def decode_plan(device: str, kv_len: list[int], kv_heads: int) -> tuple[Planned, int]:
    """Our plan of decoding one token a request, and how many blocks run at once."""
    hardware = named_hardware(device)
    count = len(kv_len)
    p = Problem((1,) * count, tuple(kv_len), kv_heads, kv_heads, 128, 128, *("bfloat16",) * 3)
    spec = choose(PLAIN, p, hardware.target)
    num_slots = slots(spec, hardware).total
    planned = make(
        [1] * count, Dense(kv_len), heads=(kv_heads, kv_heads), workers=num_slots, few_rows=16,
        kinds=(None, native_kind(spec, hardware.target, hardware=hardware)), head_dim_v=128,
        merge_ns=merge_cost(hardware.target),
    )  # fmt: skip
    return planned, num_slots


def keys_of_lists(planned: Planned) -> list[int]:
    """Keys of each worker."""
    return [sum(i["kv_end"] - i["kv_begin"] for i in items) for items in planned.lists(1)]


def waves(keys: int, count: int, num_slots: int) -> list[int]:
    """Keys of each slot, of `count` blocks of as many keys each."""
    return [keys * (count // num_slots + (i < count % num_slots)) for i in range(num_slots)]


def decode_ns(device: str, keys: list[int], splits: int) -> float:
    """Until the last worker is done with its keys and one block has merged a row's states.

    keys: of each worker. The active ones share the bandwidth, up to the rate of one alone.
    """
    hardware = named_hardware(device)
    target = hardware.target
    spec = choose(PLAIN, Problem((1,), (1,), 1, 1, 128, 128, *("bfloat16",) * 3), target)
    costs = coefficients(spec, target, hardware)
    time, done = 0.0, 0
    for i, longer in enumerate(sorted(keys)):
        active = len(keys) - i
        time += (longer - done) * max(costs.alone_ns, costs.load_ns * active / len(keys))
        done = longer
    return time + (splits * costs.state_ns if splits > 1 else 0)


def flash_attention_3_splits(blocks: int, key_blocks: int, num_slots: int) -> int:
    """The least number of splits whose waves are at least 85 % as full as the fullest ones."""
    if blocks >= 0.8 * num_slots or key_blocks <= 4:
        return 1
    full = [blocks * n / num_slots / math.ceil(blocks * n / num_slots)
            for n in range(1, min(128, num_slots, key_blocks) + 1)]  # fmt: skip
    return next(n for n, x in enumerate(full, 1) if x >= 0.85 * max(full))


def flashinfer_chunk(kv_len: int, batch: int, kv_heads: int, num_slots: int) -> int:
    """Keys of a chunk: the least, from 128 on, with which all chunks run at once."""
    low, high = 128, max(128, kv_len)
    while low < high:
        middle = (low + high) // 2
        if batch * math.ceil(kv_len / middle) * kv_heads <= num_slots:
            high = middle
        else:
            low = middle + 1
    return low


@pytest.mark.parametrize("device", ["A100", "H200", "RTX 4090", "B200"])
@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len"),
    [(1, 8, 131072), (1, 1, 65536), (4, 8, 32768), (16, 8, 8192), (32, 8, 8192), (3, 4, 20000)],
)
def test_splits_fill_the_device_as_well_as_the_references(device, batch, kv_heads, kv_len):
    """Ours are lists of workers, theirs waves of blocks. One head of one request is cut into fewer
    parts, because the one block that merges them takes longer with each state. They split until the
    slots are full, ours not once the blocks saturate the memory: then lists are longer, but end no
    later."""
    planned, num_slots = decode_plan(device, [kv_len] * batch, kv_heads)
    units, most, lists = batch * kv_heads, planned.plan.most_splits, keys_of_lists(planned)
    ours = decode_ns(device, lists, most)
    tile_ns = decode_ns(device, [64] * num_slots, 1)

    split = flash_attention_3_splits(units, kv_len // 64, num_slots)
    theirs = waves(math.ceil(kv_len / split), units * split, num_slots)
    assert ours <= 1.15 * decode_ns(device, theirs, split) + tile_ns, (most, split)
    assert most == 1 or units == 1 or max(lists) <= 1.15 * max(theirs) + 64

    chunk = flashinfer_chunk(kv_len, batch, kv_heads, num_slots)
    split = math.ceil(kv_len / chunk)
    theirs = waves(chunk, units * split, num_slots)
    assert ours <= 1.15 * decode_ns(device, theirs, split) + tile_ns, (most, chunk)
    assert most == 1 or units == 1 or max(lists) <= 1.15 * max(theirs) + 64


def test_enough_requests_are_not_split():
    """Nor is the remainder of the full rounds, if it saturates the memory: 4,096 equal items on the
    396 slots of an H200 are 10 rounds and 136 items."""
    for device in ("A100", "RTX 4090", "H200"):
        assert decode_plan(device, [4096] * 512, 8)[0].plan.most_splits == 1


def test_a_remainder_that_does_not_saturate_the_memory_is_split():
    """5 rounds of an H200 and 20 items, to which few bytes are in flight."""
    planned, num_slots = decode_plan("H200", [8192] * 250, 8)
    assert num_slots == 396 and 5 * num_slots + 20 == 250 * 8
    assert planned.merges and len(planned.merges) <= num_slots // 2
    assert max(keys_of_lists(planned)) < 1.02 * 8192 * 2000 / num_slots


def test_short_keys_are_split_into_few_chunks():
    """FlashInfer's chunks have 128 keys or more, ours a tile or more; its fixed cost is counted."""
    planned, num_slots = decode_plan("H200", [1024], 8)
    assert planned.plan.most_splits <= 16
    assert len(planned.items) <= num_slots / 3
    assert min(i["kv_end"] - i["kv_begin"] for i in planned.items) >= 64


def test_skewed_requests_are_cut_where_they_are_long():
    """FlashInfer has one chunk length for all; ours cuts the one long request and few others, the
    last of which even out the workers."""
    planned, num_slots = decode_plan("H200", [65536, *[512] * 63], 8)
    parts = [0] * 64
    for item in planned.items:
        parts[item["request"]] += 1
    assert parts[0] > 8 * 8 and max(parts[1:]) <= 2 * 8
    assert sum(parts[1:]) < 1.2 * 63 * 8
    assert planned.plan.critical_ns < 1.1 * planned.plan.total_ns / num_slots
