"""The error criterion: results that pass, results that fail, and messages of failures."""

from __future__ import annotations

import pytest
import torch

from flashattn_jit.inspect.verification.error import compare, compare_lse, half_ulp


@pytest.fixture
def results():
    """(expected fp64, eager bf16-rounded) of 2 x 3 x 50 rows of 16."""
    expected = torch.randn(2, 3, 50, 16, dtype=torch.float64)
    return expected, expected.bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, 1.5, -3.75, 1000.0, 0.001])
def test_half_ulp_is_half_the_distance_to_the_next_number(dtype, value):
    x = torch.tensor(value).to(dtype)
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    following = (x.view(bits) + 1).view(dtype)
    distance = (following.double() - x.double()).abs()
    assert half_ulp(x.double(), dtype) == distance / 2


def test_rounding_passes_and_uses_part_of_what_is_allowed(results):
    expected, eager = results
    found = compare(expected.bfloat16(), expected, eager)
    assert not found.problem
    assert 0 < found.error < found.allowed


def test_noise_of_three_times_the_rounding_fails(results):
    expected, eager = results
    noise = 8 * half_ulp(expected, torch.bfloat16) * torch.randn(expected.shape)
    found = compare((expected + noise).bfloat16(), expected, eager)
    assert found.error > found.allowed
    assert found.problem.startswith("out at b=")


def test_one_wrong_row_among_many_fails_and_is_named():
    expected = torch.randn(1, 8, 4096, 16, dtype=torch.float64)
    got = expected.bfloat16()
    got[0, 5, 77] += 0.1  # too little for the RMS of 32,768 rows
    found = compare(got, expected, expected.bfloat16())
    assert found.error < found.allowed
    assert "b=0, h=5, row=77" in found.problem


def test_nan_where_the_reference_is_finite_fails(results):
    expected, eager = results
    got = expected.bfloat16()
    got[1, 2, 3, 4] = float("nan")
    assert compare(got, expected, eager).problem.startswith(
        "out at b=1, h=2, row=3, dim=4 is nan, not "
    )


def test_infinities_must_agree_in_sign():
    expected = torch.tensor([[[1.0, -torch.inf]]], dtype=torch.float64)
    eager = expected.float()
    assert not compare_lse(expected.float(), expected, eager, torch.float32).problem
    wrong = torch.tensor([[[1.0, torch.inf]]])
    assert "lse at b=0, h=0, row=1 is inf, not -inf" in compare_lse(
        wrong, expected, eager, torch.float32
    ).problem  # fmt: skip


def test_an_lse_may_use_a_little_of_the_outputs_precision():
    expected = torch.randn(2, 3, 50, dtype=torch.float64) + 5
    got = (expected + 2e-6).float()
    assert not compare_lse(got, expected, expected.float(), torch.bfloat16).problem
    assert compare_lse(got, expected, expected.float(), torch.float32).problem


def test_trimming_forgives_a_few_rows_and_no_more(results):
    expected, eager = results
    got = expected.bfloat16()
    got[:, :, 0] = 9.0
    assert compare(got, expected, eager).problem
    assert not compare(got, expected, eager, trim=0.05).problem
    got[:, :, :10] = 9.0
    assert compare(got, expected, eager, trim=0.05).problem


def test_empty_results_pass():
    empty = torch.empty(2, 3, 0, 16, dtype=torch.float64)
    assert not compare(empty.float(), empty, empty.float()).problem
