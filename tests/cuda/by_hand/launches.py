"""Hand-written launches of kernels in the emulator: a test sets any field of `fajit_args`.

A test chooses the work of each block, so that kernels run work that no plan has: empty lists,
padding between items, states in any order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch

from flashattn_jit import _C
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.jit.emulator import programs
from flashattn_jit.jit.module import kernel_ptx, load_stepping
from flashattn_jit.planner.tiles import build_request
from flashattn_jit.variants.binding import Bound
from tests.harness.abi import Args, Launch, TensorParam


@dataclass(slots=True)
class ByHand:
    """A hand-written launch. values: fields of Args; a tensor stands for its address.

    q, out: [tokens, heads, dim]; lse: [tokens, heads]; k, v: [tokens, heads, dim] or
    [pages, page_size, heads, dim]. work, merge_work: int32 [items, 8].
    """

    spec: KernelSpec
    bound: Bound
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    work: torch.Tensor
    merge_work: torch.Tensor | None = None
    partial_rows: int = 0
    values: Mapping[str, torch.Tensor | int] = field(default_factory=dict)

    def run(self, copies: Literal["late", "early"] = "late") -> None:
        """Runs the attention kernel, then the merge if it has work. Raises EmulatorFault."""
        module, text = artifact_of(self.spec)
        partial_out = torch.full((self.partial_rows, self.spec.head_dim_v), float("nan"))
        partial_lse = torch.full((self.partial_rows,), float("nan"))
        arrays = {
            "q": self.q, "k": self.k, "v": self.v, "work": self.work,
            **{n: t for n, t in self.values.items() if isinstance(t, torch.Tensor)},
        }  # fmt: skip
        results = {"out": self.out, "lse": self.lse}
        states = {"partial_out": partial_out, "partial_lse": partial_lse}
        if self.merge_work is not None:
            arrays["merge_work"] = self.merge_work
        args = self._args({**arrays, **results, **states})
        params = {f"param {i}": t for i, t in enumerate(self.bound.tensors)}
        inputs = [_extent(n, t, False) for n, t in (arrays | params).items() if t.numel()]
        written = [_extent(n, t, True) for n, t in results.items()]
        program = _program(text)
        for kernel in (0, 1)[: 1 if self.merge_work is None else 2]:
            launch = Launch.aligned()
            status = module.fajit_plan_launch(ctypes.byref(args), kernel, ctypes.byref(launch))
            assert status == 0, f"refused with status {status}"
            if launch.grid[0] == 0:
                continue
            program.run(
                launch.kernel.decode(),
                tuple(launch.grid),
                tuple(launch.block),
                launch.shared_bytes,
                bytes(launch.params[: launch.params_bytes]),
                [
                    *inputs,
                    *written,
                    *(_extent(n, t, kernel == 0) for n, t in states.items() if t.numel()),
                ],
                async_copies=copies,
                overlaps=(*results, *states) if launch.waits else None,
            )

    def _args(self, tensors: Mapping[str, torch.Tensor]) -> Args:
        spec, bound = self.spec, self.bound
        args = Args(
            abi_version=_C.ABI_VERSION,
            args_bytes=ctypes.sizeof(Args),
            num_q_heads=self.q.shape[1],
            num_kv_heads=self.k.shape[-2],
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            flags=_C.WRITE_LSE,
            scale=spec.head_dim**-0.5,
            num_tensors=len(bound.tensors),
            num_scalars=len(bound.scalars),
            num_work=len(self.work),
            kv_rows=self.k.shape[-3],
            kv_requests=self.k.shape[0] if self.k.ndim == 4 else 1,
        )
        assert not bound.scalars, "scalar params are not supported here"
        layouts = (TensorParam * max(1, len(bound.tensors)))()
        for layout, tensor in zip(layouts, bound.tensors, strict=False):
            layout.describe(tensor)
        scalars = (ctypes.c_uint64 * 1)()
        args.kept = layouts, scalars  # kept alive as long as args points to them
        args.tensors, args.scalars = ctypes.addressof(layouts), ctypes.addressof(scalars)
        for name, value in self.values.items():
            setattr(args, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
        for name, tensor in tensors.items():
            setattr(args, name, tensor.data_ptr())
        for name in ("q", "k", "v", "out", "lse"):
            *first, row, head = tensors[name].stride()[: 3 if tensors[name].ndim == 4 else 2]
            strides = (first[0] if first else 0, head, row)
            getattr(args, f"{name}_stride")[:] = strides
        if self.merge_work is not None:
            merges = self.merge_work[self.merge_work[:, 0] >= 0]  # without padding
            args.num_merge_work = len(self.merge_work)
            args.max_merge_rows = int((merges[:, 4] - merges[:, 3]).max())
        return args


def artifact_of(spec: KernelSpec) -> tuple[ctypes.CDLL, str]:
    """The host part of a kernel's artifact, and its PTX."""
    module = load_stepping([build_request(spec)])[1]
    return ctypes.CDLL(module.path), ptx_of_artifact(spec, kernel_ptx(module))


ptx_of_artifact: Callable[[KernelSpec, str], str] = lambda spec, text: text  # noqa: E731
"""The PTX that runs for a spec; tests of mutants replace this function."""


@cache
def _program(text: str) -> programs.Program:
    return programs.Program(text)


def _extent(name: str, tensor: torch.Tensor, writable: bool) -> tuple[str, int, int, bool, bool]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    # Results hold NaN, which no kernel may read; only the merge reads the states, after attention.
    return name, tensor.data_ptr(), size, writable, not writable


def ints(values: Sequence[int]) -> torch.Tensor:
    """An int32 tensor, as kernels read their arrays."""
    return torch.tensor(values, dtype=torch.int32)
