"""What the model says of a compiled kernel, as text."""

from __future__ import annotations

from dataclasses import dataclass

from ...codegen.budget import changes_rows, ctas_per_sm, warpgroup_registers
from ...codegen.spec import KernelSpec, stored_bytes
from ...codegen.targets import architecture
from ...errors import InputError
from ...jit.cache.entry import ARTIFACT
from ...jit.compilation.ptxas_report import KernelResources, parse_report
from ...jit.compilation.toolchain import RESOURCES
from ...jit.module import prepare_kernel
from ...planner.devices import Device
from ...planner.tiles import build_requests, fallbacks
from ..table import si, table
from .disassembly import Instruction, disassemble
from .multiprocessor import Multiprocessor, multiprocessor
from .prediction import QUERY_START, KernelModel, LoopCost
from .rows import changers_of
from .simulation import Ring

ATTENTION = "fajit_attention_kernel"
_COMPARED = "sm_90"


@dataclass(frozen=True)
class MachineCode:
    """The predicted cost of a kernel's loops over the keys. `str()` gives a table.

    No figure is a measurement: the model (`inspect/machine_code`) reads the compiled instructions
    and simulates a multiprocessor whose K and V are in the L2.

    spec: the kernel, on the tile that was taken. device: the GPU, which need not exist here.
    resources: ptxas' report.
    """

    spec: KernelSpec
    device: Device
    model: KernelModel
    resources: KernelResources

    @property
    def loops(self) -> tuple[LoopCost, ...]:
        """The loops in order of address: full tiles, and masked ones where they have a loop."""
        return self.model.costs

    def flops_per_s(self, cost: LoopCost) -> float:
        """The predicted rate (FLOP/s) of the device while its blocks repeat a loop's turn."""
        return self.model.flops_per_s(cost) * self.device.num_sms

    def __str__(self) -> str:
        header = ["loop", "instructions", "per key and warp", "clocks", "longest", "bound by",
                  "rate", "of peak"]  # fmt: skip
        rows, lines = [], []
        for n, cost in enumerate(self.loops):
            turn, rate = cost.common, self.flops_per_s(cost)
            size = len(cost.loop.common)
            rows.append(
                [self._name(n), str(size), f"{size / self._keys:.1f}", f"{turn.cycles:.0f}",
                 f"{cost.longest.cycles:.0f}", turn.bound_by,
                 si(rate, "FLOP/s"), f"{rate / self.device.matrix_flops:.0%}"]
            )  # fmt: skip
            stalls = sorted(turn.stalls.items(), key=lambda s: -s[1])
            lines.append(
                f"loop {n}, share of a warp's clocks: "
                + ", ".join(f"{cause} {share:.0%}" for cause, share in stalls if share >= 0.005)
            )
            if cost.loop.spills:
                lines.append(
                    f"loop {n}: {cost.loop.spills} loads and stores of spilled registers, "
                    f"{cost.loop.spills_among_products} among the matrix products"
                )
        known = (
            ""
            if architecture(self.spec.target) == _COMPARED
            else (f"; its figures for {self.spec.target} were compared with no published ones")
        )
        tile = f"{self.spec.tile_kind} {self.spec.tile_q} x {self.spec.tile_kv}"
        return "\n".join(
            [
                f"{tile}, {self._blocks()}; simulated, not measured{known}",
                self._registers(),
                table(header, rows),
                *lines,
            ]
        )

    def _registers(self) -> str:
        used = self.resources
        changes = (
            f", {used.spills_of_changes} loads and stores in a turn of the changers"
            if used.spills_of_changes
            else ""
        )
        spilled = (
            f"spills {used.spill_store_bytes} bytes stored and {used.spill_load_bytes} loaded a "
            f"thread, {used.spills_among_products or 'none'} of them among the matrix products"
            f"{changes}"
            if used.spill_store_bytes
            else "no spills"
        )
        return f"{used.registers} registers{self._divided()}, {spilled}"

    def _divided(self) -> str:
        """How warpgroups with roles divide the registers, after the launch."""
        produces, consumes, changes = warpgroup_registers(self.spec) if self._wgmma else (0, 0, 0)
        if not consumes:
            return ""
        also = f", {changes} of a changer" if changes else ""
        return f" at the launch, then {consumes} of a consumer{also} and {produces} of the producer"

    @property
    def _wgmma(self) -> bool:
        return self.spec.tile_kind == "prefill_wgmma"

    def _blocks(self) -> str:
        blocks, warps = self.model.blocks, self.model.warps
        where = f"a multiprocessor of {self.device.name}"
        if not self._wgmma:
            return f"{blocks} blocks of {warps} warps {where}"
        number = "1 block" if blocks == 1 else f"{blocks} blocks"
        also = ", 4 load and 4 change rows" if changes_rows(self.spec) else ", and 4 load"
        return f"{number} {where}: {warps} warps multiply, in groups of 4{also}"

    def _name(self, n: int) -> str:
        """Of a loop. Kernels of wgmma have one for full tiles and one for partial ones."""
        if not self._wgmma or len(self.loops) != 2:
            return str(n)
        return f"{n}: {'full' if self.loops[n] == self.model.full else 'partial'} tiles"

    @property
    def _keys(self) -> int:
        """Keys of a tile that one warp multiplies: two warps share the rows of a wide tile."""
        split = {"few_row": self.spec.num_warps, "prefill_wide": 2}
        return self.spec.tile_kv // split.get(self.spec.tile_kind, 1)


def kernel_model(
    spec: KernelSpec, code: tuple[Instruction, ...], machine: Multiprocessor
) -> KernelModel:
    """The model of an attention kernel of this project, with its tile."""
    if spec.tile_kind != "prefill_wgmma":
        changed = spec if changes_rows(spec) and spec.tile_kind == "prefill" else None
        return KernelModel(code, machine, ctas_per_sm(spec), spec.num_warps, rows=changed)
    rows = stored_bytes(spec.head_dim, spec.k_dtype) + stored_bytes(spec.head_dim_v, spec.v_dtype)
    ring = Ring(2 * spec.num_stages, spec.tile_kv * rows / 2, changers_of(spec, code))
    return KernelModel(code, machine, ctas_per_sm(spec), spec.tile_q // 16, ring, QUERY_START)


def machine_code(spec: KernelSpec, device: Device) -> MachineCode:
    """Compile a kernel if the cache lacks it, and simulate its loops on a device.

    Raises:
        InputError: nvdisasm is missing, or the model does not know the device's architecture.
        CompileError: the kernel does not compile.
    """
    machine = multiprocessor(device)
    if machine is None:
        raise InputError(f"the model of machine code has no figures for {device.target}")
    obtained = prepare_kernel(build_requests(spec))
    taken = (spec, *fallbacks(spec))[obtained.tile]
    code = disassemble(obtained.found.read(ARTIFACT))[ATTENTION]
    model = kernel_model(taken, code, machine)
    report = parse_report(obtained.found.read(RESOURCES))
    return MachineCode(taken, device, model, report.kernel(ATTENTION))
