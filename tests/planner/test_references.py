"""The planner against what FlashAttention 2 and 3 and FlashInfer choose, as their sources say.

FlashAttention 2: tiles of `csrc/flash_attn/src` by head_dim and device. FlashInfer 0.6:
`FA2DetermineCtaTileQ` and the keys of a tile from shared memory and registers. Splits:
`hopper/heuristics.h` of FlashAttention 3 and FlashInfer's decode plan. Where ours differ the test
names the difference and why.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashattn_jit import _C
from flashattn_jit.codegen.budget import LIMITS, accumulator_registers, ctas_per_sm, shared_bytes
from flashattn_jit.planner import Problem, choose, min_chunk, named_hardware, slots
from flashattn_jit.variants.ir import VariantIR

PLAIN = VariantIR(())
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90")


def chosen(rows: int, head_dim: int, target: str):
    p = Problem((rows,), (8192,), 1, 1, head_dim, head_dim, *("float16",) * 3)
    return choose(PLAIN, p, target)


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
    # Twice the keys need more registers than a thread has: see planner/cuda_tiles.py.
    **{(64, t): 64 for t in TARGETS},
    **{(128, t): 32 for t in ("sm_80", "sm_90")},
    # Rows of 96 values are padded against bank conflicts, which costs addresses.
    **{(96, t): 32 for t in TARGETS},
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


# --- splits ---------------------------------------------------------------------------------------


def splits_of(device: str, batch: int, kv_heads: int, kv_len: int, group: int = 1):
    """(splits of the longest request, items, slots) as our scheduler plans decoding."""
    hardware = named_hardware(device)
    p = Problem((1,) * batch, (kv_len,) * batch, kv_heads * group, kv_heads, 128, 128,
                *("bfloat16",) * 3)  # fmt: skip
    spec = choose(PLAIN, p, hardware.target)
    found = slots(spec, hardware).total
    planned = _C.schedule(
        None,
        _C.Problem(
            num_requests=batch, num_q_heads=p.num_q_heads, num_kv_heads=kv_heads, head_dim=128,
            head_dim_v=128, q_len=p.q_len, kv_len=p.kv_len,
        ),
        tile_q=spec.tile_q, row_granule=spec.tile_q, tile_kv=spec.tile_kv,
        min_chunk=min_chunk(spec), num_workers=found, device=True,
    )  # fmt: skip
    work = np.frombuffer(planned["work"], np.int32).reshape(-1, 8)
    return planned["most_splits"], work, found


def flash_attention_3_splits(blocks: int, key_blocks: int, places: int) -> int:
    """The least number whose waves are at least 85 % as full as the best's; `places` to run at."""
    if blocks >= 0.8 * places or key_blocks <= 4:
        return 1
    full = [blocks * n / places / math.ceil(blocks * n / places)
            for n in range(1, min(128, places, key_blocks) + 1)]  # fmt: skip
    return next(n for n, x in enumerate(full, 1) if x >= 0.85 * max(full))


def flashinfer_chunk(kv_len: int, batch: int, kv_heads: int, places: int) -> int:
    """Keys of a chunk: the least, from 128 on, with which all chunks run at once."""
    low, high = 128, max(128, kv_len)
    while low < high:
        middle = (low + high) // 2
        if batch * math.ceil(kv_len / middle) * kv_heads <= places:
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
    most, work, places = splits_of(device, batch, kv_heads, kv_len)
    units = batch * kv_heads
    longest = int((work[:, 6] - work[:, 5]).max())
    ours = longest * math.ceil(len(work) / places)  # keys that the last wave ends after

    split = flash_attention_3_splits(units, kv_len // 64, places)
    theirs = math.ceil(kv_len / split) * math.ceil(units * split / places)
    assert ours <= 1.15 * theirs + 64, (most, split)

    chunk = flashinfer_chunk(kv_len, batch, kv_heads, places)
    theirs = chunk * math.ceil(units * math.ceil(kv_len / chunk) / places)
    assert ours <= 1.15 * theirs + 64, (most, chunk)


def test_enough_requests_are_not_split():
    for device in ("A100", "H200", "RTX 4090"):
        assert splits_of(device, 512, 8, 4096)[0] == 1


def test_short_keys_are_split_into_chunks_of_128_at_least():
    """FlashInfer's and ours: B1, kv 1024, 8 heads give 64 chunks, not one a slot."""
    most, work, _ = splits_of("H200", 1, 8, 1024)
    assert most <= 8
    assert int((work[:, 6] - work[:, 5]).min()) >= 128


def test_skewed_requests_are_cut_where_they_are_long():
    """FlashInfer has one chunk length for all; ours cuts the one long request and no other."""
    hardware = named_hardware("H200")
    kv_len = (65536, *(512,) * 63)
    p = Problem((1,) * 64, kv_len, 8, 8, 128, 128, *("bfloat16",) * 3)
    spec = choose(PLAIN, p, "sm_90")
    planned = _C.schedule(
        None,
        _C.Problem(num_requests=64, num_q_heads=8, num_kv_heads=8, head_dim=128, head_dim_v=128,
                   q_len=p.q_len, kv_len=kv_len),
        tile_q=16, row_granule=16, tile_kv=64, min_chunk=min_chunk(spec),
        num_workers=slots(spec, hardware).total, device=True,
    )  # fmt: skip
    work = np.frombuffer(planned["work"], np.int32).reshape(-1, 8)
    parts = np.bincount(work[:, 0], minlength=64)
    assert parts[0] > 8 * 8 and (parts[1:] <= 2 * 8).all()
    ideal = planned["total_cost"] / slots(spec, hardware).total
    assert planned["critical_cost"] < 1.6 * ideal
