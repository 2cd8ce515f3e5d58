"""All kernels that calls of a variant can ask for: what warming builds, so that nothing is missed.

A kernel follows from the variant, dtypes, head dims and target; from its class of packed rows, of
which there are two on CPUs and three on CUDA; and from its features, which follow from the kind of
the call. Lengths, head counts, strides of q, k and v beyond their alignment and the machine decide
nothing. The dtypes of a variant's tensor params, and where their strides are 0 or 1, are part of
the variant: ``bias`` and ``bias.expand(...)`` have kernels of their own, to be recorded or warmed
each.

| format     | what asks for it                          | CPU        | CUDA                     |
| ---------- | ----------------------------------------- | ---------- | ------------------------ |
| dense      | fa.attention, varlen_attention, flex      | -          | -                        |
| block_mask | flex_attention with a BlockMask           | block_mask | block_mask               |
| ragged     | fa.BatchAttention over fa.Ragged          | -          | -                        |
| paged      | fa.BatchAttention over fa.Paged           | indirect   | paged                    |
| sparse     | with fa.BlockSparse or fa.TokenSparse     | indirect   | sparse; paged too        |
| cascade    | fa.CascadeAttention with shared levels    | indirect   | mixed_rows; paged too    |
| tree       | with fa.Tree: bits in the variant's mask  | as ragged and paged                   |
| block_bits | fa.BlockSparse with bits, likewise        | as sparse                             |
| max_scores | flex_attention's second pass for them     | as dense and block_mask, head_dim_v 1 |

On CUDA each also comes `unaligned`, for tensors whose rows do not all start at multiples of 16
bytes; where a head dim is no multiple of 8 there is only that. So all formats of a variant are 6
kernels on a CPU target and 42 on a CUDA one (21 where a head dim is no multiple of 8), dense alone
2 and 6. The last three formats are of variants of their own: `deploy/wanted/compositions.py`.
`BatchAttention.workspace_bytes` asks a CUDA target for the kernels of ragged or of paged keys,
whatever the sparsity. A cascade of one level, in a step that shares nothing, asks for them too:
they are listed with `cascade`, and come with a recorded kernel of lists or cascades.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..codegen.spec import DTYPE_BYTES, FEATURES, AnySpec, KernelSpec, UtilitySpec, takes_dtypes
from ..codegen.targets import compiled_target, is_cuda
from ..errors import InputError
from ..variants.ir.ir import VariantIR, unscaled_integers
from .tiles import placed

FORMATS = (
    "dense", "block_mask", "ragged", "paged", "sparse", "cascade", "tree", "block_bits",
    "max_scores",
)  # fmt: skip
"""Kinds of calls, in the words of the table above."""

COMPOSED = ("tree", "block_bits", "max_scores")
"""Formats whose calls have a variant of their own, made of the user's."""

_CPU: dict[str, tuple[tuple[str, ...], ...]] = {
    "dense": ((),),
    "block_mask": (("block_mask",),),
    "ragged": ((),),
    "paged": (("indirect",),),
    "sparse": (("indirect",),),
    "cascade": (("indirect",),),
    "tree": ((), ("indirect",)),
    "block_bits": (("indirect",),),
    "max_scores": ((), ("block_mask",)),
}
_CUDA: dict[str, tuple[tuple[str, ...], ...]] = {
    "dense": ((),),
    "block_mask": (("block_mask",),),
    "ragged": ((),),
    "paged": (("paged",),),
    "sparse": (("sparse",), ("paged", "sparse")),
    "cascade": (("mixed_rows",), ("paged", "mixed_rows")),
    "tree": ((), ("paged",)),
    "block_bits": (("sparse",), ("paged", "sparse")),
    "max_scores": ((), ("block_mask",)),
}


