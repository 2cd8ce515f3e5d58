"""What turns scores into weights: `Softmax`, optionally with a sink, or `Pointwise`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashattn_jit.errors import VariantError


@dataclass(frozen=True)
class Softmax:
    """Softmax over the kept keys; with a sink sigma, exp(sigma) joins the denominator.

    sink: None, a number, a tensor [num_q_heads] (or [batch, num_q_heads], or 0-dim), the name of
    a param of the variant holding one, or a function (b, h) of 0-dim int32 tensors. `lse`
    includes it. Source: gpt-oss' attention sinks.

    >>> fa.variant(normalizer=fa.Softmax(sink=torch.zeros(8)))  # softmax-off-by-one
    """

    sink: Any = None

    __fajit_names__ = frozenset({"sink"})


@dataclass(frozen=True)
class Pointwise:
    """Weights that are a function of one score: out = scale * sum_j fn(score_j) v_j.

    fn: a function of the fp32 score; masked pairs add 0. scale: None (1), a number, or a function
    (b, h, q_idx). Asking for lse raises. Source: sigmoid attention (arXiv 2409.04431).

    >>> fa.variant(normalizer=fa.Pointwise(torch.sigmoid))
    """

    fn: Callable[[Any], Any]
    scale: Any = None

    __fajit_names__ = frozenset({"fn", "scale"})


Normalizer = Softmax | Pointwise


def is_default(normalizer: Any) -> bool:
    """Whether it is a softmax without a sink."""
    return normalizer is None or isinstance(normalizer, Softmax) and normalizer.sink is None


def normalizer_hooks(normalizer: Any, owner: Any) -> dict[str, Callable[..., Any]]:
    """The hooks ``sink``, ``pointwise`` and ``pointwise_scale`` of a normaliser.

    owner: the variant (or the proxy of it) whose params a sink may name.
    """
    if normalizer is None:
        return {}
    if isinstance(normalizer, Softmax):
        return {} if normalizer.sink is None else {"sink": _sink(normalizer.sink, owner)}
    if isinstance(normalizer, Pointwise):
        hooks: dict[str, Callable[..., Any]] = {"pointwise": normalizer.fn}
        scale = normalizer.scale
        if scale is not None:
            hooks["pointwise_scale"] = scale if callable(scale) else lambda b, h, q_idx: scale
        return hooks
    raise VariantError(
        f"a normalizer is fa.Softmax(...) or fa.Pointwise(...), got {type(normalizer).__name__}"
    )


def _sink(sink: Any, owner: Any) -> Callable[..., Any]:
    if isinstance(sink, str):
        if not hasattr(type(owner), sink) and not hasattr(owner, sink):
            raise VariantError(f"fa.Softmax(sink={sink!r}) names no param of the variant")
        sink = getattr(owner, sink)
    if callable(sink):
        return sink  # type: ignore[no-any-return]

    def hook(b: Any, h: Any) -> Any:
        rank = getattr(sink, "ndim", 0)
        if rank > 2:
            raise VariantError(
                f"a sink is a tensor of at most 2 dims [batch, num_q_heads], got {rank} dims"
            )
        return sink[b, h] if rank == 2 else sink[h] if rank == 1 else sink

    return hook
