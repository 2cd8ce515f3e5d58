"""One line for any model: torch's own `scaled_dot_product_attention` on the CPU by this engine.

    fa.integrations.torch.activate()

torch sends what its fused CPU attention can compute to one op; all the rest (other devices, dtypes
without a kernel, nested tensors, dropout) it computes by parts. `activate` registers a kernel of
that op's for the CPU. The kernel passes on to torch's what needs gradients or is too small to be
faster here; results are torch's up to rounding.

torch's registry of flash attention implementations (`torch.nn.attention`) is not used: it has one
entry, and would evict a FlashAttention 3 or 4 of CUDA tensors.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading
import warnings
from types import TracebackType
from typing import Any, NoReturn

import torch

from ..codegen.spec import default_target, host_target, host_targets, matrix_dtype
from ..codegen.targets import CPU_ROWS, has_amx
from ..errors import InputError
from ..ops.attention import run_dense
from ..ops.launching.repeats import call_again
from ..ops.sdpa import ADD, CAUSAL, FULL
from ..variants.variant import Variant, tensor

_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_FP32 = torch.float32
_KIND = ("activate",)  # of `call_again`
_MAX_HEAD_DIM = 256  # longer rows were not compared with torch's
_DTYPES = (_FP32, torch.bfloat16, torch.float16)


_COLUMNS = (1, 8, 32)  # query rows: 1, 2 to 8, 9 to 32, more
_LEAST_MFLOP = {
    "float32": (30, 30, 400, 50),
    "16 bits": (0.5, 8, 8, 8),
    "16 bits, in fp32": (0.5, 10, 200, 8),
    # On CPUs with AMX torch's own products of bf16 are fast.
    "bf16 on AMX": (30, 15, 40, 30),
    "bf16, on another target than the machine's": (30, 30, 1000, 50),
    # Where the CPU has AVX512-BF16, but its own target has not: torch uses it.
    "bf16, in fp32": (60, 8, 9, 8),
}
"""The smallest calls, in 1e6 floating-point operations, in which the engine is at least as fast as
torch: `python -m benchmarks.activate --only borders` on 2 cores of a Zen 4 and of Xeons with and
without AMX, each CPU target on its own. The engine's fixed cost is higher than torch's (5 to 20
us), and torch is faster over a few rows whose keys are in cache."""
_LEAST_GROUPED_MFLOP = (4, 16, 16, 16)  # at most these where heads share keys


def least_flops(dtype: torch.dtype, q_len: int, grouped: bool) -> float:
    """The floating-point operations of the smallest call in which the engine is faster."""
    column = bisect.bisect_left(_COLUMNS, q_len)
    kind = (
        "float32"
        if dtype == _FP32
        else _kind(dtype, default_target(), host_target(), host_targets())
    )
    least = _LEAST_MFLOP[kind][column]
    return 1e6 * (min(least, _LEAST_GROUPED_MFLOP[column]) if grouped else least)


@functools.cache
def _kind(dtype: torch.dtype, target: str, host: str, runs: tuple[str, ...]) -> str:
    """The row of `_LEAST_MFLOP` for calls in a dtype of 16 bits.

    host: this machine's own target. runs: all that it runs.
    """
    if dtype == torch.bfloat16 and has_amx(host):
        return "bf16 on AMX" if has_amx(target) else "bf16, on another target than the machine's"
    has_bf16 = any(CPU_ROWS[name].bf16_rate for name in runs)
    if dtype == torch.bfloat16 and has_bf16 and not CPU_ROWS[host].bf16_rate:
        return "bf16, in fp32" if target == host else "bf16, on another target than the machine's"
    in_fp32 = matrix_dtype(target, str(dtype).removeprefix("torch.")) == "float32"
    return "16 bits, in fp32" if in_fp32 else "16 bits"


class _AddToKeys(Variant):
    """Add a mask that is the same for all heads and query rows, as for padded sequences."""

    attn_mask: torch.Tensor = tensor("batch|1", "kv_len|1")

    def score_mod(
        self,
        score: torch.Tensor,
        b: torch.Tensor,
        h: torch.Tensor,
        q_idx: torch.Tensor,
        kv_idx: torch.Tensor,
    ) -> torch.Tensor:
        return score + self.attn_mask[b, kv_idx]


_ADD_TO_KEYS = _AddToKeys()


class Activation:
    """What `activate` returns: a context manager, at whose end the activation ends.

    Example:
        >>> with fa.integrations.torch.activate():
        ...     model(**inputs)
    """

    def __init__(self) -> None:
        self._active = True

    def deactivate(self) -> None:
        """End this activation; a second call does nothing."""
        with _lock:
            if self._active:
                self._active = False
                _active.remove(self)
                _register()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise InputError("an activation cannot be copied or pickled; call activate() for another")

    def __enter__(self) -> Activation:
        if not self._active:
            raise InputError("this activation has ended; call activate() for another")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.deactivate()


_lock = threading.RLock()
_active: list[Activation] = []
_kernel: _Kernel | None = None


def activate() -> Activation:
    """Let torch's `scaled_dot_product_attention` on CPU tensors run on this engine.

    For the whole process and all its threads, compiled and exported programs included; a program
    that AOTInductor compiled calls torch's kernel directly and is not changed. Left to torch: calls
    with gradients (an input requires grad while grad mode is on), with dropout, with both a mask
    and is_causal, in float64, calls smaller than `least_flops`, and whatever torch does not send to
    its fused CPU attention, such as calls under ``sdpa_kernel(SDPBackend.MATH)``. The first call of
    a kind compiles its kernel, as `fa.attention` does.

    Activations may be nested or repeated: the engine is in use until each has ended. Where another
    library has replaced the same op, its implementation gets what is left to torch.

    Attention then fails as the engine does where a kernel is missing and cannot be compiled
    (CompileError, MissingKernelError) or FLASHATTN_JIT_TARGET names no target of this machine.

    Returns:
        The activation, to end it by `Activation.deactivate` or as a context manager.

    Example:
        >>> fa.integrations.torch.activate()
        >>> torch.nn.functional.scaled_dot_product_attention(q, k, v)  # by this engine
    """
    with _lock:
        activation = Activation()
        _active.append(activation)
        _register()
        return activation


def deactivate() -> None:
    """End every activation: torch's attention is as it was before the first."""
    with _lock:
        for activation in list(_active):
            activation.deactivate()


