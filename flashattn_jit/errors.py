"""The errors that this package raises, all of them `FlashAttnJitError`.

They are raised before any work begins, except for `LaunchError` and the emulator's: then a kernel
was refused or stopped, and the outputs are not valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

__all__ = [
    "AbiError", "CacheError", "CompileError", "DistributedError", "EmulatorError",
    "EmulatorFault", "EnvironmentVariableError", "FlashAttnJitError", "GradError", "InputError",
    "LaunchError", "ManifestError", "MissingKernelError", "OutOfPages", "PackError", "ParamError",
    "SequenceError", "TargetError", "TorchInputError", "TraceError", "UnsafeCacheError",
    "VariantError", "VerificationError", "WarmError",
]  # fmt: skip


class FlashAttnJitError(Exception):
    """Base of every error of this package."""


@dataclass(eq=False, repr=False)
class _WithFields(FlashAttnJitError):
    """Base of the errors that have more than a message."""

    message: str

    def __post_init__(self) -> None:
        super().__init__(self.message)


class InputError(FlashAttnJitError, ValueError):
    """An argument has a wrong shape, dtype, device, stride or value."""


class ManifestError(InputError):
    """A manifest or a spec document is ill-formed. Names the field and, in a file, the line."""


class ParamError(FlashAttnJitError, TypeError):
    """A variant's param is missing, unknown, or of the wrong kind, shape or dtype."""


class VariantError(FlashAttnJitError, ValueError):
    """A variant is ill-formed: conflicting hooks, normalisers or param names."""


class TraceError(VariantError):
    """A hook does something that cannot become a kernel. Names the user's file, line and remedy."""


class TargetError(FlashAttnJitError, ValueError):
    """A target is unknown, or this machine cannot run it."""


@dataclass(eq=False, repr=False)
class CompileError(_WithFields, RuntimeError):
    """The compiler is missing or failed. Has the first error line and the paths of log and source.

    `location` is the (file, line) of that error as `#line` names it, such as
    ("hook:SoftCap.score_mod", 3); None where the compiler named none.
    """

    _: KW_ONLY
    first_error: str = ""
    location: tuple[str, int] | None = None
    log_path: str = ""
    source_path: str = ""


@dataclass(eq=False, repr=False)
class WarmError(CompileError):
    """Some kernels of `warm` failed, the others are built. `report` is the `WarmReport`."""

    report: object = None


class CacheError(FlashAttnJitError, RuntimeError):
    """The kernel cache cannot be used: wrong owner or mode, or an entry that stays corrupt."""


class UnsafeCacheError(CacheError):
    """A cache folder that other users can change: wrong owner or mode, or a symlink in its path."""


@dataclass(frozen=True, slots=True)
class Searched:
    """A cache layer that did not have the kernel, and why. fault: the layer needs repair."""

    layer: str
    location: str
    reason: str
    fault: bool = False

    def __str__(self) -> str:
        return f"{self.layer} {self.location}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two key documents differ."""

    field: str
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"{self.field}: {self.wanted} -> {self.found}"


@dataclass(frozen=True, slots=True)
class Nearest:
    """The cache entry most similar to the wanted kernel: its location, and all differences."""

    key: str
    location: str
    differences: tuple[Difference, ...]


@dataclass(eq=False, repr=False)
class MissingKernelError(_WithFields, CacheError):
    """The cache lacks a kernel and FLASHATTN_JIT_COMPILE=never forbids to compile it.

    `spec` is the canonical JSON of the kernel spec, `key` and `target` are those of the kernel,
    `layers` has the reason of each layer, `nearest` the most similar entry (None where the layers
    are empty), `command` is the shell command that builds the kernel.
    """

    _: KW_ONLY
    spec: str = ""
    key: str = ""
    target: str = ""
    layers: Sequence[Searched] = ()
    nearest: Nearest | None = None
    command: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers = tuple(self.layers)


class SequenceError(FlashAttnJitError, RuntimeError):
    """A sequence, step or cache of `fa.kv` is used in a state that does not allow it."""


@dataclass(eq=False, repr=False)
class OutOfPages(_WithFields, RuntimeError):
    """A cache of `fa.kv` has too few pages, and nothing of it has changed.

    `needed` pages were asked for in the group of layers number `group`, which has `free` pages and
    `evictable` ones: pages that only the prefix index holds.
    """

    _: KW_ONLY
    needed: int = 0
    free: int = 0
    evictable: int = 0
    group: int = 0


class PackError(CacheError):
    """A pack of kernels is damaged, unsafe, or in a format that this version cannot read."""


class EnvironmentVariableError(FlashAttnJitError, ValueError):
    """An environment variable of this package has an invalid value."""


class AbiError(FlashAttnJitError, RuntimeError):
    """A loaded artifact has another binary interface than this version."""


class LaunchError(FlashAttnJitError, RuntimeError):
    """CUDA refused to load or to launch a kernel. Names kernel, grid and the artifact's path.

    On the CPU: the process was forked after kernels ran on several threads, which cannot run there.
    """


class EmulatorError(FlashAttnJitError, RuntimeError):
    """The emulator cannot run a kernel, for example because of an unsupported instruction."""


@dataclass(eq=False, repr=False)
class EmulatorFault(_WithFields, EmulatorError):
    """A kernel has a bad access, a race or a deadlock, which the emulator found.

    `kind` is which of them; `kernel`, `source` ("file:line" of the rendered source), `block`,
    `thread`, `address` and `allocation` (a tensor's name) are where. Fields that do not apply are
    empty or None.
    """

    _: KW_ONLY
    kind: str = ""
    kernel: str = ""
    source: str = ""
    block: tuple[int, int, int] | None = None
    thread: int | None = None
    address: int | None = None
    allocation: str = ""


class GradError(FlashAttnJitError, RuntimeError):
    """An input requires grad while grad mode is on; this engine is inference only."""


class DistributedError(FlashAttnJitError, RuntimeError):
    """A rank of a process group failed, is gone, or was given something else than the others."""


class TorchInputError(InputError, RuntimeError):
    """An argument for which the torch function of the same name raises a RuntimeError."""


@dataclass(eq=False, repr=False)
class VerificationError(_WithFields, AssertionError):
    """A compiled kernel disagrees with the eager reference. `report` is the `VerifyReport`."""

    report: object = None
