"""`Plan`: the distribution of one batch's work, for inspection."""

from __future__ import annotations

from os import PathLike
from typing import NoReturn

from ..errors import InputError
from ..late_binding import upper
from .launching.batch_run import Planned
from .launching.mixed_run import MixedPlanned


class Plan:
    """The distribution of one batch's work; `plan()` returns it, and later runs use it.

    Example:
        >>> print(batch.plan(q_indptr, paged).explain())
    """

    def __init__(self, planned: Planned | MixedPlanned) -> None:
        if isinstance(planned, MixedPlanned):
            self._parts, self._finish_ns = planned.parts, planned.finish_ns
        else:
            self._parts, self._finish_ns = (planned,), 0.0
        self._planned = self._parts[-1]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that runs need for partial states.

        A cascade over two storages allocates its rows' states besides, at each run.
        """
        return max(part.first.native.workspace_bytes for part in self._parts)

    @property
    def predicted_ns(self) -> float:
        """What the planner expects a run to take, in nanoseconds, on an idle machine."""
        parts = [part.first for part in self._parts]
        return self._finish_ns + sum(x.native.critical_ns + x.merge_ns for x in parts)

    def explain(self) -> str:
        """Tables, as text, of the kernels chosen, the reasons, and the balance of the work."""
        return "\n\n".join(upper("explain_plan")(part) for part in self._parts)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the timeline of the workers to an image; the name's suffix decides its format.

        Raises InputError if matplotlib is missing or cannot write this format, or if the plan is of
        two storages, which have timelines of their own.
        """
        if len(self._parts) > 1:
            raise InputError(
                "plot() draws the plan of one storage, this one has levels in two: explain() "
                "prints both"
            )
        upper("plot_plan")(self._planned, path)

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a Plan is part of the BatchAttention that made it and cannot be copied or pickled; "
            "copy that object, and plan() with the copy"
        )

    def __repr__(self) -> str:
        lengths = self._planned.batch.lengths
        return (
            f"<Plan of {lengths.num_requests} requests, {lengths.num_q_tokens} query tokens, "
            f"workspace {self.workspace_bytes} bytes>"
        )
