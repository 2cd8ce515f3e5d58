"""The target of a call, and kernel specs: everything that determines the code of one artifact.

A target is a name such as ``cpu:avx512_bf16`` or ``sm_80`` (`targets`). Code is compiled for
exactly one. ``emulated:sm_80`` runs the PTX of sm_80 on the CPU.

In order: dtypes that targets support; the target of a call's tensors; the spec of an attention
kernel; that of CUDA utility kernels (merging states, appending to pages); display names; kernel
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal

from .. import _C, env
from ..errors import EnvironmentVariableError, InputError, TargetError
from ..variants.ir.ir import LATENT_ROWS, VariantIR, canonical_json, fitting_name, variant_to_json
from .targets import (
    CPU_ROWS,
    CPU_TARGETS,
    CUDA_TARGETS,
    EMULATED,
    EMULATED_TARGETS,
    architecture,
    best_cpu_target,
    compiled_target,
    is_cuda,
    is_emulated,
    runnable_cpu_targets,
    runs_on,
    sm_version,
)

if TYPE_CHECKING:
    import torch

# --- dtypes and targets ---------------------------------------------------------------------------

MAX_HEAD_DIM = 576
"""The largest head dim of q, k and v on any target: that of DeepSeek's latent rows."""


@dataclass(frozen=True, slots=True)
class StorageDtype:
    """A dtype that keys and values may have in memory.

    Args:
        name: torch's.
        bytes: of one value.
        cpp: its type in the headers of CPU kernels (fajit/cpu/vector/load_row.h).
        short: what people call it, where its name is long.
        cuda: of codes, their type in the headers of CUDA kernels (fajit/cuda/tile/codes.h).
    """

    name: str
    bytes: float
    cpp: str
    short: str = ""
    cuda: str = ""


STORAGE = (
    StorageDtype("float32", 4, "float", "fp32"),
    StorageDtype("bfloat16", 2, "bfloat16_t", "bf16"),
    StorageDtype("float16", 2, "half_t", "fp16"),
    StorageDtype("int8", 1, "int8_t", cuda="Int8Codes"),
    StorageDtype("float8_e4m3fn", 1, "e4m3_t", "fp8", "E4m3Codes"),
    StorageDtype("float8_e5m2", 1, "e5m2_t", "e5m2", "E5m2Codes"),
    StorageDtype("bits4x2", 0.5, "int4x2_t", "int4", "Int4Codes"),  # two values an element
    StorageDtype("uint8", 1, "latent_t", "fp8_ds_mla", "LatentCodes"),  # `LATENT_ROWS`
)

DTYPE_BYTES = {dtype.name: dtype.bytes for dtype in STORAGE}
"""Bytes of one value of the dtypes that q, k and v may have, by torch's names."""

CPP_TYPES = {dtype.name: dtype.cpp for dtype in STORAGE}
"""The types of these dtypes in the headers of CPU kernels."""

CUDA_CODES = {dtype.name: dtype.cuda for dtype in STORAGE if dtype.cuda}
"""The types of quantised keys and values in the headers of CUDA kernels."""

CODE_DTYPES = tuple(name for name in CUDA_CODES if name != "uint8")
"""Dtypes of quantised keys and values whose scales are elsewhere."""

KV_DTYPES = tuple(DTYPE_BYTES)
"""Dtypes of keys and values on CPU targets."""

