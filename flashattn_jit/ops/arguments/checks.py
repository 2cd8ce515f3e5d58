"""Checks of a call's arguments, before anything runs: dims, dtypes, devices, strides, grad mode."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.autograd import forward_ad

from ...codegen.spec import KV_DTYPES, MAX_HEAD_DIM, Q_DTYPES
from ...errors import GradError, InputError
from ...torch_modes import PLAIN, grad_message, need_values, refuse_transforms, unreadable
from ...variants.ir.dtypes import KV_NAMES, row_dim
from ...variants.ir.ir import LATENT_ROWS

_LARGEST_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)  # kernels compute with exp2
INT32_MAX = 2**31 - 1
Scale = float | torch.Tensor
"""A factor of scores: a number, or a 0-dim cpu tensor."""

INTEGERS = frozenset((torch.int32, torch.int64))
"""Dtypes of lengths and indices."""

PACKED = (
    "[num_q_tokens, num_q_heads, head_dim]",
    "[num_kv_tokens, num_kv_heads, head_dim]",
    "[num_kv_tokens, num_kv_heads, head_dim_v]",
)
"""Layouts of q, k and v with packed requests."""

PAGED = (
    PACKED[0],
    "[num_pages, page_size, num_kv_heads, head_dim]",
    "[num_pages, page_size, num_kv_heads, head_dim_v]",
)
"""Layouts of q, k and v with keys in pages."""


def check_tensors(q: object, k: object, v: object, layouts: Sequence[str]) -> None:
    """Raises InputError unless q, k, v are tensors on one device, of ranks and dtypes that kernels
    take, with a contiguous last dim. Dtypes that only the call's target refuses pass.
    """
    for name, value, layout in zip("qkv", (q, k, v), layouts, strict=True):
        tensor = check_readable(name, value)
        rank = layout.count(",") + 1
        if tensor.dim() != rank:
            raise InputError(
                f"{name} must be {layout}, got {tensor.dim()} dims: {tuple(tensor.shape)}"
            )
        check_dtype(name, tensor.dtype)
        if tensor.device.type not in ("cpu", "cuda"):
            raise InputError(
                f"{name} is on device {tensor.device}, but kernels run on cpu and cuda tensors; "
                f"move it with {name}.cpu() or {name}.cuda()"
            )
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel() > 0:
            raise InputError(
                f"{name}'s last dim (head_dim) must be contiguous, its stride is "
                f"{tensor.stride(-1)}; pass {name}.contiguous()"
            )
        width = LATENT_ROWS[576 if name == "k" else 512]
        if tensor.dtype is torch.uint8 and tensor.shape[-1] != width:
            raise InputError(
                f"{name} of uint8 must have latent rows of {width} bytes, got "
                f"{list(tensor.shape)}: 512 codes of e4m3, 4 scales and in k 64 values of bfloat16"
            )
        check_not_lazy(name, tensor)
    check_devices({"q": q, "k": k, "v": v})  # type: ignore[dict-item]  # tensors by now


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises InputError for a dtype that no target takes for `name`: q, k or v."""
    allowed = Q_DTYPES if name == "q" else KV_DTYPES
    if KV_NAMES.get(dtype) not in allowed:
        names = ", ".join(allowed)
        raise InputError(f"{name} has dtype {dtype}; supported: {names}. Convert it first")


def check_readable(name: str, tensor: object) -> torch.Tensor:
    """The value, a tensor whose entries are strided memory. Raises InputError for anything else."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if problem := unreadable(tensor):
        raise InputError(f"{name} {problem}")
    return tensor


def check_not_lazy(name: str, tensor: torch.Tensor) -> None:
    """Raises InputError for a lazy view: its memory holds other values than the tensor has."""
    if tensor.is_conj() or tensor.is_neg():
        raise InputError(f"{name} is a lazy conj/neg view; pass {name}.resolve_neg()")


def check_int(name: str, value: object, low: int, high: int = INT32_MAX, rule: str = "") -> int:
    """The value as an int in [low, high]. It may be a numpy integer, but no bool and no tensor.

    rule: the requirement in words, for messages; by default the range. Raises InputError.
    """
    if type(value) is not int:
        if isinstance(value, bool | torch.Tensor) or not hasattr(value, "__index__"):
            raise _no_int(name, value, rule)
        try:
            value = operator.index(value)
        except TypeError:  # an array of more than one number
            raise _no_int(name, value, rule) from None
    if not low <= value <= high:
        shown = str(value) if abs(value) < 10**30 else "that number"
        raise InputError(f"{name}={shown} {rule or f'must be {low} to {high}'}")
    return value


def shown(value: object) -> str:
    """A wrong value for a message: its text, cut to 60 characters, or its type."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return f"{value!r:.60}" if isinstance(value, str) else f"{value}"[:60]
    return f"<{type(value).__name__}>"


