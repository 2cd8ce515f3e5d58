"""What a plan of appends keeps of its arguments, and what its runs accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import flashattn_jit as fa
from flashattn_jit.errors import GradError, InputError
from tests.harness.toolkit import needs_nvcc

every_target = pytest.mark.parametrize(
    "target", [None, pytest.param("emulated:sm_80", marks=needs_nvcc)], ids=["cpu", "emulated"]
)
transforms = pytest.mark.parametrize("transform", [None, fa.RoPE()], ids=["copy", "rope"])
K = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).half()


def tables() -> tuple[torch.Tensor, fa.Paged]:
    """Three requests with 6, 0 and 5 keys, of which 3, 0 and 1 are new."""
    paged = fa.Paged(
        torch.tensor([0, 2, 2, 4]), torch.tensor([5, 2, 0, 7]).int(), torch.tensor([2, 0, 1]), 4
    )
    return torch.tensor([0, 3, 3, 4]), paged


def caches(*shape: int) -> torch.Tensor:
    return torch.zeros(2, *(shape or (12, 4, 2, 8)), dtype=torch.float16)


def appended(append: fa.AppendPlan, **params: Any) -> torch.Tensor:
    cache = caches()
    append.run(K, K, *cache, **params)
    return cache


def leaked(x: torch.Tensor) -> torch.Tensor:
    """A tensor of a vmap that has ended."""
    found: list[torch.Tensor] = []

    def keep(part: torch.Tensor) -> torch.Tensor:
        found.append(part)
        return part

    torch.func.vmap(keep)(torch.stack([x, x]))
    return found[0]


@every_target
@transforms
@pytest.mark.parametrize("profiled", [False, True])
def test_tables_that_change_after_the_plan_do_not_count(target, transform, profiled) -> None:
    """Nor do they reach plans that are cached under what they became."""
    wanted = appended(fa.plan_append(*tables(), transform=transform, target=target))
    indptr, paged = tables()
    append = fa.plan_append(indptr, paged, transform=transform, target=target)
    indptr.copy_(torch.tensor([0, 2, 2, 4]))
    paged.page_indptr.copy_(torch.tensor([0, 2, 3, 5]))
    paged.last_page_len.copy_(torch.tensor([2, 1, 1]))
    paged.page_indices.fill_(2**30)
    if profiled:
        with torch.profiler.profile():
            found = appended(append)
    else:
        found = appended(append)
    assert torch.equal(found, wanted)


@every_target
def test_a_cached_plan_is_that_of_its_tables(target) -> None:
    """The first plan's tables become those of the second one before the first one runs."""
    later = fa.Paged(
        torch.tensor([0, 2, 3, 5]), torch.tensor([5, 2, 9, 0, 7]).int(), torch.tensor([2, 1, 1]), 4
    )
    indptr, paged = tables()
    first = fa.plan_append(indptr, paged, transform=fa.RoPE(), target=target)
    paged.page_indptr.copy_(later.page_indptr)
    paged.last_page_len.copy_(later.last_page_len)
    wanted = appended(first)  # with pages 0 and 7 of request 2 as entries 2 and 3
    second = fa.plan_append(indptr, later, transform=fa.RoPE(), target=target)
    assert torch.equal(appended(second), wanted)


@every_target
@transforms
def test_dims_of_one_entry_have_any_stride(target, transform) -> None:
    """Heads, tokens and pages of one entry, with strides that overflow when they are multiplied."""
    far = 2**62
    k = torch.as_strided(K[0, 0], (1, 1, 8), (far, far, 1))
    memory = caches(1, 4, 1, 8)
    given = [torch.as_strided(t, (1, 4, 1, 8), (far, 8, far, 1)) for t in memory]
    paged = fa.Paged(torch.tensor([0, 1]), torch.tensor([0]).int(), torch.tensor([3]), 4)
    append = fa.plan_append(torch.tensor([0, 1]), paged, transform=transform, target=target)
    append.run(k, k, *given)
    wanted = caches(1, 4, 1, 8)
    append.run(k.clone(), k.clone(), *wanted)
    assert torch.equal(memory, wanted) and wanted[:, 0, 2].any()


@every_target
@pytest.mark.parametrize("changes", [False, True])
def test_rows_of_one_entry_have_any_stride(target, changes) -> None:
    k = torch.as_strided(K, (4, 2, 1), (10, 5, 3))
    transform = fa.variant(key_mod=lambda row, b, h, i: 2 * row) if changes else None
    memory = torch.zeros(2, 12, 4, 2, 3, dtype=torch.float16)
    cache = torch.as_strided(memory, (2, 12, 4, 2, 1), (288, 24, 6, 3, 3))
    wanted = caches(12, 4, 2, 1)
    append = fa.plan_append(*tables(), transform=transform, target=target)
    append.run(k, k, *cache)
    append.run(k.contiguous(), k.contiguous(), *wanted)
    assert torch.equal(cache, wanted) and wanted[0, 5, 3, 0, 0] == (1 + changes) * k[0, 0, 0]
    assert not memory[..., 1:].any()


