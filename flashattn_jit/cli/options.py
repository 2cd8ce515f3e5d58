"""Types of options and arguments: how their text is read, and what a shell completes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from .. import env
from ..codegen.target import (
    CPU_TARGETS,
    CUDA_TARGETS,
    EMULATED_TARGETS,
    KV_DTYPES,
    SHORT_DTYPES,
    default_target,
)
from . import library_index, variant_names

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:  # older clicks' is not generic
    _Type = click.ParamType

DTYPES = {text: name for name in KV_DTYPES for text in (SHORT_DTYPES.get(name, name), name)}
"""Short and long names of dtypes, and torch's."""


class SizeType(_Type):
    """Bytes: a number, or one with K, M, G or T (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return env.parse_bytes(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)


class TargetType(_Type):
    """A target's name; ``host`` is what CPU tensors run on by default.

    groups: whether ``cpu``, ``cuda`` and ``all`` may stand for several, as `warm` takes them.
    """

    name = "target"

    def __init__(self, emulated: bool = False, groups: bool = False) -> None:
        self.groups = groups
        extra = ("cpu", "cuda", "all") if groups else EMULATED_TARGETS if emulated else ()
        self.known = ("host", *CPU_TARGETS, *CUDA_TARGETS, *extra)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "host" and not self.groups:
            return default_target()
        if value not in self.known:
            self.fail(f"{value!r} is not one of {', '.join(self.known)}", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return _beginning(incomplete, dict.fromkeys(self.known, ""))


class HeadDimType(_Type):
    """A head dim, or two: ``192/128`` for queries and keys, and for values."""

    name = "head-dim"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        parts = str(value).split("/")
        if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
            self.fail(f"{value!r} is not a head dim such as 64 or 192/128", param, ctx)
        return str(value)


class DtypeType(_Type):
    """A dtype by its short or long name; the value is torch's name without the prefix."""

    name = "dtype"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in DTYPES:
            self.fail(f"{value!r} is not one of {', '.join(DTYPES)}", param, ctx)
        return DTYPES[value]

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return _beginning(incomplete, dict.fromkeys(DTYPES, ""))


class DtypesType(DtypeType):
    """A dtype, or several: ``bf16/int8`` for queries, and for keys and values."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return "/".join(super(DtypesType, self).convert(v, param, ctx) for v in value.split("/"))


class FormatType(_Type):
    """A kind of calls, of `planner.reachable.FORMATS`."""

    name = "format"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ..planner.reachable import FORMATS

        if value not in FORMATS:
            self.fail(f"{value!r} is not one of {', '.join(FORMATS)}", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from ..planner.reachable import FORMATS

        return _beginning(incomplete, dict.fromkeys(FORMATS, ""))


class VariantType(_Type):
    """A variant's name; read when the command runs. See `variant_names`."""

    name = "variant"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        if "/" in incomplete or "." in incomplete:
            return [CompletionItem(incomplete, type="file")]
        return _beginning(incomplete, library_index.variants())


class ManifestOrVariantType(VariantType):
    """A manifest's file, ``-`` for standard input, or a variant."""

    name = "manifest|variant"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [*super().shell_complete(ctx, param, incomplete),
                CompletionItem(incomplete, type="file")]  # fmt: skip


class KeyType(_Type):
    """A kernel's key, or the beginning of one."""

    name = "key"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from .entries import key_names

        return _beginning(incomplete, key_names(incomplete))


class SpecType(KeyType):
    """A key's beginning, a manifest's file, or a spec as JSON."""

    name = "key|manifest|spec"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [*super().shell_complete(ctx, param, incomplete),
                CompletionItem(incomplete, type="file")]  # fmt: skip


class NameValueType(_Type):
    """``name=value``: a Python literal, text, or a tensor of zeros as ``float32[8,2]``."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        name, equals, text = value.partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r} is not name=value", param, ctx)
        return name, variant_names.param_value(text)


allow_cpp_option = click.option(
    "--allow-cpp",
    is_flag=True,
    help="Take manifests with hooks given as C++ text, which is code: trust who wrote them.",
)


def shape_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of a problem's sizes, for commands that take one; they arrive as `Dims`' names."""
    sizes = {
        "batch": ("--batch", 1, "Requests."),
        "num_q_heads": ("--q-heads", 8, "Query heads."),
        "num_kv_heads": ("--kv-heads", None, "Key-value heads; as many as query heads if unset."),
        "q_len": ("--q-len", 1024, "Query positions."),
        "kv_len": ("--kv-len", None, "Keys; as many as query positions if unset."),
        "head_dim": ("--head-dim", 64, "Head dim of queries and keys."),
        "head_dim_v": ("--head-dim-v", None, "Head dim of values; as the others if unset."),
    }
    for name, (flag, default, text) in reversed(sizes.items()):
        shown = default is not None
        function = click.option(
            flag, name, type=click.IntRange(min=1), default=default, show_default=shown, help=text
        )(function)
    function = click.option(
        "--dtype", type=DtypeType(), default="fp32", show_default=True, help="Of q, k and v."
    )(function)
    return click.option(
        "--param", "params", type=NameValueType(), multiple=True, help="A param of the variant."
    )(function)


def complete_sizes(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """The sizes of `shape_options` with those left out filled in."""
    full = dict(sizes)
    for name, other in (("num_kv_heads", "num_q_heads"), ("kv_len", "q_len"),
                        ("head_dim_v", "head_dim")):  # fmt: skip
        if full.get(name) is None:
            full[name] = full[other]
    return {name: int(value) for name, value in full.items() if value is not None}


def _beginning(incomplete: str, choices: Mapping[str, str]) -> list[CompletionItem]:
    low = incomplete.lower()
    return [
        CompletionItem(name, help=text or None)
        for name, text in choices.items()
        if name.lower().startswith(low)
    ]
