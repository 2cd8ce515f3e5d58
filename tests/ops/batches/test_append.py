"""`append_paged_kv`: new rows land in their slots, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import GradError, InputError, TargetError
from tests.harness.toolkit import needs_nvcc

every_target = pytest.mark.parametrize(
    "target", [None, pytest.param("emulated:sm_80", marks=needs_nvcc)], ids=["cpu", "emulated"]
)


def pages(page_size: int = 4) -> fa.Paged:
    """Three requests with 6, 0 and 5 keys."""
    indptr = {4: [0, 2, 2, 4], 1: [0, 6, 6, 11]}[page_size]
    last = {4: [2, 0, 1], 1: [1, 0, 1]}[page_size]
    indices = torch.tensor([5, 2, 0, 7] if page_size == 4 else [9, 2, 0, 7, 1, 3, 11, 4, 8, 6, 10])
    return fa.Paged(torch.tensor(indptr), indices.int(), torch.tensor(last), page_size)


def slot(paged: fa.Paged, request: int, key: int) -> tuple[int, int]:
    page = paged.page_indptr[request] + key // paged.page_size
    return int(paged.page_indices[page]), key % paged.page_size


@every_target
@pytest.mark.parametrize("page_size", [4, 1])
@pytest.mark.parametrize(
    ("dtype", "dim", "dim_v"),
    [(torch.bfloat16, 64, 64), (torch.float32, 5, 3), (torch.int8, 7, 16),
     (torch.float8_e4m3fn, 32, 32)],
)  # fmt: skip
def test_new_tokens_become_the_last_keys(target, page_size, dtype, dim, dim_v) -> None:
    paged = pages(page_size)
    q_indptr = torch.tensor([0, 3, 3, 4])  # 3, 0 and 1 new tokens
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(-100, 100, shape, generator=generator).float().to(dtype)

    k, v = some(4, 2, dim), some(4, 2, dim_v)
    k_pages, v_pages = some(12, page_size, 2, dim), some(12, page_size, 2, dim_v)
    before = k_pages.clone(), v_pages.clone()
    fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, paged, target=target)
    expected = [t.clone() for t in before]
    for token, (request, key) in enumerate([(0, 3), (0, 4), (0, 5), (2, 4)]):
        page, at = slot(paged, request, key)
        expected[0][page, at], expected[1][page, at] = k[token], v[token]
    for got, wanted in zip((k_pages, v_pages), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@every_target
def test_caches_and_rows_have_any_strides(target) -> None:
    """One tensor of keys and values, heads before slots; new rows inside of a packed qkv."""
    paged = pages()
    both = torch.zeros(12, 2, 3, 4, 8)  # [pages, k or v, heads, slots, dim]
    k_pages, v_pages = (both[:, i].transpose(1, 2) for i in (0, 1))
    qkv = torch.randn(4, 9, 8)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    fa.append_paged_kv(k, v, k_pages, v_pages, torch.tensor([0, 3, 3, 4]), paged, target=target)
    for token, (request, key) in enumerate([(0, 3), (0, 4), (0, 5), (2, 4)]):
        page, at = slot(paged, request, key)
        assert torch.equal(both[page, 0, :, at], k[token])
        assert torch.equal(both[page, 1, :, at], v[token])
    assert int((both != 0).any(-1).sum()) == 4 * 2 * 3


@needs_nvcc
@pytest.mark.parametrize("wild", [-1, 12, 2**31 - 1])
def test_an_unchecked_page_that_is_not_there_is_left_out(wild, monkeypatch) -> None:
    """On devices page indices are not checked."""
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "0")
    paged = pages()
    paged.page_indices[1] = wild  # of keys 4 and 5 of request 0
    k = torch.randn(4, 2, 8)
    k_pages, v_pages = torch.zeros(2, 12, 4, 2, 8)
    indptr = torch.tensor([0, 3, 3, 4])
    fa.append_paged_kv(k, -k, k_pages, v_pages, indptr, paged, target="emulated:sm_80")
    expected = torch.zeros_like(k_pages)
    expected[5, 3], expected[7, 0] = k[0], k[3]
    assert torch.equal(k_pages, expected) and torch.equal(v_pages, -expected)


@every_target
def test_no_new_token_writes_nothing(target) -> None:
    cache = torch.zeros(12, 4, 2, 8)
    none = torch.zeros(0, 2, 8)
    fa.append_paged_kv(
        none, none, cache, cache.clone(), torch.tensor([0, 0, 0, 0]), pages(), target=target
    )
    assert not cache.any()


K, CACHE, INDPTR = torch.zeros(4, 2, 8), torch.zeros(12, 4, 2, 8), torch.tensor([0, 3, 3, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": K[0]}, r"k must be \[num_tokens, num_kv_heads, head_dim\], got \[2, 8\]"),
        ({"k": None}, "k must be a torch.Tensor"),
        ({"k": K.half()}, r"k has dtype torch\.float16, but k_pages torch\.float32"),
        ({"v": K[:, :1]}, "v has num_kv_heads=1 and rows of 8, but v_pages has 2 and 8"),
        ({"v": K[:3]}, "v has num_tokens=3"),
        ({"v_pages": CACHE[0]}, r"v_pages must be \[num_pages, page_size"),
        ({"k_pages": CACHE[:1].expand(12, -1, -1, -1)}, "k_pages is an expanded tensor"),
        ({"k_pages": CACHE.transpose(2, 3).contiguous().transpose(2, 3)}, "must be contiguous"),
        ({"v_pages": CACHE.to("meta")}, "v_pages is on meta"),
        ({"k": K.to("meta"), "v": K.to("meta")}, "k is on meta, so it has no values"),
        (
            {"q_indptr": torch.tensor([0, 3, 4])},
            "page_indptr has 4 entries; q_indptr has",
        ),
        (
            {"q_indptr": torch.tensor([0, 3, 3, 5])},
            "k has num_tokens=4, .* has 5 new tokens",
        ),
        ({"k_pages": CACHE[:1], "v_pages": CACHE[1:2]}, "num_pages=1 of k_pages and v_pages$"),
        ({"q_indptr": torch.tensor([0, 3, 4, 4])}, "request 1 has 1 new tokens, but paged gives"),
    ],
)
def test_errors_name_what_is_wrong_and_nothing_is_written(change, message: str) -> None:
    cache = torch.zeros(12, 4, 2, 8)
    options = {"k": K + 1, "v": K + 1, "k_pages": cache, "v_pages": cache.clone()}
    with pytest.raises(InputError, match=message):
        fa.append_paged_kv(**{**options, "q_indptr": INDPTR, "paged": pages(), **change})
    assert not cache.any()


def test_gradients_and_targets_are_refused() -> None:
    options = (CACHE.clone(), CACHE.clone(), INDPTR, pages())
    with pytest.raises(GradError, match="inference only"):
        fa.append_paged_kv(K.clone().requires_grad_(), K, *options)
    with pytest.raises(TargetError, match="runs on CUDA tensors"):
        fa.append_paged_kv(K, K, *options, target="sm_80")


@every_target
def test_one_plan_serves_all_layers_of_pages_with_layers_inside(target) -> None:
    """[pages, layers, keys or values, slots, heads, dim]: strides that no layer alone has."""
    paged, layers = pages(), 3
    memory = torch.zeros(12, layers, 2, 4, 2, 8)
    append = fa.plan_append(torch.tensor([0, 3, 3, 4]), paged, target=target)
    assert append.num_tokens == 4
    rows = torch.randn(layers, 2, 4, 2, 8)
    for layer in range(layers):
        append.run(*rows[layer], memory[:, layer, 0], memory[:, layer, 1])
    expected = torch.zeros_like(memory)
    for token, (request, key) in enumerate([(0, 3), (0, 4), (0, 5), (2, 4)]):
        page, at = slot(paged, request, key)
        expected[page, :, :, at] = rows[:, :, token]
    assert torch.equal(memory, expected)


@every_target
def test_positions_say_which_keys_the_tokens_become(target) -> None:
    paged = pages()
    keys = [(0, 5), (0, 0), (0, 1), (2, 3)]
    append = fa.plan_append(
        torch.tensor([0, 3, 3, 4]), paged, positions=torch.tensor([k for _, k in keys]),
        target=target,
    )  # fmt: skip
    k = torch.randn(4, 2, 8)
    k_pages, v_pages = torch.zeros(2, 12, 4, 2, 8)
    append.run(k, -k, k_pages, v_pages)
    expected = torch.zeros_like(k_pages)
    for token, (request, key) in enumerate(keys):
        expected[slot(paged, request, key)] = k[token]
    assert torch.equal(k_pages, expected) and torch.equal(v_pages, -expected)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([5, 0, 6, 3], r"positions\[2\]=6 of request 0 must be 0 to 5"),
        ([5, 0, 1, -1], r"positions\[3\]=-1 of request 2 must be 0 to 4"),
        ([5, 0, 1], r"positions must be \[num_tokens=4\], got \[3\]"),
        ([5.0, 0, 1, 2], "positions"),
    ],
)
def test_positions_that_are_no_keys(positions, message) -> None:
    with pytest.raises(InputError, match=message):
        fa.plan_append(torch.tensor([0, 3, 3, 4]), pages(), positions=torch.tensor(positions))


def test_random_appends_equal_index_put() -> None:
    """Random lengths, page sizes, dtypes and strides; also of tensors that a plan saw before."""
    generator = torch.Generator().manual_seed(1)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(200):
        size, heads, dim, requests = pick(1, 9), pick(1, 3), pick(1, 9), pick(1, 5)
        old, new = [pick(0, 20) for _ in range(requests)], [pick(0, 9) for _ in range(requests)]
        counts = [-(-(a + b) // size) for a, b in zip(old, new, strict=True)]
        order = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)].int()
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)])
        last = [(a + b - 1) % size + 1 if a + b else 0 for a, b in zip(old, new, strict=True)]
        paged = fa.Paged(starts, order, torch.tensor(last), size)
        indptr = torch.tensor([0, *torch.tensor(new).cumsum(0)])
        dtype = [torch.float32, torch.bfloat16, torch.int8][pick(0, 2)]
        rows = torch.randint(-99, 99, (2, sum(new), heads + 1, dim), generator=generator)
        k, v = rows.to(dtype)[:, :, 1:]
        shape = (2, sum(counts) + 3, heads, size, dim)
        cache = torch.zeros(shape, dtype=dtype).transpose(2, 3)
        if pick(0, 1):
            cache = cache.contiguous()
        append = fa.plan_append(indptr, paged)
        wanted = cache.clone()
        token = 0
        for b in range(requests):
            for key in range(old[b], old[b] + new[b]):
                wanted[0][slot(paged, b, key)], wanted[1][slot(paged, b, key)] = k[token], v[token]
                token += 1
        for _ in range(2):
            append.run(k, v, cache[0], cache[1])
            assert torch.equal(cache, wanted)
            cache.zero_()


def test_a_plan_checks_the_tensors_of_each_run() -> None:
    append = fa.plan_append(INDPTR, pages())
    cache = torch.zeros(2, 12, 4, 2, 8)
    append.run(K, K, cache[0], cache[1])
    for k, caches, message in (
        (K[:3], cache, "num_tokens=4"), (K.half(), cache, "float16"),
        (K, cache[:, :, :2], "page_size=2"), (K, cache[:, :6], "num_pages=6"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            append.run(k, K, caches[0], caches[1])
    with pytest.raises(InputError, match="same entry"):
        append.run(K, K, cache[0], cache[0])
    with pytest.raises(InputError, match="memory of k_pages"):
        append.run(cache[0, :1].flatten(0, 1), K, cache[0], cache[1])
    with pytest.raises(GradError):
        append.run(K.clone().requires_grad_(), K, cache[0], cache[1])


@pytest.mark.parametrize("device", ["foo", "meta", 1.5])
def test_plans_for_devices_that_are_none(device: object) -> None:
    with pytest.raises(fa.InputError, match="device"):
        fa.plan_append(INDPTR, pages(), device=device)  # type: ignore[arg-type]
