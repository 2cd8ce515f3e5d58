"""All kernels that calls of a variant can request, which warming builds.

A kernel depends on the variant, dtypes, head dims and target; on its class of packed rows, of which
there are two on CPUs and three on CUDA; and on its features, which follow from the kind of the
call. It does not depend on lengths, head counts, the machine, or strides of q, k and v beyond their
alignment. The dtypes of a variant's tensor params, and which of their strides are 0 or 1, are part
of the variant: ``bias`` and ``bias.expand(...)`` have different kernels, each to be recorded or
warmed.

| format     | calls                                     | CPU        | CUDA                     |
| ---------- | ----------------------------------------- | ---------- | ------------------------ |
| dense      | fa.attention, varlen_attention, flex      | -          | -                        |
| block_mask | flex_attention with a BlockMask           | block_mask | block_mask               |
| ragged     | fa.BatchAttention over fa.Ragged          | -          | -                        |
| paged      | fa.BatchAttention over fa.Paged           | indirect   | paged                    |
| sparse     | with fa.BlockSparse or fa.TokenSparse     | indirect   | sparse; paged too        |
| cascade    | fa.CascadeAttention with shared levels    | indirect   | mixed_rows; paged too    |
| tree       | with fa.Tree: bits in the variant's mask  | as ragged and paged                   |
| bits       | with fa.Bits, likewise                    | as ragged and paged                   |
| block_bits | fa.BlockSparse with bits, likewise        | as sparse                             |
| max_scores | flex_attention's second pass for them     | as dense and block_mask, head_dim_v 1 |
| append     | fa.append_paged_kv with a transform       | one of a kind of its own              |

On CUDA each kernel also exists with `unaligned`, for tensors whose rows do not all start at
multiples of 16 bytes; if a head dim is no multiple of 8 there is only that one. So all formats of a
variant are 6 kernels on a CPU target and 42 on a CUDA one (21 if a head dim is no multiple of 8),
dense alone 2 and 6; on sm_90 two more, of `mma.sync`, for pages whose size is not a multiple of 8.
The last five formats have variants composed from the user's:
`deploy/wanted/compositions.py`. `BatchAttention.workspace_bytes` requests the kernels of ragged or
of paged keys on a CUDA target, whatever the sparsity. So does a cascade of one level, in a step
that shares nothing: those kernels are listed with `cascade`, and added to recorded kernels of lists
and cascades.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..codegen.spec import (
    CODE_DTYPES,
    DTYPE_BYTES,
    FEATURES,
    Q_DTYPES,
    AnySpec,
    KernelSpec,
    UtilitySpec,
    append_kernel,
    has_whole_rows,
    takes_dtypes,
    wrong_rows,
)
from ..codegen.targets import compiled_target, is_cuda
from ..errors import InputError
from ..variants.ir.ir import KV_HOOKS, VariantIR, unscaled_integers
from .cuda_tiles import against_wide, has_tiles
from .tiles import kernels_by_rows

FORMATS = (
    "dense", "block_mask", "ragged", "paged", "sparse", "cascade", "tree", "bits",
    "block_bits", "max_scores", "append",
)  # fmt: skip
"""Kinds of calls: the first column of the table above."""

COMPOSED = ("tree", "bits", "block_bits", "max_scores", "append")
"""Formats whose calls have a variant that is composed from the user's."""

_CUDA_FEATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "dense": ((),),
    "block_mask": (("block_mask",),),
    "ragged": ((),),
    "paged": (("paged",),),
    "sparse": (("sparse",), ("paged", "sparse")),
    "cascade": (("mixed_rows",), ("paged", "mixed_rows")),
    "tree": ((), ("paged",)),
    "bits": ((), ("paged",)),
    "block_bits": (("sparse",), ("paged", "sparse")),
    "max_scores": ((), ("block_mask",)),
}


_CPU_FEATURES = {
    name: tuple(dict.fromkeys(f if f in ((), ("block_mask",)) else ("indirect",) for f in features))
    for name, features in _CUDA_FEATURES.items()
}
"""Keys in pages, lists and mixed rows are one feature of CPU kernels, `indirect`."""


def reachable(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    formats: Sequence[str] = FORMATS,
    v_in_k: bool = False,
) -> tuple[KernelSpec, ...]:
    """Every kernel that calls of the variant in these formats can request, most rows first.

    Fallbacks for kernels that spill registers are not included: `build_requests` adds them.

    Args:
        variant: the variant's IR.
        head_dims: (head_dim, head_dim_v).
        dtypes: of q, k and v.
        target: any target. The result is empty if it does not support the dtypes or head dims, or
            if keys or values are int8 and the variant has no hook that scales them.
        formats: of `FORMATS`, all by default.
        v_in_k: of batches whose values are the first columns of keys.

    Raises:
        InputError: a format is unknown.
    """
    alone = ("ragged", "paged") if "cascade" in formats else ()  # of steps that share nothing
    return _kernels(variant, head_dims, dtypes, target, (*formats, *alone), v_in_k=v_in_k)


