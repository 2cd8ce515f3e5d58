"""`Plan`: the distribution of one batch's work, for inspection."""

from __future__ import annotations

from os import PathLike
from typing import NoReturn

from ..errors import InputError
from ..late_binding import upper
from .launching.batch_run import Planned


class Plan:
    """The distribution of one batch's work; `plan()` returns it, and later runs use it.

    Example:
        >>> print(batch.plan(q_indptr, paged).explain())
    """

    def __init__(self, planned: Planned) -> None:
        self._planned = planned

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that runs need for partial states."""
        return self._planned.first.native.workspace_bytes

    @property
    def predicted_ns(self) -> float:
        """What the planner expects a run to take, in nanoseconds, on an idle machine."""
        first = self._planned.first
        return first.native.critical_ns + first.merge_ns

    def explain(self) -> str:
        """Tables, as text, of the kernels chosen, the reasons, and the balance of the work."""
        return upper("explain_plan")(self._planned)  # type: ignore[no-any-return]

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the timeline of the workers to an image; the name's suffix decides its format.

        Raises InputError if matplotlib is missing or cannot write this format.
        """
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
