"""_C: what reaches a kernel, what is refused before it could read or write outside its tensors."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashattn_jit import _C
from flashattn_jit.errors import AbiError

Item = tuple[int, int, int, int, int, int, int, int]


def packed(*items: Iterable[int]) -> bytes:
    """Work or merge items as the buffer that `Call` takes."""
    return b"".join(struct.pack("8i", *item) for item in items)


def dense(q: torch.Tensor, kv_len: int = 5, num_kv_heads: int | None = None, **more: Any) -> Any:
    """The problem of q [B, H, S, D], out like q, lse [B, H, S]."""
    batch, heads, q_len, dim = q.shape
    options: dict[str, Any] = {
        "num_requests": batch,
        "num_q_heads": heads,
        "num_kv_heads": num_kv_heads or heads,
        "head_dim": dim,
        "head_dim_v": dim,
        "q_len": q_len,
        "kv_len": kv_len,
        "q_stride": q.stride()[:3],
        "out_stride": (heads * q_len * dim, q_len * dim, dim),
        "lse_stride": (heads * q_len, q_len, 1),
    }
    return _C.Problem(**{**options, **more})


def all_rows(batch: int, heads: int, group: int, rows: int, kv_len: int) -> bytes:
    """One final item for each request and kv head."""
    return packed(
        *(
            (b, h, group, 0, rows * group, 0, kv_len, -1)
            for b in range(batch)
            for h in range(0, heads, group)
        )
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("group", [1, 3])
def test_dense_calls_reach_every_row_through_strides(
    minimal_module: _C.Module, group: int, threads: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 7, 6, 8).transpose(1, 2)  # [B, H, S, D], rows strided
    out, lse = torch.empty(2, 6, 7, 8), torch.empty(2, 6, 7)
    problem = dense(q, num_kv_heads=6 // group)
    call = _C.Call(minimal_module, problem, all_rows(2, 6, group, 7, 5), flags=_C.WRITE_LSE)
    call.launch(
        q.data_ptr(), q.data_ptr(), q.data_ptr(), out.data_ptr(), lse.data_ptr(), 0.5, threads
    )
    torch.testing.assert_close(out, (0.5 * q[..., :1]).expand_as(out))
    assert (lse == 5).all()


def test_packed_calls_start_at_each_requests_first_row(minimal_module: _C.Module) -> None:
    torch.manual_seed(0)
    lengths = [3, 0, 4]
    q, out = torch.randn(7, 2, 4), torch.empty(7, 2, 4)  # [N, H, D]
    strides = (0, q.stride(1), q.stride(0))
    problem = _C.Problem(
        num_requests=3,
        num_q_heads=2,
        num_kv_heads=2,
        head_dim=4,
        head_dim_v=4,
        q_len=lengths,
        kv_len=np.array([2, 1, 9], dtype=np.int32),
        q_row0=(0, 3, 3),
        kv_row0=[0, 2, 3],
        q_offset=[-1, 1, 5],
        q_stride=strides,
        out_stride=strides,
    )
    assert problem.num_requests == 3
    work = packed(*((b, h, 1, 0, n, 0, 0, -1) for b, n in enumerate(lengths) for h in range(2)))
    _C.Call(minimal_module, problem, work).launch(q.data_ptr(), 0, 0, out.data_ptr(), 0, 2.0, 1)
    torch.testing.assert_close(out, (2 * q[..., :1]).expand_as(out))


def test_params_reach_the_kernel(minimal_module: _C.Module) -> None:
    q, out = torch.ones(1, 1, 1, 4), torch.empty(1, 1, 1, 4)
    tensors = [torch.tensor([[3.0, 9.0]]), torch.tensor(40.0)]
    problem = dense(
        q,
        tensors=[(tuple(t.shape), t.stride()) for t in tensors],
        scalar_kinds="if",
    )
    call = _C.Call(minimal_module, problem, packed((0, 0, 1, 0, 1, 0, 0, -1)))
    addresses = tuple(t.data_ptr() for t in tensors)

    def launch(tensors: Any = addresses, scalars: Any = (500, 0.25)) -> None:
        call.launch(q.data_ptr(), 0, 0, out.data_ptr(), 0, 1.0, 1, tensors, scalars)

    launch()
    assert (out == 544).all()
    launch(scalars=[-500, 1])  # an int is a fine float; a new value needs nothing new
    assert (out == -456).all()
    for wrong in ((), addresses[:1], (*addresses, 0)):
        with pytest.raises(ValueError, match="tensors must have 2 addresses"):
            launch(tensors=wrong)
    with pytest.raises(ValueError, match="param tensor 1 has address 0"):
        launch(tensors=(addresses[0], 0))
    with pytest.raises(ValueError, match="scalars must have 2 values, got 1"):
        launch(scalars=(1,))
    with pytest.raises(TypeError, match=r"an int scalar .* got 0\.5"):
        launch(scalars=(0.5, 0.5))
    with pytest.raises(TypeError, match="fit 64 bits"):
        launch(scalars=(2**63, 0.5))
    with pytest.raises(TypeError):
        launch(scalars=(1, "x"))
    with pytest.raises(TypeError):
        launch(tensors=(1.5, 2.5))
    with pytest.raises(TypeError, match="tuple or list"):
        launch(tensors=iter(addresses))


def test_an_empty_param_tensor_may_have_no_address(minimal_module: _C.Module) -> None:
    q = torch.ones(1, 1, 1, 4)
    problem = dense(q, tensors=[((3, 0), (0, 1))])
    _C.Call(minimal_module, problem, b"").launch(0, 0, 0, 0, 0, 1.0, 1, (0,))


def test_many_params_do_as_well_as_few(minimal_module: _C.Module) -> None:
    q, out, one = torch.zeros(1, 1, 1, 4), torch.empty(1, 1, 1, 4), torch.ones(1)
    problem = dense(q, tensors=[((1,), (1,))] * 40, scalar_kinds="i" * 40)
    call = _C.Call(minimal_module, problem, packed((0, 0, 1, 0, 1, 0, 0, -1)))
    call.launch(q.data_ptr(), 0, 0, out.data_ptr(), 0, 1.0, 1, (one.data_ptr(),) * 40, (2,) * 40)
    assert (out == 42).all()


def test_split_rows_are_merged_from_the_workspace(minimal_module: _C.Module) -> None:
    q, out = torch.full((1, 2, 3, 4), 2.0), torch.full((1, 2, 3, 4), -1.0)
    problem = dense(q, kv_len=10, num_kv_heads=1)
    work = packed((0, 0, 2, 0, 6, 0, 4, 0), (0, 0, 2, 0, 6, 4, 10, 6))  # 6 packed rows in 2 splits
    merge = packed((0, 0, 2, 0, 6, 0, 2, 0))
    call = _C.Call(minimal_module, problem, work, merge, partial_rows=12)
    assert call.workspace_bytes == 12 * 4 * 4 + 12 * 4
    workspace = torch.empty(call.workspace_bytes, dtype=torch.uint8)
    arguments = (q.data_ptr(), q.data_ptr(), q.data_ptr(), out.data_ptr(), 0, 1.0, 1)
    call.launch(*arguments, workspace=workspace.data_ptr())
    assert (out == 4).all()
    with pytest.raises(ValueError, match="workspace has address 0"):
        call.launch(*arguments)


def test_the_partial_lse_starts_aligned(minimal_module: _C.Module) -> None:
    problem = dense(torch.ones(1, 1, 3, 3))
    call = _C.Call(minimal_module, problem, b"", b"", partial_rows=3)
    assert call.workspace_bytes == 64 + 3 * 4
    assert _C.Call(minimal_module, problem, b"").workspace_bytes == 0


@pytest.mark.parametrize("missing", ["q", "k", "v", "out", "lse"])
def test_a_null_tensor_is_refused(minimal_module: _C.Module, missing: str) -> None:
    q = torch.ones(1, 1, 2, 4)
    call = _C.Call(minimal_module, dense(q), packed((0, 0, 1, 0, 2, 0, 5, -1)), flags=_C.WRITE_LSE)
    addresses = dict.fromkeys(("q", "k", "v", "out", "lse"), q.data_ptr())
    with pytest.raises(ValueError, match=f"{missing} has address 0"):
        call.launch(**{**addresses, missing: 0}, scale=1.0, num_threads=1)


def test_work_that_touches_nothing_needs_no_tensors(minimal_module: _C.Module) -> None:
    problem = dense(torch.ones(1, 1, 2, 4))
    _C.Call(minimal_module, problem, b"").launch(0, 0, 0, 0, 0, 1.0, 1)
    nothing = packed((0, 0, 1, 1, 1, 0, 5, -1))
    _C.Call(minimal_module, problem, nothing).launch(0, 0, 0, 0, 0, 1.0, 1)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ((2, 0, 1, 0, 1, 0, 1, -1), "request 2 of num_requests=2"),
        ((-1, 0, 1, 0, 1, 0, 1, -1), "request -1"),
        ((0, 4, 1, 0, 1, 0, 1, -1), r"heads \[4, 5\) of num_q_heads=4"),
        ((0, -1, 1, 0, 1, 0, 1, -1), r"heads \[-1, 0\)"),
        ((0, 0, 0, 0, 1, 0, 1, -1), r"heads \[0, 0\)"),
        ((0, 1, 2, 0, 1, 0, 1, -1), "not of one kv head"),
        ((0, 0, 2**31 - 1, 0, 1, 0, 1, -1), "heads"),
        ((0, 0, 2, 0, 7, 0, 1, -1), r"rows \[0, 7\) of 6 packed rows"),
        ((0, 0, 1, 0, 4, 0, 1, -1), r"rows \[0, 4\) of 3 packed rows"),  # one of two heads
        ((0, 0, 2, 3, 2, 0, 1, -1), r"rows \[3, 2\)"),
        ((0, 0, 2, -1, 2, 0, 1, -1), r"rows \[-1, 2\)"),
        ((0, 0, 1, 0, 3, 0, 6, -1), r"keys \[0, 6\) of kv_len=5"),
        ((0, 0, 1, 0, 3, -1, 5, -1), r"keys \[-1, 5\)"),
        ((0, 0, 1, 0, 3, 5, 4, -1), r"keys \[5, 4\)"),
        ((0, 0, 1, 0, 3, 0, 5, 2), r"partial rows \[2, 5\) of 4"),
        ((0, 0, 1, 0, 3, 0, 5, -2), "partial rows"),
        ((0, 0, 1, 0, 3, 0, 5, 2**31 - 1), "partial rows"),
    ],
)
def test_work_outside_the_problem_is_refused(
    minimal_module: _C.Module, item: Item, says: str
) -> None:
    problem = dense(torch.ones(2, 4, 3, 4), num_kv_heads=2)
    fine = (0, 0, 1, 0, 3, 0, 5, 1)
    _C.Call(minimal_module, problem, packed(fine), partial_rows=4)
    with pytest.raises(ValueError, match=rf"work\[1\].*{says}"):
        _C.Call(minimal_module, problem, packed(fine, item), partial_rows=4)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ((2, 0, 1, 0, 1, 0, 1, 0), "request 2"),
        ((0, 0, 1, 0, 3, 0, 2, 0), r"partial rows \[0, 6\) of 4"),
        ((0, 0, 1, 0, 3, -1, 1, 0), "partial rows"),
        ((0, 0, 1, 0, 3, 0, 0, 0), "partial rows"),
        ((0, 0, 1, 0, 3, 2**31 - 1, 2**31 - 1, 0), "partial rows"),
    ],
)
def test_merge_work_outside_the_partial_rows_is_refused(
    minimal_module: _C.Module, item: Item, says: str
) -> None:
    problem = dense(torch.ones(2, 4, 3, 4), num_kv_heads=2)
    with pytest.raises(ValueError, match=rf"merge_work\[0\].*{says}"):
        _C.Call(minimal_module, problem, b"", packed(item), partial_rows=4)


def test_a_work_buffer_may_be_any_contiguous_memory(minimal_module: _C.Module) -> None:
    problem = dense(torch.ones(1, 1, 2, 4))
    item = [0, 0, 1, 0, 2, 0, 5, -1]
    array = np.array([item, item], dtype=np.int32)
    for work in (array, memoryview(array), bytearray(array.tobytes())):
        _C.Call(minimal_module, problem, work)
    with pytest.raises(ValueError, match="contiguous"):
        _C.Call(minimal_module, problem, array.T)
    with pytest.raises(ValueError, match="multiple"):
        _C.Call(minimal_module, problem, array.tobytes()[:-4])
    with pytest.raises(TypeError):
        _C.Call(minimal_module, problem, [item])


BlockMask = tuple[tuple[int, ...], tuple[int, ...], int, int]


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (((1, 1, 2), (0, 0, 0, 1), 2, 4), "4 entries"),
        (((1, 1, 2, 2), (0, 0, 0, 1), 0, 4), "positive"),
        (((1, 1, 2, 2), (4, 0, 2, 1), 2, 4), "1 requests, the problem 2: a broadcast dim"),
        (((2, 2, 2, 2), (8, 4, 2, 1), 2, 4), "2 heads, the problem 4"),
        (((2, -4, 2, 2), (8, 0, 2, 1), 2, 4), "negative"),
    ],
)
def test_a_block_mask_must_cover_the_problem(mask: BlockMask, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dense(torch.ones(2, 4, 3, 4), block_mask=mask)


def test_work_outside_the_block_mask_is_refused(minimal_module: _C.Module) -> None:
    q = torch.ones(2, 4, 3, 4)
    problem = dense(q, block_mask=((1, 1, 1, 1), (0, 0, 1, 1), 2, 4))
    inside = packed((0, 0, 1, 0, 2, 0, 4, -1))
    for outside in ((0, 0, 1, 0, 3, 0, 4, -1), (0, 0, 1, 0, 2, 0, 5, -1)):
        with pytest.raises(ValueError, match="block mask, which covers 2 query rows and 4 keys"):
            _C.Call(minimal_module, problem, packed(outside))
    call = _C.Call(minimal_module, problem, inside)
    address = q.data_ptr()
    with pytest.raises(ValueError, match="states has address 0"):
        call.launch(address, address, address, address, 0, 1.0, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_q_heads=4"),
        ({"head_dim": 0}, "head_dim=0 must be positive"),
        ({"num_requests": -1}, "num_requests"),
        ({"q_len": [3]}, "q_len must have num_requests=2 entries, got 1"),
        ({"kv_len": -1}, r"kv_len\[0\]=-1 must not be negative"),
        ({"q_row0": -1}, "q_row0"),
        ({"kv_row0": (0, -1)}, r"kv_row0\[1\]"),
        ({"q_len": 2**31}, "does not fit 32 bits"),
        ({"q_len": np.zeros(2, dtype=np.int64)}, "int32 buffer"),
        ({"q_len": np.zeros(4, dtype=np.int32)[::2]}, "contiguous"),
        ({"q_len": np.zeros(2, dtype=np.float32)}, "int32 buffer"),
        ({"q_stride": (1, 2)}, "q_stride must have 3 entries, got 2"),
        ({"tensors": [((1,) * 9, (1,) * 9)]}, "rank 9, at most 8"),
        ({"tensors": [((1, 2), (1,))]}, "strides must have 2 entries"),
        ({"tensors": [((1, -2), (1, 1))]}, "negative"),
        ({"tensors": [(1,)]}, r"\(sizes, strides\)"),
        ({"scalar_kinds": "ix"}, "'i' .*'f'"),
    ],
)
def test_an_impossible_problem_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dense(torch.ones(2, 4, 3, 4), **change)


@pytest.mark.parametrize("change", [{"q_len": "3"}, {"q_len": 3.0}, {"tensors": 3}])
def test_a_wrong_type_is_a_type_error(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        dense(torch.ones(2, 4, 3, 4), **change)


def test_bad_options_of_a_call_are_refused(minimal_module: _C.Module) -> None:
    problem = dense(torch.ones(1, 1, 2, 4))
    with pytest.raises(ValueError, match="unknown bits"):
        _C.Call(minimal_module, problem, b"", flags=64)
    with pytest.raises(ValueError, match="partial_rows"):
        _C.Call(minimal_module, problem, b"", partial_rows=-1)
    with pytest.raises(ValueError, match="num_threads=0"):
        _C.Call(minimal_module, problem, b"").launch(0, 0, 0, 0, 0, 1.0, 0)


@pytest.mark.parametrize(("head_dim", "error"), [(13, ValueError), (14, MemoryError)])
def test_a_kernels_refusal_is_an_error(
    minimal_module: _C.Module, head_dim: int, error: type[Exception]
) -> None:
    q = torch.ones(1, 1, 1, head_dim)
    call = _C.Call(minimal_module, dense(q), packed((0, 0, 1, 0, 1, 0, 0, -1)))
    with pytest.raises(error):
        call.launch(q.data_ptr(), 0, 0, q.data_ptr(), 0, 1.0, 1)


def test_tiles_are_classified_into_a_buffer(minimal_module: _C.Module) -> None:
    problem = dense(torch.ones(1, 2, 7, 4), kv_len=7)
    states = np.full(9, 99, dtype=np.uint8)

    def classify(**change: Any) -> None:
        arguments = {
            "problem": problem,
            "request": 0,
            "head_begin": 0,
            "head_end": 2,
            "q_begin": 0,
            "q_end": 7,
            "tile_q": 4,
            "kv_begin": 0,
            "kv_end": 7,
            "tile_kv": 2,
            "states": states,
            "tensors": (),
            "scalars": (),
        }
        minimal_module.classify(**{**arguments, **change})

    classify()
    assert states.tolist() == [1, 1, 0, 0, 2, 2, 1, 1, 99]
    with pytest.raises(ValueError, match="at least 8"):
        classify(states=np.zeros(7, dtype=np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        classify(states=np.zeros(9, dtype=np.int32))
    with pytest.raises(BufferError):
        classify(states=bytes(9))
    for change in (
        {"request": 1},
        {"head_end": 3},
        {"head_begin": 2},
        {"tile_q": 0},
        {"kv_begin": 8},
        {"kv_begin": -1},
    ):
        with pytest.raises(ValueError):
            classify(**change)


def test_the_gil_is_released_and_threads_may_share_a_call(minimal_module: _C.Module) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 1, 4096, 64)
    call = _C.Call(minimal_module, dense(q), packed((0, 0, 1, 0, 4096, 0, 0, -1)))
    outs = [torch.empty_like(q) for _ in range(4)]

    def run(out: torch.Tensor, scale: float) -> None:
        for _ in range(50):
            call.launch(q.data_ptr(), 0, 0, out.data_ptr(), 0, scale, 1)

    threads = [threading.Thread(target=run, args=(out, float(i))) for i, out in enumerate(outs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, out in enumerate(outs):
        torch.testing.assert_close(out, (i * q[..., :1]).expand_as(out))


def test_a_launch_costs_microseconds(minimal_module: _C.Module) -> None:
    q = torch.ones(1, 1, 1, 64)
    call = _C.Call(minimal_module, dense(q), packed((0, 0, 1, 0, 1, 0, 0, -1)))
    address = q.data_ptr()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            call.launch(address, 0, 0, address, 0, 1.0, 1, (), ())
        best = min(best, (time.perf_counter() - start) / 500)
    assert best < 5e-6


def test_what_is_no_artifact_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot load artifact"):
        _C.Module(str(tmp_path / "absent.so"))
    text = tmp_path / "text.so"
    text.write_text("no shared object")
    with pytest.raises(OSError, match=r"text\.so"):
        _C.Module(str(text))
    import _ctypes

    with pytest.raises(AbiError, match="fajit_describe"):
        _C.Module(_ctypes.__file__)


# ---- merging states ---------------------------------------------------------------------------


def merge(
    outs: list[torch.Tensor], lses: list[torch.Tensor], threads: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged (out, lse) of states out [a, b, c, D], lse [a, b, c]."""
    out = torch.empty(outs[0].shape)
    lse = torch.empty(outs[0].shape[:3])
    _C.merge_states(
        [t.data_ptr() for t in outs],
        [t.stride()[:3] for t in outs],
        [t.data_ptr() for t in lses],
        [t.stride() for t in lses],
        tuple(out.shape[:3]),
        out.shape[3],
        out.data_ptr(),
        out.stride()[:3],
        lse.data_ptr() if lses else 0,
        lse.stride(),
        threads,
    )
    return out, lse


