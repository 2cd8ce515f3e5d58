"""Which attention layers of a transformers model call the engine, read from their classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

import torch

from flashattn_jit.integrations import _own_attention
from flashattn_jit.integrations._sources import calls_the_interface, keywords

OWN_CODE = "has attention code of its own, which does not call transformers' attention interface"


@dataclasses.dataclass(frozen=True, slots=True)
class ServedLayer:
    """One attention layer.

    name: its name in `named_modules`. layer: its class. reason: why it is not served, or "".
    """

    name: str
    layer: str
    reason: str

    @property
    def served(self) -> bool:
        """Whether the engine computes this layer's attention."""
        return not self.reason


class Served(tuple[ServedLayer, ...]):
    """The attention layers of a model, in order. `str()` gives one line a layer."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "no attention layer was found"
        width = max(len(layer.name) for layer in self)
        return "\n".join(
            f"{'served' if layer.served else 'stock ':<6}  {layer.name:<{width}}  {layer.layer}"
            + (f": {layer.reason}" if layer.reason else "")
            for layer in self
        )


def layers_of(model: torch.nn.Module, known: Set[str]) -> Served:
    """See `flashattn_jit.integrations.transformers.served`.

    known: the keyword arguments that the engine takes.
    """
    return Served(
        ServedLayer(
            name or type(model).__name__,
            type(module).__name__,
            _reason(model, name, module, known),
        )
        for name, module in model.named_modules()
        if _is_attention(module)
    )


def _is_attention(module: torch.nn.Module) -> bool:
    """Whether `module` computes attention itself, rather than holding a module that does."""
    if calls_the_interface(_class(module)):
        return True
    if not _names_attention(module):
        return False
    below = list(module.modules())[1:]
    return not any(_names_attention(part) or calls_the_interface(_class(part)) for part in below)


def _class(module: torch.nn.Module) -> type:
    return type(module)  # a cached function takes it: mypy regards type[Module] as unhashable


def _names_attention(module: torch.nn.Module) -> bool:
    return "Attention" in type(module).__name__ or isinstance(module, torch.nn.MultiheadAttention)


def _reason(model: torch.nn.Module, name: str, module: torch.nn.Module, known: Set[str]) -> str:
    config = getattr(module, "config", None) or _config_above(model, name)
    implementation = getattr(config, "_attn_implementation", None)
    methods = (getattr(type(module), method, None) for method in ("forward", "_attn"))
    patched = any(map(_own_attention.serves, methods))
    if not patched and not calls_the_interface(_class(module)):
        return OWN_CODE
    if implementation not in _own_attention.IMPLEMENTATIONS:
        return f"attn_implementation is {implementation!r}"
    unknown = sorted(keywords(_class(module)) - known)
    if unknown:
        return f"passes {'=, '.join(unknown)}=, which is refused unless it is None"
    return ""


def _config_above(model: torch.nn.Module, name: str) -> object:
    """The config of the nearest module around `name` that has one."""
    while name:
        name = name.rpartition(".")[0]
        config = getattr(model.get_submodule(name), "config", None)
        if config is not None:
            return config
    return None
