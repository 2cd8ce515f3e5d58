"""ptxas reports are parsed and compared with budgets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flashattn_jit.codegen.budget import CHANGE_SPILLS
from flashattn_jit.jit.compilation.ptxas_report import (
    Budget,
    KernelResources,
    Report,
    check,
    declared_budgets,
    load_report,
    parse_ptxas,
    read_report,
)

# nvcc 13.0, two kernels; the second calls a function that was not inlined.
WORDS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fajit_merge_kernel' for 'sm_80'
ptxas info    : Function properties for fajit_merge_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 512 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 2.411 ms
ptxas info    : Compiling entry function 'fajit_attention_kernel' for 'sm_80'
ptxas info    : Function properties for fajit_attention_kernel
    1072 bytes stack frame, 1508 bytes spill stores, 1592 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1072 bytes cumulative stack size, 8 bytes cmem[0], 16 bytes cmem[2]
ptxas info    : Function properties for _Z5otherf
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""  # noqa: E501

PTX = """\
.visible .entry fajit_merge_kernel(
\t.param .align 8 .b8 fajit_merge_kernel_param_0[24]
)
.maxntid 128
{
\tret;
}
.visible .entry fajit_attention_kernel(
\t.param .align 8 .b8 fajit_attention_kernel_param_0[24]
)
.maxntid 128, 1, 1
.minnctapersm 3
{
\tret;
}
"""


def clean() -> KernelResources:
    """A kernel within its budget."""
    return KernelResources("k", 128, 0, 0, 0, 512, 376, 1)


def test_each_kernel_is_read() -> None:
    merge, attention = parse_ptxas(WORDS)
    assert merge == KernelResources("fajit_merge_kernel", 10, 0, 0, 0, 512, 376, 1)
    assert attention == KernelResources("fajit_attention_kernel", 255, 1072, 1508, 1592, 0, 24, 2)


def test_words_of_other_tools_are_passed_over() -> None:
    assert parse_ptxas("kernel.cu(3): warning #177-D: variable was declared\n" + WORDS) == (
        parse_ptxas(WORDS)
    )
    assert parse_ptxas("") == ()


def test_frames_of_functions_that_are_called_count() -> None:
    lines = WORDS.splitlines()
    called = "\n".join([*lines[6:9], *lines[10:12], lines[9]])
    assert parse_ptxas(called)[0].stack_bytes == 1072 + 8


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared"),
    [("sm_80", 128, 168, 164 * 1024 // 3 - 1024), ("sm_75", 128, 168, 64 * 1024 // 3)],
)
def test_a_budget_follows_from_launch_bounds(
    target: str, threads: int, registers: int, shared: int
) -> None:
    budgets = declared_budgets(PTX, target)
    assert budgets["fajit_attention_kernel"] == Budget(threads, registers, shared)
    assert budgets["fajit_merge_kernel"].registers == 255


def test_a_clean_report_has_no_complaints() -> None:
    assert check(clean(), Budget(128, 128, 512)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spill_store_bytes": 4}, "k spills registers: 4 bytes stored, 0 bytes loaded"),
        ({"spill_load_bytes": 8}, "k spills registers: 0 bytes stored, 8 bytes loaded"),
        ({"stack_bytes": 16}, "k uses 16 bytes of local memory"),
        ({"registers": 129}, "k uses 129 registers; 128 are its budget"),
        ({"shared_bytes": 513}, "k uses 513 bytes of shared memory; 512 are its budget"),
    ],
)
def test_what_exceeds_the_budget_is_said(change: dict[str, int], says: str) -> None:
    assert check(replace(clean(), **change), Budget(128, 128, 512)) == [says]


SPILLED = {
    "stack_bytes": 24, "spill_store_bytes": 20, "spill_load_bytes": 36, "spills_among_products": 0,
}  # fmt: skip
"""A kernel that spills five registers, none among products: its frame is a multiple of 8 bytes."""


@pytest.mark.parametrize(
    ("change", "allowance", "within"),
    [
        ({}, 24, True),
        ({}, 23, False),
        ({}, 0, False),
        ({"spills_among_products": 1}, 64, False),
        ({"spills_of_changes": CHANGE_SPILLS}, 24, True),
        ({"spills_of_changes": CHANGE_SPILLS + 1}, 64, False),
        ({"spills_among_products": None}, 64, False),  # a kernel without products in loops
        ({"stack_bytes": 32}, 64, False),  # more than was spilled: an array
        ({"registers": 129}, 64, False),
    ],
)
def test_spills_outside_of_products_may_be_allowed(
    change: dict[str, int | None], allowance: int, within: bool
) -> None:
    kernel = replace(clean(), **SPILLED | change)
    budget = Budget(128, 128, 512)
    assert (check(kernel, budget, allowance) == []) is within
    report = Report((kernel, clean()), {"k": budget})
    needs = report.spill_bytes
    assert needs == (24 if change in ({}, {"spills_of_changes": CHANGE_SPILLS}) else None)
    assert needs is None or report.complaints(needs) == []


def test_a_spill_among_products_is_said() -> None:
    kernel = replace(clean(), **SPILLED | {"spills_among_products": 3})
    assert (
        "3 loads and stores among the products of a loop" in check(kernel, Budget(1, 128, 512))[0]
    )


def test_spills_where_rows_are_changed_are_said() -> None:
    kernel = replace(clean(), **SPILLED | {"spills_of_changes": CHANGE_SPILLS + 1})
    said = check(kernel, Budget(1, 128, 512), 64)[0]
    assert said.endswith(f"36 bytes loaded, {CHANGE_SPILLS + 1} where rows are changed")


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = read_report(WORDS, PTX, "sm_80", b"")
    path = tmp_path / "resources.json"
    path.write_text(json.dumps({"artifact_bytes": 7, **asdict(report)}))
    assert load_report(path) == report
    assert report.kernel("fajit_merge_kernel").registers == 10
    assert [text.split()[0] for text in report.complaints()] == ["fajit_attention_kernel"] * 3


def test_serialised_matrix_instructions_are_complaints() -> None:
    line = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources for the wgmma pipeline"
    )
    report = read_report(f"{line}\n", PTX, "sm_90", b"")
    assert report == Report((), report.budgets, (line,))
    assert report.complaints() == [line]
