"""The specification: attention of a variant in eager torch, step by step.

The user's hooks run unchanged under nested ``torch.vmap`` over 0-dim index tensors. The computation
shares no code with the tracer, so that comparing the two checks both. O(q_len * kv_len) memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashattn_jit.errors import InputError, VariantError
from flashattn_jit.torch_modes import need_values
from flashattn_jit.variants.builtins import CONTEXT
from flashattn_jit.variants.capture.extract import map_tree
from flashattn_jit.variants.functions import tanh_approx
from flashattn_jit.variants.ir.dtypes import CODES4, latent_values, unpacked
from flashattn_jit.variants.ir.halves import call_as_read, reads_as_float32, widened
from flashattn_jit.variants.ir.ir import unscaled_integers
from flashattn_jit.variants.params import PARTS, Dims, parts_of, resolve
from flashattn_jit.variants.variant import CppHook, Variant, as_variant

Offset = int | Tensor | Literal["end"]
Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors that are put into a computation in order to measure their effect on its result.

    score: a function of the scores [Hq, Sq, Skv] of a request that is applied before and after
    score_mod. approximation: the relative error of each ``tanh_approx(x)`` in a hook, given x.
    """

    score: Callable[[Tensor], Tensor]
    approximation: Callable[[Tensor], Tensor | float]


NO_ERRORS = Errors(lambda score: score, lambda x: 0.0)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Any = None,
    *,
    scale: float | None = None,
    q_offset: Offset = 0,
    kv_len: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    partial: bool = False,
    params: Mapping[str, object] | None = None,
    errors: Errors = NO_ERRORS,
) -> Result:
    """(out, lse) of dense attention. q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv].

    variant: a Variant or a bare score_mod or mask_mod. scale: default 1/sqrt(D). q_offset: position
    of row 0, an int, [B] or "end" (kv_len - Sq). kv_len: [B], keys that exist; entries past them
    may be NaN. partial: the state before sink and output_mod. params: the variant's params.
    errors: what is put into the computation, to measure its effect.

    dtype: that of the computation. For float16 and bfloat16 the scores and the softmax are float32
    and the weights are rounded before the second product, as matrix units need them. out is
    [B, Hq, Sq, Dv] in `dtype`; lse [B, Hq, Sq], float32 at least, or None for a pointwise
    normaliser.

    Raises:
        InputError: keys or values are int8 and no hook of the variant scales them.
    """
    k, v = (_rows_of(x, 1) for x in (k, v))
    need_values("q, k or v", "the reference computes them", (q, k, v))
    batch, num_q_heads, q_rows, _ = q.shape
    _, num_kv_heads, kv_rows, _ = k.shape
    lens = _each(batch, kv_rows) if kv_len is None else kv_len.long().cpu()
    dims = Dims(batch, num_q_heads, num_kv_heads, q_rows, kv_rows, q.shape[3], v.shape[3], q.device)
    starts = torch.arange(batch, device="cpu")
    lengths = _Lengths(
        _each(batch, q_rows), lens, starts * q_rows, starts * kv_rows,
        _offsets(q_offset, lens, _each(batch, q_rows)),
    )  # fmt: skip
    run = _Run(
        as_variant(variant), dims, (k.dtype, v.dtype), params or {}, lengths, scale, dtype, partial,
        errors,
    )  # fmt: skip
    with q.device:  # what hooks make themselves
        results = [run.request(b, q[b], k[b], v[b]) for b in range(batch)]
    outs, lses = [r[0] for r in results], [r[1] for r in results]
    if not results:
        return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), run.empty_lse(q.shape[:3], q)
    found = [x for x in lses if x is not None]
    return torch.stack(outs), torch.stack(found) if found else None


def varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    variant: Any = None,
    *,
    scale: float | None = None,
    q_offset: Offset = "end",
    dtype: torch.dtype = torch.float64,
    partial: bool = False,
    params: Mapping[str, object] | None = None,
    errors: Errors = NO_ERRORS,
) -> Result:
    """(out, lse) of packed attention: q [Nq, Hq, D], k [Nkv, Hkv, D], v [Nkv, Hkv, Dv].

    q_indptr, kv_indptr: [B + 1], first row of each request and the end. The rest is as for
    `attention_reference`; out is [Nq, Hq, Dv], lse [Nq, Hq].
    """
    k, v = (_rows_of(x, -2) for x in (k, v))
    need_values("q, k or v", "the reference computes them", (q, k, v))
    q_starts, kv_starts = q_indptr.long().cpu(), kv_indptr.long().cpu()
    q_lens, kv_lens = q_starts.diff(), kv_starts.diff()
    batch = len(q_lens)
    q_len, kv_len = (int(x.max()) if batch else 0 for x in (q_lens, kv_lens))
    dims = Dims(batch, q.shape[1], k.shape[1], q_len, kv_len, q.shape[2], v.shape[2], q.device)
    lengths = _Lengths(
        q_lens, kv_lens, q_starts[:-1], kv_starts[:-1], _offsets(q_offset, kv_lens, q_lens)
    )
    run = _Run(
        as_variant(variant), dims, (k.dtype, v.dtype), params or {}, lengths, scale, dtype, partial,
        errors,
    )  # fmt: skip
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=dtype)
    lse = run.empty_lse(q.shape[:2], q)
    for b in range(batch):
        rows = slice(int(q_starts[b]), int(q_starts[b + 1]))
        keys = slice(int(kv_starts[b]), int(kv_starts[b + 1]))
        parts = (q[rows], k[keys], v[keys])
        with q.device:  # what hooks make themselves
            one, one_lse = run.request(b, *(x.transpose(0, 1) for x in parts))
        out[rows] = one.transpose(0, 1)
        if lse is not None and one_lse is not None:
            lse[rows] = one_lse.transpose(0, 1)
    return out, lse


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Of each request, on the CPU: lengths, first rows in packed q and k, position of row 0."""

    q: Tensor
    kv: Tensor
    q_start: Tensor
    kv_start: Tensor
    offset: Tensor


def _offsets(q_offset: Offset, kv_lens: Tensor, q_lens: Tensor) -> Tensor:
    if isinstance(q_offset, str):
        if q_offset != "end":
            raise InputError(f"q_offset is an int, a tensor [batch] or 'end', got {q_offset!r}")
        return kv_lens - q_lens
    if isinstance(q_offset, Tensor):
        return q_offset.long().cpu().expand(len(q_lens))
    return _each(len(q_lens), int(q_offset))


def _each(batch: int, value: int) -> Tensor:
    return torch.full((batch,), value, dtype=torch.int64, device="cpu")


class _Run:
    """The variant with its params, for the requests of one call."""

    def __init__(
        self, variant: Variant, dims: Dims, kv_dtypes: tuple[torch.dtype, torch.dtype],
        params: Mapping[str, object], lengths: _Lengths,
        scale: float | None, dtype: torch.dtype, partial: bool,
        errors: Errors = NO_ERRORS,
    ) -> None:  # fmt: skip
        values = resolve(variant._declared, dims, params, variant.name)
        owners: dict[int, dict[str, object]] = {}
        for d, value in zip(variant._declared, values, strict=True):
            owners.setdefault(id(d.owner), {})[d.param.name] = value
        self._hooks = {
            name: _on_float32(_callable(name, hook, variant.name))
            for name, hook in _with_values(variant, owners).hooks().items()
        }
        if wrong := unscaled_integers(self._hooks.__contains__, *kv_dtypes):
            raise InputError(wrong)
        self.pointwise = "pointwise" in self._hooks
        self._dims, self._lengths, self._partial = dims, lengths, partial
        self._errors = errors
        self._scale = 1 / math.sqrt(dims.head_dim) if scale is None else scale
        self._dtype = dtype
        self._work = torch.float32 if reads_as_float32(dtype) else dtype

    def empty_lse(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """An lse tensor of no keys; None for a pointwise normaliser."""
        if self.pointwise:
            return None
        return like.new_full(tuple(shape), -math.inf, dtype=self._work)

    # --- built-ins, as a Context -------------------------------------------------------------

    def builtin(self, name: str, args: tuple[Any, ...]) -> Any:
        """The value of a built-in such as `fa.q_len`."""
        b = args[0]
        n = self._lengths

        def of(table: Tensor) -> Any:
            return table.to(b.device)[b]

        if name in ("q_len", "kv_len"):
            return of(n.q if name == "q_len" else n.kv).int()
        if name == "q_row":
            return of(n.q_start - n.offset) + args[1]
        return of(n.kv_start) + args[1]

    # --- one request -------------------------------------------------------------------------

    def request(self, b: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """(out [Hq, Sq, Dv], lse [Hq, Sq]) of request `b`; q [Hq, Sq, D], k [Hkv, Skv, D]."""
        token = CONTEXT.set(self)
        try:
            with HookFunctions(self._errors), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*batching rule.*")
                return self._request(b, q, k, v)
        finally:
            CONTEXT.reset(token)

    def _request(self, b: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        hooks, device = self._hooks, q.device
        kv_len = int(self._lengths.kv[b])
        k, v = k[:, :kv_len], v[:, :kv_len]
        request = torch.tensor(b, dtype=torch.int64, device=device)
        heads, kv_heads, q_pos, kv_pos = (
            torch.arange(n, dtype=torch.int64, device=device) + start
            for n, start in (
                (q.shape[0], 0), (k.shape[0], 0),
                (q.shape[1], int(self._lengths.offset[b])), (kv_len, 0),
            )
        )  # fmt: skip
        # 1. rows
        q = self._rows("query_mod", q, request, heads, q_pos)
        k = self._rows("key_mod", k, request, kv_heads, kv_pos)
        v = self._rows("value_mod", v, request, kv_heads, kv_pos)
        group = q.shape[0] // max(k.shape[0], 1)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        # 2. scores, in natural units, at least float32
        score = (q.to(self._work) @ k.to(self._work).transpose(-1, -2)) * self._scale
        score = self._errors.score(score)
        # 3. score_mod, then 4. mask_mod
        grid = (heads, q_pos, kv_pos)
        if "score_mod" in hooks:
            score = self._pairs(hooks["score_mod"], (score,), request, *grid).to(score.dtype)
            score = self._errors.score(score)
        kept = torch.ones_like(score, dtype=torch.bool)
        if "mask_mod" in hooks:
            kept = self._pairs(hooks["mask_mod"], (), request, *grid).bool().expand_as(score)
        # 5. normaliser
        if self.pointwise:
            weights = self._pointwise(score, kept, request, heads, q_pos)
            lse = None
        else:
            score = torch.where(kept, score, -math.inf)
            lse = score.logsumexp(-1) if kv_len else score.new_full(score.shape[:2], -math.inf)
            # Relative to the largest score, not to lse: beyond 1e16 that cannot hold the log of a
            # sum, and weights would not add up to 1. A row without keys has weights of 0, not NaN.
            top = score.detach().amax(-1) if kv_len else lse
            sink = None
            if "sink" in hooks and not self._partial:
                sink = self._call(lambda h: hooks["sink"](request, h), heads)
                sink = sink.to(lse.dtype).expand(len(heads))[:, None]
                lse = torch.logaddexp(lse, sink)
                top = torch.maximum(top, sink.detach())
            base = torch.where(top == -math.inf, 0.0, top)
            weights = torch.exp(score - base[..., None])
            total = weights.sum(-1)
            if sink is not None:
                total = total + torch.exp(sink - base)
            weights = weights / torch.where(total == 0, 1.0, total)[..., None]
        out = weights.to(self._dtype) @ v.to(self._dtype)
        # 6. output_mod
        if "output_mod" in hooks and not self._partial and out.numel():
            rows = out.to(self._work)
            stats = torch.zeros_like(rows[..., 0]) if lse is None else lse
            hook = hooks["output_mod"]
            out = _mapped(
                lambda row, own, h, i: _tensor(hook(row, own, request, h, i), row),
                (0, 0, None, 0), (0, 0, 0, None),
            )(rows, stats, heads, q_pos)  # fmt: skip
        return out.to(self._dtype), lse

    def _rows(self, name: str, x: Tensor, b: Tensor, heads: Tensor, positions: Tensor) -> Tensor:
        """A row hook on [H, S, D]; rounded once to the dtype of the products."""
        hook = self._hooks.get(name)
        if hook is None or x.numel() == 0:
            return x.to(self._dtype)
        over_rows = _mapped(
            lambda row, h, i: _tensor(hook(row, b, h, i), row), (0, None, 0), (0, 0, None)
        )
        return over_rows(x.to(self._work), heads, positions).to(self._dtype)

    def _pairs(
        self, hook: Callable[..., Any], first: tuple[Tensor, ...], b: Tensor, heads: Tensor,
        q_pos: Tensor, kv_pos: Tensor,
    ) -> Tensor:  # fmt: skip
        shape = (len(heads), len(q_pos), len(kv_pos))
        if 0 in shape:
            return heads.new_zeros(shape, dtype=self._work)
        score = [0] * len(first)

        def body(*args: Any) -> Tensor:
            *s, h, i, j = args
            return _tensor(hook(*s, b, h, i, j), h)

        over_keys, over_rows, over_heads = (None, None, 0), (None, 0, None), (0, None, None)
        over_pairs = _mapped(
            body, (*score, *over_keys), (*score, *over_rows), (*score, *over_heads)
        )
        return over_pairs(*first, heads, q_pos, kv_pos)

    def _pointwise(
        self, score: Tensor, kept: Tensor, b: Tensor, heads: Tensor, q_pos: Tensor
    ) -> Tensor:
        flat = score.flatten()
        hook = self._hooks["pointwise"]
        weights = self._call(hook, flat).to(score.dtype).expand(flat.shape)
        weights = torch.where(kept, weights.view(score.shape), 0.0)
        scale = self._hooks.get("pointwise_scale")
        if scale is not None and weights.numel():
            over_rows = _mapped(lambda h, i: _tensor(scale(b, h, i), h), (None, 0), (0, None))
            factor = over_rows(heads, q_pos)
            weights = weights * factor.to(score.dtype)[..., None]
        return weights

    def _call(self, fn: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        if not x.numel():
            return x
        return torch.vmap(lambda e: _tensor(fn(e), e))(x)


def _mapped(body: Callable[..., Tensor], *in_dims: tuple[int | None, ...]) -> Callable[..., Tensor]:
    """`body` under nested `torch.vmap`, from the innermost to the outermost ``in_dims``."""
    for dims in in_dims:
        body = torch.vmap(body, in_dims=dims)
    return body


def _tensor(x: Any, like: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x
    dtype = torch.float32 if isinstance(x, float) else None
    return torch.as_tensor(x, dtype=dtype, device=like.device)


def _callable(name: str, hook: Any, owner: str) -> Callable[..., Any]:
    if not isinstance(hook, CppHook):
        return hook  # type: ignore[no-any-return]
    if hook.reference is None:
        raise VariantError(
            f"{owner}.{name} is C++ text without a reference; give it one: "
            "fa.cpp(text, reference=function)"
        )
    return hook.reference


def _with_values(variant: Variant, values: Mapping[int, Mapping[str, object]]) -> Variant:
    """A copy of the variant tree whose params are plain attributes with the call's values."""
    copy = object.__new__(type(variant))
    copy.__dict__.update(variant.__dict__)
    copy.__dict__.update(values.get(id(variant), {}))
    if parts := parts_of(variant):
        copy.__dict__[PARTS] = tuple(_with_values(p, values) for p in parts)
    return copy


