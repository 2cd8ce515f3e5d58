"""`fa.BatchAttention`: plan() once per step, run() for every layer."""

from __future__ import annotations

import torch

from ..torch_modes import on_host
from .arguments.by_name import needs_arguments
from .arguments.calls import Offset
from .batch_base import BatchBase
from .keys.level_pages import CascadeLevel
from .keys.sparsity import Sparsity
from .keys.storage import Storage
from .plan import Plan


class BatchAttention(BatchBase):
    """Attention over batches of requests, planned once per step and run for every layer.

    Args:
        variant: a `Variant`, a bare ``score_mod`` or ``mask_mod``, or None for plain attention.
        num_q_heads, num_kv_heads: num_kv_heads divides num_q_heads.
        head_dim, head_dim_v: of q and k, and of v (head_dim by default); 1 to 576, on CUDA
            head_dim_v to 512, on sm_75 both to 256.
        v_in_k: values are the first head_dim_v columns of k, as in latent attention (DeepSeek-V2,
            arXiv 2405.04434, section 2.1): runs take no v, and need a scale. On CUDA, with head
            dims above 256 and without key_mod and value_mod, a row is read once for both.
        q_dtype: float32, bfloat16 or float16 on the CPU, bfloat16 or float16 on CUDA.
        kv_dtype: q_dtype by default; on the CPU also float8_e4m3fn, float8_e5m2, and int8 where the
            variant has a `key_mod` and a `value_mod`, which scale it. uint8 is of latent rows of
            656 bytes (`fa.kv.latent_parts`), of head_dim 576 and head_dim_v 512.
        kv_format: an `fa.kv.Format` in place of kv_dtype, or a pair of one for k and one for v,
            either of which may be None (then of kv_dtype): runs take `fa.kv.Stored`, codes with
            their scales.
        device: of the tensors of runs.
        workspace: uint8 tensor on the device for partial states, at least `Plan.workspace_bytes`
            long; several objects may share one on one stream. Torch's allocator by default.
        limits: bounds of later batches; see `Limits`.
        cuda_graph: keep the plan at a fixed address, so that a captured run() replays every later
            plan; needs limits. The first plan fixes the page size, the kind and block size of a
            sparsity, the largest number of shared levels of a cascade (later plans may have fewer),
            the largest size of a sparsity's bits, and the scalar values and tensor sizes of the
            mask's params. q (and ragged k and v) may then
            be longer than the plan's tokens; rows past these are not written. The object, and a
            workspace passed to it, must outlive the graph.
        batch_invariant: tiles and splits depend on each request alone, so that its result is
            bitwise independent of the rest of the batch.
        target: as for `fa.attention`; the default is resolved when the object is made.
        mesh: a `torch.distributed.DeviceMesh` of one dim, over whose ranks keys are divided; see
            `divided`. All ranks make the same calls in the same order.
        divided: what a mesh divides. "pages": page i of each request, counted from its first key
            through all levels, is with rank i % num_ranks; q and results are equal on all ranks.
            "pages_heads": likewise, but each rank has its share of the heads of q and of results,
            as in tensor parallel layers. "requests_heads": each rank plans requests of its own,
            with all their keys; q and results have the rows of all ranks, in the order of the
            ranks, and the rank's share of the heads: for caches with fewer heads than ranks, such
            as latents.

    Raises:
        InputError, TargetError, VariantError: an argument is out of range or unknown.

    Source: plan and run are FlashInfer's (Ye et al. 2025, arXiv 2501.01005).

    Example:
        >>> batch = fa.BatchAttention(fa.Causal(), num_q_heads=32, num_kv_heads=8, head_dim=128,
        ...                           q_dtype=torch.bfloat16)
        >>> batch.plan(q_indptr, fa.Paged(page_indptr, page_indices, last_page_len, page_size=16))
        >>> outs = [batch.run(q, k_pages, v_pages) for q, k_pages, v_pages in layers]
    """

    @on_host
    @needs_arguments("BatchAttention.plan()")
    def plan(
        self,
        q_indptr: torch.Tensor,
        storage: Storage,
        *,
        sparsity: Sparsity | None = None,
        q_offset: Offset = "end",
        **mask_params: object,
    ) -> Plan:
        """Distribute the work of a batch over workers, on the host, without waiting for a device.

        Args:
            q_indptr: int32 or int64 cpu tensor [num_requests + 1]: request b has the query tokens
                q_indptr[b] to q_indptr[b + 1], from 0 on. A request may have more query tokens
                than keys: under a causal mask the first ones then see no key, and their rows are 0.
            storage: `fa.Ragged` or `fa.Paged`, with kv_len keys per request.
            sparsity: `fa.BlockSparse`, `fa.TokenSparse`, `fa.Tree` or `fa.Bits`; every key by
                default; none over a mesh that divides pages.
            q_offset: position of a request's first query token: "end" for kv_len - q_len, an int,
                or an int tensor [num_requests].
            **mask_params: the variant's params that its mask reads or that are compiled in (bools
                and strings), by name; runs use these.

        Over a mesh that divides pages, storage has the pages of all ranks; entries of page_indices
        for pages of other ranks have no meaning, and may be -1.

        Tensors are referenced, not copied: page_indices, the indices and bits of a sparsity and
        the tensors of mask_params must keep their values until the last run, as the plan depends on
        them. (With cuda_graph=True they are copied to fixed memory.)

        Returns:
            The plan, which is in force for the runs that follow.

        Raises:
            InputError: an array is wrong (the message names the request), the batch is beyond the
                limits, or the workspace is too small. The previous plan stays in force.
            ParamError: a param of the mask is missing, or one is not the mask's.
            CompileError: a kernel was needed that no cache has, and the compiler failed.
            LaunchError: the stream is being captured in a CUDA graph.
            DistributedError: another rank of the mesh failed, or was given something else.

        Example:
            >>> plan = batch.plan(q_indptr, paged)
        """
        if self._mesh is None:
            return self._plan(q_indptr, storage, (), sparsity, q_offset, mask_params)
        return self._mesh.plan(  # type: ignore[no-any-return]
            lambda: [CascadeLevel(q_indptr, storage)], sparsity, q_offset, mask_params,
            lambda: self._plan(q_indptr, storage, (), sparsity, q_offset, mask_params),
        )  # fmt: skip
