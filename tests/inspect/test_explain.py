"""`Variant.explain`: the contents of every section, with and without tensors."""

from __future__ import annotations

import sys

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError, ParamError
from flashattn_jit.inspect.explanation import explanation, plots

DIMS = {"batch": 1, "num_q_heads": 4, "num_kv_heads": 2, "q_len": 500, "kv_len": 500}


class Windowed(fa.Variant):
    """A tensor, scalars, a specialised number, a mask that depends on the head."""

    slopes: torch.Tensor = fa.tensor("num_q_heads", default=fa.alibi_slopes)
    window: int = fa.scalar(64)
    power: int = 2

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score**self.power + self.slopes[h] * (kv_idx - q_idx)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window * (h + 1))


@pytest.fixture(scope="module")
def windowed():
    return Windowed().explain(dims=DIMS)


def test_the_text_has_every_section(windowed):
    text = str(windowed)
    for wanted in (
        "variant Windowed on cpu:",
        "q_len 500, kv_len 500, heads 4 over 2",
        "score_mod:",
        "gather(",
        "mask_mod:",
        "slopes: float32 [4] = [0.25, 0.0625, 0.01562, 0.003906]",
        "window: int64 = 64",
        "specialised",
        "head 3",
        "FLOP/B",
        "-> ",
        "schedule: ",
        windowed.plan.key.hex,
    ):
        assert wanted in text, wanted


def test_a_number_that_decides_the_structure_is_specialised(windowed):
    assert "2" in [value for _, value in windowed.specialised], windowed.specialised


def test_attributes(windowed):
    assert windowed.ir.hook("mask_mod") is not None
    assert windowed.tiles.counts.empty > 0
    assert len(windowed.tiles.per_head) == 4
    assert windowed.roofline.point.bound == "compute"
    assert windowed.roofline.attainable_s > 0
    assert windowed.plan.spec.tile_kind == "prefill"
    assert [c.chosen for c in windowed.plan.candidates].count(True) == 1
    assert windowed.plan.balance >= 1.0
    assert windowed.plan.artifact.endswith("artifact.so")


def test_the_source_is_what_the_compiler_gets(windowed):
    assert "struct Hooks" in windowed.source
    assert windowed.source == Windowed().explain(dims=DIMS).source


def test_tensors_and_dims_say_the_same(windowed):
    q = torch.randn(1, 4, 500, 64)
    k, v = torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64)
    assert str(Windowed().explain(q, k, v)) == str(windowed)


def test_the_planned_kernel_is_the_one_that_runs(windowed):
    q = torch.randn(1, 4, 500, 64)
    k, v = torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64)
    compiled = fa.cache_info().compiles
    fa.attention(q, k, v, Windowed())
    assert fa.cache_info().compiles == compiled


def test_decode_is_bound_by_memory_and_gets_the_few_row_kernel():
    found = fa.Causal().explain(
        dims={"batch": 4, "num_q_heads": 2, "num_kv_heads": 2, "q_len": 1, "kv_len": 4000},
        dtype=torch.bfloat16, q_offset="end",
    )  # fmt: skip
    assert found.plan.spec.tile_kind == "few_row"
    assert found.roofline.point.bound == "memory"
    assert found.tiles.counts.visited_share == 1.0
    assert "memory bound" in str(found)


def test_lengths_and_offsets_reach_the_tiles():
    found = fa.Causal().explain(
        dims={**DIMS, "batch": 2}, kv_len=torch.tensor([500, 96]), q_offset=torch.tensor([0, -404])
    )
    assert [r.grid.kv_end for r in found.tiles.runs] == [500, 96]
    assert [r.grid.q_begin for r in found.tiles.runs] == [0, -404]


def test_a_variant_without_hooks_is_explained():
    assert "0 requests" in str(fa.Causal().explain(dims={**DIMS, "batch": 0}))
    text = str(fa.variant().explain(dims=DIMS))
    assert "hooks (normaliser: softmax)\n  none" in text


def test_a_mask_in_cpp_is_not_analysed_and_says_so():
    mask = fa.variant(mask_mod=fa.cpp("return kv_idx <= q_idx;"))
    found = mask.explain(dims=DIMS)
    assert "return kv_idx <= q_idx;" in str(found)
    assert "not analysed" in found.tiles.note and found.tiles.note in str(found)
    counts = found.tiles.counts
    assert (counts.empty, counts.full) == (0, 0) and counts.partial > 0  # as in kernels


def test_a_sequence_of_a_million_is_explained():
    found = fa.SlidingWindow(4096).explain(
        dims={"batch": 1, "num_q_heads": 1, "num_kv_heads": 1, "q_len": 2**20, "kv_len": 2**20}
    )
    assert found.tiles.counts.visited_share < 0.005


def test_without_a_compiler_all_but_the_schedule_is_there(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "/nonexistent/c++")

    def mask(b, h, q_idx, kv_idx):  # of this test alone: no other has loaded its kernel
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 10) & (kv_idx != 271)

    found = fa.variant(mask_mod=mask).explain(dims=DIMS)
    assert found.plan.call is None
    assert found.plan.balance == 0.0
    assert "does not compile" in str(found)
    assert found.tiles.counts.empty > 0


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    fa.Causal().explain(dims=DIMS, plot=path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="cannot be written"):
        fa.Causal().explain(dims=DIMS, plot=tmp_path / "out.nonsense")


def test_cells_of_the_picture_end_where_tiles_do():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    tiles = fa.SlidingWindow(100).explain(dims={"q_len": 700, "kv_len": 650}).tiles
    axes = figure.subplots()
    plots._draw_tiles(axes, figure, tiles)
    left, right, bottom, top = axes.images[0].get_extent()
    rows, columns = axes.images[0].get_array().shape
    assert (left, top, right, bottom) == (0, 0, columns * tiles.tile_kv, rows * tiles.tile_q)
    assert (*axes.get_xlim(), *axes.get_ylim()) == (0, 650, 700, 0)


def test_a_plot_without_matplotlib_is_an_error_that_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(explanation, "plan", None)  # nothing was planned before
    with pytest.raises(InputError, match=r"flashattn_jit\[plot\]"):
        fa.Causal().explain(dims=DIMS, plot=tmp_path / "out.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "q, k and v, or dims="),
        ({"q": torch.zeros(1, 1, 1, 8)}, "q, k and v, or dims="),
        ({"q": torch.zeros(1, 1, 1, 8), "dims": DIMS}, "one or the other"),
        ({"dims": DIMS, "q_offset": "start"}, "q_offset"),
        ({"dims": DIMS, "kv_len": torch.tensor([1, 2])}, "batch=1"),
    ],
)
def test_unusable_arguments(arguments, message):
    with pytest.raises(InputError) as info:
        fa.Causal().explain(**arguments)
    assert message in str(info.value)


def test_unknown_params_are_errors():
    with pytest.raises(ParamError, match="colour"):
        fa.Causal().explain(dims=DIMS, colour=1)