def reachable(
    variant: VariantIR,
    head_dims: tuple[int, int],
    dtypes: tuple[str, str, str],
    target: str,
    formats: Sequence[str] = FORMATS,
) -> tuple[KernelSpec, ...]:
    """Every kernel that calls of the variant in these formats can ask for, most rows first.

    What takes their place where they spill registers is not among them: `requests_of` adds it.

    Args:
        variant: the variant's IR.
        head_dims: (head_dim, head_dim_v).
        dtypes: of q, k and v.
        target: any target; where it does not take the dtypes there are no kernels. Nor are there
            where keys or values are int8 and the variant has no hook that scales them.
        formats: of `FORMATS`, all by default.

    Raises:
        InputError: a format is unknown.
    """
    if not takes_dtypes(target, dtypes) or unscaled_integers(variant.has, *dtypes[1:]):
        return ()
    alone = ("ragged", "paged") if "cascade" in formats else ()  # of steps that share nothing
    features = [f for wanted in (*formats, *alone) for f in _features(wanted, target, head_dims)]
    return placed(variant, head_dims, dtypes, target, tuple(dict.fromkeys(features)))


def _features(wanted: str, target: str, head_dims: tuple[int, int]) -> Iterator[tuple[str, ...]]:
    if wanted not in FORMATS:
        raise InputError(f"unknown format {wanted!r}; formats are {', '.join(FORMATS)}")
    if not is_cuda(compiled_target(target)):
        yield from _CPU[wanted]
        return
    for features in _CUDA[wanted]:
        if not any(n % 8 for n in head_dims):
            yield features
        yield _sorted({*features, "unaligned"})


def _sorted(features: set[str]) -> tuple[str, ...]:
    return tuple(f for f in FEATURES if f in features)


def utilities(dtypes: Sequence[str], target: str) -> tuple[UtilitySpec, ...]:
    """The kernels that `merge_states` and `append_paged_kv` can ask for on a target.

    dtypes: those of keys and values, which say how narrow the copies of appending may be. There
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
    """The formats whose calls ask for kernels with the spec's features, on the spec's target.

    Where they are of lists or cascades, keys alone are among them: a cascade in a step that shares
    nothing asks for those, and `workspace_bytes`.
    """
    features = set(spec.features) - {"unaligned"}
    table = _CUDA if is_cuda(spec.target) else _CPU
    found = tuple(
        name
        for name in FORMATS
        if name not in COMPOSED and any(features == set(f) for f in table[name])
    )
    keys = "paged" if "paged" in features else "ragged"
    lists = {"sparse", "cascade"} & set(found)
    return (*found, keys) if lists and keys not in found else found


def retarget(spec: AnySpec, target: str) -> tuple[AnySpec, ...]:
    """What a kernel that was recorded means for a target, its own or another one.

    All kernels of its variant, dims and dtypes that calls in its formats can ask for there, so that
    other lengths are no misses. A CPU kernel with `indirect` serves pages, lists and cascades,
    which have kernels of their own on CUDA: all of them. CPUs merge states and append to pages
    without kernels, so that CUDA's come with every CPU kernel.

    Empty where the target does not take the dtypes, or has no such utility, and where no call is
    let have int8 keys or values, as for `reachable`. The name stays.
    """
    if isinstance(spec, UtilitySpec):
        kind = (spec.kernel, spec.unit_bytes)
        return tuple(u for u in utilities((), target) if (u.kernel, u.unit_bytes) == kind)
    dims = (spec.head_dim, spec.head_dim_v)
    dtypes = (spec.q_dtype, spec.k_dtype, spec.v_dtype)
    if not takes_dtypes(target, dtypes) or unscaled_integers(spec.variant.has, *dtypes[1:]):
        return ()
    features = [f for name in formats_of(spec) for f in _features(name, target, dims)]
    kernels = placed(spec.variant, dims, dtypes, target, tuple(dict.fromkeys(features)), spec.name)
    return kernels if is_cuda(spec.target) else (*kernels, *utilities(dtypes[1:], target))
