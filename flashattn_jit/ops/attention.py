"""`fa.attention`: attention of a variant over dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..formats import Stored
from ..stored_hooks import unwrap
from ..torch_modes import is_direct, is_plain
from ..variants.binding import Swap
from ..variants.variant import Variant, as_variant
from .arguments import checks
from .arguments.calls import Offset, dense_form, dense_requests
from .launching.launches import attend
from .launching.repeats import Kind, call_again
from .torch_ops import as_op


def attention(
    q: torch.Tensor,
    k: torch.Tensor | Stored,
    v: torch.Tensor | Stored,
    variant: Variant | Callable[..., object] | None = None,
    *,
    scale: checks.Scale | None = None,
    q_offset: Offset = 0,
    kv_len: torch.Tensor | None = None,
    return_lse: bool = False,
    partial: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    target: str | None = None,
    **params: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of `variant` as one fused kernel, compiled on demand and cached.

    Args:
        q: [batch, num_q_heads, q_len, head_dim]; float32, bfloat16 or float16 on the CPU, bfloat16
            or float16 (sm_75: float16) on CUDA. Any strides with a contiguous last dim, as for k
            and v. All tensors of a call must be on one device.
        k: [batch, num_kv_heads, kv_len, head_dim] of q's dtype, or an `fa.kv.Stored`, codes with
            their scales. On the CPU also of any other dtype of q's, of float8_e4m3fn or
            float8_e5m2, and of int8 where `key_mod` and `value_mod` scale it (int8 without is an
            error). num_kv_heads divides num_q_heads.
        v: [batch, num_kv_heads, kv_len, head_dim_v]; dtypes as for k.
        variant: a `Variant`, a bare FlexAttention ``score_mod`` or ``mask_mod`` (told apart by its
            number of arguments), or None for plain attention.
        scale: multiplies q . k; 1/sqrt(head_dim) by default. A float, or a 0-dim cpu tensor, which
            each call reads.
        q_offset: ``q_idx = q_offset + row``: an int, a tensor [batch], or ``"end"`` for
            kv_len - q_len. 0 by default, as in FlexAttention.
        kv_len: int cpu tensor [batch]: keys at positions >= kv_len[b] are never read. Lengths and
            offsets are on the CPU because calls are planned on the host.
        return_lse: also return the natural-log log-sum-exp [batch, num_q_heads, q_len], fp32.
        partial: return the unfinalised fp32 state, (out, lse) before sink and output_mod, for
            `merge_states`. Implies `return_lse` for softmax variants.
        out: result tensor to write to.
        lse: fp32 tensor to write lse to, of any strides; implies return_lse.
        target: a target such as ``"cpu:avx2"``; by default the best of the tensors' device, on the
            CPU the value of FLASHATTN_JIT_TARGET if it is set. ``"emulated:sm_80"`` on CPU tensors
            runs the CUDA kernel of sm_80 in an emulator, which checks every access: slow, but it
            needs no GPU.
        **params: the variant's params by name.

    Returns:
        out [batch, num_q_heads, q_len, head_dim_v] in q's dtype and stride order, or (out, lse).

    Raises:
        InputError: a shape, dtype, device, stride or value is wrong.
        ParamError: a param is missing, unknown or of the wrong kind.
        TraceError: a hook cannot become a kernel.
        CompileError: the compiler is missing or failed.
        TargetError: `target` is unknown, or does not run on the tensors' device.
        EnvironmentVariableError: FLASHATTN_JIT_TARGET names no CPU target of this machine.
        LaunchError: CUDA refused the kernel; or it was not planned before a CUDA graph's capture.
        EmulatorFault: on an emulated target, the kernel made an illegal access or another error.
        GradError: an input requires grad while grad mode is on.

    On CUDA the kernel is enqueued on torch's current stream, without synchronisation. A call that
    was made before can be captured in a CUDA graph; replays use the lengths of the capture.

    Example:
        >>> out = fa.attention(q, k, v, fa.Causal())
    """
    kind: Kind | None = None
    if isinstance(k, Stored) or isinstance(v, Stored):
        k, v, variant = unwrap(k, v, as_variant(variant), params, True, partial)
    if kv_len is None and target is None and type(q_offset) in (int, str):
        kind = ("attention", q_offset)
    given = (q, k, v) if out is None else (q, k, v, out)
    if lse is not None:
        given = (*given, lse)
    direct = not torch.compiler.is_dynamo_compiling() and is_direct(*given)
    if not (direct and is_plain(kv_len, q_offset, scale)):
        arguments = {
            "scale": scale, "q_offset": q_offset, "kv_len": kv_len, "return_lse": return_lse,
            "partial": partial, "target": target,
        }  # fmt: skip
        return as_op.states("attention", q, k, v, variant, params, arguments, out, lse)  # type: ignore[no-any-return]
    chosen = as_variant(variant)
    results = None
    if kind is not None:
        results = call_again(chosen, kind, q, k, v, out, lse, scale, return_lse, partial, params)
    result, written = results or run_dense(
        q, k, v, chosen, params, scale=scale, q_offset=q_offset, kv_len=kv_len,
        return_lse=return_lse, partial=partial, out=out, lse=lse, target=target, direct=direct,
        kind=kind,
    )  # fmt: skip
    return result if written is None else (result, written)


def run_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chosen: Variant,
    params: Mapping[str, object],
    *,
    scale: checks.Scale | None = None,
    q_offset: Offset = 0,
    kv_len: torch.Tensor | None = None,
    block_states: torch.Tensor | None = None,
    block_size: tuple[int, int] | tuple[()] = (),
    return_lse: bool = False,
    partial: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    target: str | None = None,
    swap: Swap | None = None,
    direct: bool | None = None,
    kind: Kind | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Checks and computes (out, lse) of a dense call; lse is None unless requested.

    block_states: uint8 [batch, num_q_heads, q blocks, kv blocks] of `BlockMask` states, with
    block_size (q_block, kv_block). swap: see `bind`. direct: the result of `is_direct` for q, k and
    v, if known. kind: see `attend`. The other arguments and the errors are those of `attention`.
    """
    if direct is None:
        direct = is_direct(q, k, v)
    form = dense_form(q, k, v, direct)
    return attend(
        form, dense_requests(form, kv_len, q_offset), chosen, params, q, k, v, scale=scale,
        return_lse=return_lse, partial=partial, out=out, lse=lse, target=target, swap=swap,
        direct=direct, block_states=block_states, block_size=block_size, kind=kind,
    )  # fmt: skip
