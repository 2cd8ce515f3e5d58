"""Random calls, each computed a second time by the oracle.

A run is a seed; it has parts, and a part has `KERNELS` choices of variant, dtype, head dims, target
and form, each of which needs a kernel for many rows and one for few. Calls of a part cycle through
them. `python -m tests.random.calls SEED PART NUMBER TARGET` repeats one call.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.inspect.verification.error import errors_of_draw
from flashattn_jit.variants.reference import HookFunctions
from tests.batch.batches import Batch, indptr, share_prefix
from tests.batch.sparse import Visited, blocks, flat_bits, tokens, trees
from tests.ops.cases import EPS, HOST_TARGETS, rms
from tests.random.meanings import (
    POINTWISE,
    READS_REQUEST,
    VARIANTS,
    Meaning,
    Sizes,
    composed,
    rope,
)
from tests.random.oracle import Answer, answer

KERNELS = 5
FORMS = {
    "direct": ("dense", "dense", "packed", "ragged"),
    "indirect": ("paged", "paged", "block_sparse", "token_sparse", "cascade"),
    "tree": ("tree",),
    "packed_tree": ("packed_tree",),
    "block_bits": ("block_sparse_bits",),
    "bits": ("bits",),
}
"""Forms, each with its own kernels, and the kinds of calls that take them."""

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (
    (32, 32),
    (64, 64),
    (16, 16),
    (40, 24),
    (20, 36),
    (6, 5),
    (64, 32),
    (33, 17),
    (128, 128),
)
ROWS = (0, 1, 1, 1, 2, 3, 7, 16, 33, 70, 97, 130)
KEYS = (0, 1, 2, 15, 16, 17, 48, 95, 96, 97, 128, 131, 200)
LONG = (1500, 4097)  # keys that are split over threads
OFFSETS = (-1000, -40, -1, 0, 5, 64, 300)


@dataclass(frozen=True, slots=True)
class Answers:
    """In fp64, in the call's dtype, and in fp64 with each element of q moved by an fp32 ulp and
    each `fa.tanh_approx` by its error."""

    exact: Answer
    eager: Answer
    moved: Callable[[], Answer]


@dataclass(frozen=True, slots=True)
class Choice:
    """What decides the kernels of a call."""

    parts: tuple[Callable[..., Any], ...]
    dtype: torch.dtype
    dims: tuple[int, int]
    form: str
    target: str

    def __str__(self) -> str:
        names = " & ".join(p.__name__ for p in self.parts)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{names}, {dtype}, head dims {self.dims}, {self.form}, {self.target}"


def choices(seed: int, part: int) -> list[Choice]:
    """The choices of a part."""
    r = random.Random(f"{seed}/{part}")
    found = []
    for n, parts in enumerate(r.sample(VARIANTS, KERNELS)):
        dims = r.choice([d for d in HEAD_DIMS if rope not in parts or d[0] % 2 == 0])
        form = r.choices(tuple(FORMS), (15, 12, 1, 1, 2, 1))[0]
        target = HOST_TARGETS[(seed + part + n) % len(HOST_TARGETS)]
        found.append(Choice(parts, r.choice(DTYPES), dims, form, target))
    return found


def repeat(seed: int, part: int, number: int, target: str = "") -> None:
    """Runs one call of a part, on `target` instead of the choice's own where it is given.

    Raises an AssertionError with the command that repeats the call.
    """
    choice = choices(seed, part)[number % KERNELS]
    own = target or choice.target
    threads = torch.get_num_threads()
    call = Call(choice, own, random.Random(f"{seed}/{part}/{number}"))
    try:
        call.run()
    except Exception as error:
        raise AssertionError(
            f"{type(error).__name__}: {error}\n{choice}: {call.words}\n"
            f"repeat: python -m tests.random.calls {seed} {part} {number} {own}"
        ) from error
    finally:
        torch.set_num_threads(threads)


class Call:
    """One random call."""

    def __init__(self, choice: Choice, target: str, r: random.Random) -> None:
        self.choice, self.target, self.r = choice, target, r
        self.words = ""
        self.scale = r.choice((None, None, r.uniform(0.05, 0.4)))
        self.partial = r.random() < 0.15
        self.pointwise = bool(POINTWISE & {*choice.parts})
        self.return_lse = not self.pointwise and r.random() < 0.7
        self.num_kv_heads = r.choice((1, 1, 2, 3))
        self.num_q_heads = self.num_kv_heads * r.choice((1, 1, 2, 3, 4, 5, 7, 8))
        self.long = r.random() < 0.03

    def run(self) -> None:
        """Makes the call and compares its results with the oracle's."""
        r = self.r
        threads = r.choice((1, 2, 4))
        torch.set_num_threads(threads)
        kind = r.choice(FORMS[self.choice.form])
        if kind == "cascade" and READS_REQUEST & {*self.choice.parts}:
            kind = "paged"
        self.words = f"{kind}, {threads} threads, scale {self.scale}, partial {self.partial}"
        if kind == "dense":
            self._dense()
        elif kind == "packed":
            self._packed()
        else:
            self._batch(kind)

    # --- kinds of calls -----------------------------------------------------------------------

    def _dense(self) -> None:
        r, (dim, dim_v) = self.r, self.choice.dims
        batch, (q_len, kv_len) = r.choice((1, 2, 3)), self._lengths()
        variant, what = self._variant(batch)
        q = self._normal(batch, self.num_q_heads, q_len, dim)
        k = self._normal(batch, self.num_kv_heads, kv_len, dim)
        v = self._normal(batch, self.num_kv_heads, kv_len, dim_v)
        if r.random() < 0.2 and batch > 1:
            k, v = (x[:1].expand_as(x) for x in (k, v))
        lens = [kv_len] * batch
        options: dict[str, Any] = {}
        if r.random() < 0.4:
            lens = [r.choice((0, kv_len, r.randint(0, kv_len))) for _ in range(batch)]
            options["kv_len"] = torch.tensor(lens, dtype=r.choice((torch.int32, torch.int64)))
        given, starts = self._offsets([q_len] * batch, lens, (0, "end", "int", "tensor"))
        self.words += f", batch {batch}, heads {self.num_q_heads}/{self.num_kv_heads}"
        self.words += f", q_len {q_len}, kv_len {lens} of {kv_len}, q_offset {given}"
        answers = [
            self._answers(what, b, q[b].transpose(0, 1), k[b, :, :n].transpose(0, 1),
                          v[b, :, :n].transpose(0, 1), starts[b], None)
            for b, n in enumerate(lens)
        ]  # fmt: skip
        # Keys that no row may read are NaN: past kv_len, and in k those that the mask hides.
        k, v = k.clone(), v.clone()
        for b, n in enumerate(lens):
            k[b, :, n:], v[b, :, n:] = math.nan, math.nan
            if what.keep:
                k[b, :, :n][self._hidden(what, b, q_len, n, starts[b])] = math.nan
        shape = (batch, self.num_q_heads, q_len, dim_v)
        got = fa.attention(
            *(self._laid_out(x) for x in (q, k, v)), variant, q_offset=given, **options,
            **self._options(shape),
        )  # fmt: skip
        out, lse = got if isinstance(got, tuple) else (got, None)
        self._check(
            [x.transpose(0, 1) for x in out],
            None if lse is None else [x.transpose(0, 1) for x in lse], answers,
        )  # fmt: skip

    def _packed(self) -> None:
        r, (dim, dim_v) = self.r, self.choice.dims
        q_lens, kv_lens = self._many_lengths()
        variant, what = self._variant(len(q_lens))
        q = self._normal(sum(q_lens), self.num_q_heads, dim)
        k = self._normal(sum(kv_lens), self.num_kv_heads, dim)
        v = self._normal(sum(kv_lens), self.num_kv_heads, dim_v)
        given, starts = self._offsets(q_lens, kv_lens, ("end", "end", "int", "tensor"))
        self._describe(q_lens, kv_lens, given)
        keys = list(zip(k.split(kv_lens), v.split(kv_lens), strict=True))
        answers = [
            self._answers(what, b, part, *keys[b], starts[b], None)
            for b, part in enumerate(q.split(q_lens))
        ]
        options = {} if r.random() < 0.5 else {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens)}
        got = fa.varlen_attention(
            *(self._laid_out(x) for x in (q, k, v)), indptr(q_lens), indptr(kv_lens), variant,
            q_offset=given, **options, **self._options((len(q), self.num_q_heads, dim_v)),
        )  # fmt: skip
        out, lse = got if isinstance(got, tuple) else (got, None)
        self._check(out.split(q_lens), None if lse is None else lse.split(q_lens), answers)

    def _batch(self, kind: str) -> None:
        r, (dim, dim_v) = self.r, self.choice.dims
        q_lens, kv_lens = self._many_lengths()
        if kind == "token_sparse":
            q_lens = [min(n, 7) for n in q_lens]
        if kind.endswith("tree"):
            q_lens = [min(n, 40) for n in q_lens]
            kv_lens = [max(n, m) for n, m in zip(q_lens, kv_lens, strict=True)]
        packed = kind in ("ragged", "packed_tree") or "sparse" in kind and r.random() < 0.3
        page = 0 if packed else r.choice((1, 4, 16))
        if kind == "cascade":
            kv_lens = [n + 16 for n in kv_lens]
        batch = Batch(
            tuple(q_lens), tuple(kv_lens), (self.num_q_heads, self.num_kv_heads), dim,
            self.choice.dtype, page, r.choice(("pages", "heads first", "mixed", "layers")), dim_v,
            r.randrange(2**31),
        )  # fmt: skip
        if kind == "cascade":
            share_prefix(batch, 16)
        kinds = ("end",) if kind.endswith("tree") else ("end", "end", "tensor")
        given, starts = self._offsets(q_lens, kv_lens, kinds)
        visited = self._visited(kind, batch)
        self._describe(q_lens, kv_lens, given)
        self.words += f", page size {page}, layout {batch.layout}"
        variant, what = self._variant(len(q_lens))
        answers = [
            self._answers(what, b, part, *batch.keys(b), starts[b],
                          visited.pairs[b] if visited else None)
            for b, part in enumerate(batch.q.split(q_lens))
        ]  # fmt: skip
        options = {**batch.options(), "target": self.target}
        if kind == "cascade":
            made: Any = fa.CascadeAttention(variant, **options)
            made.plan(fa.cascade_levels(batch.q_indptr, batch.storage), q_offset=given)
        else:
            made = fa.BatchAttention(variant, **options)
            made.plan(
                batch.q_indptr, batch.storage, q_offset=given,
                sparsity=visited.sparsity if visited else None,
            )  # fmt: skip
        run = self._options((len(batch.q), self.num_q_heads, dim_v))
        run.pop("target")
        for _ in range(r.choice((1, 1, 2))):
            got = made.run(batch.q, batch.k, batch.v, **run)
        out, lse = got if isinstance(got, tuple) else (got, None)
        self._check(out.split(q_lens), None if lse is None else lse.split(q_lens), answers)

    def _visited(self, kind: str, batch: Batch) -> Visited | None:
        r = self.r
        seed, per_head = r.randrange(2**31), r.random() < 0.5
        if kind in ("block_sparse", "block_sparse_bits"):
            size = (r.choice((1, 16, 20)), r.choice((4, 16, 33)))
            return blocks(batch, size, r.random(), per_head, kind.endswith("bits"), seed)
        if kind == "token_sparse":
            return tokens(batch, r.choice((1, 9, 40)), per_head, seed)
        if kind == "bits":
            return flat_bits(batch, seed, per_head)  # packed in half of the calls
        return trees(batch, seed) if kind.endswith("tree") else None

    # --- parts of calls -----------------------------------------------------------------------

    def _lengths(self) -> tuple[int, int]:
        if self.long:
            self.num_q_heads = min(self.num_q_heads, 8)
            self.num_kv_heads = math.gcd(self.num_q_heads, self.num_kv_heads)
            return self.r.choice((1, 2, 5)), self.r.choice(LONG)
        return self.r.choice(ROWS), self.r.choice(KEYS)

    def _many_lengths(self) -> tuple[list[int], list[int]]:
        pairs = [self._lengths() for _ in range(1 if self.long else self.r.choice((1, 2, 3, 5)))]
        return [n for n, _ in pairs], [n for _, n in pairs]

    def _offsets(
        self, q_lens: list[int], kv_lens: list[int], kinds: tuple[Any, ...]
    ) -> tuple[Any, list[int]]:
        """(q_offset as given, the position of each request's first row)."""
        kind = self.r.choice(kinds)
        ends = [m - n for n, m in zip(q_lens, kv_lens, strict=True)]
        if kind == "end":
            return kind, ends
        if kind == 0:
            return 0, [0] * len(q_lens)
        if kind == "int":
            offset = self.r.choice(OFFSETS)
            return offset, [offset] * len(q_lens)
        starts = [self.r.choice(OFFSETS) for _ in q_lens]
        return torch.tensor(starts, dtype=self.r.choice((torch.int32, torch.int64))), starts

    def _variant(self, batch: int) -> tuple[Any, Meaning]:
        positions = 4800 if self.long else 480
        return composed(
            self.choice.parts,
            Sizes(batch, self.num_q_heads, self.num_kv_heads, *self.choice.dims, positions), self.r,
        )  # fmt: skip

    def _normal(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.r.randrange(2**31))
        return torch.randn(shape, generator=generator).to(self.choice.dtype)

    def _laid_out(self, x: Tensor) -> Tensor:
        """The same values in another memory layout, or with NaN around them."""
        layout = self.r.choice(("plain", "plain", "swapped", "padded", "padded"))
        if layout == "swapped":
            return x.transpose(-3, -2).contiguous().transpose(-3, -2)
        if layout == "plain":
            return x
        before, after = self.r.choice(((0, 8), (3, 2), (16, 0)))
        room = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + before + after), math.nan)
        view = room[..., 1:, before : before + x.shape[-1]]
        return view.copy_(x)

    def _options(self, shape: tuple[int, ...]) -> dict[str, Any]:
        options: dict[str, Any] = {
            "scale": self.scale, "return_lse": self.return_lse, "partial": self.partial,
            "target": self.target,
        }  # fmt: skip
        if self.r.random() < 0.15:
            dtype = torch.float32 if self.partial else self.choice.dtype
            options["out"] = torch.full(shape, math.nan, dtype=dtype)
        return options

    def _hidden(self, what: Meaning, b: int, q_len: int, kv_len: int, start: int) -> Tensor:
        """bool [Hkv, kv_len]: keys that no row of the kv head's group sees."""
        assert what.keep is not None
        i, heads = torch.arange(q_len) + start, torch.arange(self.num_q_heads)[:, None, None]
        kept = what.keep(b, heads, i[:, None], torch.arange(kv_len))
        kept = kept.expand(self.num_q_heads, q_len, kv_len).any(1)
        return ~kept.unflatten(0, (self.num_kv_heads, -1)).any(1)

    def _describe(self, q_lens: list[int], kv_lens: list[int], offset: Any) -> None:
        self.words += f", heads {self.num_q_heads}/{self.num_kv_heads}"
        self.words += f", q_len {q_lens}, kv_len {kv_lens}, q_offset {offset}"

    # --- expected results ---------------------------------------------------------------------

    def _answers(
        self, what: Meaning, b: int, q: Tensor, k: Tensor, v: Tensor, start: int,
        visited: Tensor | None,
    ) -> Answers:  # fmt: skip
        i = torch.arange(len(q)) + start

        def of(q: Tensor, dtype: torch.dtype) -> Answer:
            return answer(what, b, q, k, v, i, self.scale, visited, self.partial, dtype)

        def moved() -> Answer:
            signs = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).sign()
            with HookFunctions(errors_of_draw(0)):
                return of(q.double() * (1 + EPS[torch.float32] * signs), torch.float64)

        return Answers(of(q, torch.float64), of(q, self.choice.dtype), moved)

    def _check(self, outs: Any, lses: Any, answers: list[Answers]) -> None:
        """RMS against fp64 at most 1.5 times that of the eager answer plus half an ulp.

        The RMS of few rows is noisy: the factor grows from 1.5 to 3 for one row, and two fp32
        roundings of the sum of absolute terms are allowed as well. So is, times the factor, what
        moving each element of q by an fp32 ulp, and `fa.tanh_approx` by its error, changes: a small
        score is the sum of large terms,
        and a normaliser such as a square passes its relative error on, of which the eager answer of
        a few keys may by chance have little.
        """
        out = torch.cat([x.flatten() for x in outs])
        exact = torch.cat([x.exact.out.flatten() for x in answers]).double()
        eager = torch.cat([x.eager.out.flatten() for x in answers]).double()
        size = torch.cat([x.exact.size.flatten() for x in answers]).double()
        dtype = torch.float32 if self.partial else self.choice.dtype
        assert out.dtype == dtype, f"out is {out.dtype}"
        assert torch.isfinite(out).all(), f"out has NaN or infinity in {_bad(outs)}"
        rows = max(out.numel() // self.choice.dims[1], 1)
        factor = 1.5 * (1 + 1 / math.sqrt(rows))
        allowed = (
            factor * rms(eager - exact)
            + EPS[dtype] * rms(exact)
            + 2 * EPS[torch.float32] * (rms(size))
        )
        error = rms(out.double() - exact)
        if error > allowed:
            moved = torch.cat([x.moved().out.flatten() for x in answers])
            allowed += factor * rms(moved - exact)
        assert error <= allowed, f"RMS {error:.3g}, allowed {allowed:.3g}, of {rows} rows"
        self._check_lse(lses, answers)

    def _check_lse(self, lses: Any, answers: list[Answers]) -> None:
        wanted = self.return_lse or self.partial and not self.pointwise
        assert (lses is not None) == wanted
        if not wanted:
            return
        lse = torch.cat([x.flatten() for x in lses])
        exact = torch.cat([x.exact.lse.flatten() for x in answers])
        eager = torch.cat([x.eager.lse.flatten() for x in answers]).double()
        assert lse.dtype == torch.float32
        good = torch.isfinite(exact)
        assert torch.equal(lse[~good].double(), exact[~good]), "lse of rows without keys"
        off = (lse.double() - exact)[good].abs()
        allowed = 2e-5 * (1 + exact[good].abs()) + 3 * _largest((eager - exact)[good])
        if (off > allowed).any():
            moved = torch.cat([x.moved().lse.flatten() for x in answers])
            allowed += 1.5 * _largest((moved - exact)[good])
        assert (off <= allowed).all(), f"lse is off by {off.max():.3g}"


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _bad(outs: Any) -> str:
    return ", ".join(f"request {b}" for b, x in enumerate(outs) if not torch.isfinite(x).all())


if __name__ == "__main__":
    seed, part, number = map(int, sys.argv[1:4])
    repeat(seed, part, number, *sys.argv[4:5])
