"""`transform=` of appends: key_mod and value_mod change new rows on their way into pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import GradError, InputError, ParamError
from flashattn_jit.jit.module import default
from flashattn_jit.variants.library.rope import rope_tables
from tests.harness.toolkit import needs_nvcc

every_target = pytest.mark.parametrize(
    ("target", "dtype"),
    [(None, torch.float32), (None, torch.bfloat16), (None, torch.float16),
     pytest.param("emulated:sm_80", torch.bfloat16, marks=needs_nvcc),
     pytest.param("emulated:sm_75", torch.float16, marks=needs_nvcc)],
    ids=["fp32", "bf16", "fp16", "sm_80", "sm_75"],
)  # fmt: skip
EPS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}

INDPTR = torch.tensor([0, 3, 3, 4])
KEYS = [(0, 3), (0, 4), (0, 5), (2, 4)]  # request and key of each new token
PAGES = fa.Paged(
    torch.tensor([0, 2, 2, 4]), torch.tensor([5, 2, 0, 7]).int(), torch.tensor([2, 0, 1]), 4
)


def slot(request: int, key: int) -> tuple[int, int]:
    entry = int(PAGES.page_indptr[request]) + key // 4
    return int(PAGES.page_indices[entry]), key % 4


def rows(dtype: torch.dtype, heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, heads, dim, generator=generator).to(dtype)


def check(cache: torch.Tensor, wanted: Any) -> None:
    """The cache [12, 4, heads, dim] has wanted(token, request, key) [heads, dim], and no more."""
    rest = cache.clone()
    for token, (request, key) in enumerate(KEYS):
        at = slot(request, key)
        expected = wanted(token, request, key)
        error = (cache[at].double() - expected).abs()
        assert (error <= EPS[cache.dtype] * (1 + expected.abs())).all(), (token, error.max())
        rest[at] = 0
    assert not rest.any()


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight.double()


def rotated(
    x: torch.Tensor, position: int | torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """x [..., heads, dim] at one position, or at those of tokens [tokens]."""
    tables = rope_tables(x.shape[-1], int(torch.as_tensor(position).max()) + 1)
    cos, sin = (t[position].double().unsqueeze(-2) for t in tables)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.by_turns(3)
@every_target
@pytest.mark.parametrize(
    ("heads", "dim", "dim_v"), [(1, 64, 64), (3, 10, 7), (5, 128, 40), (2, 576, 512)]
)
def test_a_norm_and_a_rotation_of_keys(target, dtype, heads, dim, dim_v) -> None:
    """Heads that do not fill warps, rows that do not fill vectors; values are copied."""
    k, v, weight = rows(dtype, heads, dim), rows(dtype, heads, dim_v, 1), torch.rand(dim) + 0.5
    k_pages = torch.zeros(12, 4, heads, dim, dtype=dtype)
    v_pages = torch.zeros(12, 4, heads, dim_v, dtype=dtype)
    variant = fa.QKNorm() & fa.RoPE() & fa.Causal()  # the mask plays no part
    append = fa.plan_append(INDPTR, PAGES, transform=variant, target=target)
    append.run(k, v, k_pages, v_pages, k_weight=weight)

    check(k_pages, lambda token, request, key: rotated(normed(k[token], weight), key))
    check(v_pages, lambda token, request, key: v[token].double())
    for token, (request, key) in enumerate(KEYS):
        assert torch.equal(v_pages[slot(request, key)], v[token])


@every_target
def test_hooks_see_request_head_key_slot_and_lengths(target, dtype) -> None:
    """Values alone change; the tensor param has a slot for each row of the cache."""
    scales = torch.rand(12 * 4) + 0.5

    def value_mod(row: Any, b: Any, kv_h: Any, kv_idx: Any) -> Any:
        return row * scales[fa.kv_slot(b, kv_idx)] + b + 2 * kv_h + kv_idx + fa.kv_len(b)

    k, v = rows(dtype, 2, 16), rows(dtype, 2, 24, 1)
    k_pages, v_pages = (torch.zeros(12, 4, 2, n, dtype=dtype) for n in (16, 24))
    transform = fa.variant(value_mod=value_mod)
    fa.append_paged_kv(k, v, k_pages, v_pages, INDPTR, PAGES, transform=transform, target=target)

    def expected(token: int, request: int, key: int) -> torch.Tensor:
        page, at = slot(request, key)
        lengths = (6, 0, 5)
        shift = request + 2 * torch.arange(2)[:, None] + key + lengths[request]
        return v[token].double() * scales[4 * page + at].double() + shift

    check(v_pages, expected)
    check(k_pages, lambda token, request, key: k[token].double())


@every_target
def test_positions_and_strides(target, dtype) -> None:
    """Keys by their positions, into pages with layers inside, from rows of a packed qkv."""
    memory = torch.zeros(12, 3, 2, 4, 2, 8, dtype=dtype)
    qkv = torch.randn(4, 9, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    k, v = qkv[:, 3:5], qkv[:, 6:8]
    keys = [5, 0, 1, 3]
    append = fa.plan_append(
        INDPTR, PAGES, positions=torch.tensor(keys), target=target,
        transform=fa.RoPE(interleaved=True),
    )  # fmt: skip
    append.run(k, v, memory[:, 1, 0], memory[:, 1, 1])
    for token, key in enumerate(keys):
        at = slot(0 if token < 3 else 2, key)
        wanted = rotated(k[token].double(), key, interleaved=True)
        error = (memory[at[0], 1, 0, at[1]].double() - wanted).abs().max()
        assert error <= EPS[dtype] * (1 + wanted.abs().max())
        assert torch.equal(memory[at[0], 1, 1, at[1]], v[token])
    assert int((memory != 0).any(-1).sum()) == 4 * 2 * 2


def test_attention_over_changed_pages_equals_attention_that_changes_them() -> None:
    variant = fa.QKNorm() & fa.RoPE() & fa.Causal()
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(11, 2, 32, generator=generator) for _ in range(2))
    q = torch.randn(4, 4, 32, generator=generator)
    weight = torch.rand(32, generator=generator) + 0.5
    everything = torch.tensor([0, 6, 6, 11])
    raw, stored = (torch.zeros(2, 12, 4, 2, 32) for _ in range(2))
    fa.append_paged_kv(k, v, *raw, everything, PAGES)
    fa.plan_append(everything, PAGES, transform=variant).run(k, v, *stored, k_weight=weight)
    outs = []
    for own, pages in ((variant, raw), (variant.without("key_mod"), stored)):
        batch = fa.BatchAttention(
            own, num_q_heads=4, num_kv_heads=2, head_dim=32, q_dtype=torch.float32,
            kv_dtype=torch.float32,
        )  # fmt: skip
        batch.plan(INDPTR, PAGES)
        outs.append(batch.run(q, *pages, q_weight=weight, **(
            {"k_weight": weight} if own is variant else {})))  # fmt: skip
    assert torch.allclose(outs[0], outs[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(raw[0], stored[0])


def test_new_values_of_params_compile_nothing_and_threads_change_no_bit() -> None:
    class Scaled(fa.Variant):
        factor: float = fa.scalar(2.0)

        def key_mod(self, row: Any, b: Any, kv_h: Any, kv_idx: Any) -> Any:
            return row * self.factor / row.abs().amax()

    k = torch.randn(600, 2, 48, generator=torch.Generator().manual_seed(4))
    paged = fa.Paged(torch.tensor([0, 150]), torch.randperm(150).int(), torch.tensor([4]), 4)
    append = fa.plan_append(torch.tensor([0, 600]), paged, transform=Scaled())
    found, threads = [], torch.get_num_threads()
    append.run(k, k, *torch.zeros(2, 150, 4, 2, 48))
    before = default.counters.compiles
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            cache = torch.zeros(2, 150, 4, 2, 48)
            append.run(k, k, *cache, factor=3.0)
            found.append(cache)
    finally:
        torch.set_num_threads(threads)
    assert default.counters.compiles == before
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.allclose(found[0][0].abs().amax(-1), torch.tensor(3.0))


@needs_nvcc
def test_an_unchecked_page_that_is_not_there_is_left_out(monkeypatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "0")
    indices = torch.tensor([5, -1, 0, 12]).int()
    paged = fa.Paged(PAGES.page_indptr, indices, PAGES.last_page_len, 4)
    k = rows(torch.float16, 2, 8)
    cache = torch.zeros(2, 12, 4, 2, 8, dtype=torch.float16)
    fa.append_paged_kv(k, k, *cache, INDPTR, paged, transform=fa.RoPE(), target="emulated:sm_80")
    assert int((cache != 0).any(-1).sum()) == 2 * 2  # key 3 of request 0 alone


def caches(dim: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(2, 12, 4, 2, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda row, b, h, i: row, r"transform must be an fa\.Variant, got function; wrap"),
        (fa.RoPE, r"transform must be an fa\.Variant, got function"),
        (fa.Causal(), "transform=Causal has neither a key_mod nor a value_mod"),
    ],
)
def test_what_is_no_transform(transform, message) -> None:
    with pytest.raises(InputError, match=message):
        fa.plan_append(INDPTR, PAGES, transform=transform)


def test_rows_that_cannot_be_changed() -> None:
    append = fa.plan_append(INDPTR, PAGES, transform=fa.RoPE())
    k = torch.zeros(4, 2, 8, dtype=torch.int8)
    with pytest.raises(InputError, match="k and v are int8 and int8; a transform changes rows of"):
        append.run(k, k, *caches(dtype=torch.int8))
    k = torch.zeros(4, 2, 578)
    with pytest.raises(InputError, match="k has rows of 578; a transform changes rows of 1 to 576"):
        append.run(k, k, *caches(578))
    emulated = fa.plan_append(INDPTR, PAGES, transform=fa.RoPE(), target="emulated:sm_80")
    k = torch.zeros(4, 2, 8)
    with pytest.raises(InputError, match="on CUDA of one dtype"):
        emulated.run(k, k, *caches())


def test_params_that_are_wrong_write_nothing() -> None:
    k, cache = torch.ones(4, 2, 8), caches()
    plain = fa.plan_append(INDPTR, PAGES)
    with pytest.raises(ParamError, match="params eps are a transform's, but there is none"):
        plain.run(k, k, *cache, eps=1.0)
    append = fa.plan_append(INDPTR, PAGES, transform=fa.QKNorm())
    with pytest.raises(ParamError, match="epsilon"):
        append.run(k, k, *cache, epsilon=1.0)
    with pytest.raises(ParamError, match="k_weight"):
        append.run(k, k, *cache, k_weight=torch.ones(9))
    with pytest.raises(GradError):
        append.run(k, k, *cache, k_weight=torch.ones(8, requires_grad=True))
    assert not cache.any()
    none = fa.plan_append(torch.tensor([0, 0, 0, 0]), PAGES, transform=fa.QKNorm())
    none.run(k[:0], k[:0], *cache)
    assert not cache.any()


def test_modes_and_compilers_are_refused_and_a_profiler_is_not() -> None:
    append = fa.plan_append(INDPTR, PAGES, transform=fa.RoPE())
    k, cache = torch.ones(4, 2, 8), caches()
    k_pages, v_pages = cache
    with torch.profiler.profile():
        append.run(k, k, k_pages, v_pages)
    assert cache.any()
    cache.zero_()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(InputError, match="not part of the op"):
        append.run(k, k, k_pages, v_pages)
    compiled = torch.compile(append.run, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="not part of the op"):
        compiled(k, k, k_pages, v_pages)
    assert not cache.any()