def _on_float32(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, where torch's functions read captured tensors as kernels do.

    Its arguments are its own, as in kernels: other hooks do not see what it changes in place.
    """

    def read(*args: Any) -> Any:
        own = [x.clone() if isinstance(x, Tensor) else x for x in args]
        with _ReadsFloat32():
            return hook(*own)

    return read


class _ReadsFloat32(TorchFunctionMode):
    """Functions of half precision and fp8 compute in float32, as do those of integers whose results
    are floats."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return call_as_read(func, args, kwargs or {})[0]


def _rows_of(x: Any, heads_dim: int) -> Tensor:
    """Keys or values as a tensor: of an `fa.kv.Stored` and of latent rows the values, of 4 bits the
    integers."""
    if hasattr(x, "dequantize") and not isinstance(x, Tensor):
        found: Tensor = x.dequantize(heads_dim=heads_dim)
        return found
    if x.dtype is torch.uint8:
        return latent_values(x)
    return unpacked(x).to(torch.int8) - 8 if x.dtype is CODES4 else x


class HookFunctions(TorchFunctionMode):
    """torch's functions as hooks mean them, with `Errors` put into approximations.

    Indexing by 0-dim tensors works under vmap: negative indices wrap, then all are clamped.
    """

    def __init__(self, errors: Errors = NO_ERRORS) -> None:
        super().__init__()
        self._errors = errors

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) and not i.is_floating_point() and i.dim() <= 1
                   and i.dtype != torch.bool for i in items):  # fmt: skip
                return _gather(args[0], items)
        if func is tanh_approx:
            return func(*args, **kwargs) * (1 + self._errors.approximation(*args))
        name = getattr(func, "__name__", "")
        if name in _SEARCHES:
            names = _SEARCHES[name]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            given.update(_comparable(given, *names[:: 1 if name == "bucketize" else -1]))
            args = (*(given.pop(own) for own in names), *args[2:])
            kwargs = given
        elif func is torch.nn.functional.embedding:
            return _gather(args[1], (args[0],))
        elif name in ("layer_norm", "rms_norm"):  # which take weights of the row's dtype alone
            to = args[0].dtype
            args, kwargs = map_tree(
                (args, kwargs), lambda x: x.to(to) if isinstance(x, Tensor) else x
            )
        return func(*args, **kwargs)


