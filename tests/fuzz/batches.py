"""Random batches and hand-written work, right and wrong, through _C.BatchLengths, BatchPlan and
BatchCall.

    python batches.py ARTIFACT SEED SECONDS

A call raises (ValueError, TypeError, MemoryError, OverflowError) or makes a plan that computes
every row once and merges the rows that it split; hand-written work need not do so. The plan then
runs on the minimal artifact, with guards around exactly sized results. Prints the numbers of
refused and of planned batches.
"""

from __future__ import annotations

import random
import struct
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from flashattn_jit import _C

REFUSALS = (ValueError, TypeError, MemoryError, OverflowError)
WILD = (-(2**31), -7, -1, 0, 1, 2, 3, 17, 255, 2**16, 2**30, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
# A batch of 2**30 rows is valid, but takes gigabytes, as each row is listed.
WILD_ROWS = tuple(x for x in WILD if x < 2**16 or x >= 2**31)
GUARD = 64  # floats before and after an output
PATTERN = -12345.0


class Arrays:
    """Host arrays as native calls take them, kept alive."""

    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.held: list[torch.Tensor] = []

    def __call__(self, values: Sequence[int]) -> tuple[int, int, int]:
        wide = self.r.random() < 0.5 or any(abs(x) >= 2**31 for x in values)
        dtype = torch.int64 if wide else torch.int32
        tensor = torch.tensor([max(-(2**63), min(x, 2**63 - 1)) for x in values], dtype=dtype)
        self.held.append(tensor)
        return tensor.data_ptr(), tensor.numel(), tensor.element_size()


class Fuzz:
    def __init__(self, module: _C.Module, seed: int) -> None:
        self.module, self.r = module, random.Random(seed)
        self.array = Arrays(self.r)

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def spoil(self, values: list[int], wild: Sequence[int] = WILD) -> list[int]:
        """Changes, removes or appends an entry."""
        if values and self.chance(0.7):
            values[self.r.randrange(len(values))] = self.r.choice(wild)
        elif values and self.chance(0.5):
            values.pop(self.r.randrange(len(values)))
        else:
            values.append(self.r.choice(wild))
        return values

    def ints(
        self, values: Sequence[int], wrong: bool, wild: Sequence[int] = WILD
    ) -> tuple[int, int, int]:
        copied = list(values)
        return self.array(self.spoil(copied, wild) if wrong and self.chance(0.3) else copied)

    def storage(self, kv_len: Sequence[int], page_size: int, wrong: bool) -> tuple[Any, ...]:
        if not page_size:
            return self.ints([0, *accumulate(kv_len)], wrong), None, None, 0, 0
        pages = [-(-n // page_size) for n in kv_len]
        last = [(n - 1) % page_size + 1 if n else 0 for n in kv_len]
        entries = sum(pages) if not wrong or self.chance(0.8) else self.r.choice(WILD)
        size = page_size if not wrong or self.chance(0.9) else self.r.choice((-1, 0, 2**31 - 1))
        return (
            None,
            self.ints([0, *accumulate(pages)], wrong),
            self.ints(last, wrong),
            size,
            entries,
        )

    def levels(self, tokens: int, page_size: int, wrong: bool) -> list[tuple[Any, ...]]:
        made = []
        for _ in range(self.r.randrange(3)):
            cuts = sorted(self.r.randrange(tokens + 1) for _ in range(self.r.randrange(4)))
            starts = [0, *cuts, tokens]
            kv_len = [self.r.randrange(60) for _ in starts[1:]]
            listed = list(range(tokens))
            self.r.shuffle(listed)
            members = self.ints(listed, wrong) if self.chance(0.4) else None
            made.append(
                (
                    self.ints(starts, wrong, WILD_ROWS),
                    members,
                    self.storage(kv_len, page_size, wrong),
                )
            )
        return made

    def kind(self, wrong: bool) -> _C.Kind | None:
        if self.chance(0.1):
            return None
        numbers: list[Any] = [self.r.choice((1, 4, 16, 64)), self.r.choice((1, 4, 16)),
                              self.r.choice((1, 16, 64)), self.r.choice((1, 64, 256))]  # fmt: skip
        costs: list[Any] = [self.r.uniform(0, 1000) for _ in range(4)]
        if wrong and self.chance(0.3):
            numbers[self.r.randrange(4)] = self.r.choice((-1, 0, 2**31 - 1, 2**40, "x", None))
        if wrong and self.chance(0.3):
            costs[self.r.randrange(4)] = self.r.choice((-1.0, float("nan"), float("inf"), "y"))
        fields = [self.module, *numbers, *costs]
        return _C.Kind(*(fields[:-1] if wrong and self.chance(0.05) else fields))

    def lists(self, q_len: Sequence[int], heads: int, wrong: bool) -> tuple[Any, ...] | None:
        if self.chance(0.6):
            return None
        q_block, per_head = self.r.choice((1, 4, 64)), self.chance(0.5)
        rows = sum(-(-n // q_block) for n in q_len) * (heads if per_head else 1)
        count = [self.r.randrange(6) for _ in range(rows)]
        begin = [0, *accumulate(count)][:rows]
        entries = sum(count) if not wrong or self.chance(0.7) else self.r.choice(WILD)
        key_block = self.r.choice((1, 16, 64)) if not wrong or self.chance(0.9) else 0
        return (q_block, key_block, per_head, self.ints(begin, wrong), self.ints(count, wrong),
                entries)  # fmt: skip

    def once(self) -> bool:
        """Whether a plan was made."""
        if self.chance(0.3):
            return self.by_hand()
        r, wrong = self.r, self.chance(0.7)
        self.array.held.clear()
        count = r.randrange(7)
        q_len = [r.choice((0, 1, 1, 2, 3, 9, 40)) for _ in range(count)]
        kv_len = [r.choice((0, 1, 7, 64, 500, 3000)) for _ in range(count)]
        page_size = r.choice((0, 0, 1, 16))
        kv_heads, group = r.choice((1, 2, 3)), r.choice((1, 2, 5))
        offset = [r.randrange(-5, 500) for _ in range(count)]
        lengths = _C.BatchLengths(
            self.ints([0, *accumulate(q_len)], wrong, WILD_ROWS),
            self.storage(kv_len, page_size, wrong),
            self.ints(offset, wrong) if self.chance(0.3) else None,
            self.levels(sum(q_len), page_size, wrong),
        )
        lists = self.lists(lengths.q_len, kv_heads, wrong)
        workers = r.choice((1, 2, 5, 40)) if not wrong or self.chance(0.9) else r.choice((-1, 0))
        limits = (8, 300, 3200, 4000) if self.chance(0.2) else None
        if wrong and self.chance(0.1):
            limits = tuple(r.choice((*WILD[:10], 300)) for _ in range(4))  # type: ignore[assignment]
        options = _C.PlanOptions(
            num_q_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim_v=8,
            few_rows=r.choice((0, 1, 8, 16)),
            num_workers=(workers, workers),
            share_workers=self.chance(0.3),
            batch_invariant=self.chance(0.3),
            split_keys=(r.choice((0, 16, 256)), r.choice((0, 16, 256))),
            limits=limits,
            num_levels=r.randrange(3) if limits else 0,
            row_block=0 if limits or self.chance(0.6) else r.choice((1, 3, 64)),
        )
        # Without a mask: the artifact's is of q_idx and kv_idx from 0 on.
        plan = _C.BatchPlan(lengths, (self.kind(wrong), self.kind(wrong)), options, lists)
        shape = {"num_q_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": 8,
                 "head_dim_v": 8}  # fmt: skip
        if lists is not None:
            shape |= {"key_block": lists[1], "num_key_blocks": lists[5]}
        spoiled = wrong and self.chance(0.3)
        if spoiled:
            shape[r.choice(list(shape))] = r.choice(WILD[:10])
        modules = (self.module, self.module)
        core = _C.BatchCall(plan, lengths, modules, **shape)
        size = core.block_bytes
        if size > 2**26:
            return True
        block = torch.zeros(max(size, 1), dtype=torch.uint8)
        core.write_block(block.data_ptr(), size)
        if not spoiled:
            self.run(core, plan, lengths, kv_heads * group, wrong)
        return True

    def run(
        self, core: _C.BatchCall, plan: _C.BatchPlan, lengths: _C.BatchLengths, heads: int,
        wrong: bool,
    ) -> None:  # fmt: skip
        """Runs on tensors that end where they must; the artifact ignores who shares keys."""
        if lengths.num_groups or core.workspace_bytes > 2**26:
            return
        tokens, rows = lengths.num_q_tokens, (0, 8, 8 * heads)
        q = torch.ones(tokens, heads, 8)
        guarded = torch.full((2 * GUARD + q.numel(),), PATTERN)
        out = guarded[GUARD : GUARD + q.numel()].view(q.shape)
        workspace = torch.full((core.workspace_bytes + 2 * GUARD,), 77, dtype=torch.uint8)
        call = core.bind(strides=(rows, rows, rows, rows, (0, 1, heads)), num_pages=2**30)
        if wrong and self.chance(0.2):
            self.refused(core)
            return
        place = workspace.data_ptr() + GUARD
        call.launch(
            q.data_ptr(), 8, 8, out.data_ptr(), 0, 1.0, self.r.randrange(1, 4), workspace=place,
            page_indices=8, key_blocks=8,
        )  # fmt: skip
        if not torch.equal(out, self.states(plan, lengths, heads)[..., None].expand_as(out)):
            raise SystemExit("a row is not computed, or not from all its states")
        ends = torch.cat([guarded[:GUARD], guarded[-GUARD:]])
        if (ends != PATTERN).any() or (workspace[:GUARD] != 77).any():
            raise SystemExit("a guard was written")
        if (workspace[-GUARD:] != 77).any():
            raise SystemExit("the workspace was overrun")

    def entry(self, least: int, most: int, wild: float) -> int:
        """A number from `least` to `most`, or with some chance one around them or anywhere."""
        if not self.chance(wild):
            return self.r.randint(least, max(least, most))
        return self.r.choice((least - 1, most + 1, *(x for x in WILD if -(2**31) <= x < 2**31)))

    def rows(self, shape: tuple[int, int, int], group: int, wild: float) -> list[int]:
        """The fields that work and merges share."""
        batch, heads, q_len = shape
        count = self.entry(1, group, wild)
        head = self.r.randrange(heads // group) * group if not self.chance(wild) else heads
        begin = self.entry(0, q_len * max(count, 0), wild)
        end = self.entry(begin, min(begin + 9, q_len * max(count, 0)), wild)
        return [self.entry(0, batch - 1, wild), head, count, begin, end]

    def packed(self, *numbers: int) -> bytes:
        return struct.pack("8i", *(max(-(2**31), min(n, 2**31 - 1)) for n in numbers))

    def by_hand(self) -> bool:
        """Work that nobody planned: refused, or it stays inside of its tensors."""
        r, wild = self.r, self.r.choice((0.0, 0.0, 0.02, 0.1))
        kv_heads, group = r.choice((1, 2)), r.choice((1, 2, 3))
        shape = (r.randrange(1, 4), kv_heads * group, r.randrange(1, 40))
        batch, heads, q_len = shape
        partial_rows, kv_len = r.choice((0, 9, 400)), r.randrange(65)
        work = merges = b""
        for _ in range(r.randrange(6)):
            rows = self.rows(shape, group, wild)
            begin = self.entry(0, kv_len, wild)
            state = self.entry(-1, partial_rows - (rows[4] - rows[3]), wild)
            work += self.packed(*rows, begin, self.entry(begin, kv_len, wild), state)
        sources = [self.entry(0, partial_rows - 9, wild) for _ in range(r.choice((0, 0, 5)))]
        for _ in range(r.randrange(3) if partial_rows >= 9 else 0):
            rows, most = self.rows(shape, group, wild), len(sources) or partial_rows // 9
            splits = self.entry(1, min(most, 3), wild)
            first = self.entry(0, most - splits, wild)
            merges += self.packed(*rows, first, splits, 0)
        plan = _C.BatchPlan.of_work(
            work, kind=r.randrange(2), merge_work=merges, merge_sources=sources,
            partial_rows=partial_rows,
        )  # fmt: skip
        core = _C.BatchCall(
            plan, _C.BatchLengths.dense(batch, q_len, 64, (kv_len,) * batch),
            (self.module, self.module), num_q_heads=heads, num_kv_heads=kv_heads, head_dim=8,
            head_dim_v=8,
        )  # fmt: skip
        q = torch.ones(batch, heads, q_len, 8)
        guarded = torch.full((2 * GUARD + q.numel(),), PATTERN)
        workspace = torch.full((core.workspace_bytes + 2 * GUARD,), 77, dtype=torch.uint8)
        mask = None
        if self.chance(0.3):
            sizes = (self.entry(batch, 9, wild), heads, self.entry(40, 50, wild), 64)
            mask = (sizes, (1, 1, 1, 1), self.entry(1, 64, wild), self.entry(1, 64, wild))
        strides = (*[q.stride()[:3]] * 4, (0, 0, 0))
        call = core.bind(strides=strides, block_mask=mask)
        call.launch(
            q.data_ptr(), 8, 8, guarded[GUARD:].data_ptr(), 0, 1.0, r.randrange(1, 4),
            workspace=workspace.data_ptr() + GUARD, states=8,
        )  # fmt: skip
        ends = torch.cat([guarded[:GUARD], guarded[-GUARD:]])
        if (ends != PATTERN).any():
            raise SystemExit("hand-written work wrote outside of its result")
        if (workspace[:GUARD] != 77).any() or (workspace[-GUARD:] != 77).any():
            raise SystemExit("hand-written work wrote outside of its workspace")
        return True

    def states(self, plan: _C.BatchPlan, lengths: _C.BatchLengths, heads: int) -> torch.Tensor:
        """[tokens, heads]: how many states there are of each row."""
        count = torch.zeros(lengths.num_q_tokens, heads)
        starts = [0, *accumulate(lengths.q_len)]
        for kind in (0, 1):
            for request, head, group, begin, end, *_ in struct.iter_unpack("8i", plan.work(kind)):
                rows = torch.arange(begin, end)
                at = (starts[request] + rows // group, head + rows % group)
                count.index_put_(at, torch.ones(len(rows)), accumulate=True)
        return count

    def refused(self, core: _C.BatchCall) -> None:
        """Wrong values of a bound call raise."""
        three = (0, 8, 8)
        wrong: list[dict[str, Any]] = [
            {"strides": (three,) * 4},
            {"strides": (three, three, three, three, (1, 2))},
            {"strides": ((0, 2**63, 1), *(three,) * 4)},
            {"strides": 5},
            {"strides": (three,) * 5, "flags": 64},
            {"strides": (three,) * 5, "num_pages": -1},
            {"strides": (three,) * 5, "layouts": [((1,) * 9, (1,) * 9)]},
            {"strides": (three,) * 5, "scalar_kinds": "z"},
            {"strides": (three,) * 5, "layouts": 3},
        ]
        for arguments in wrong:
            try:
                core.bind(**arguments)
            except REFUSALS:
                continue
            raise SystemExit(f"bind took {arguments}")


def main(artifact: str, seed: str, seconds: str) -> None:
    """Fuzz for some seconds from a seed on."""
    module = _C.Module(artifact)
    end, made, refused, number = time.monotonic() + float(seconds), 0, 0, int(seed)
    while time.monotonic() < end:
        sys.stderr.write(f"seed {number}\n")
        sys.stderr.flush()
        try:
            made += Fuzz(module, number).once()
        except REFUSALS:
            refused += 1
        number += 1
    print(refused, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
