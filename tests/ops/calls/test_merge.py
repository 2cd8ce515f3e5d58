"""Merged states in other dtypes, in given tensors, in place and of some rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from tests.harness.toolkit import needs_nvcc
from tests.ops.merge_oracle import merge_reference

TARGETS = [None, pytest.param("emulated:sm_80", marks=needs_nvcc)]
SHAPES = [(5, 3, 40), (2, 3, 4, 17)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states(
    shape: tuple[int, ...], count: int = 3, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """States, the first of them without keys in some rows, and one row without any."""
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(shape, generator=generator) for _ in range(count)]
    lses = [torch.randn(shape[:-1], generator=generator) * 4 for _ in range(count)]
    outs[0][0], lses[0][0] = torch.nan, -torch.inf
    for out, lse in zip(outs, lses, strict=True):
        out[1, 1], lse[1, 1] = torch.nan, -torch.inf
    return outs, lses


def expected(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    clean = [o.nan_to_num().double() for o in outs]
    out, lse = merge_reference(clean, [x.double() for x in lses])
    return out, lse


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_merged_out_is_rounded_once(
    shape: tuple[int, ...], dtype: torch.dtype, count: int, target: str | None
) -> None:
    outs, lses = states(shape, count)
    exact, exact_lse = fa.merge_states(outs, lses, target=target)
    out, lse = fa.merge_states(outs, lses, dtype=dtype, target=target)
    assert out.dtype == dtype and lse is not None and torch.equal(lse, exact_lse)
    assert torch.equal(out, exact.to(dtype))
    reference, _ = expected(outs, lses)
    torch.testing.assert_close(exact.double(), reference, rtol=1e-5, atol=1e-5)
    sums, none = fa.merge_states([o.nan_to_num() for o in outs], dtype=dtype, target=target)
    assert none is None and sums.dtype == dtype


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_round_as_torch_rounds_them(dtype: torch.dtype, target: str | None) -> None:
    """Ties, subnormals, overflow, signed zeros and NaN."""
    steps = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    values = torch.cat(
        [(steps << 16 | low).view(torch.float32) for low in (0, 0x1000, 0x7FFF, 0x8000, 0x8001)]
    )
    if target is not None:
        values = values[::17]
    x = values[: values.numel() // 64 * 64].view(-1, 1, 64)
    skipped = torch.zeros(x.shape[0], dtype=torch.bool)  # copies, without arithmetic
    out, _ = fa.merge_states([x], dtype=dtype, mask=skipped, target=target)
    assert torch.equal(out.isnan(), x.isnan())
    rounded, wanted = out[~x.isnan()], x.to(dtype)[~x.isnan()]
    assert torch.equal(rounded.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [2, 70])
def test_states_merge_in_place(shape: tuple[int, ...], count: int, target: str | None) -> None:
    outs, lses = states(shape, count)
    wanted, wanted_lse = fa.merge_states(outs, lses, target=target)
    out, lse = fa.merge_states(outs, lses, out=outs[0], lse=lses[0], target=target)
    assert out is outs[0] and lse is lses[0]
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_results_of_any_strides(target: str | None) -> None:
    outs, lses = states((2, 3, 4, 17))
    wanted, wanted_lse = fa.merge_states(outs, lses, target=target)
    out = torch.full((2, 4, 3, 20), 7.0, dtype=torch.float16).transpose(1, 2)[..., 2:19]
    lse = torch.empty(4, 3, 2).permute(2, 1, 0)
    found = fa.merge_states(outs, lses, out=out, lse=lse, target=target)
    assert found[0] is out and found[1] is lse
    assert torch.equal(out, wanted.half()) and torch.equal(lse, wanted_lse)
    assert (out._base[..., :2] == 7).all() and (out._base[..., 19:] == 7).all()
    one, other = fa.merge_states(outs, lses, lse=lse, target=target)
    assert torch.equal(one, wanted) and other is lse


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("form", ["tokens", "rows", "broadcast"])
def test_rows_outside_of_the_mask_keep_the_first_state(
    form: str, in_place: bool, count: int, target: str | None
) -> None:
    outs, lses = states((6, 3, 33), count)
    mask = torch.tensor([False, True, True, False, False, True])
    if form == "rows":
        mask = torch.rand(6, 3, generator=torch.Generator().manual_seed(1)) < 0.5
        mask[0] = False  # the first state has no keys there
    elif form == "broadcast":
        mask = torch.tensor([[False, True, True]])
    kept = ~mask.view(*mask.shape, *(1,) * (2 - mask.dim())).expand(6, 3)
    merged, merged_lse = fa.merge_states(outs, lses, target=target)
    first, first_lse = outs[0].clone(), lses[0].clone()
    given = {"out": outs[0], "lse": lses[0]} if in_place else {}
    out, lse = fa.merge_states(outs, lses, mask=mask, target=target, **given)
    assert lse is not None
    assert torch.equal(out[~kept], merged[~kept]) and torch.equal(lse[~kept], merged_lse[~kept])
    assert torch.equal(lse[kept], first_lse[kept])
    # Bit for bit, NaN of rows without keys included.
    assert torch.equal(out.view(torch.int32)[kept], first.view(torch.int32)[kept])
    clean = [o.nan_to_num() for o in outs]
    sums, _ = fa.merge_states(clean, mask=mask, target=target)
    assert torch.equal(sums[kept], clean[0][kept])
    assert torch.equal(sums[~kept], fa.merge_states(clean, target=target)[0][~kept])


@pytest.mark.parametrize("target", TARGETS)
def test_an_exclusive_half_of_a_cascade(target: str | None) -> None:
    """Some requests of a batch share a prefix: FlashInfer's use of the mask."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(4, 2, 1, 16, generator=generator)
    k, v = (torch.randn(4, 2, 20, 16, generator=generator) for _ in range(2))
    shared_k, shared_v = (torch.randn(1, 2, 30, 16, generator=generator) for _ in range(2))
    shares = torch.tensor([True, False, True, False])
    own, own_lse = fa.attention(q, k, v, partial=True)
    other, other_lse = fa.attention(
        q, shared_k.expand(4, -1, -1, -1), shared_v.expand(4, -1, -1, -1), partial=True
    )
    fa.merge_states(
        [own, other], [own_lse, other_lse], out=own, lse=own_lse, mask=shares, target=target
    )
    for b, shared in enumerate(shares.tolist()):
        keys, values = k[b : b + 1], v[b : b + 1]
        if shared:
            keys = torch.cat([shared_k, keys], 2)
            values = torch.cat([shared_v, values], 2)
        wanted = torch.nn.functional.scaled_dot_product_attention(q[b : b + 1], keys, values)
        torch.testing.assert_close(own[b : b + 1], wanted, rtol=1e-5, atol=1e-5)


