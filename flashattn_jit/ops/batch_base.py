"""The base of `BatchAttention` and `CascadeAttention`: options, run(), and planning."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .. import _C
from ..codegen.spec import KV_DTYPES, Q_DTYPES, check_matrix_dtypes, target_on_device, wrong_rows
from ..errors import InputError
from ..formats import Formats, KvFormat, Stored, kv_bytes, read_formats
from ..late_binding import upper
from ..stored_hooks import Decodings, check_partial, codes_of, decoded, decodings
from ..torch_modes import PLAN_FIRST, is_direct, refuse_capture
from ..variants.binding import Bound
from ..variants.compose import present_hooks
from ..variants.ir.dtypes import KV_NAMES
from ..variants.ir.ir import unscaled_integers
from ..variants.params import Dims
from ..variants.variant import Variant, as_variant, is_pointwise
from .arguments import checks
from .arguments.by_name import by_name
from .arguments.calls import Array, Offset, host_array, offset_array
from .arguments.limits import Limits
from .keys.columns import check_values_in_keys, columns
from .keys.sparsity import Sparsity
from .keys.storage import ReadStorage, Storage, read_storage
from .launching import batch_run
from .launching.batch_run import Observed, Pairs, Planned
from .launching.launches import Workspace
from .launching.mixed_run import MixedPlanned
from .plan import Plan
from .planning import batch_plan
from .planning.batch_params import bind_plan, bound_kernels
from .planning.batch_plan import Batch, Kernels, Keys, Options, native_kinds
from .planning.replays import check_replayable, padded, with_room
from .planning.sparsities import Sparsities, check_values
from .torch_ops import as_op, sites

if TYPE_CHECKING:
    from .device.plan_memory import DeviceState

Params = Mapping[str, object]

_objects: weakref.WeakValueDictionary[int, BatchBase] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_MOST = 10**30


class Level(NamedTuple):
    """Shared keys for the planner: q_indptr of groups, tokens, storage. held: owners of memory."""

    q_indptr: Array
    tokens: Array | None
    stored: ReadStorage
    held: tuple[torch.Tensor, ...]


class OverFormats(NamedTuple):
    """What computes attention over keys and values of some formats."""

    formats: Formats
    decodings: Decodings
    variant: Variant
    kernels: Kernels
    observed: Observed


class BatchBase:
    """The base of `BatchAttention` and `CascadeAttention`: everything except plan()."""

    plan_state: tuple[str, ...] = ("_planned",)
    """The attributes that plan() sets."""

    @by_name(
        "{}()",
        "give a workspace as workspace=; layouts are strides: pass pages.transpose(1, 2) to run()",
    )
    def __init__(
        self,
        variant: Variant | Callable[..., object] | None = None,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        v_in_k: bool = False,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        kv_format: KvFormat | None = None,
        device: str | torch.device = "cpu",
        workspace: torch.Tensor | None = None,
        limits: Limits | None = None,
        cuda_graph: bool = False,
        batch_invariant: bool = False,
        target: str | None = None,
        mesh: object = None,
        divided: str = "pages",
    ) -> None:
        self._formats = read_formats(kv_format)
        if kv_dtype is not None and None not in self._formats:
            raise InputError("kv_format says the dtypes of codes; give no kv_dtype beside it")
        self.given = as_variant(variant)
        own = checks.check_device(device)
        self._kv_dtype = kv_dtype
        kv_dtype = q_dtype if kv_dtype is None else kv_dtype
        for name, dtype, allowed in (
            ("q_dtype", q_dtype, Q_DTYPES), ("kv_dtype", kv_dtype, KV_DTYPES),
        ):  # fmt: skip
            if not isinstance(dtype, torch.dtype) or KV_NAMES.get(dtype) not in allowed:
                names = ", ".join(allowed)
                raise InputError(
                    f"{name}={checks.shown(dtype)} is not supported; supported: {names}"
                )
        num_q_heads = checks.check_int("num_q_heads", num_q_heads, 1)
        num_kv_heads = checks.check_int("num_kv_heads", num_kv_heads, 1)
        checks.check_heads(num_q_heads, num_kv_heads, num_kv_heads)
        head_dim = checks.check_int("head_dim", head_dim, -_MOST, _MOST)
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        head_dim_v = checks.check_int("head_dim_v", head_dim_v, -_MOST, _MOST)
        checks.check_head_dims(head_dim, head_dim, head_dim_v)
        if not isinstance(v_in_k, bool):
            raise InputError(f"v_in_k={v_in_k!r:.60} must be True or False")
        if v_in_k:
            check_values_in_keys(head_dim, head_dim_v, self._formats)
        decodings(self._formats, head_dim, head_dim_v)  # raises before anything is resolved
        self.pointwise = is_pointwise(self.given)  # then runs have no lse
        if limits is not None and not isinstance(limits, Limits):
            raise InputError(f"limits must be an fa.Limits, got {type(limits).__name__}")
        if cuda_graph and limits is None:
            raise InputError(
                "cuda_graph=True needs limits=fa.Limits(...): a captured run has a fixed grid and "
                "fixed buffers, whose sizes follow from the largest batch"
            )
        resolved = target_on_device(own, target)
        self._plain = Options(
            num_q_heads, num_kv_heads, head_dim, head_dim_v, q_dtype, kv_dtype, kv_dtype, own,
            resolved, limits, cuda_graph, batch_invariant, v_in_k=v_in_k,
        )  # fmt: skip
        self._by_formats: dict[tuple[Formats, bool], OverFormats] = {}
        over = self._over(self._formats)
        self._decodings, self._variant, self._kernels, self._observed = over[1:]
        self._sparsities = Sparsities(self._variant, self._kernels.options)
        self._workspace = Workspace(workspace, own)
        self._target = target  # not resolved: a copy may be unpickled on another machine
        self._state: DeviceState | None = None
        self._planned: Planned | MixedPlanned | None = None
        self.number = next(_numbers)  # identifies the object in graphs
        _objects[self.number] = self
        if mesh is None and divided != "pages":
            raise InputError(f"divided={divided!r:.60} says what a mesh divides: give mesh= too")
        self._mesh = None if mesh is None else upper("over_mesh")(self, mesh, divided)

    def __reduce__(self) -> Any:
        # A copy has the same options, another number, and no plan.
        if self._mesh is not None:
            raise InputError(
                f"a {type(self).__name__} with a mesh belongs to the process group of its rank and "
                "cannot be copied or pickled; make one on each rank"
            )
        return _made_again, (type(self), self.given, self.made())

    def made(self) -> dict[str, Any]:
        """The options that the object was made with, but for a mesh."""
        options = self._kernels.options
        return {
            "num_q_heads": options.num_q_heads, "num_kv_heads": options.num_kv_heads,
            "head_dim": options.head_dim, "head_dim_v": options.head_dim_v,
            "v_in_k": options.v_in_k,
            "q_dtype": options.q_dtype, "device": options.device,
            "kv_dtype": self._kv_dtype, "kv_format": self._formats,
            "workspace": self._workspace.given, "limits": options.limits,
            "cuda_graph": options.cuda_graph, "batch_invariant": options.batch_invariant,
            "target": self._target,
        }  # fmt: skip

    def _over(self, formats: Formats, rotate_back: bool = False) -> OverFormats:
        """What computes attention over keys and values of some formats; made once.

        rotate_back: see `decoded`. Raises InputError for formats that do not fit the object.
        """
        found = self._by_formats.get((formats, rotate_back))
        if found is not None:
            return found
        plain = self._plain
        if plain.v_in_k:
            check_values_in_keys(plain.head_dim, plain.head_dim_v, formats)
        sides = decodings(formats, plain.head_dim, plain.head_dim_v)
        variant = decoded(self.given, sides, rotate_back=rotate_back)
        k_dtype, v_dtype = (f.dtype if f else plain.k_dtype for f in formats)
        if not plain.cpu:
            check_matrix_dtypes((plain.q_dtype, k_dtype, v_dtype), plain.target)
        if wrong := unscaled_integers(present_hooks(variant).__contains__, k_dtype, v_dtype):
            raise InputError(wrong)
        bytes_ = kv_bytes(
            formats, (k_dtype, v_dtype), plain.num_kv_heads, plain.head_dim, plain.head_dim_v
        )
        options = replace(plain, k_dtype=k_dtype, v_dtype=v_dtype, kv_bytes=bytes_)
        if wrong := wrong_rows((plain.head_dim, plain.head_dim_v), options.dtypes):
            raise InputError(wrong)
        observed = Observed(not options.cpu and not options.whole_rows)
        made = OverFormats(formats, sides, variant, Kernels(options), observed)
        return self._by_formats.setdefault((formats, rotate_back), made)

    def share_kernels(self, other: BatchBase) -> None:
        """Take kernels from what an object with equal options has loaded."""
        self._kernels = other._kernels
        self._by_formats = {
            key: over._replace(kernels=other._by_formats[key].kernels)
            for key, over in self._by_formats.items()
        }

    @property
    def variant(self) -> Variant:
        """What is computed, with the scales of a kv_format."""
        return self._variant

    @property
    def options(self) -> Options:
        """Heads, head dims, dtypes, device and target, by which kernels are chosen."""
        return self._kernels.options

    # --- running ----------------------------------------------------------------------------------

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | Stored,
        v: torch.Tensor | Stored | None = None,
        *,
        scale: checks.Scale | None = None,
        return_lse: bool = False,
        partial: bool = False,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        **params: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention over the planned batch; any number of runs follow one plan.

        Args:
            q: [num_q_tokens, num_q_heads, head_dim] in q_dtype; any strides with a contiguous last
                dim, as for k and v.
            k: [num_pages, page_size, num_kv_heads, head_dim] over pages, [num_kv_tokens,
                num_kv_heads, head_dim] ragged, in kv_dtype. Another layout is a transposed view.
                With a kv_format an `fa.kv.Stored` of that layout.
            v: likewise, with head_dim_v; its strides may differ from k's. Absent with v_in_k.
            scale: multiplies q . k; 1/sqrt(head_dim) by default, but with v_in_k, whose rows are
                of other widths than the heads that they stand for, it must be given. A float, or a
                0-dim cpu tensor, which each run reads.
            return_lse: also return the natural-log log-sum-exp [num_q_tokens, num_q_heads], fp32.
            partial: return the unfinalised fp32 state for `fa.merge_states`; implies return_lse for
                softmax variants.
            out: result tensor to write to.
            lse: fp32 tensor [num_q_tokens, num_q_heads] to write lse to; implies return_lse.
            **params: the variant's params that its mask does not read, by name.

        Returns:
            out [num_q_tokens, num_q_heads, head_dim_v] in q's dtype, or (out, lse).

        Raises:
            InputError: nothing is planned, or a tensor does not fit the object or the plan.
            ParamError: a param is missing or unknown, or is the mask's and so belongs to plan().
            CompileError: other kernels than planned are needed, and the compiler failed.
            LaunchError: CUDA refused the launch, or other kernels are needed during a capture.
            GradError: an input requires grad while grad mode is on.
            DistributedError: another rank of the mesh failed, is gone, or was given another scale
                or return_lse.

        Example:
            >>> out = batch.run(q, k_pages, v_pages)
        """
        if self._mesh is not None:
            return self._mesh.run(q, k, v, scale, return_lse, partial, out, lse, params)  # type: ignore[no-any-return]
        return self.run_own(q, k, v, scale, return_lse, partial, out, lse, params)

    def run_own(
        self, q: torch.Tensor, k: Any, v: Any, scale: checks.Scale | None, return_lse: bool,
        partial: bool, out: torch.Tensor | None, lse: torch.Tensor | None,
        params: dict[str, object],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`run` over what this process holds, whether there is a mesh or not."""
        k, v = self._codes(*self._values(k, v, scale), partial, params)
        return self._run(q, k, v, (), params, scale, return_lse, partial, out, lse)

    def _values(
        self, k: torch.Tensor | Stored, v: torch.Tensor | Stored | None, scale: object
    ) -> tuple[torch.Tensor | Stored, torch.Tensor | Stored]:
        """k, and v or what v_in_k takes for it. Raises InputError."""
        options = self._kernels.options
        if not options.v_in_k:
            if v is None:
                raise InputError(
                    "v is missing: pass keys and values apart, such as cache[:, 0], cache[:, 1]; "
                    "only objects with v_in_k=True have v in k"
                )
            return k, v
        if v is not None:
            raise InputError(
                f"v_in_k=True: values are the first {options.head_dim_v} columns of k; give no v"
            )
        if scale is None:
            raise InputError(
                "v_in_k=True: scale has no default, as latent rows are wider than the heads that "
                "they stand for; give scale=(nope_dim + rope_dim) ** -0.5 of the model"
            )
        return k, columns(k, 0, options.head_dim_v)

    def _codes(
        self, k: torch.Tensor | Stored, v: torch.Tensor | Stored, partial: bool,
        params: dict[str, object],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """k and v as tensors: codes, whose scales are added to params. Raises InputError."""
        plain = isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
        if plain and self._formats == (None, None):
            return k, v  # type: ignore[return-value]
        (own_k, own_v), (of_k, of_v) = self._formats, self._decodings
        check_partial(of_v, self.given, partial)
        return codes_of("k", k, own_k, of_k, params), codes_of("v", v, own_v, of_v, params)

    def _run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: Pairs, params: Params,
        scale: checks.Scale | None, return_lse: bool, partial: bool, out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The result of `run`. more: k and v of further levels of a cascade."""
        given: tuple[Any, ...] = (q, k, v)
        if out is not None:
            given = (q, k, v, out)
        if lse is not None:
            given = (*given, lse)
        if params or isinstance(scale, torch.Tensor):
            given = (*given, *(x for x in (*params.values(), scale) if isinstance(x, torch.Tensor)))
        if more:
            given = (*given, *(t for pair in more for t in pair))
        direct = not torch.compiler.is_dynamo_compiling() and is_direct(*given)
        if not direct:
            return as_op.batch(self, q, k, v, more, params, scale, return_lse, partial, out, lse)  # type: ignore[no-any-return]
        planned = self.in_force()
        result, lse = planned.run(q, k, v, params, scale, return_lse, partial, out, lse, more)
        return result if lse is None else (result, lse)

    def check_placed(self, q: Any, k: Any, v: Any, out: Any, lse: Any, more: Any) -> None:
        """Raises InputError for arguments that are no tensors on the object's device."""
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)):
            if name in "qkv" or tensor is not None:
                batch_run.check_device(name, tensor, self._kernels.options.device)
        for tensor in more:
            batch_run.check_device("k or v of a level", tensor, self._kernels.options.device)

    def in_force(self) -> Planned | MixedPlanned:
        """The plan that runs use. Raises InputError if there is none."""
        planned = self._planned
        if planned is None:
            raise InputError(
                "run() before plan(): nothing is planned; call plan(q_indptr, storage) first, once "
                "a step"
            )
        return planned

    # --- sizes ------------------------------------------------------------------------------------

    def workspace_bytes(
        self, limits: Limits | None = None, *, q_block: int = 0, num_levels: int = 0
    ) -> int:
        """The largest workspace, in bytes, that a plan within `limits` needs.

        limits: the object's own by default. q_block: Br of plans with `fa.BlockSparse`, 1 with
        `fa.TokenSparse`. num_levels: levels of shared keys of a cascade. On CUDA this compiles the
        kernels, whose registers decide how many blocks run at once; on CPUs it compiles nothing.

        Raises:
            InputError: there are no limits.
        """
        q_block = checks.check_int("q_block", q_block, 0)
        num_levels = checks.check_int("num_levels", num_levels, 0)
        limits = self._kernels.options.limits if limits is None else limits
        if not isinstance(limits, Limits):
            raise InputError("workspace_bytes() needs limits=fa.Limits(...)")
        options = self._kernels.options
        dims = Dims(
            limits.max_requests, options.num_q_heads, options.num_kv_heads, limits.max_q_tokens,
            limits.max_kv_len, options.head_dim, options.head_dim_v, options.device,
        )  # fmt: skip
        kernels = Kernels(replace(options, limits=limits))
        paged = limits.max_pages > 0

        def bound(tma: bool) -> int:
            pair = bound_kernels(
                kernels, self._variant, dims, paged, q_block > 0, num_levels > 0, tma
            )
            plan_options = kernels.plan_options(pair, options.num_kv_heads, num_levels)
            return _C.BatchPlan.workspace_bound(native_kinds(pair), plan_options, q_block)

        # Pages of any size: those that TMA copies and others may have different kernels.
        return max(bound(True), bound(False)) if paged else bound(True)

    # --- planning ---------------------------------------------------------------------------------

    def _plan(
        self,
        q_indptr: torch.Tensor,
        storage: Storage,
        levels: Sequence[Level],
        sparsity: Sparsity | None,
        q_offset: Offset,
        params: Params,
    ) -> Plan:
        """Plan a batch and put it in force; an error leaves the plan before it in force."""
        self.check_plan(sparsity, params)
        stored = read_storage(storage, self._kernels.options.device)
        planned = self._planned_now(q_indptr, stored, levels, sparsity, q_offset, params)
        return self._put_in_force(planned)

    def _put_in_force(self, planned: Planned | MixedPlanned) -> Plan:
        self._planned = planned
        return Plan(planned)

    def check_plan(self, sparsity: Sparsity | None, params: Params) -> None:
        """Raises where nothing can be planned: during a capture, or without values."""
        if sparsity is not None or params:
            check_values(sparsity, params)
        options = self._kernels.options
        if not options.cpu:
            refuse_capture(options.device, "plan() was called", PLAN_FIRST)

    def _planned_now(
        self, q_indptr: torch.Tensor, stored: ReadStorage, levels: Sequence[Level],
        sparsity: Sparsity | None, q_offset: Offset, params: Params,
        over: OverFormats | None = None, whole_q_len: Array | None = None,
    ) -> Planned:  # fmt: skip
        """A plan that is not in force yet. Levels whose keys are elsewhere count in positions.

        over: the object's own formats by default. whole_q_len: where requests are parts of longer
        ones, see `_C.BatchLengths`.
        """
        over = self._over(self._formats) if over is None else over
        options = over.kernels.options
        rows, _rows_held = host_array("q_indptr", q_indptr)
        offset, _offset_held = offset_array(q_offset, rows[1] - 1)
        try:
            lengths = _C.BatchLengths(
                rows,
                stored.native,
                offset,
                tuple((x.q_indptr, x.tokens, x.stored.native) for x in levels),
                whole_q_len,
                *options.query_bounds,
            )
        except ValueError as error:
            raise InputError(str(error)) from None
        dims = self._dims(lengths)
        variant, lists = over.variant, None
        bits: dict[str, Any] = {}
        if sparsity is not None:
            variant, lists, bits = self._sparsities.read(sparsity, lengths, q_offset)
        # Kernels of mixed rows read keys from kv_first on, so levels that are elsewhere count too.
        num_levels = len(levels)
        if options.cuda_graph:
            before = self._one_before()
            room = None if before is None else before.batch.lists
            lists = with_room(lists, sparsity, options, room)
            if before is not None:
                bits = padded(bits, before.params)
                num_levels = max(num_levels, before.batch.num_levels)
        given = {**params, **bits}
        keys = _keys(stored, levels)
        bound = bind_plan(variant, dims, given, over.observed.dtypes)
        batch = Batch(over.kernels, variant.name, lengths, dims, keys, lists, num_levels)
        self._check_variant(batch, bound)
        unaligned = over.observed.unaligned
        first = batch_plan.vary(batch, bound, unaligned)
        self._workspace.check(first.native.workspace_bytes)
        if options.cuda_graph and (before := self._one_before()) is not None:
            check_replayable(before.latest, first)
        if not options.cpu and self._state is None:
            from .device.plan_memory import DeviceState

            self._state = DeviceState(options.device, options.target, options.cuda_graph)
        first.commit(self._state)
        return Planned(
            batch, variant, given, first, unaligned, self._state, self._workspace, over.observed
        )

    def _dims(self, lengths: _C.BatchLengths) -> Dims:
        """The sizes that the variant's params have."""
        options = self._kernels.options
        return Dims(
            lengths.num_requests, options.num_q_heads, options.num_kv_heads, lengths.max_q_len,
            lengths.max_kv_len, options.head_dim, options.head_dim_v, options.device,
        )  # fmt: skip

    def _one_before(self) -> Planned | None:
        """The plan in force of an object with a CUDA graph, whose plans have one storage."""
        assert not isinstance(self._planned, MixedPlanned)
        return self._planned

    def _check_variant(self, batch: Batch, bound: Bound) -> None:
        """Raises VariantError for a variant that this kind of plan does not support."""