def is_active() -> bool:
    """Whether torch's attention on CPU tensors runs on this engine."""
    return bool(_active)


def _register() -> None:
    """Registers or removes the kernel, as `_active` wants."""
    global _kernel
    if _active and _kernel is None:
        _kernel = _Kernel()
    elif not _active and _kernel is not None:
        _kernel.remove()
        _kernel = None


class _Kernel:
    """The registered kernel of torch's op, and the one that it replaced."""

    def __init__(self) -> None:
        self._replaced = torch.library.get_kernel(_OP, "CPU")
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns, once in a process, of what is the purpose here.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            self._library.impl(_OP, self.run, "CPU")

    def remove(self) -> None:
        """Make the replaced kernel the op's again."""
        self._library._destroy()

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [batch, num_q_heads, q_len, head_dim], lse [batch, num_q_heads, q_len]).

        Both have the strides of torch's kernel, which compiled programs rely on.
        """
        out = None
        if not dropout_p and _is_served(query, key, value, attn_mask, is_causal, scale):
            out = torch.empty_like(query)
        if out is None or out.stride(3) != 1:
            return self._by_replaced(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        variant: Variant = CAUSAL if is_causal else FULL
        params: dict[str, object] = {}
        if attn_mask is not None:
            variant, params = _with_mask(attn_mask)
        results = call_again(
            variant, _KIND, query, key, value, out, None, scale, True, False, params
        )
        out, lse = results or run_dense(
            query, key, value, variant, params, scale=scale, return_lse=True, out=out, direct=True,
            kind=_KIND,
        )  # fmt: skip
        assert lse is not None
        if attn_mask is not None:
            lse = lse.masked_fill(lse == -torch.inf, 0.0)  # torch's value for a row without a key
        return out, _in_torchs_order(lse)

    def _by_replaced(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._replaced.call_boxed(_CPU, *args, **kwargs)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if "has been invalidated" not in str(error):
                raise
            raise InputError(
                "another library replaced torch's CPU attention before activate(), and has "
                "withdrawn its implementation since: call fa.integrations.torch.deactivate() and "
                "then activate() again"
            ) from None


def _in_torchs_order(lse: torch.Tensor) -> torch.Tensor:
    """A contiguous lse [batch, num_q_heads, q_len] with its heads in the last stride."""
    _, heads, q_len = lse.shape
    if heads > 1 and q_len > 1:
        return lse.transpose(1, 2).contiguous().transpose(1, 2)
    return lse.as_strided(lse.shape, (heads * q_len, 1, heads))


def _is_served(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> bool:
    """Whether a call of torch's fused attention is for this engine; torch refuses bad arguments."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        return False
    batch, heads, q_len, head_dim = query.shape
    if head_dim > _MAX_HEAD_DIM or value.shape[3] != head_dim:
        return False
    if attn_mask is not None and (
        is_causal or attn_mask.dim() not in (2, 4) or attn_mask.dtype not in (query.dtype, _FP32)
    ):
        return False
    if scale is not None and not math.isfinite(scale):
        return False
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return False
    if torch.is_grad_enabled() and (
        (attn_mask is not None and attn_mask.requires_grad)
        or query.requires_grad
        or key.requires_grad
        or value.requires_grad
    ):
        return False
    flops = 4 * batch * heads * q_len * key.shape[2] * head_dim
    return flops >= least_flops(query.dtype, q_len, key.shape[1] != heads)


def _with_mask(mask: torch.Tensor) -> tuple[Variant, dict[str, object]]:
    """The variant that adds a float mask, of any number of dims, and its param."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in range(4):  # an expanded dim is one entry
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    if mask.shape[1] == mask.shape[2] == 1:
        return _ADD_TO_KEYS, {"attn_mask": mask[:, 0, 0]}
    return ADD, {"attn_mask": mask}