Q_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of queries, and of the output, on CPU targets."""

SHORT_DTYPES = {dtype.name: dtype.short for dtype in STORAGE if dtype.short}
"""What people call dtypes whose names are long."""


@cache
def host_target() -> str:
    """The best CPU target for this machine, for example ``"cpu:avx512_bf16"``."""
    return best_cpu_target(_C.cpu_features())


@cache
def host_targets() -> tuple[str, ...]:
    """The CPU targets that this machine runs; those after `host_target` are slower here."""
    return runnable_cpu_targets(_C.cpu_features())


def default_target() -> str:
    """The target of CPU tensors where a call names none.

    `host_target`, or what FLASHATTN_JIT_TARGET names.

    Raises:
        EnvironmentVariableError: it names no CPU target, or one that this machine cannot run.
    """
    name = env.target()
    return _forced(name) if name else host_target()


@cache
def _forced(name: str) -> str:
    runs = host_targets()
    if name in runs:
        return name
    if name in CPU_TARGETS:
        problem = f"needs instructions that this machine lacks; set it to one of {', '.join(runs)}"
    else:
        problem = f"must be a CPU target that this machine runs: {', '.join(runs)}"
    if name in CUDA_TARGETS or name in EMULATED_TARGETS:
        problem += f"; for {compiled_target(name)} pass target= to a call"
    raise EnvironmentVariableError(
        f"FLASHATTN_JIT_TARGET={name!r} {problem}; or unset it, which means {host_target()}"
    )


@cache
def cuda_target(major: int, minor: int) -> str:
    """The target for a device of compute capability `major`.`minor`: never a suffixed one.

    Raises:
        TargetError: no target of that major version is not above it.
    """
    fitting = [t for t in CUDA_TARGETS if t == architecture(t) and runs_on(t, major, minor)]
    if not fitting:
        raise TargetError(
            f"no kernels exist for compute capability {major}.{minor}; CUDA targets are "
            f"{', '.join(CUDA_TARGETS)}"
        )
    return fitting[-1]


def resolve_target(target: str | None) -> str:
    """`target` checked, or `default_target` when None.

    Raises:
        TargetError: the name is unknown, or this machine cannot run it.
        EnvironmentVariableError: as for `default_target`.
    """
    if target is None:
        return default_target()
    if not isinstance(target, str):
        raise TargetError(
            f"unknown target <{type(target).__name__}>; a target is a name such as "
            f"{CPU_TARGETS[0]!r}, or None for the best of this machine"
        )
    if target in EMULATED_TARGETS:
        return target
    if target in CUDA_TARGETS:
        raise TargetError(
            f"target {target!r} runs on CUDA tensors; on CPU tensors use {EMULATED + target!r} to "
            "run its kernels in the emulator"
        )
    if target not in CPU_TARGETS:
        known = ", ".join((*CPU_TARGETS, *CUDA_TARGETS, *EMULATED_TARGETS))
        raise TargetError(f"unknown target {target!r}; known targets: {known}")
    if target not in host_targets():
        raise TargetError(
            f"target {target!r} needs instructions that this machine lacks; the highest target "
            f"that runs here is {host_targets()[-1]!r}"
        )
    return target


def cuda_dtypes(target: str) -> tuple[str, ...]:
    """The dtypes of q, k and v on a CUDA target, which multiplies them on matrix units.

    All three have one dtype, with fp32 accumulate; but keys and values may be codes, which become
    that dtype on chip. float32 is not supported: three tf32 products would run at a third of the
    rate, double the shared memory of every tile and keep 21 bits of each operand. CPU targets have
    fp32's accuracy, bfloat16 has the speed.
    """
    return ("bfloat16", "float16") if sm_version(target) >= 80 else ("float16",)


@lru_cache(maxsize=1024)
def takes_dtypes(target: str, dtypes: tuple[str, str, str]) -> bool:
    """Whether a target has kernels for these dtypes of q, k and v."""
    if is_cuda(compiled_target(target)):
        return dtypes[0] in cuda_dtypes(target) and {*dtypes[1:]} <= {dtypes[0], *CUDA_CODES}
    return dtypes[0] in Q_DTYPES and {*dtypes[1:]} <= DTYPE_BYTES.keys()


def matrix_dtype(target: str, q_dtype: str) -> str:
    """The dtype in which a target multiplies matrices for queries of `q_dtype`.

    CPU: bfloat16 where the machine has bf16 dot products, else float32 (rows are converted on
    load). CUDA: that of the queries, which is float16 or bfloat16.
    """
    if is_cuda(target):
        return q_dtype
    return "bfloat16" if q_dtype == "bfloat16" and CPU_ROWS[target].bf16_rate else "float32"


def stored_bytes(dim: int, dtype: str) -> float:
    """Bytes of `dim` values of a row."""
    return LATENT_ROWS.get(dim, dim) if dtype == "uint8" else dim * DTYPE_BYTES[dtype]


def wrong_rows(head_dims: tuple[int, int], dtypes: tuple[str, str, str]) -> str:
    """Why keys or values of dtype uint8 cannot be `LATENT_ROWS`; empty if they can, or are not."""
    for name, dim, wanted, dtype in zip(
        ("head_dim", "head_dim_v"), head_dims, LATENT_ROWS, dtypes[1:], strict=True
    ):
        if dtype == "uint8" and dim != wanted:
            return (
                f"{name}={dim}, but uint8 is of latent rows: keys of head_dim=576, values of "
                "head_dim_v=512; pass other codes as an fa.kv.Stored, with a kv_format"
            )
    return ""


def has_whole_rows(head_dims: tuple[int, int], dtypes: tuple[str, str, str]) -> bool:
    """Whether the rows of q, k, v and out are multiples of 16 bytes long, as copies on CUDA are.

    >>> has_whole_rows((40, 40), ("bfloat16", "bfloat16", "bfloat16"))
    True
    >>> has_whole_rows((40, 40), ("bfloat16", "int8", "int8"))
    False
    """
    (head_dim, head_dim_v), (q, k, v) = head_dims, dtypes
    rows = ((head_dim, q), (head_dim, k), (head_dim_v, v), (head_dim_v, q))
    return not any(stored_bytes(dim, dtype) % 16 for dim, dtype in rows)


# --- where a call runs ----------------------------------------------------------------------------


def on_cpu(target: str) -> bool:
    """Whether a resolved target's kernels are CPU code."""
    return target in CPU_TARGETS