_SEARCHES = {"searchsorted": ("sorted_sequence", "input"), "bucketize": ("input", "boundaries")}


def _comparable(given: Mapping[str, Any], values: str, sequence: str) -> dict[str, Tensor]:
    """Values and the sequence in which they are searched in one dtype: that of the sequence, but
    of integers the wider one."""
    x, of = given[values], given[sequence]
    if not isinstance(x, Tensor):
        return {}
    integers = not any(t.dtype.is_floating_point or t.dtype is torch.bool for t in (x, of))
    wider = torch.promote_types(x.dtype, of.dtype) if integers else of.dtype
    return {values: x.to(wider), sequence: of.to(wider)}


def _gather(t: Tensor, items: tuple[Any, ...]) -> Tensor:
    given = sum(1 for i in items if i is not Ellipsis and i is not None)
    expanded: list[Any] = []
    for i in items:
        expanded += [slice(None)] * (t.dim() - given) if i is Ellipsis else [i]
    # First all items that are no tensors, so that whole dims and tensor indices remain.
    t = t[tuple(slice(None) if isinstance(i, Tensor) else i for i in expanded)]
    left = [i for i in expanded if isinstance(i, Tensor | slice) or i is None]
    where = [i if isinstance(i, Tensor) else None for i in left]
    if any(i is not None and t.shape[d] == 0 for d, i in enumerate(where)):
        return t.new_zeros([n for n, i in zip(t.shape, where, strict=False) if i is None])
    index = [None if i is None else _wrapped(i, t.shape[d]) for d, i in enumerate(where)]
    tensors = [d for d, i in enumerate(index) if i is not None]
    if tensors == list(range(tensors[0], tensors[-1] + 1)):
        return widened(torch.ops.aten.index(t, index))  # type: ignore[no-any-return]
    for d in reversed(tensors):
        t = torch.ops.aten.index(t, [None] * d + [index[d]])
    return widened(t)  # type: ignore[no-any-return]


def _wrapped(i: Tensor, size: int) -> Tensor:
    return torch.where(i < 0, i + size, i).clamp(0, size - 1).long()