class Ones(TorchFunctionMode):
    """Makes what factories make wrong."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made + 1 if func in (torch.zeros, torch.empty, torch.tensor, torch.arange) else made


@every_target
@transforms
@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), Ones], ids=["device", "function"])
@pytest.mark.parametrize("placed", [False, True])
def test_default_devices_and_function_modes_do_not_count(target, transform, mode, placed) -> None:
    indptr, paged = tables()
    positions = torch.tensor([5, 0, 1, 3]) if placed else None
    options: dict[str, Any] = {"positions": positions, "transform": transform, "target": target}
    wanted, found, once = caches(), caches(), caches()
    fa.append_paged_kv(K, K, *wanted, indptr, paged, **options)
    with mode():
        fa.plan_append(indptr, paged, **options).run(K, K, found[0], found[1])
        fa.append_paged_kv(K, K, once[0], once[1], indptr, paged, **options)
    assert torch.equal(found, wanted) and torch.equal(once, wanted)


@every_target
def test_rows_of_the_packed_k_in_a_transform(target) -> None:
    """fa.q_row finds a token by its key, which `positions` changes."""
    scales = torch.tensor([2.0, 3.0, 5.0, 7.0])
    transform = fa.variant(key_mod=lambda row, b, h, i: row * scales[fa.q_row(b, i)])
    append = fa.plan_append(*tables(), transform=transform, target=target)
    found = appended(append)[0]
    for token, at in enumerate([(5, 3), (2, 0), (2, 1), (7, 0)]):
        assert torch.allclose(found[at], K[token] * scales[token], rtol=1e-3)
    placed = fa.plan_append(
        *tables(), transform=transform, positions=torch.tensor([5, 0, 1, 3]), target=target
    )
    cache = caches()
    with pytest.raises(InputError, match=r"reads fa\.q_row.*index by kv_idx"):
        placed.run(K, K, *cache)
    assert not cache.any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, on first use
@transforms
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("profiled", [False, True])
def test_tangents_are_refused_in_every_run(transform, which, profiled) -> None:
    append = fa.plan_append(*tables(), transform=transform)
    given = [K, K.clone(), *caches()]
    append.run(*given)
    given[2].zero_()
    with forward_ad.dual_level():
        append.run(*given)
        given[2].zero_()
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        with pytest.raises(GradError, match="forward-mode tangent"):
            if profiled:
                with torch.profiler.profile():
                    append.run(*given)
            else:
                append.run(*given)
    assert not given[2].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, on first use
@transforms
def test_functional_derivatives_are_refused(transform) -> None:
    """Also where the rows alone are written and the function's result is another."""
    append, cache, k = fa.plan_append(*tables(), transform=transform), caches(), K.float()
    cache = cache.float()

    def both(x: torch.Tensor) -> torch.Tensor:
        append.run(x, k, *cache)
        return x.sum()

    def once(x: torch.Tensor) -> torch.Tensor:
        fa.append_paged_kv(k, x, *cache, *tables(), transform=transform)
        return x.sum()

    for run in (both, once):
        with pytest.raises((GradError, InputError)):
            torch.func.jvp(run, (k,), (k,))
        with pytest.raises((GradError, InputError)):
            torch.func.grad(run)(k)
    assert not cache.any()


def test_tables_that_are_lazy_views_or_hold_no_values() -> None:
    indptr, paged = tables()
    lazy = fa.Paged(
        torch._neg_view(-paged.page_indptr), torch._neg_view(-paged.page_indices),
        torch._neg_view(-paged.last_page_len), 4,
    )  # fmt: skip
    positions = torch.tensor([5, 0, 1, 3])
    for one, other in ((None, None), (positions, torch._neg_view(-positions))):
        wanted = appended(fa.plan_append(indptr, paged, positions=one))
        given = torch._neg_view(-indptr)
        assert torch.equal(appended(fa.plan_append(given, lazy, positions=other)), wanted)
    empty = fa.Paged(paged.page_indptr, paged.page_indices.to("meta"), paged.last_page_len, 4)
    with pytest.raises(InputError, match="device"):
        fa.plan_append(indptr, empty)


def test_gradients_are_refused_in_every_run() -> None:
    append = fa.plan_append(*tables(), transform=fa.RoPE())
    k, cache = K.clone().requires_grad_(), caches()
    with torch.no_grad():
        append.run(k, k, *cache)
    with pytest.raises(GradError):
        append.run(k, k, *cache)


@transforms
@pytest.mark.parametrize(
    "name", ["k", "pages", "q_indptr", "page_indices", "positions", "captured"]
)
def test_tensors_that_left_their_vmap(transform, name) -> None:
    indptr, paged = tables()
    k, cache, positions = K, list(caches()), None
    with pytest.raises(InputError, match=r"torch\.vmap"):
        if name == "k":
            k = leaked(K)
        elif name == "pages":
            cache[1] = leaked(cache[1])
        elif name == "q_indptr":
            indptr = leaked(indptr)
        elif name == "page_indices":
            indices = leaked(paged.page_indices)
            paged = fa.Paged(paged.page_indptr, indices, paged.last_page_len, 4)
        elif name == "positions":
            positions = leaked(torch.tensor([5, 0, 1, 3]))
        else:
            weight = leaked(torch.ones(8))
            transform = fa.variant(key_mod=lambda row, b, h, i: row * weight)
        append = fa.plan_append(indptr, paged, transform=transform, positions=positions)
        append.run(k, K, *cache)


def test_a_param_may_be_called_self() -> None:
    class Scaled(fa.Variant):
        self: float = fa.scalar(2.0)

        def key_mod(this, row, b, kv_h, kv_idx):  # type: ignore[no-untyped-def]
            return row * this.self

    found = appended(fa.plan_append(*tables(), transform=Scaled()), self=3.0)
    assert torch.equal(found[0, 7, 0], K[3] * 3)
