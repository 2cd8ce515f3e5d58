"""Types of options and arguments: how their text is read, and what a shell completes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from .. import env
from ..codegen.spec import KV_DTYPES, SHORT_DTYPES, default_target
from ..codegen.targets import CPU_TARGETS, CUDA_TARGETS, EMULATED_TARGETS
from . import library_index, variant_names

if TYPE_CHECKING:
    _Base = click.ParamType[Any]
else:  # older clicks' is not generic
    _Base = click.ParamType

DTYPES = {text: name for name in KV_DTYPES for text in (SHORT_DTYPES.get(name, name), name)}
"""Short and long names of dtypes, and torch's."""

SIZES = {
    "batch": (1, "Requests."),
    "num_q_heads": (8, "Query heads."),
    "num_kv_heads": (None, "Key-value heads; as many as query heads if unset."),
    "q_len": (1024, "Query positions."),
    "kv_len": (None, "Keys; as many as query positions if unset."),
    "head_dim": (64, "Head dim of queries and keys."),
    "head_dim_v": (None, "Head dim of values; as the others if unset."),
}
"""A problem's sizes by `Dims`' names: what they are by default, and what they mean."""


class _Type(_Base):
    """A type whose values a shell completes.

    or_file: whether the name of a file may stand there as well.
    """

    or_file = False

    def choices(self, incomplete: str) -> Mapping[str, str]:
        """Values, with what they mean; those that do not begin so are left out later."""
        return {}

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=text or None)
            for name, text in self.choices(incomplete).items()
            if name.lower().startswith(incomplete.lower())
        ]
        return [*found, CompletionItem(incomplete, type="file")] if self.or_file else found


class _ChoiceType(_Type):
    """A type that takes its choices and nothing else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = self.choices("")
        if value not in known:
            self.fail(f"{value!r} is not one of {', '.join(known)}", param, ctx)
        return str(value)


class SizeType(_Base):
    """Bytes: a number, or one with K, M, G or T (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return env.parse_bytes(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)


class TargetType(_ChoiceType):
    """A target's name; ``host`` is what CPU tensors run on by default.

    groups: whether ``cpu``, ``cuda`` and ``all`` may stand for several, as `warm` takes them.
    """

    name = "target"

    def __init__(self, emulated: bool = False, groups: bool = False) -> None:
        self.groups = groups
        extra = ("cpu", "cuda", "all") if groups else EMULATED_TARGETS if emulated else ()
        self.known = ("host", *CPU_TARGETS, *CUDA_TARGETS, *extra)

    def choices(self, incomplete: str) -> Mapping[str, str]:
        """See `_Type`."""
        return dict.fromkeys(self.known, "")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "host" and not self.groups:
            return default_target()
        return super().convert(value, param, ctx)


class HeadDimType(_Base):
    """A head dim, or two: ``192/128`` for queries and keys, and for values."""

    name = "head-dim"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        parts = str(value).split("/")
        if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
            self.fail(f"{value!r} is not a head dim such as 64 or 192/128", param, ctx)
        return str(value)


class DtypeType(_ChoiceType):
    """A dtype by its short or long name; the value is torch's name without the prefix."""

    name = "dtype"

    def choices(self, incomplete: str) -> Mapping[str, str]:
        """See `_Type`."""
        return dict.fromkeys(DTYPES, "")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return DTYPES[super().convert(value, param, ctx)]


class DtypesType(DtypeType):
    """A dtype, or several: ``bf16/int8`` for queries, and for keys and values."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return "/".join(super(DtypesType, self).convert(v, param, ctx) for v in value.split("/"))


class FormatType(_ChoiceType):
    """A kind of calls, of `planner.reachable.FORMATS`."""

    name = "format"

    def choices(self, incomplete: str) -> Mapping[str, str]:
        """See `_Type`."""
        from ..planner.reachable import FORMATS

        return dict.fromkeys(FORMATS, "")


class VariantType(_Type):
    """A variant's name; read when the command runs. See `variant_names`."""

    name = "variant"

    def choices(self, incomplete: str) -> Mapping[str, str]:
        """See `_Type`."""
        return library_index.variants()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        if "/" in incomplete or "." in incomplete:
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, param, incomplete)


class ManifestOrVariantType(VariantType):
    """A manifest's file, ``-`` for standard input, or a variant."""

    name = "manifest|variant"
    or_file = True


class KeyType(_Type):
    """A kernel's key, or the beginning of one."""

    name = "key"

    def choices(self, incomplete: str) -> Mapping[str, str]:
        """See `_Type`."""
        from .entries import key_names

        return key_names(incomplete)


class SpecType(KeyType):
    """A key's beginning, a manifest's file, or a spec as JSON."""

    name = "key|manifest|spec"
    or_file = True


class NameValueType(_Base):
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


keys_option = click.option(
    "--key", "keys", type=KeyType(), multiple=True, help="Only these kernels."
)

params_option = click.option(
    "--param", "params", type=NameValueType(), multiple=True, help="A param of the variant."
)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def targets_option(
    text: str = "Only kernels for these.", *, groups: bool = False, default: Any = None
) -> Decorator:
    """``--target``, which may be given several times."""
    return click.option(
        "--target", "targets", type=TargetType(groups=groups), multiple=True, default=default,
        help=text,
    )  # fmt: skip


def size_flag(name: str) -> str:
    """The option of one of `SIZES`: ``--q-heads`` for num_q_heads."""
    return "--" + name.removeprefix("num_").replace("_", "-")


def shape_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of a problem's sizes, for commands that take one; they arrive as `Dims`' names."""
    for name, (default, text) in reversed(SIZES.items()):
        function = click.option(
            size_flag(name), name, type=click.IntRange(min=1), default=default,
            show_default=default is not None, help=text,
        )(function)  # fmt: skip
    function = click.option(
        "--dtype", type=DtypeType(), default="fp32", show_default=True, help="Of q, k and v."
    )(function)
    return params_option(function)


def complete_sizes(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """The sizes of `shape_options` with those left out filled in."""
    full = dict(sizes)
    for name, other in (("num_kv_heads", "num_q_heads"), ("kv_len", "q_len"),
                        ("head_dim_v", "head_dim")):  # fmt: skip
        if full.get(name) is None:
            full[name] = full[other]
    return {name: int(value) for name, value in full.items() if value is not None}