def _kernels(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    formats: Sequence[str],
    name: str = "variant",
    v_in_k: bool = False,
) -> tuple[KernelSpec, ...]:
    if not takes_dtypes(target, dtypes) or not has_tiles(head_dims, target):
        return ()
    if wrong_rows(head_dims, dtypes):
        return ()
    if is_cuda(compiled_target(target)) and against_wide(
        KernelSpec(variant, *dtypes, *head_dims, compiled_target(target), "prefill", 0, 0)
    ):
        return ()
    appends: tuple[KernelSpec, ...] = ()
    if "append" in formats:
        formats = [wanted for wanted in formats if wanted != "append"]
        hooks = {hook for hook, _ in (*variant.hooks, *variant.cpp)}
        quantises = not {*dtypes[1:]}.isdisjoint(CODE_DTYPES)
        new = [dtypes[0] if quantises else dtype for dtype in dtypes[1:]]
        changes = hooks <= {*KV_HOOKS} and (hooks or quantises)
        if changes and appends_dtypes(target, new, dtypes[1:]):
            appends = (append_kernel(variant, head_dims, dtypes[1:], target, name, new[0]),)
    if unscaled_integers(variant.has, *dtypes[1:]):
        return () if formats else appends
    features = [f for wanted in formats for f in _features(wanted, target, head_dims, dtypes)]
    if v_in_k:
        features = [(*f, "values_in_keys") for f in features]
    attention = kernels_by_rows(
        variant, head_dims, dtypes, target, tuple(dict.fromkeys(features)), name
    )
    return (*attention, *appends)


def appends_dtypes(target: str, dtypes: Sequence[str], stored: Sequence[str] = ()) -> bool:
    """Whether rows of k and v of these dtypes can be changed on their way into pages.

    stored: dtypes of the pages, where they differ: those of codes, for which all rows have one
    dtype. On CUDA they always have one, that attention takes there.
    """
    k, v = dtypes
    stored = stored or dtypes
    codes = [s in CODE_DTYPES for s in stored]
    if any(s != new for code, s, new in zip(codes, stored, dtypes, strict=True) if not code):
        return False
    if is_cuda(compiled_target(target)):
        return k == v and takes_dtypes(target, (k, k, k))
    return {k, v} <= {*Q_DTYPES} and (k == v or not any(codes))


def _features(
    wanted: str, target: str, head_dims: tuple[int, int], dtypes: tuple[str, str, str]
) -> Iterator[tuple[str, ...]]:
    if wanted not in FORMATS:
        raise InputError(f"unknown format {wanted!r}; formats are {', '.join(FORMATS)}")
    if not is_cuda(compiled_target(target)):
        yield from _CPU_FEATURES[wanted]
        return
    for features in _CUDA_FEATURES[wanted]:
        if has_whole_rows(head_dims, dtypes):
            yield features
        yield tuple(f for f in FEATURES if f in features or f == "unaligned")


def utilities(dtypes: Sequence[str], target: str) -> tuple[UtilitySpec, ...]:
    """The kernels that `merge_states` and `append_paged_kv` can request on a target.

    dtypes: those of keys and values, whose sizes bound the copy unit of appending from below. There
    are none on CPU targets, and up to six on CUDA.
    """
    target = compiled_target(target)
    if not is_cuda(target):
        return ()
    least = min((DTYPE_BYTES[d] for d in dtypes), default=1)
    units = [n for n in (16, 8, 4, 2, 1) if n >= least]
    return (
        UtilitySpec("merge_states", target),
        *(UtilitySpec("append_paged_kv", target, n) for n in units),
    )


def formats_of(spec: KernelSpec) -> tuple[str, ...]:
    """The formats whose calls request kernels with the spec's features, on the spec's target.

    "sparse" and "cascade" add "ragged" or "paged": a cascade in a step that shares nothing requests
    those kernels, and so does `workspace_bytes`.
    """
    if spec.tile_kind == "append":
        return ("append",)
    features = set(spec.features) - {"unaligned", "values_in_keys"}
    table = _CUDA_FEATURES if is_cuda(spec.target) else _CPU_FEATURES
    found = tuple(
        name
        for name in FORMATS
        if name not in COMPOSED and any(features == set(f) for f in table[name])
    )
    keys = "paged" if "paged" in features else "ragged"
    lists = {"sparse", "cascade"} & set(found)
    return (*found, keys) if lists and keys not in found else found


def retarget(spec: AnySpec, target: str) -> tuple[AnySpec, ...]:
    """The kernels on a target, its own or another one, that stand for a recorded kernel.

    They are all kernels of its variant, dims and dtypes that calls in its formats can request
    there, so that other lengths are no misses. A CPU kernel with `indirect` serves pages, lists and
    cascades, which have separate kernels on CUDA: all of them are included. CPUs merge states and
    append to pages without kernels, so every CPU kernel includes CUDA's utilities.

    The result is empty if the target does not support the dtypes or has no such utility, and for
    int8 keys or values that calls refuse, as for `reachable`. The name is kept.
    """
    if isinstance(spec, UtilitySpec):
        kind = (spec.kernel, spec.unit_bytes)
        return tuple(u for u in utilities((), target) if (u.kernel, u.unit_bytes) == kind)
    dims = (spec.head_dim, spec.head_dim_v)
    dtypes = (spec.q_dtype, spec.k_dtype, spec.v_dtype)
    formats = formats_of(spec)
    kernels: tuple[KernelSpec, ...] = ()
    # A CPU kernel does not tell whether values were columns of keys.
    told = is_cuda(spec.target) or spec.head_dim_v > spec.head_dim or spec.k_dtype != spec.v_dtype
    for v_in_k in ("values_in_keys" in spec.features,) if told else (False, True):
        kernels += _kernels(spec.variant, dims, dtypes, target, formats, spec.name, v_in_k)
    kernels = tuple(dict.fromkeys(kernels))
    if is_cuda(spec.target) or not kernels:
        return kernels
    return (*kernels, *utilities(dtypes[1:], target))