@cache
def device_capability(index: int) -> tuple[int, int]:
    """The compute capability of a device."""
    import torch  # commands that only name targets do without

    return torch.cuda.get_device_capability(index)


def device_target(index: int) -> str:
    """The CUDA target of a device. Raises TargetError where no kernels exist for it."""
    return cuda_target(*device_capability(index))


def call_target(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, target: str | None) -> str:
    """The target of a call on these tensors: `target` if it is given.

    Raises:
        TargetError: `target` is unknown, or does not run on the tensors' device.
        InputError: the target does not take the tensors' dtypes.
    """
    if not q.is_cuda:
        target = resolve_target(target)
        if not on_cpu(target):
            check_matrix_dtypes((q.dtype, k.dtype, v.dtype), target)
        return target
    target = _checked(target, q.device)
    check_matrix_dtypes((q.dtype, k.dtype, v.dtype), target)
    return target


def target_on_device(device: torch.device, target: str | None) -> str:
    """As `call_target`, of kernels that take any dtype, or before there are tensors."""
    if device.type != "cuda":
        return resolve_target(target)
    return _checked(target, device)


def _checked(target: str | None, device: torch.device) -> str:
    index = device.index or 0
    own = device_target(index)
    if target is None or target == own:
        return own
    if target in CUDA_TARGETS:
        if runs_on(target, *device_capability(index)):
            return target
        raise TargetError(
            f"target {target!r} does not run on {device}, whose target is {own!r}; leave target "
            "out, or pass that one"
        )
    if is_emulated(target) or target in CPU_TARGETS:
        raise TargetError(
            f"target {target!r} runs on CPU tensors, but the tensors are on {device}; move them "
            "with .cpu(), or leave target out"
        )
    return resolve_target(target)  # raises the error for unknown names


def check_matrix_dtypes(dtypes: Sequence[torch.dtype], target: str) -> None:
    """Raises InputError unless q, k and v have one dtype that a CUDA target supports, or k and v
    are codes."""
    q, k, v = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    if takes_dtypes(target, (q, k, v)):
        return
    allowed = [f"torch.{name}" for name in cuda_dtypes(target)]
    raise InputError(
        f"CUDA kernels of {compiled_target(target)} take q, k and v of one dtype, "
        f"{' or '.join(allowed)}, or codes for k and v; got q torch.{q}, k torch.{k}, v torch.{v}. "
        f"Convert them with .to({allowed[0]}), or call on CPU tensors without a CUDA target, where "
        "float32 is supported"
    )


# --- kernel specs --------------------------------------------------------------------------------

SCHEMA = 2
"""Version of an attention kernel's document; part of its cache keys."""

UTILITY_SCHEMA = 1
"""The same of other kernels."""