def random_states(count: int, *shape: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    outs = [torch.randn(shape).transpose(0, 1) for _ in range(count)]
    lses = [10 * torch.randn(shape[:3]).transpose(0, 1) for _ in range(count)]
    return outs, lses


@pytest.mark.parametrize("count", [1, 2, 5])
def test_states_merge_as_softmax_weights_say(count: int) -> None:
    outs, lses = random_states(count, 3, 70, 5, 33)
    out, lse = merge(outs, lses)
    weights = torch.stack(lses).double().softmax(0)
    torch.testing.assert_close(lse, torch.stack(lses).double().logsumexp(0).float())
    expected = (weights[..., None] * torch.stack(outs)).sum(0).float()
    torch.testing.assert_close(out, expected)


def test_the_number_of_threads_changes_no_bit() -> None:
    outs, lses = random_states(3, 4, 64, 16, 64)
    assert all(map(torch.equal, merge(outs, lses, 1), merge(outs, lses, 2)))


def test_empty_states_count_nothing_whatever_they_hold() -> None:
    outs, lses = random_states(2, 1, 2, 1, 4)
    lses[0].fill_(-torch.inf)
    outs[0].fill_(torch.nan)
    out, lse = merge(outs, lses)
    assert torch.equal(out, outs[1])
    assert torch.equal(lse, lses[1])
    lses[1].fill_(-torch.inf)
    out, lse = merge(outs, lses)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_sums_are_added() -> None:
    outs, _ = random_states(3, 2, 3, 4, 5)
    out, _ = merge(outs, [])
    torch.testing.assert_close(out, sum(outs))


def test_no_rows_merge_to_no_rows() -> None:
    out, lse = merge([torch.empty(2, 0, 3, 4)], [torch.empty(2, 0, 3)])
    assert out.numel() == lse.numel() == 0


def test_lists_that_do_not_fit_together_are_refused() -> None:
    outs, lses = random_states(2, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="at least one"):
        merge_arguments: Callable[..., None] = _C.merge_states
        merge_arguments([], [], [], [], (1, 1, 1), 4, 8, (1, 1, 1), 8, (1, 1, 1), 1)
    with pytest.raises(ValueError, match="equally long"):
        merge(outs, lses[:1])


# ---- hardware ---------------------------------------------------------------------------------


def test_the_isa_agrees_with_the_kernels_list() -> None:
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split(":")[1].split())
            break
    v3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
    v4 = v3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    expected = "generic"
    for isa, needed in (
        ("avx2", v3),
        ("avx512", v4),
        ("avx512_bf16", v4 | {"avx512_bf16", "avx512_vnni"}),
        ("amx_bf16", v4 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"}),
    ):
        if needed <= flags:
            expected = isa
    assert _C.cpu_isa() == expected


def test_cache_sizes_are_plausible() -> None:
    l1, l2, l3 = _C.cache_sizes()
    for size, low, high in (
        (l1, 8 << 10, 1 << 20),
        (l2, 64 << 10, 1 << 28),
        (l3, 1 << 19, 1 << 34),
    ):
        assert size == 0 or low <= size <= high
