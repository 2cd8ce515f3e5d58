"""Library masks against dense boolean matrices, each written here directly from its definition.

Matrices are read off the reference: with all scores equal and v the identity, output row i holds
the weights of row i, which are not zero exactly where the mask keeps a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flashattn_jit.variants.library as lib
from flashattn_jit.errors import InputError, ParamError, VariantError
from flashattn_jit.variants.variant import Variant
from tests.variants.library.library_tools import bound, kept_pairs


def dense(
    rule: Callable[[int, int, int], bool], q_len: int, kv_len: int, q_offset: int = 0,
    batch: int = 1,
) -> torch.Tensor:  # fmt: skip
    """The matrix [batch, q_len, kv_len] of ``rule(b, i, j)``, pair by pair."""
    rows = [
        [[bool(rule(b, i + q_offset, j)) for j in range(kv_len)] for i in range(q_len)]
        for b in range(batch)
    ]
    return torch.tensor(rows).reshape(batch, q_len, kv_len)


def check(
    variant: Variant, rule: Callable[[int, int, int], bool], q_len: int, kv_len: int,
    q_offset: int = 0, batch: int = 1, **params: object,
) -> None:  # fmt: skip
    got = kept_pairs(variant, q_len, kv_len, q_offset, batch, **params)
    expected = dense(rule, q_len, kv_len, q_offset, batch)
    assert torch.equal(got, expected[:, None].expand_as(got))


SIZES = [(1, 1, 0), (7, 7, 0), (33, 33, 0), (21, 45, 24), (45, 21, 0), (1, 53, 52), (19, 40, 0)]


@pytest.mark.parametrize("q_len, kv_len, q_offset", SIZES)
def test_masks_of_positions(q_len: int, kv_len: int, q_offset: int) -> None:
    sizes = (q_len, kv_len, q_offset)
    check(lib.Full(), lambda b, i, j: True, *sizes)
    check(lib.Causal(), lambda b, i, j: j <= i, *sizes)
    for window in (1, 5, 100):
        check(lib.SlidingWindow(window), lambda b, i, j, w=window: i - w < j <= i, *sizes)
        both = lib.SlidingWindow(window, causal=False)
        check(both, lambda b, i, j, w=window: abs(i - j) <= w, *sizes)
    check(lib.Chunked(8), lambda b, i, j: i // 8 == j // 8 and j <= i, *sizes)
    check(lib.StreamingLLM(6, 3), lambda b, i, j: j <= i and (i - j < 6 or j < 3), *sizes)
    check(lib.BlockCausal(5), lambda b, i, j: j // 5 <= i // 5, *sizes)


@pytest.mark.parametrize("window, dilation", [(0, 1), (1, 2), (9, 3), (10, 3), (11, 3), (100, 7)])
def test_dilated(window: int, dilation: int) -> None:
    def causal(b: int, i: int, j: int) -> bool:
        return 0 <= i - j <= window and (i - j) % dilation == 0

    def bidirectional(b: int, i: int, j: int) -> bool:
        return abs(i - j) <= window and (i - j) % dilation == 0

    check(lib.Dilated(window, dilation), causal, 31, 43, 9)
    check(lib.Dilated(window, dilation, causal=False), bidirectional, 31, 43, 9)


def test_prefix_lm_has_a_prefix_for_each_request() -> None:
    prefix = [0, 9, 40]
    check(
        lib.PrefixLM(), lambda b, i, j: j <= i or (i < prefix[b] and j < prefix[b]), 33, 33, 0, 3,
        prefix_len=torch.tensor(prefix),
    )  # fmt: skip


def test_document_mask_of_sorted_and_unsorted_ids() -> None:
    for rows in (
        [[0] * 11 + [1] * 2 + [2] * 14, [3] * 27],
        np.random.default_rng(0).integers(0, 4, (2, 27)).tolist(),
    ):
        documents = torch.tensor(rows, dtype=torch.int32)
        same = lambda b, i, j, r=rows: r[b][i] == r[b][j]  # noqa: E731
        check(lib.DocumentMask(), same, 27, 27, 0, 2, documents=documents)
        check(
            lib.DocumentMask() & lib.Causal(),
            lambda b, i, j, r=rows: r[b][i] == r[b][j] and j <= i, 9, 27, 18, 2,
            documents=documents,
        )  # fmt: skip


def test_document_ids_lays_documents_out_in_order() -> None:
    assert lib.document_ids([2, 0, 3]).tolist() == [0, 0, 2, 2, 2]
    assert lib.document_ids([]).shape == (0,)
    for lengths in (np.array([2, 1]), torch.tensor([2, 1]), (np.int64(2), torch.tensor(1))):
        assert lib.document_ids(lengths).tolist() == [0, 0, 1]
    with pytest.raises(InputError, match=r"0 or more, got lengths\[1\]=-1"):
        lib.document_ids([3, -1])


NO_INTS: list[tuple[Any, str]] = [
    ([1, 2.0], r"\[1\] must be an int, got float"), ([0, "1"], r"\[1\] must be an int, got str"),
    ([None], r"\[0\] must be an int, got NoneType"), ([True], r"\[0\] must be an int, got bool"),
    ([np.bool_(True)], r"\[0\] must be an int"), ([[1], [2]], r"\[0\] must be an int, got list"),
    ([0, 10**5000], r"\[1\] does not fit 64 bits"), (torch.tensor([0.0]), r"\[0\] must be an int"),
    (torch.tensor([True]), r"\[0\] must be an int"), (np.array([1.5]), r"\[0\] must be an int"),
    (torch.zeros(2, 2, dtype=torch.int64), r" must have one dim, got shape \[2, 2\]"),
    (torch.tensor(3), " must have one dim"), (np.array(3), " must have one dim"),
    (None, " must be a sequence"), (3, " must be a sequence"), ("12", " must be a sequence"),
    (b"12", " must be a sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), NO_INTS)
def test_helpers_refuse_entries_that_are_no_ints(values: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"lengths{words}"):
        lib.document_ids(values)
    with pytest.raises(InputError, match=f"parents{words}"):
        lib.tree_bits(values)


def test_documents_that_fit_no_sequence_or_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for lengths in ([2**31], [2**62, 2**62, 2**62], [2**31 - 1, 1]):
        with pytest.raises(InputError, match=f"add up to {sum(lengths)}, but positions are int32"):
            lib.document_ids(lengths)

    def repeat(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr("flashattn_jit.variants.library.packed_masks.np.repeat", repeat)
    with pytest.raises(InputError, match=r"add up to 5, .* do not fit the memory"):
        lib.document_ids([2, 3])


def test_padding_mask() -> None:
    keep = torch.tensor(np.random.default_rng(1).random((3, 21)) < 0.6)
    check(lib.PaddingMask(), lambda b, i, j: bool(keep[b, j]), 13, 21, 0, 3, keep=keep)


@pytest.mark.parametrize("length, kernel", [(17, 1), (17, 5), (5, 5), (23, 9)])
def test_natten_1d(length: int, kernel: int) -> None:
    def rule(b: int, i: int, j: int) -> bool:
        first = min(max(i - kernel // 2, 0), length - kernel)  # the window, shifted inwards
        return first <= j < first + kernel

    check(lib.Natten(length, kernel), rule, length, length)


@pytest.mark.parametrize(
    "shape, kernel", [((5, 7), (3, 5)), ((6, 6), 3), ((3, 9), (3, 9)), ((4, 5), 1)]
)
def test_natten_2d(shape: tuple[int, int], kernel: int | tuple[int, int]) -> None:
    height, width = shape
    kernels = (kernel, kernel) if isinstance(kernel, int) else kernel

    def near(i: int, j: int, size: int, k: int) -> bool:
        first = min(max(i - k // 2, 0), size - k)
        return first <= j < first + k

    def rule(b: int, i: int, j: int) -> bool:
        rows = near(i // width, j // width, height, kernels[0])
        return rows and near(i % width, j % width, width, kernels[1])

    check(lib.Natten(shape, kernel), rule, height * width, height * width)


@pytest.mark.parametrize(
    "shape, kernel", [(9, 4), (9, 11), (9, 0), ((3, 3), (3, 5)), ((3, 3, 3), 3), ((9,), (3, 3))]
)
def test_natten_refuses_kernels_that_do_not_fit(shape: object, kernel: object) -> None:
    with pytest.raises(VariantError, match="Natten"):
        lib.Natten(shape, kernel)  # type: ignore[arg-type]


@pytest.mark.parametrize("length, block", [(16, 4), (15, 4), (9, 1), (12, 100)])
def test_block_diffusion(length: int, block: int) -> None:
    def rule(b: int, i: int, j: int) -> bool:
        i_clean, j_clean = i >= length, j >= length
        i_block, j_block = (i % length) // block, (j % length) // block
        if not i_clean and not j_clean:
            return i_block == j_block
        if not i_clean and j_clean:
            return i_block > j_block
        return i_clean and j_clean and i_block >= j_block

    check(lib.BlockDiffusion(length, block), rule, 2 * length, 2 * length)


# --- trees ----------------------------------------------------------------------------------------


def ancestors(parents: list[int]) -> list[set[int]]:
    sees = []
    for token, parent in enumerate(parents):
        sees.append({token} | (sees[parent] if parent >= 0 else set()))
    return sees


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 130])
def test_tree_mask_of_any_number_of_words(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    trees = [[-1, *(int(rng.integers(-1, t)) for t in range(1, tokens))] for _ in range(2)]
    bits = torch.cat([lib.tree_bits(parents) for parents in trees])
    assert bits.shape == (2, tokens, (tokens + 63) // 64) and bits.dtype == torch.int64
    sees = [ancestors(parents) for parents in trees]
    for prefix in (0, 37):
        check(
            lib.TreeMask(),
            lambda b, i, j, p=prefix: j < p or (j - p) in sees[b][i - p],
            tokens, prefix + tokens, prefix, 2,
            prefix_len=torch.full((2,), prefix), bits=bits,
        )  # fmt: skip


def test_keys_beyond_the_words_of_a_tree_are_not_seen() -> None:
    bits = lib.pack_bits(torch.ones(1, 4, 64, dtype=torch.bool))
    got = kept_pairs(lib.TreeMask(), 4, 90, 10, 1, prefix_len=torch.tensor([10]), bits=bits)
    assert got[..., :74].all() and not got[..., 74:].any()


def test_pack_bits_and_tree_bits_agree() -> None:
    parents = [-1, 0, 0, 1, 1, 4] * 12
    parents = [-1, *[min(p, t) for t, p in enumerate(parents)]]
    sees = ancestors(parents)
    table = torch.tensor([[t in s for t in range(len(parents))] for s in sees])
    assert torch.equal(lib.pack_bits(table[None]), lib.tree_bits(parents))
    assert lib.pack_bits(torch.zeros(3, 0, dtype=torch.bool)).shape == (3, 1)
    with pytest.raises(InputError, match="bool tensor"):
        lib.pack_bits(torch.zeros(3, 3))
    with pytest.raises(InputError, match="every parent before its child"):
        lib.tree_bits([-1, 1])
    for given in (np.array([-1, 0]), torch.tensor([-1, 0]), [np.int32(-1), torch.tensor(0)]):
        assert lib.tree_bits(given).tolist() == [[[1], [3]]]


# --- params ---------------------------------------------------------------------------------------


def test_sizes_are_runtime_params() -> None:
    """A new window, chunk or radius has the same structure: nothing is traced or compiled again."""
    pairs = [
        (lib.SlidingWindow(4), lib.SlidingWindow(1000)),
        (lib.SlidingWindow(4, causal=False), lib.SlidingWindow(9, causal=False)),
        (lib.Chunked(4), lib.Chunked(64)),
        (lib.Dilated(4, 2), lib.Dilated(64, 3)),
        (lib.StreamingLLM(4), lib.StreamingLLM(6, 7)),
        (lib.Natten(9, 3), lib.Natten(90, 7)),
        (lib.Natten((9, 9), 3), lib.Natten((7, 8), (5, 3))),
        (lib.BlockDiffusion(8, 2), lib.BlockDiffusion(16, 4)),
        (lib.BlockCausal(8), lib.BlockCausal(16)),
    ]
    for first, second in pairs:
        assert bound(first).ir == bound(second).ir, first
    assert bound(lib.SlidingWindow(4)).ir != bound(lib.SlidingWindow(4, causal=False)).ir
    assert bound(lib.SlidingWindow(4), window=7).scalars == (7,)


def test_params_are_given_by_position_or_by_name() -> None:
    by_name = lib.StreamingLLM(window=24, num_sinks=2)
    assert bound(lib.StreamingLLM(24, 2)).scalars == bound(by_name).scalars == (24, 2)
    assert bound(lib.Sigmoid(-2.0)).scalars == (-2.0,)
    with pytest.raises(ParamError, match="at most 2 positional"):
        lib.StreamingLLM(1, 2, 3)  # type: ignore[call-arg]
    with pytest.raises(ParamError, match="'window' twice"):
        lib.StreamingLLM(1, window=2)  # type: ignore[misc]


def test_huge_windows_do_not_overflow() -> None:
    got = kept_pairs(lib.SlidingWindow(2**31 - 1), 40, 40)
    assert torch.equal(got[0, 0], torch.ones(40, 40).tril().bool())


@pytest.mark.parametrize(
    "variant, params",
    [
        (lib.PrefixLM, {}),
        (lib.PrefixLM, {"prefix_len": torch.zeros(3, dtype=torch.int32)}),  # batch is 2
        (lib.PrefixLM, {"prefix_len": torch.zeros(2, 1, dtype=torch.int32)}),
        (lib.PrefixLM, {"prefix_len": [1, 2]}),
        (lib.PaddingMask, {"keep": torch.ones(2, 9, dtype=torch.bool)}),  # kv_len is 16
        (lib.PaddingMask, {"keep": torch.ones(2, 16, dtype=torch.bool), "window": 3}),
        (lib.DocumentMask, {"documents": torch.zeros(16, dtype=torch.int32)}),
        (lib.TreeMask, {"prefix_len": torch.zeros(2, dtype=torch.int32)}),
        (lambda: lib.SlidingWindow(4), {"window": "4"}),
        (lambda: lib.SlidingWindow(4), {"window": 4.5}),
        (lib.SlidingWindow, {}),
    ],
)
def test_wrong_params_are_errors(variant: Callable[[], Variant], params: dict) -> None:
    with pytest.raises(ParamError):
        bound(variant(), batch=2, q_len=16, kv_len=16, **params)


NO_NUMBERS: list[tuple[Callable[[], Variant], str]] = [
    (lambda: lib.SlidingWindow(0), r"'window' must be at least 1, got 0; .*leave fa.SlidingWindow"),
    (lambda: lib.SlidingWindow(-1), "'window' must be at least 1, got -1"),
    (lambda: lib.SlidingWindow(-1, causal=False), "at least 0 where causal is False, got -1"),
    (lambda: lib.StreamingLLM(0), "'window' must be at least 1, got 0; .*fa.Causal"),
    (lambda: lib.StreamingLLM(8, -1), "'num_sinks' must be at least 0"),
    (lambda: lib.Chunked(0), "'chunk' must be at least 1"),
    (lambda: lib.Chunked(-8), "'chunk' must be at least 1"),
    (lambda: lib.Dilated(-1, 2), "'window' must be at least 0"),
    (lambda: lib.Dilated(8, 0), "'dilation' must be at least 1"),
    (lambda: lib.BlockCausal(0), "'block' must be at least 1"),
    (lambda: lib.BlockDiffusion(8, -4), "'block' must be at least 1"),
]


@pytest.mark.parametrize("make, words", NO_NUMBERS)
def test_sizes_that_keep_no_pair_are_refused(make: Callable[[], Variant], words: str) -> None:
    with pytest.raises(ParamError, match=words):
        make()


def test_sizes_are_checked_wherever_they_are_given() -> None:
    for window in (0, -1):
        with pytest.raises(ParamError, match=f"'window' must be at least 1, got {window}"):
            bound(lib.SlidingWindow(), window=window)
        with pytest.raises(ParamError, match="'local_window' must be at least 1"):
            bound(lib.SlidingWindow(3).named("local") & lib.Causal(), local_window=window)
    with pytest.raises(ParamError, match="'radius' must be at least 0"):
        bound(lib.Natten(9, 3), radius=-1)
    held = lib.SlidingWindow(3)
    with pytest.raises(ParamError, match="'window' must be at least 1"):
        held.window = 0
    assert held.window == 3
    own_key = lib.SlidingWindow(0, causal=False)
    assert torch.equal(kept_pairs(own_key, 9, 9)[0, 0], torch.eye(9).bool())
    with pytest.raises(ParamError, match="'window' must be at least 1"):
        bound(own_key, causal=True)
    assert bound(lib.SlidingWindow(3), window=0, causal=False).scalars == (0,)