TileKind = Literal["prefill", "few_row", "prefill_wgmma", "prefill_wide", "append"]
"""prefill_wgmma: prefill by the matrix instructions of warpgroups, on Hopper. prefill_wide: any
number of rows of head dims above 256, on CUDA. append: no attention, but new keys and values that
key_mod and value_mod change on their way into pages."""
UtilityKernel = Literal["merge_states", "append_paged_kv"]
FEATURES = (
    "block_mask", "paged", "mixed_rows", "sparse", "unaligned", "indirect", "values_in_keys",
)  # fmt: skip
"""block_mask: a byte map decides which tiles are visited. paged: key rows are found through a page
table. mixed_rows: rows of several requests share an item's keys. sparse: items visit lists of key
blocks. unaligned: rows of q, k, v or out do not all start at multiples of 16 bytes (CUDA).
indirect: paged, mixed_rows and sparse in one kernel, distinguished at run time (CPU).
values_in_keys: values are the first columns of the keys' rows, in one buffer (CUDA)."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Names one artifact: variant IR x dtypes x head dims x target x tile kind x features.

    Dtypes are torch's names without the prefix. `tile_q` counts packed query rows, `tile_kv` keys.
    `num_warps` and `num_stages` (buffers of the copy pipeline) are of CUDA kernels, else 0.
    """

    variant: VariantIR
    q_dtype: str
    k_dtype: str
    v_dtype: str
    head_dim: int
    head_dim_v: int
    target: str
    tile_kind: TileKind
    tile_q: int
    tile_kv: int
    features: tuple[str, ...] = ()
    name: str = field(default="variant", compare=False)  # for logical #line names only
    num_warps: int = 0
    num_stages: int = 0

    @property
    def has_codes(self) -> bool:
        """Whether keys or values are quantised."""
        return self.k_dtype in CUDA_CODES or self.v_dtype in CUDA_CODES

    @property
    def template(self) -> str:
        """The template that renders this spec, below templates/."""
        kernel = "append" if self.tile_kind == "append" else "attention"
        return f"cuda/{kernel}.cu.j2" if is_cuda(self.target) else f"cpu/{kernel}.cpp.j2"

    def document(self) -> str:
        """The canonical JSON that identifies the spec: equal specs, equal text, on any machine."""
        return canonical_json(
            {
                "schema": SCHEMA,
                "variant": self._variant_document(),
                "dtypes": [self.q_dtype, self.k_dtype, self.v_dtype],
                "head_dims": [self.head_dim, self.head_dim_v],
                "target": self.target,
                "tile": [self.tile_kind, self.tile_q, self.tile_kv],
                "warps": [self.num_warps, self.num_stages],
                "features": sorted(self.features),
            }
        )

    def _variant_document(self) -> dict[str, object]:
        """The variant without its params' names, which are not part of the code."""
        if self.variant.cpp:
            # C++ texts refer to params by name, and compiler messages contain the variant's name.
            return {**variant_to_json(self.variant), "name": self.name}
        nameless = replace(
            self.variant,
            tensors=tuple(replace(p, name="") for p in self.variant.tensors),
            scalars=tuple(replace(p, name="") for p in self.variant.scalars),
        )
        return variant_to_json(nameless)


APPEND_TOKENS = 16
"""New tokens of an item of work of appends."""


def append_kernel(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str],
    target: str,
    name: str = "variant",
    new_dtype: str = "",
) -> KernelSpec:
    """The kernel that changes new keys and values by the variant's hooks on their way into pages.

    dtypes: of keys and values as they are stored. new_dtype: of new rows that become codes, else
    that of keys.
    """
    compiled = compiled_target(target)
    warps, stages = (4, 1) if is_cuda(compiled) else (0, 0)
    return KernelSpec(
        variant, new_dtype or dtypes[0], *dtypes, *head_dims, compiled, "append", APPEND_TOKENS, 16,
        (), name, warps, stages,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class UtilitySpec:
    """Names one artifact with one utility kernel (no attention).

    append_paged_kv copies rows in units of `unit_bytes`: 1, 2, 4, 8 or 16; 0 for merge_states.
    """

    kernel: UtilityKernel
    target: str
    unit_bytes: int = 0

    @property
    def template(self) -> str:
        """The template that renders this spec, below templates/."""
        return f"cuda/{self.kernel}.cu.j2"

    def document(self) -> str:
        """The canonical JSON that identifies the spec."""
        return canonical_json(
            {
                "utility_schema": UTILITY_SCHEMA,
                "kernel": self.kernel,
                "target": self.target,
                "unit_bytes": self.unit_bytes,
            }
        )


AnySpec = KernelSpec | UtilitySpec
"""The spec of any artifact."""


def name_of(spec: AnySpec) -> str:
    """The display name of a spec: its variant's name as in manifests, or a utility's kernel."""
    return spec.kernel if isinstance(spec, UtilitySpec) else fitting_name(spec.name)


def tile_words(
    tile: Sequence[object], head_dims: Sequence[int], dtypes: Sequence[str], features: Iterable[str]
) -> str:
    """An attention kernel in a few words, from a spec's fields or from its document's.

    >>> tile_words(("prefill", 96, 96), (64, 64), ("float32",) * 3, ("block_mask",))
    'prefill 96x96 d64 fp32 block_mask'
    """
    kind, tile_q, tile_kv = tile
    q, k, v = (SHORT_DTYPES.get(name, name) for name in dtypes)
    short = q if q == k == v else f"{q}/{k}" if k == v else f"{q}/{k}/{v}"
    head_dim, head_dim_v = head_dims
    dims = f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}/{head_dim_v}"
    return " ".join([str(kind), f"{tile_q}x{tile_kv}", dims, short, *features])


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """One kernel request.

    spec: the canonical JSON of its spec, target included. template: its root template's name below
    templates/. render: returns the source, called on a miss; picklable, as a request may be sent to
    another process. name: of the variant, for display; no key depends on it. spill_bytes: what a
    thread of a CUDA kernel may spill outside of matrix products before a smaller tile replaces it.
    """

    spec: str
    template: str
    target: str
    render: Callable[[], str]
    name: str = "variant"
    spill_bytes: int = 0
