"""The parts of `register`: checks the version of transformers, and hooks into its models."""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from flashattn_jit.errors import InputError
from flashattn_jit.integrations import _own_attention
from flashattn_jit.integrations._own_attention import IMPLEMENTATIONS, Attend
from flashattn_jit.integrations._served import OWN_CODE, Served

NAME = "attn_jit"
"""The registered name. transformers reserves names with "flash" in them for its kernel loader."""

TESTED = ("5.23",)
"""Versions of transformers with which every model type was compared with its eager code."""


def check_version() -> None:
    """Raises ImportError without transformers or before the tested versions; warns after them."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(_needs()) from error
    version = transformers.__version__
    found, first, last = map(_release, (version, TESTED[0], TESTED[-1]))
    if found < first:
        raise ImportError(f"{_needs()}; this is {version}")
    if found > last:
        warnings.warn(
            f"this integration was tested with transformers {', '.join(TESTED)}, and this is "
            f"{version}: a model family may have changed since; compare one forward pass with "
            "attn_implementation='eager'",
            stacklevel=4,
        )


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, which may end in letters, as in "6.0rc1"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _needs() -> str:
    return (
        f"register() needs Hugging Face transformers {TESTED[0]} or later; install it with "
        f"pip install 'transformers>={TESTED[0]}'"
    )


class _Changing(threading.local):
    """Per thread: whether existing models of the served families may change implementation now."""

    served = False


_changing = _Changing()


def look_at_models(attend: Attend, layers: Callable[[nn.Module], Served]) -> None:
    """Hooks into the creation of models and the change of their implementation, once.

    Families with attention code of their own are prepared before a layer of them exists, and a
    warning names the layers that never call the engine. layers: `served`. ``generate`` refuses
    use_cache=False for a cache over pages.
    """
    from transformers import GenerationMixin, PreTrainedModel

    for name in sorted(IMPLEMENTATIONS):
        _own_attention.prepare_imported(name, attend)
    choose: Any = PreTrainedModel.get_correct_attn_implementation
    may_change: Any = vars(PreTrainedModel)["_can_set_attn_implementation"].__func__
    change: Any = PreTrainedModel.set_attn_implementation
    end: Any = PreTrainedModel.post_init
    prepare: Any = GenerationMixin._prepare_cache_for_generation
    if getattr(choose, "_looks_at_models", False):
        return

    @functools.wraps(choose)
    def chosen(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        for name in sorted(IMPLEMENTATIONS):
            _own_attention.prepare(type(self), name, attend)
        return str(choose(self, requested_attention, is_init_check))

    @functools.wraps(may_change)
    def may_be_changed(cls: type) -> bool:
        return (_changing.served and _own_attention.is_served(cls)) or bool(may_change(cls))

    @functools.wraps(change)
    def changed(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        # transformers never changes existing models of the served families. This allows it only
        # where this engine is chosen or left; layers made for FlashAttention have other classes.
        if isinstance(attn_implementation, str):
            # What continuous batching called an implementation until transformers 5.22.
            plain = attn_implementation.removeprefix("paged|")
            attn_implementation = plain if _is_ours(plain) else attn_implementation
        now = str(self.config._attn_implementation)
        _changing.served = (_is_ours(attn_implementation) and "flash" not in now) or (
            attn_implementation == "eager" and now in IMPLEMENTATIONS
        )
        try:
            change(self, attn_implementation, *args, **kwargs)
        finally:
            _changing.served = False
        if _is_ours(attn_implementation):
            _warn_of_own_code(layers(self))

    @functools.wraps(end)
    def made(self: Any) -> None:
        end(self)
        if _is_ours(self.config._attn_implementation):
            _warn_of_own_code(layers(self))

    @functools.wraps(prepare)
    def prepared(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = model_kwargs.get("past_key_values")
        if generation_config.use_cache is False and getattr(cache, "needs_use_cache", False):
            raise InputError("use_cache=False with a PagedCache: leave out one of them")
        return prepare(self, generation_config, model_kwargs, *args, **kwargs)

    chosen._looks_at_models = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = chosen
    PreTrainedModel._can_set_attn_implementation = classmethod(may_be_changed)
    PreTrainedModel.set_attn_implementation = changed
    PreTrainedModel.post_init = made
    GenerationMixin._prepare_cache_for_generation = prepared


def _is_ours(implementation: object) -> bool:
    """Whether an implementation, or one in a dict by part of a model, is this engine."""
    if isinstance(implementation, dict):
        return any(map(_is_ours, implementation.values()))
    return implementation in IMPLEMENTATIONS


def _warn_of_own_code(layers: Served) -> None:
    classes = sorted({layer.layer for layer in layers if layer.reason == OWN_CODE})
    if classes:
        warnings.warn(
            f"{', '.join(classes)}: {OWN_CODE}; these layers run unchanged, and this engine is "
            "not called for them",
            stacklevel=3,
        )
