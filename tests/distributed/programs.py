"""What ranks do in the tests: see `ranks.on_ranks`. Every rank has the whole batch, to compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import flashattn_jit as fa
from tests.batch.batches import Batch
from tests.batch.oracle import Math, check
from tests.registry.cases import by_name

Q_LEN = (700, 3, 0, 1100, 1, 64)
KV_LEN = (700, 40, 5, 1300, 300, 0)
DECODE_Q = (1, 1, 0, 2, 1)
DECODE_KV = (3000, 40, 5, 6000, 0)


class Gate(fa.Variant):
    """Reads everything that a hook can learn of its request."""

    gate: torch.Tensor = fa.tensor("tokens")
    bias: torch.Tensor = fa.tensor("slots")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        """Lengths, the row, the slot and the request."""
        row = self.gate[fa.q_row(b, q_idx)] + self.bias[fa.kv_slot(b, kv_idx)]
        return score + row + 0.01 * b + 0.001 * fa.q_len(b) - 0.002 * fa.kv_len(b)

    def mask_mod(self, b, h, q_idx, kv_idx):
        """Causal, but for the last keys of odd requests."""
        return (kv_idx <= q_idx) & ((b % 2 == 0) | (kv_idx < fa.kv_len(b) - 2))

    def output_mod(self, row, lse, b, h, q_idx):
        """Reads the request too."""
        return row * (1 + 0.1 * b)


def _variants(q_len, kv_len) -> dict[str, tuple[Any, Mapping[str, Any], Mapping[str, Any]]]:
    """name -> (variant, params of the mask, other params)."""
    made = torch.Generator().manual_seed(5)
    longest, count = max(kv_len), len(q_len)
    documents = torch.randint(0, 4, (count, longest), generator=made).sort(1).values.int()
    prefix = torch.tensor([min(n, 100) for n in kv_len], dtype=torch.int32)
    blocks = torch.rand(longest // 64 + 1, longest // 64 + 1, generator=made) < 0.3
    per_token = {
        "gate": torch.randn(sum(q_len), generator=made),
        "bias": torch.randn(sum(kv_len), generator=made),
    }
    return {
        "full": (None, {}, {}),
        "causal": (fa.Causal(), {}, {}),
        "window": (fa.SlidingWindow(150), {}, {}),
        "documents": (fa.DocumentMask() & fa.Causal(), {"documents": documents}, {}),
        "prefix": (fa.PrefixLM(), {"prefix_len": prefix}, {}),
        "blocks": (fa.variant(mask_mod=lambda b, h, q, k: blocks[q // 64, k // 64]), {}, {}),
        "streaming": (fa.StreamingLLM(100), {}, {}),
        "alibi": (fa.ALiBi() & fa.Causal(), {}, {}),
        "soft cap": (fa.SoftCap(5.0) & fa.Causal(), {}, {}),
        "sink": (fa.Sink() & fa.Causal(), {}, {"sink": torch.randn(4, generator=made)}),
        "rope": (fa.RoPE(max_position=8192) & fa.Causal(), {}, {}),
        "sigmoid": (fa.Sigmoid() & fa.Causal(), {}, {}),
        "gate": (Gate(), {}, per_token),
    }


NAMES = tuple(_variants((1,), (1,)))


def _pair(mesh: DeviceMesh, batch: Batch, variant: Any, **options: Any):
    both = {**batch.options(), **options}
    both.pop("device", None)
    one = {k: v for k, v in both.items() if k != "way"}
    return fa.ContextParallel(variant, mesh, **both), fa.BatchAttention(variant, **one)


def shard(x: torch.Tensor, shards, rank: int) -> torch.Tensor:
    """A rank's tokens."""
    return x[shards[rank] : shards[rank + 1]].clone()