def _no_int(name: str, value: object, rule: str) -> InputError:
    if rule:
        return InputError(f"{name}={shown(value)} {rule}")
    return InputError(f"{name} must be an int, got {type(value).__name__}")


def check_devices(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises InputError unless all tensors are on one device."""
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            found = ", ".join(f"{n} on {t.device}" for n, t in tensors.items())
            raise InputError(
                f"all tensors of a call must be on one device, got {found}; move them, such as "
                f"{name}.to({str(device)!r})"
            )


def check_device(device: object) -> torch.device:
    """The device, with its index on CUDA. Raises InputError."""
    if not isinstance(device, str | int | torch.device):
        raise InputError(
            f'device must be a torch.device or a name such as "cpu", got {type(device).__name__}'
        )
    try:
        own = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"device={device!r} is unknown: {error}") from None
    if own.type not in ("cpu", "cuda"):
        raise InputError(f"device={device!r}: kernels run on cpu and cuda")
    if own.type == "cpu":
        return own
    count = torch.cuda.device_count()
    index = own.index
    if torch.version.cuda is None or not count or (index is not None and index >= count):
        found = (
            "this torch is built without CUDA" if torch.version.cuda is None else
            f"torch finds {count} CUDA devices"
        )  # fmt: skip
        raise InputError(
            f'device="{own}", but {found}; pass device="cpu", with target="emulated:sm_80" to '
            "run CUDA kernels in the emulator"
        )
    return torch.device("cuda", torch.cuda.current_device()) if index is None else own


def check_head_dims(head_dim: int, k_head_dim: int, head_dim_v: int) -> None:
    """Raises InputError unless q and k have one head_dim and both head dims are in range."""
    if head_dim != k_head_dim:
        raise InputError(f"k has head_dim={k_head_dim}, but q has head_dim={head_dim}")
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= value <= MAX_HEAD_DIM:
            raise InputError(f"{name}={value} is not supported; it must be 1 to {MAX_HEAD_DIM}")


def check_heads(
    num_q_heads: int, num_kv_heads: int, v_heads: int, dim: int = 1, hint: str = ""
) -> None:
    """Raises InputError unless num_kv_heads divides num_q_heads and is the same in k and v.

    dim: that of the heads in k and v. hint: the end of the message where it does not divide.
    """
    if num_kv_heads != v_heads:
        remedy = "pass k and v of the same layer: each head of k has one of v"
        for name, few, many in (("v", v_heads, num_kv_heads), ("k", num_kv_heads, v_heads)):
            if 0 < few < many and many % few == 0:
                repeated = f"{name}.repeat_interleave({many // few}, {dim})"
                remedy = f"to share each head of {name}, pass {repeated}"
        raise InputError(
            f"v has num_kv_heads={v_heads}, but k has num_kv_heads={num_kv_heads}; {remedy}"
        )
    if num_q_heads < 1 or num_kv_heads < 1:
        raise InputError(
            f"num_q_heads={num_q_heads} and num_kv_heads={num_kv_heads} must be at least 1"
        )
    if num_q_heads % num_kv_heads:
        raise InputError(
            f"k has num_kv_heads={num_kv_heads}, which does not divide num_q_heads={num_q_heads}"
            f"{hint}"
        )


def check_sizes(batch: int, num_q_heads: int, num_kv_heads: int, q_len: int, kv_len: int) -> None:
    """Raises InputError for sizes of a dense call that kernels cannot count in 32 bits."""
    group = num_q_heads // num_kv_heads
    counts = (batch, num_q_heads, q_len * group, kv_len, batch * q_len, batch * kv_len)
    if max(counts) > INT32_MAX:
        raise InputError(
            f"num_q_heads={num_q_heads}, q_len={q_len} x group_size={group}, kv_len={kv_len} or "
            f"batch={batch} x length does not fit 32 bits: more than {INT32_MAX}; split the batch "
            "or the sequence"
        )


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks q [B, Hq, Sq, D], k [B, Hkv, Skv, D] and v [B, Hkv, Skv, Dv]. Raises InputError."""
    check_tensors(
        q, k, v,
        ("[batch, num_q_heads, q_len, head_dim]", "[batch, num_kv_heads, kv_len, head_dim]",
         "[batch, num_kv_heads, kv_len, head_dim_v]"),
    )  # fmt: skip
    batch, num_q_heads, q_len, _ = q.shape
    kv_batch, num_kv_heads, kv_len, _ = k.shape
    v_batch, v_heads, v_len, _ = v.shape
    if kv_batch != batch:
        raise InputError(
            f"k has batch={kv_batch}, but q has batch={batch}; "
            "share one k over a batch with k.expand(batch, -1, -1, -1)"
        )
    if v_batch != batch:
        raise InputError(f"v has batch={v_batch}, but q has batch={batch}")
    hint = ""
    if 0 < kv_len == v_len and q_len % kv_len == 0:
        hint = (
            "; tensors are [batch, heads, tokens, head_dim]: if yours are [batch, tokens, heads, "
            "head_dim], pass q.transpose(1, 2), and k and v likewise"
        )
    check_heads(num_q_heads, num_kv_heads, v_heads, hint=hint)
    if kv_len != v_len:
        raise InputError(f"v has kv_len={v_len}, but k has kv_len={kv_len}")
    check_head_dims(row_dim(q), row_dim(k), row_dim(v))
    check_sizes(batch, num_q_heads, num_kv_heads, q_len, kv_len)


def check_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks q [Nq, Hq, D], k [Nk, Hkv, D] and v [Nk, Hkv, Dv]. Raises InputError."""
    check_tensors(q, k, v, PACKED)
    check_heads(q.shape[1], k.shape[1], v.shape[1])
    check_head_dims(row_dim(q), row_dim(k), row_dim(v))
    if k.shape[0] != v.shape[0]:
        raise InputError(f"v has num_kv_tokens={v.shape[0]}, but k has num_kv_tokens={k.shape[0]}")


def check_paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks q [Nq, Hq, D], k and v [pages, page_size, Hkv, D or Dv]. Raises InputError."""
    check_tensors(q, k, v, PAGED)
    check_heads(q.shape[1], k.shape[2], v.shape[2], 2)
    check_head_dims(row_dim(q), row_dim(k), row_dim(v))
    for dim, what in enumerate(("num_pages", "page_size")):
        if k.shape[dim] != v.shape[dim]:
            raise InputError(f"v has {what}={v.shape[dim]}, but k has {what}={k.shape[dim]}")
    if k.shape[0] > INT32_MAX:
        raise InputError(f"num_pages={k.shape[0]} does not fit 32 bits")


QKV = ("q", "k", "v")


def check_grad(
    tensors: Sequence[torch.Tensor], names: Sequence[str], of_variant: Sequence[str] = ()
) -> None:
    """Raises GradError for an input with derivatives: ops have no backward or forward-mode rule.

    names: of the first tensors, for messages. of_variant: of the others, which are the variant's.
    """
    if forward_ad._current_level >= 0:
        for i, tensor in enumerate(tensors):
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise GradError(
                    f"{_name_of(i, names, of_variant)} has a forward-mode tangent, but this engine "
                    "is inference only; pass the primal, "
                    "torch.autograd.forward_ad.unpack_dual(x).primal"
                )
    if not torch.is_grad_enabled():
        return
    for i, tensor in enumerate(tensors):
        if tensor.requires_grad:
            raise GradError(grad_message(_name_of(i, names, of_variant)))


def _name_of(i: int, names: Sequence[str], of_variant: Sequence[str]) -> str:
    return names[i] if i < len(names) else variants_tensor(of_variant[i - len(names)])


def variants_tensor(name: str) -> str:
    """What messages call a param or a captured tensor."""
    return f"the variant's tensor {name!r}"


def check_scale(scale: Scale | None, head_dim: int) -> float:
    """The scale as a finite float; 1/sqrt(head_dim) when None. Raises InputError, GradError."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, torch.Tensor):
        scale = _number_of(scale)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise InputError(
            f"scale must be a float, a 0-dim cpu tensor or None, got {type(scale).__name__}"
        )
    if not abs(scale) <= _LARGEST_SCALE:  # NaN as well
        raise InputError(f"scale={scale} must be finite as a float32, at most {_LARGEST_SCALE:.4g}")
    return float(scale)


def _number_of(scale: torch.Tensor) -> float:
    """The entry of a scale that is a tensor. Raises InputError, GradError."""
    check_readable("scale", scale)
    if scale.dim() or scale.is_complex() or scale.dtype == torch.bool:
        raise InputError(
            f"scale must be a float, a 0-dim cpu tensor or None, got a tensor {list(scale.shape)} "
            f"of {scale.dtype}; a scale for each head is a score_mod: pass scale=1.0 and return "
            "score * scale[h]"
        )
    if scale.device.type != "cpu":
        raise InputError(
            f"scale is on {scale.device}, but a launch takes it as a number of the host; pass "
            "scale.cpu(), which waits for the device, or scale=1.0 with a score_mod that "
            "multiplies by the tensor: kernels read it where it is"
        )
    need_values("scale", "a launch takes it as a number", (scale,))
    check_grad((scale,), ("scale",))
    return scale.item()


def check_lse(return_lse: bool, pointwise: bool) -> None:
    """Raises InputError if a log-sum-exp is requested of a variant that has none."""
    if return_lse and pointwise:
        raise InputError(
            "return_lse: a pointwise normaliser has no log-sum-exp; only softmax variants do"
        )


def no_tensor(name: str, value: object) -> str:
    """The type of a value that should be a tensor of ints, with the remedy if it holds some."""
    kind = type(value).__name__
    if not isinstance(value, (list, tuple)) and not hasattr(value, "__array__"):
        return kind
    try:
        array = np.asarray(value)
    except Exception:  # of whatever class: the value is a user's
        return kind
    if array.size and array.dtype.kind not in "iu":
        return kind  # a conversion would truncate
    argument = name.rpartition(": ")[2].rpartition(".")[2]  # of "level 0: storage.kv_indptr"
    return f"{kind}; make one: torch.tensor({argument}, dtype=torch.int32)"


def check_host_integers(name: str, value: object, planned: str = "lengths") -> torch.Tensor:
    """The value, an int32 or int64 CPU tensor. planned: what is planned from it, for messages."""
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"{name} must be an int32 or int64 cpu tensor, got {no_tensor(name, value)}"
        )
    if type(value) not in PLAIN or value.layout is not torch.strided or value.is_nested:
        check_readable(name, value)
    if value.dtype not in INTEGERS or not (value.is_cpu or value.device.type == "cpu"):
        raise InputError(
            f"{name} must be an int32 or int64 cpu tensor, got {value.dtype} on {value.device}; "
            f"{planned} are planned on the host, without waiting for a device"
        )
    if type(value) is not torch.Tensor:
        need_values(name, f"{planned} are planned from them", (value,))
    refuse_transforms(value)
    return value


def check_lengths(
    name: str, value: torch.Tensor, batch: int, low: int, high: int
) -> tuple[int, ...]:
    """An int32 or int64 CPU tensor [batch] with entries in [low, high], as ints."""
    if isinstance(value, int) and not isinstance(value, bool):
        raise InputError(
            f"{name} must be an int32 or int64 cpu tensor [batch={batch}], got the int {value}; "
            f"for all requests pass torch.full(({batch},), {value})"
        )
    check_host_integers(name, value)
    if value.dim() != 1 or value.shape[0] != batch:
        is_one = value.dim() <= 1 and value.numel() == 1
        remedy = f"; for all requests pass torch.full(({batch},), {value.item()})" if is_one else ""
        raise InputError(f"{name} must be [batch={batch}], got {tuple(value.shape)}{remedy}")
    entries = tuple(value.tolist())
    for i, entry in enumerate(entries):
        if not low <= entry <= high:
            raise InputError(f"{name}[{i}]={entry} is outside of [{low}, {high}]")
    return entries


def check_out_layout(
    out: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    name: str = "out",
) -> None:
    """Raises InputError unless `out` has the result's shape, dtype and device, its last dim is
    contiguous (not that of ``lse``), and no two of its entries share an address."""
    check_readable(name, out)
    check_not_lazy(name, out)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
        raise InputError(
            f"{name} must be {list(shape)} of {dtype} on {device}, got {list(out.shape)} of "
            f"{out.dtype} on {out.device}"
        )
    if out.numel() == 0:
        return
    if name == "out" and out.stride(-1) != 1 and out.shape[-1] > 1:
        raise InputError(
            f"out's last dim must be contiguous, its stride is {out.stride(-1)}; pass "
            f"torch.empty({list(shape)}, dtype={dtype}), or leave out= away and copy the result"
        )
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise InputError(f"{name} is an expanded tensor: several entries share one address")
    if not _dense(out):
        raise InputError(f"{name}'s entries overlap each other; pass a tensor of its own")


def check_out_grad(out: torch.Tensor, name: str = "out") -> None:
    """Raises GradError for a result that autograd tracks: the write would not be recorded."""
    if out.requires_grad and torch.is_grad_enabled():
        raise GradError(
            f"{name} requires grad while grad mode is on, but this engine is inference only: the "
            f"result written to it would have no gradient; pass {name}.detach(), or call under "
            "torch.no_grad()"
        )


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first entry of a tensor to the end of its last one; 0 if it is empty."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same entries at the same addresses."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    )


def check_apart(
    out: torch.Tensor,
    size: int,
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    name: str = "out",
    other: str = "an input",
) -> None:
    """Raises InputError if the address ranges of out and an input, of these sizes, overlap.

    name, other: what they are, for the message.
    """
    begin = out.data_ptr()
    end = begin + size
    for tensor, bytes_ in zip(inputs, sizes, strict=True):
        low = tensor.data_ptr()
        if low < end and begin < low + bytes_ and size and bytes_:
            raise InputError(f"{name} shares memory with {other}; pass a tensor of its own")


def _dense(tensor: torch.Tensor) -> bool:
    """Whether no two entries share an address, from the strides alone."""
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 1
    for stride, size in dims:
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True