# --- parts ----------------------------------------------------------------------------------------


def by_number(number: int) -> BatchBase:
    """The object of a number. Raises InputError if it no longer exists."""
    found = _objects.get(sites.local_number(number))
    if found is None:
        raise InputError(
            f"number {number} names no batch of this process; keep the BatchAttention alive"
        )
    return found


def _made_again(kind: type[BatchBase], variant: Variant, options: Mapping[str, Any]) -> BatchBase:
    return kind(variant, **options)


def _keys(stored: ReadStorage, levels: Sequence[Level]) -> Keys:
    """The storage of all keys: the requests' own pages, then those of each level."""
    parts = [stored, *(level.stored for level in levels)]
    page_size = max(p.page_size for p in parts)
    if not page_size:
        return Keys(0, None, None)
    indptrs = [p.held[0] for p in parts]
    if not levels:
        return Keys(stored.page_size, stored.page_indices, stored.pages, indptrs)
    used = [p.page_indices[: p.used_pages] for p in parts if p.page_indices is not None]
    here = [p for p in parts if not p.is_elsewhere]
    known = [p.pages for p in here if p.pages is not None and p.pages[1] >= 0]
    pages = None
    if all(p.pages is not None for p in here):
        pages = (min((p[0] for p in known), default=0), max((p[1] for p in known), default=-1))
    return Keys(page_size, _joined(used), pages, indptrs)


def _joined(indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors end to end. numpy joins those on the host, as torch would wake its threads."""
    if any(type(x) is not torch.Tensor or not x.is_cpu for x in indices):
        return torch.cat(list(indices))
    return torch.from_numpy(np.concatenate([x.numpy() for x in indices]))