def evenly(tokens: int, ranks: int) -> list[int]:
    """The default shards."""
    size = -(-tokens // ranks)
    return [min(i * size, tokens) for i in range(ranks + 1)]


def in_pages(batch: Batch, size: int = 64) -> tuple[fa.Paged, torch.Tensor, torch.Tensor]:
    """The packed keys in pages, which need the same kernels as the ranks."""
    counts = [-(-n // size) for n in batch.kv_len]
    indptr = torch.tensor([0, *counts]).cumsum(0)
    made = [x.new_zeros((max(1, sum(counts)) * size, *x.shape[1:])) for x in (batch.k, batch.v)]
    starts = batch.storage.kv_indptr.tolist()
    for b, length in enumerate(batch.kv_len):
        for to, x in zip(made, (batch.k, batch.v), strict=True):
            first = int(indptr[b]) * size
            to[first : first + length] = x[starts[b] : starts[b] + length]
    last = [n - (c - 1) * size if c else 0 for n, c in zip(batch.kv_len, counts, strict=True)]
    storage = fa.Paged(
        indptr,
        torch.arange(sum(counts), dtype=torch.int32),
        torch.tensor(last, dtype=torch.int32),
        size,
    )
    return storage, *(x.unflatten(0, (-1, size)) for x in made)


def compared(mesh, batch, variant, mask_params, params, *, bits, lse=True, slots=False, **options):
    """Runs both and compares this rank's rows; returns the plan.

    slots: the variant reads `fa.kv_slot`, which counts packed keys.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    parallel, one = _pair(mesh, batch, variant, batch_invariant=bits, **options)
    q_shards, kv_shards = (evenly(len(x), ranks) for x in (batch.q, batch.k))
    plan = parallel.plan(batch.q_indptr, batch.storage.kv_indptr, **mask_params)
    storage, *keys = (batch.storage, batch.k, batch.v) if slots else in_pages(batch)
    one.plan(batch.q_indptr, storage, **mask_params)
    got = parallel.run(
        shard(batch.q, q_shards, rank), shard(batch.k, kv_shards, rank),
        shard(batch.v, kv_shards, rank), return_lse=lse, **params,
    )  # fmt: skip
    want = one.run(batch.q, *keys, return_lse=lse, **params)
    for mine, whole in zip(got if lse else (got,), want if lse else (want,), strict=True):
        other = shard(whole, q_shards, rank)
        assert mine.shape == other.shape and mine.dtype == other.dtype
        if bits:
            assert torch.equal(mine, other), (mine.float() - other.float()).abs().max()
        else:
            torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)
    return plan


def equal(mesh: DeviceMesh, names: list[str], bits: bool, way: str, decode: bool = False) -> None:
    """The variants of these names, as a single process.

    Memory that nobody wrote is NaN: none of it reaches a result.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(3).isnan().all()
    q_len, kv_len = (DECODE_Q, DECODE_KV) if decode else (Q_LEN, KV_LEN)
    batch = Batch(q_len, kv_len, (4, 2), 64)
    for name in names:
        variant, mask_params, params = _variants(q_len, kv_len)[name]
        plan = compared(
            mesh, batch, variant, mask_params, params, bits=bits, lse=name != "sigmoid", way=way,
            slots=name == "gate",
        )  # fmt: skip
        assert plan.way == way
        assert "chosen" in plan.explain()


def registry(mesh: DeviceMesh, names: list[str]) -> None:
    """Cases of the registry, bit for bit."""
    for name in names:
        case = by_name(name)
        shape = case.shape
        variant, params = case.build()
        batch = Batch(
            (shape.q_len,) * shape.batch, (shape.kv_len,) * shape.batch,
            (shape.num_q_heads, shape.num_kv_heads), shape.head_dim, dim_v=shape.head_dim_v,
        )  # fmt: skip
        whole = fa.BatchAttention(variant, **batch.options())
        reads = _mask_params(whole, batch, params)
        mask = {k: v for k, v in params.items() if k in reads}
        rest = {k: v for k, v in params.items() if k not in reads}
        compared(
            mesh, batch, variant, {"q_offset": case.q_offset, **mask}, rest, bits=True,
            lse=not whole.pointwise, slots="builtin" in case.tags,
        )  # fmt: skip


def _mask_params(batch_object: fa.BatchAttention, batch: Batch, params) -> set[str]:
    """Which params plan() takes: it refuses the others by name."""
    reads = set(params)
    for _ in range(len(params) + 1):
        try:
            batch_object.plan(
                batch.q_indptr, batch.storage, **{k: v for k, v in params.items() if k in reads}
            )
            return reads
        except fa.ParamError as error:
            name = next(n for n in reads if f"param {n!r}" in str(error))
            reads.discard(name)
    raise AssertionError("no params are the mask's")


def error_rule(mesh: DeviceMesh, way: str, dtype: str) -> None:
    """The results of all ranks against attention in fp64, by the rule of the package."""
    decode = way == "states"
    q_len, kv_len = (DECODE_Q, DECODE_KV) if decode else (Q_LEN, KV_LEN)
    batch = Batch(q_len, kv_len, (4, 2), 64, getattr(torch, dtype))
    math = Math(causal=True, window=500)
    parallel, _ = _pair(mesh, batch, math.variant(4), way=way)
    parallel.plan(batch.q_indptr, batch.storage.kv_indptr)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    q_shards, kv_shards = (evenly(len(x), ranks) for x in (batch.q, batch.k))
    out, lse = parallel.run(
        shard(batch.q, q_shards, rank), shard(batch.k, kv_shards, rank),
        shard(batch.v, kv_shards, rank), return_lse=True,
    )  # fmt: skip
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (out, lse))
    check(batch, math, torch.cat([x for x, _ in every]), torch.cat([x for _, x in every]))


def shards(mesh: DeviceMesh) -> None:
    """Shards of any size, empty ones, DTensors, several plans and runs of one object."""
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, ranks = mesh.get_local_rank(), mesh.size()
    batch = Batch(Q_LEN, KV_LEN, (4, 2), 64)
    parallel, one = _pair(mesh, batch, fa.Causal(), batch_invariant=True)
    paged, *pages = in_pages(batch)
    one.plan(batch.q_indptr, paged)
    whole = one.run(batch.q, *pages)
    rows, keys = len(batch.q), len(batch.k)
    for q_shards, kv_shards in (
        ([0] * ranks + [rows], [0] + [keys] * ranks),
        ([0] + [rows] * ranks, [0] * ranks + [keys]),
        ([0, *range(5, 5 + ranks - 1), rows], [0, *range(77, 77 + ranks - 1), keys]),
    ):
        parallel.plan(
            batch.q_indptr, batch.storage.kv_indptr, q_shards=q_shards, kv_shards=kv_shards
        )
        args = (
            shard(batch.q, q_shards, rank), shard(batch.k, kv_shards, rank),
            shard(batch.v, kv_shards, rank),
        )  # fmt: skip
        for _ in range(2):
            assert torch.equal(parallel.run(*args), shard(whole, q_shards, rank))
    parallel.plan(batch.q_indptr, batch.storage.kv_indptr)
    spread = [distribute_tensor(x, mesh, [Shard(0)]) for x in (batch.q, batch.k, batch.v)]
    out, lse = parallel.run(*spread, return_lse=True)
    assert torch.equal(out.full_tensor(), whole) and lse.full_tensor().shape == whole.shape[:2]
    try:
        parallel.run(spread[0], batch.k, spread[2])
    except fa.InputError as error:
        assert "k must be a DTensor" in str(error)
    else:
        raise AssertionError("a tensor among DTensors was taken")


def unused_slots(mesh: DeviceMesh) -> None:
    """NaN in keys that no row sees reaches no result, whichever rank has them."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    batch = Batch((200,), (900,), (2, 1), 64)
    window = fa.SlidingWindow(64)
    parallel, one = _pair(mesh, batch, window, batch_invariant=True)
    paged, *pages = in_pages(batch)
    one.plan(batch.q_indptr, paged)
    want = one.run(batch.q, *pages)
    batch.k[:600] = float("nan")
    q_shards, kv_shards = evenly(200, ranks), evenly(900, ranks)
    parallel.plan(batch.q_indptr, batch.storage.kv_indptr)
    got = parallel.run(
        shard(batch.q, q_shards, rank), shard(batch.k, kv_shards, rank),
        shard(batch.v, kv_shards, rank),
    )  # fmt: skip
    assert torch.equal(got, shard(want, q_shards, rank))


def nothing(mesh: DeviceMesh) -> None:
    """No requests; no rows; no keys."""
    for q_len, kv_len in (((), ()), ((0, 0), (5, 300)), ((3, 70), (0, 0))):
        batch = Batch(q_len, kv_len, (2, 1), 64)
        for way in ("keys", "ring", "states"):
            compared(mesh, batch, fa.Causal(), {}, {}, bits=False, way=way)


def overlapped(mesh: DeviceMesh) -> None:
    """Rows that need nothing of other ranks are computed first, the others after the messages."""
    torch.use_deterministic_algorithms(True)
    documents = torch.arange(1500)[None] // 333
    for name, variant, params in (
        ("window", fa.SlidingWindow(100), {}),
        ("documents", fa.DocumentMask() & fa.Causal(), {"documents": documents.expand(2, -1)}),
    ):
        batch = Batch((1300, 200), (1500, 333), (4, 2), 64)
        plan = compared(mesh, batch, variant, params, {}, bits=False, way="keys")
        every: list[Any] = [None] * mesh.size()
        dist.all_gather_object(every, plan.overlap)
        assert any(0.3 < share < 1 for share in every), (name, every)


def emulated(mesh: DeviceMesh, way: str) -> None:
    """CUDA kernels in the emulator, a device a rank."""
    batch = Batch((40, 7), (40, 70), (4, 2), 64, torch.bfloat16)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    options = {**batch.options(), "target": "emulated:sm_80"}
    options.pop("device", None)
    parallel = fa.ContextParallel(fa.Causal(), mesh, way=way, **options)
    q_shards, kv_shards = (evenly(len(x), ranks) for x in (batch.q, batch.k))
    parallel.plan(batch.q_indptr, batch.storage.kv_indptr)
    out = parallel.run(
        shard(batch.q, q_shards, rank), shard(batch.k, kv_shards, rank),
        shard(batch.v, kv_shards, rank),
    )  # fmt: skip
    one = fa.BatchAttention(fa.Causal(), **options)
    one.plan(batch.q_indptr, batch.storage)
    want = shard(one.run(batch.q, batch.k, batch.v), q_shards, rank)
    torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)
