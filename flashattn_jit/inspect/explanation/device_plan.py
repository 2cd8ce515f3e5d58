"""The plan of a problem on a GPU, which this machine need not have: tile, slots, splits."""

from __future__ import annotations

from dataclasses import dataclass

from ... import _C
from ...codegen.budget import ctas_per_sm, register_budget, shared_bytes
from ...codegen.spec import KernelSpec, resolve_target
from ...codegen.targets import EMULATED, architecture, compiled_target, is_cuda
from ...env import format_bytes
from ...errors import InputError
from ...jit.cache.entry import KernelKey
from ...ops.planning.batch_plan import native_kind
from ...planner.cuda_tiles import in_flight_bytes
from ...planner.devices import Device, device_hardware, named_hardware, typical_hardware
from ...planner.roofline import Hardware, host_hardware
from ...planner.tiles import Problem, Slots, TileChoice, few_rows, merge_cost, slots
from ..table import table


def machine(target: str | None, device: str | int | None) -> tuple[str, Hardware | Device]:
    """The target and the hardware that `target=` and `device=` name.

    Raises:
        InputError: the device is unknown, or is not of the target.
        TargetError: the target is unknown, or is a CPU target that this machine cannot run.
    """
    if device is not None and str(device) != "cpu":
        found = _device(device)
        if target is None:
            return found.target, found
        compiled = compiled_target(target)
        if not is_cuda(compiled) or architecture(compiled) != found.target:
            raise InputError(
                f"target {target!r} is not that of {found.name}, which is {found.target!r}"
            )
        return compiled, found
    if target is not None and is_cuda(compiled_target(target)):
        resolve_target(EMULATED + compiled_target(target))  # whether it exists
        return compiled_target(target), typical_hardware(target)
    return resolve_target(target), host_hardware()


def _device(device: str | int) -> Device:
    if isinstance(device, int):
        return device_hardware(device)
    name, _, index = device.partition(":")
    if name == "cuda":
        return device_hardware(int(index) if index.isdigit() else 0)
    return named_hardware(device)


@dataclass(frozen=True)
class DevicePlan:
    """The plan for a GPU. `str()` gives the candidates, the slots and the splits.

    num_work, most_splits: work items, and the most parts that the keys of one are split into. Both
    follow from lengths alone, while the schedule of a call also considers the mask.
    """

    candidates: tuple[TileChoice, ...]
    spec: KernelSpec
    key: KernelKey
    device: Device
    slots: Slots
    num_work: int
    most_splits: int

    def __str__(self) -> str:
        header = ["", "tile kind", "tile", "warps", "stages", "shared", "for or against"]
        rows = [
            ["->" if c.chosen else "", c.spec.tile_kind, f"{c.spec.tile_q} x {c.spec.tile_kv}",
             str(c.spec.num_warps), str(c.spec.num_stages), format_bytes(c.scratch_bytes), c.reason]
            for c in self.candidates
        ]  # fmt: skip
        spec, found = self.spec, self.slots
        flying = in_flight_bytes(spec)
        loads = f", {format_bytes(flying)} of K and V in flight on each" if flying else ""
        lines = [
            table(header, rows, "  "),
            f"  budget: {register_budget(spec)} registers a thread, "
            f"{format_bytes(shared_bytes(spec))} of shared memory, at least {ctas_per_sm(spec)} "
            "blocks a multiprocessor",
            f"  slots: {found.per_sm} a multiprocessor (as {found.limit} "
            f"allow{'' if found.limit.endswith('s') else 's'}), "
            f"{found.total} on {self.device.name}{loads}",
            f"  schedule by lengths: {self.num_work} items on {found.total} slots, "
            f"{split_words(self.most_splits)}",
            f"  kernel {self.key.hex}",
        ]
        return "\n".join(lines)


def split_words(most_splits: int) -> str:
    """The number of key splits as text."""
    return f"keys cut into up to {most_splits} parts" if most_splits > 1 else "no keys split"


def device_plan(
    candidates: tuple[TileChoice, ...],
    spec: KernelSpec,
    key: KernelKey,
    device: Device,
    problem: Problem,
) -> DevicePlan:
    """The plan of a problem on a device, from its lengths."""
    found = slots(spec, device)
    workers = max(1, found.total)
    kind = native_kind(spec, device.target, hardware=device)
    few = few_rows(device.target, problem.q_dtype)
    native = _C.BatchPlan(
        _C.BatchLengths.dense(
            len(problem.q_len), max(problem.q_len, default=0), max(problem.kv_len, default=0),
            problem.kv_len,
        ),
        (None, kind) if problem.packed_rows <= few else (kind, None),
        _C.PlanOptions(
            num_q_heads=problem.num_q_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim_v=problem.head_dim_v,
            few_rows=few,
            num_workers=(workers, workers),
            merge_ns=merge_cost(device.target),
        ),
    )  # fmt: skip
    return DevicePlan(candidates, spec, key, device, found, native.num_work, native.most_splits)
