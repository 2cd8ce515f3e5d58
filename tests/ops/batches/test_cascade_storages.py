"""Cascades with ragged and paged levels: one plan a storage, merged and finalised once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc

HEADS, KV_HEADS, D, PAGE = 4, 2, 32, 4
Q_LEN = (1, 3, 20, 0, 2)
OWN = (5, 17, 30, 4, 0)
STARTS = [0, 1, 4, 24, 24, 26]
GROUPS = (((0, 2), (1,)), ((0,), (2,)))
"""The requests of the groups of each shared level: outer, inner."""
SHARED = ((24, 9), (8, 16))
"""Keys of these groups; what is nested has equally many keys before it."""


class Hooked(fa.Variant):
    """Every hook that reads a position or the request, and all that is finalised."""

    sink: Tensor = fa.tensor("num_q_heads", default=lambda dims: torch.linspace(-1, 1, 4))
    slope: float = fa.scalar(0.1)
    window: int = fa.scalar(40)

    normalizer = fa.Softmax(sink="sink")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.slope * (kv_idx - q_idx)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window + b)

    def output_mod(self, row, lse, b, h, q_idx):
        return row * torch.sigmoid(lse + h + q_idx / 100)


VARIANTS = {"hooked": Hooked(), "plain": None, "sigmoid": fa.Sigmoid() & fa.Causal()}


def ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


class Mixed:
    """A batch in the levels of `kinds` ("r" or "p", the requests' own last), and all in one."""

    def __init__(self, kinds: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.q = self.random(STARTS[-1], HEADS, D)
        self.keys: list[list[tuple[Tensor, Tensor]]] = []
        lengths = [*SHARED[: len(kinds) - 1], OWN]
        for level in lengths:
            self.keys.append(
                [(self.random(n, KV_HEADS, D), self.random(n, KV_HEADS, D)) for n in level]
            )
        ragged = [pair for kind, level in zip(kinds, self.keys, strict=True) for pair in level
                  if kind == "r"]  # fmt: skip
        paged = [pair for kind, level in zip(kinds, self.keys, strict=True) for pair in level
                 if kind == "p"]  # fmt: skip
        pairs = {"r": tuple(torch.cat([x[i] for x in ragged]) for i in (0, 1)) if ragged else ()}
        counts = [-(-k.shape[0] // PAGE) for k, _ in paged]
        order = torch.randperm(sum(counts), generator=self.generator)
        pages = [self.random(len(order), PAGE, KV_HEADS, D).mul_(0) for _ in (0, 1)]
        self.levels, first, used = [], 0, 0
        for number, (kind, level) in enumerate(zip(kinds, self.keys, strict=True)):
            sizes = [k.shape[0] for k, _ in level]
            storage: Any = fa.Ragged(ends(sizes))
            if kind == "p":
                own = [-(-n // PAGE) for n in sizes]
                for pair, n, count in zip(level, sizes, own, strict=True):
                    for key in range(n):
                        for cache, tensor in zip(pages, pair, strict=True):
                            cache[order[first + key // PAGE], key % PAGE] = tensor[key]
                    first += count
                storage = fa.Paged(
                    ends(own), order[used:first].int(),
                    torch.tensor([(n - 1) % PAGE + 1 if n else 0 for n in sizes]), PAGE,
                )  # fmt: skip
                used = first
            if number == len(kinds) - 1:
                self.levels.append(fa.CascadeLevel(torch.tensor(STARTS), storage))
                continue
            members = [[t for b in group for t in range(STARTS[b], STARTS[b + 1])]
                       for group in GROUPS[number]]  # fmt: skip
            self.levels.append(
                fa.CascadeLevel(
                    ends([len(m) for m in members]),
                    storage,
                    torch.tensor([t for m in members for t in m]),
                )
            )
        pairs["p"] = tuple(pages)
        self.pairs: list[tuple[Tensor, Tensor]] = [pairs[kind] for kind in kinds]  # type: ignore

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def options(self, target: str | None = None) -> dict[str, Any]:
        return {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": D,
                "q_dtype": self.dtype, "target": target}  # fmt: skip

    def planned(self, variant: Any, target: str | None = None, **params: Any) -> Any:
        cascade = fa.CascadeAttention(variant, **self.options(target))
        cascade.plan(self.levels, **params)
        return cascade

    def flat(self, variant: Any, target: str | None = None, **params: Any) -> Any:
        """All keys of each request, one after another: a batch without levels, and its k and v."""
        of_request: list[list[tuple[Tensor, Tensor]]] = [[] for _ in Q_LEN]
        for groups, level in zip(GROUPS, self.keys[:-1], strict=False):
            for group, pair in zip(groups, level, strict=True):
                for b in group:
                    of_request[b].append(pair)
        for b, pair in enumerate(self.keys[-1]):
            of_request[b].append(pair)
        sizes = [sum(k.shape[0] for k, _ in parts) for parts in of_request]
        k, v = (torch.cat([p[i] for parts in of_request for p in parts]) for i in (0, 1))
        batch = fa.BatchAttention(variant, **self.options(target))
        batch.plan(torch.tensor(STARTS), fa.Ragged(ends(sizes)), **params)
        return batch, k, v


def close(got: Any, wanted: Any) -> None:
    for one, other in zip(got, wanted, strict=True):
        loose = 2e-2 if one.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(one, other, rtol=loose, atol=loose)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kinds", ["rp", "pr", "rrp", "rpr", "prp", "ppr", "rpp"])
@pytest.mark.parametrize("name", VARIANTS)
def test_levels_of_two_storages(kinds: str, name: str) -> None:
    mixed, variant = Mixed(kinds), VARIANTS[name]
    cascade = mixed.planned(variant)
    batch, k, v = mixed.flat(variant)
    for partial in (False, True):
        got = cascade.run(mixed.q, mixed.pairs, partial=partial, scale=0.2)
        wanted = batch.run(mixed.q, k, v, partial=partial, scale=0.2)
        close(*(x if isinstance(x, tuple) else (x,) for x in (got, wanted)))
    if name != "sigmoid":
        got = cascade.run(mixed.q, mixed.pairs, return_lse=True)
        close(got, batch.run(mixed.q, k, v, return_lse=True))


@needs_nvcc
@pytest.mark.parametrize(
    ("kinds", "name"), rotation.turn(4, [("rp", "hooked"), ("prp", "sigmoid"), ("rpr", "plain")])
)
def test_levels_of_two_storages_on_emulated_kernels(kinds: str, name: str) -> None:
    mixed, variant = Mixed(kinds, torch.bfloat16), VARIANTS[name]
    cascade = mixed.planned(variant, "emulated:sm_80")
    batch, k, v = mixed.flat(variant)
    got, wanted = cascade.run(mixed.q, mixed.pairs), batch.run(mixed.q, k, v)
    close((got,), (wanted,))
    wide = torch.zeros(STARTS[-1], HEADS, D + 3, dtype=torch.bfloat16)
    assert torch.equal(cascade.run(mixed.q, mixed.pairs, out=wide[..., 1:-2]), got)
    assert not wide[..., 0].any() and not wide[..., -2:].any()


def test_params_of_runs_and_of_the_mask() -> None:
    mixed, variant = Mixed("rp"), Hooked()
    cascade = mixed.planned(variant, window=7)
    batch, k, v = mixed.flat(variant, window=7)
    for slope, sink in ((0.0, torch.zeros(4)), (0.5, torch.ones(4))):
        given = {"slope": slope, "sink": sink, "scale": torch.tensor(0.1)}
        close((cascade.run(mixed.q, mixed.pairs, **given),), (batch.run(mixed.q, k, v, **given),))
    with pytest.raises(fa.ParamError, match="read by its mask"):
        cascade.run(mixed.q, mixed.pairs, window=3)


def test_results_are_written_to_given_tensors() -> None:
    mixed = Mixed("prp")
    cascade = mixed.planned(Hooked())
    out, lse = cascade.run(mixed.q, mixed.pairs, return_lse=True)
    space, rows = torch.full((STARTS[-1], HEADS, D + 3), 7.0), torch.empty(HEADS, STARTS[-1]).t()
    given = space[..., 1 : D + 1]
    found = cascade.run(mixed.q, mixed.pairs, out=given, lse=rows)
    assert found[0] is given and found[1] is rows
    assert torch.equal(given, out) and torch.equal(rows, lse)
    assert (space[..., 0] == 7).all() and (space[..., D + 1 :] == 7).all()
    with pytest.raises(fa.InputError, match="out shares memory with an input"):
        cascade.run(mixed.q, mixed.pairs, out=mixed.q)
    with pytest.raises(fa.InputError, match=r"out must be \[26, 4, 32\]"):
        cascade.run(mixed.q, mixed.pairs, out=space)
    with pytest.raises(fa.InputError, match="no log-sum-exp"):
        mixed.planned(fa.Sigmoid()).run(mixed.q, mixed.pairs, return_lse=True)


def test_a_batch_without_queries() -> None:
    rows = torch.tensor([0, 0])
    cascade = fa.CascadeAttention(**Mixed("rp").options())
    own = fa.Paged(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([3]), PAGE)
    cascade.plan(
        [fa.CascadeLevel(rows, fa.Ragged(torch.tensor([0, 5]))), fa.CascadeLevel(rows, own)]
    )
    k, pages = torch.randn(5, KV_HEADS, D), torch.randn(1, PAGE, KV_HEADS, D)
    out, lse = cascade.run(k.new_empty(0, HEADS, D), [(k, k), (pages, pages)], return_lse=True)
    assert out.shape == (0, HEADS, D) and lse.shape == (0, HEADS)


def test_a_list_for_levels_of_one_storage() -> None:
    mixed = Mixed("pp")
    cascade = mixed.planned(Hooked())
    k, v = mixed.pairs[0]
    out = cascade.run(mixed.q, k, v)
    assert torch.equal(cascade.run(mixed.q, mixed.pairs), out)
    assert torch.equal(cascade.run(mixed.q, [(k, v)]), out)


def test_plans_say_what_they_are() -> None:
    mixed = Mixed("rp")
    cascade = fa.CascadeAttention(Hooked(), **mixed.options())
    plan = cascade.plan(mixed.levels)
    assert "5 requests, 26 query tokens" in repr(plan) and plan.predicted_ns > 0
    assert plan.explain().count("\n\n") >= 1 and plan.workspace_bytes >= 0
    with pytest.raises(fa.InputError, match=r"explain\(\) prints both"):
        plan.plot("plan.png")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_modes_and_graphs() -> None:
    mixed = Mixed("rp")
    cascade = mixed.planned(Hooked())
    expected = cascade.run(mixed.q, mixed.pairs, return_lse=True)

    def call(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Any:
        out, lse = cascade.run(q * 1, [(k, v), (k_pages, v_pages)], return_lse=True)
        return out + 0, lse

    tensors = (mixed.q, *mixed.pairs[0], *mixed.pairs[1])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*tensors), expected, strict=True):
        assert torch.equal(one, other)
    with torch.profiler.profile() as profile:
        found = cascade.run(mixed.q, mixed.pairs, return_lse=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert any(e.key == "flashattn_jit::batch_attention" for e in profile.key_averages())


# --- errors ---------------------------------------------------------------------------------------


def test_wrong_pairs_are_refused() -> None:
    mixed = Mixed("rpp")
    cascade = mixed.planned(Hooked())
    (k, v), pages, _ = mixed.pairs
    other = tuple(t.clone() for t in pages)
    before = cascade.run(mixed.q, mixed.pairs)
    for given, words in (
        ((mixed.q, k, v), "got 1 pairs of k and v, but 3 levels are planned, in 2 storages"),
        ((mixed.q, [(k, v), pages]), "got 2 pairs"),
        ((mixed.q, [(k, v), pages, other]), "levels 1 and 2 are both paged, but have different k"),
        ((mixed.q, [(k, v), pages, pages], v), "instead of both a list of one"),
        ((mixed.q, []), "instead of both a list of one"),
        ((mixed.q, [k, v, k]), "instead of both a list of one"),
        ((mixed.q, k), "instead of both a list of one"),
        ((mixed.q, [pages, (k, v), (k, v)]), "k is .*, but the batch is planned over ragged keys"),
        (
            (mixed.q, [(k, v), pages, (pages[0], 3)]),
            "k or v of a level must be a torch.Tensor, got int",
        ),
        ((mixed.q, [(k[:-1], v[:-1]), pages, pages]), "k has num_kv_tokens=32, but the plan's"),
    ):
        with pytest.raises(fa.InputError, match=words):
            cascade.run(*given)
    assert torch.equal(cascade.run(mixed.q, mixed.pairs), before)
    one = Mixed("pp").planned(Hooked())
    with pytest.raises(fa.InputError, match="levels 0 and 1 are both paged, but have different k"):
        one.run(mixed.q, [pages, other])


def test_wrong_levels_are_refused_and_the_plan_before_stays() -> None:
    mixed = Mixed("rp")
    cascade = mixed.planned(Hooked())
    before = cascade.run(mixed.q, mixed.pairs)
    shared, own = mixed.levels
    wrong = fa.CascadeLevel(shared.q_indptr, fa.Ragged(torch.tensor([0, 5])), shared.tokens)
    with pytest.raises(fa.InputError, match="kv_indptr of level 0 has 2 entries"):
        cascade.plan([wrong, own])
    tokens = fa.CascadeLevel(shared.q_indptr, shared.storage, shared.tokens.flip(0))  # type: ignore
    with pytest.raises(fa.InputError, match="tokens of level 0"):
        cascade.plan([tokens, own])
    assert torch.equal(cascade.run(mixed.q, mixed.pairs), before)
    limits = fa.Limits(max_requests=5, max_q_tokens=26, max_kv_len=100, max_pages=40)
    graph = fa.CascadeAttention(**mixed.options(), limits=limits, cuda_graph=True)
    with pytest.raises(fa.InputError, match="put all keys into pages of one cache"):
        graph.plan(mixed.levels)