# --- errors ---------------------------------------------------------------------------------------

_SPACE = torch.zeros(5, 3, 80)

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.float64}, "dtype=torch.float64 is not supported"),
    "no dtype": ({"dtype": "half"}, "dtype='half' is not supported"),
    "dtype of out": ({"out": torch.zeros(5, 3, 40).double()}, "out.dtype=torch.float64"),
    "two dtypes": (
        {"out": torch.zeros(5, 3, 40), "dtype": torch.bfloat16}, "out is torch.float32, but dtype"
    ),
    "shape of out": ({"out": torch.zeros(5, 3, 41)}, r"out must be \[5, 3, 40\]"),
    "rows of out": ({"out": torch.zeros(40, 3, 5).transpose(0, 2)}, "last dim must be contiguous"),
    "expanded out": ({"out": torch.zeros(1, 3, 40).expand(5, 3, 40)}, "expanded"),
    "no out": ({"out": 3}, "out must be a torch.Tensor"),
    "shape of lse": ({"lse": torch.zeros(5, 4)}, r"lse must be \[5, 3\]"),
    "dtype of lse": ({"lse": torch.zeros(5, 3).half()}, "lse must be .* of torch.float32"),
    "expanded lse": ({"lse": torch.zeros(1, 3).expand(5, 3)}, "lse is an expanded tensor"),
    "dtype of mask": ({"mask": torch.ones(5)}, "mask must be a bool tensor"),
    "shape of mask": ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask is \[3\], but outs have"),
    "dims of mask": ({"mask": torch.ones(5, 3, 1, dtype=torch.bool)}, "must be the first ones"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_and_masks_are_refused(name: str) -> None:
    given, words = WRONG[name]
    outs, lses = states((5, 3, 40))
    before = [t.clone() for t in (*outs, *lses)]
    with pytest.raises(fa.InputError, match=words):
        fa.merge_states(outs, lses, **given)
    for one, other in zip((*outs, *lses), before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_memory_of_another_input_is_refused() -> None:
    space = torch.randn(2, 5, 3, 40)
    lses = list(torch.randn(2, 5, 3))
    outs = list(space)
    shifted = space.view(-1)[40 : 40 + 600].view(5, 3, 40)
    for given, words in (
        ({"out": outs[1]}, "out shares memory"),
        ({"out": shifted}, "out shares memory"),
        ({"lse": lses[1]}, "lse shares memory"),
        ({"lse": outs[0][..., 0]}, "lse shares memory"),
        ({"out": outs[0], "lse": outs[0][..., 0]}, "out shares memory"),
    ):
        with pytest.raises(fa.InputError, match=words):
            fa.merge_states(outs, lses, **given)  # type: ignore[arg-type]
    with pytest.raises(fa.InputError, match="out shares memory"):
        fa.merge_states([outs[0], outs[0]], lses, out=outs[0])
    with pytest.raises(fa.InputError, match="lse is given without lses"):
        fa.merge_states(outs, lse=lses[0])
    with pytest.raises(fa.GradError, match="out requires grad"):
        fa.merge_states(outs, lses, out=torch.zeros(5, 3, 40, requires_grad=True))


# --- in graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_merges(in_place: bool) -> None:
    mask = torch.tensor([True, False, True, True, False])

    def call(outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> Any:
        if in_place:
            out, lse = outs[0], lses[0]
        found, found_lse = fa.merge_states(outs, lses, out=out, lse=lse, mask=mask)
        half, _ = fa.merge_states([found, found], [found_lse, found_lse], dtype=torch.half)
        return found + 1, half

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    wanted, got = ([*states((5, 3, 40), seed=4)] for _ in range(2))
    results = [torch.zeros(5, 3, 40), torch.zeros(5, 3)]
    expected = call(*wanted, *results)
    others = [torch.zeros(5, 3, 40), torch.zeros(5, 3)]
    for one, other in zip(compiled(*got, *others), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    written, to_write = (*wanted[0], *wanted[1], *results), (*got[0], *got[1], *others)
    for one, other in zip(written, to_write, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_graph_on_fake_tensors_knows_the_dtype() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        outs, lses = [torch.empty(5, 3, 40)] * 2, [torch.empty(5, 3)] * 2
        out, lse = fa.merge_states(outs, lses, dtype=torch.bfloat16)
        given = torch.empty(5, 3, 40, dtype=torch.float16)
        same, rows = fa.merge_states(outs, lses, out=given, mask=torch.ones(5, dtype=torch.bool))
    assert out.dtype == torch.bfloat16 and lse is not None and lse.shape == (5, 3)
    assert same is given and rows is not None and rows.dtype == torch.float32
