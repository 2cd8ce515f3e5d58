"""A process group as the ranks of a call: agreement, and exchanges of rows between all pairs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import DistributedError, FlashAttnJitError, InputError

T = TypeVar("T")

NO_DIGEST = bytes(32)
"""The digest of calls that need not be compared, of the size of all digests."""

_BACKENDS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}


class Ranks:
    """The group of a mesh with one dim. Raises InputError for anything else."""

    def __init__(self, mesh: object) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() "
                "and make the mesh with torch.distributed.init_device_mesh() first"
            )
        if not isinstance(mesh, DeviceMesh):
            raise InputError(
                f"mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}; make one "
                'with init_device_mesh("cpu", (num_ranks,))'
            )
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ("name",)
            raise InputError(
                f"mesh has {mesh.ndim} dims {list(mesh.shape)}, but attention is shared out over "
                f"one: pass that dim of it, such as mesh[{names[0]!r}]"
            )
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.device_type = mesh.device_type
        backend = str(dist.get_backend(self.group))
        allowed = _BACKENDS.get(self.device_type, ())
        if not any(name in backend for name in allowed):
            raise InputError(
                f"mesh is of device type {self.device_type!r} over backend {backend!r}; supported: "
                "cpu over gloo, cuda over nccl"
            )

    @property
    def device(self) -> torch.device:
        """Where the tensors of messages are."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    def agree(self, doing: str, work: Callable[[], tuple[T, bytes]]) -> T:
        """The result of `work`, if no rank's failed and the digests of all are equal.

        Every rank takes part, also one whose own work fails: it raises its own error, the others
        DistributedError, which names the ranks.
        """
        error: Exception | None = None
        digest = NO_DIGEST
        try:
            result, digest = work()
        except Exception as raised:  # is raised again below
            error = raised
        try:
            rows = self._gathered(bytes([error is not None]) + digest)
        except DistributedError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        failed = [r for r, row in enumerate(rows) if row[0]]
        if failed:
            raise DistributedError(
                f"{doing} failed on {_named(failed)}, whose errors say why; nothing has changed"
            )
        other = [r for r, row in enumerate(rows) if row != rows[0]]
        if other:
            raise DistributedError(
                f"{_named(other)} gave {doing} something else than rank 0: lengths, positions, "
                "shards, variant, values of its mask and options must be equal on every rank; "
                "nothing has changed"
            )
        return result

    def computed(self, work: Callable[[], T]) -> T:
        """The result of a rank's part of run(), which the other ranks wait for; see `agree`."""
        return self.agree("run()", lambda: (work(), NO_DIGEST))

    def gathered(self, values: Sequence[float]) -> list[tuple[float, ...]]:
        """The values of every rank. All ranks call it."""
        form = f"<{len(values)}d"
        return [struct.unpack(form, row) for row in self._gathered(struct.pack(form, *values))]

    def _gathered(self, row: bytes) -> list[bytes]:
        if self.size == 1:
            return [row]
        own = torch.tensor(list(row), dtype=torch.uint8, device=self.device)
        every = torch.empty(self.size * len(row), dtype=torch.uint8, device=self.device)
        # Newer versions of torch deprecate the older name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._call("agreeing on a call", gather, every, own, group=self.group)
        data = bytes(every.tolist())
        return [data[i : i + len(row)] for i in range(0, len(data), len(row))]

    def begin(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        received: Sequence[Sequence[torch.Tensor]],
    ) -> Exchange:
        """Start sending sent[r] to each rank r, and receiving received[r] from it.

        Contiguous tensors; those without entries are skipped, on both sides. Entries of the own
        rank are ignored.
        """
        ops = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            for function, peer, tensors in (
                (dist.isend, to, sent[to]), (dist.irecv, source, received[source]),
            ):  # fmt: skip
                ops += [
                    dist.P2POp(function, _memory_of(t), group=self.group, group_peer=peer)
                    for t in tensors
                    if t.numel()
                ]
        works = []
        if ops:
            works = self._call("an exchange of rows", dist.batch_isend_irecv, ops)
        return Exchange(self, works, ops)

    def _call(self, doing: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except FlashAttnJitError:
            raise
        except RuntimeError as error:
            why = str(error).strip().splitlines()[0]
            raise DistributedError(
                f"{doing} failed on rank {self.rank} of {self.size}: a rank is gone, or took "
                f"longer than the group's timeout ({why}); make the process group anew"
            ) from error


class Exchange:
    """Messages under way; their tensors are kept until they have arrived."""

    def __init__(self, ranks: Ranks, works: Sequence[Any], held: Sequence[object]) -> None:
        self._ranks, self._works, self._held = ranks, list(works), held

    def wait(self) -> None:
        """Until all have arrived. Raises DistributedError, after waiting for the others too."""
        errors: list[DistributedError] = []
        for work in self._works:
            try:
                self._ranks._call("an exchange of rows", work.wait)
            except DistributedError as error:
                errors.append(error)
        self._works, self._held = [], ()
        if errors:
            raise errors[0]


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: backends do not have every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
