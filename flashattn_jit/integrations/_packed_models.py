"""Which models run over the tokens of several requests in one row, without padding."""

from __future__ import annotations

import inspect
from typing import Any

from flashattn_jit.errors import InputError
from flashattn_jit.integrations import _own_attention


def check_positions(model: Any) -> None:
    """Raises InputError for a model that counts the positions of a row's tokens itself.

    Layers with ALiBi need no positions: `KeyBias` has those of the request.
    """
    if not takes_positions(model) and not _own_attention.is_served(type(model)):
        raise InputError(
            f"{type(model).__name__} takes no position_ids, so the tokens of several requests "
            "cannot run in one row; use model.generate, with a PagedCache or without"
        )


def takes_positions(model: Any) -> bool:
    """Whether a model's forward takes position_ids, or passes them to a decoder that does."""
    taken = inspect.signature(model.forward).parameters
    others = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in taken.values())
    if "position_ids" not in taken and others and hasattr(model, "get_decoder"):
        taken = inspect.signature(model.get_decoder().forward).parameters
    return "position_ids" in taken


def check_lengths(model: Any, longest: int, most_rows: int) -> None:
    """Raises InputError where a request's result would depend on the others of its steps.

    longest: tokens of the longest request. most_rows: tokens of a step.
    """
    for name, module in model.named_modules():
        limit = _rope_limit(module)
        if longest > limit:
            raise InputError(
                f"{name} changes its frequencies when a sequence has more than {limit} tokens, "
                f"those of all other requests too; the longest request has {longest}: shorten it, "
                "or use model.generate, with a PagedCache or without"
            )
        # Llama 4 takes the positions from the cache, for the rows of a step as if of one request.
        scaled = getattr(module, "attn_temperature_tuning", False)
        if scaled and not module.use_rope and longest + most_rows >= module.floor_scale:
            raise InputError(
                f"{name} scales queries from position floor_scale={module.floor_scale:g} on, and "
                f"counts positions of a step as those of one request; the longest request has "
                f"{longest} tokens, a step up to {most_rows}: reduce max_step_tokens, or use "
                "model.generate, with a PagedCache or without"
            )


def _rope_limit(module: Any) -> float:
    """The length from which on a rotary embedding has other frequencies."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None or not hasattr(module, "original_max_seq_len"):
        return float("inf")
    parameters = module.config.rope_parameters
    limits = [float("inf")]
    for layers, kind in (kinds if isinstance(kinds, dict) else {"": kinds}).items():
        if kind == "longrope":
            own = parameters[layers] if layers else parameters
            limits.append(own["original_max_position_embeddings"])
        elif "dynamic" in kind:
            limits.append(module.original_max_seq_len)
    return min(limits)
