"""Types of options and arguments, and the options that several commands have."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.shell_completion import CompletionItem

from .. import env
from ..codegen.spec import KV_DTYPES, SHORT_DTYPES
from ..codegen.targets import CPU_TARGETS, CUDA_TARGETS, EMULATED_TARGETS
from ..deploy.files import fault_of_output
from ..deploy.wanted.arguments import dtypes_of, head_dims_of
from ..planner.reachable import FORMATS
from .variant_names import library_variants, param_value

if TYPE_CHECKING:
    _Base = click.ParamType[Any]
else:  # older clicks' is not generic
    _Base = click.ParamType


class Type(_Base):
    """How the text of an option or argument is read, and what a shell completes.

    read: the text's value; its ValueError says what is wrong with the text. choices: values that
    may begin with some text, and what they mean. files: whether a shell completes names of files,
    too: in any case, or where no choice fits.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[str], Any] = str,
        choices: Callable[[str], Mapping[str, str]] = lambda incomplete: {},
        files: Literal["no", "else", "too"] = "no",
    ) -> None:
        self.name = name
        self.read, self.choices, self.files = read, choices, files

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """See `click.ParamType`."""
        found = [
            CompletionItem(name, help=text or None)
            for name, text in self.choices(incomplete).items()
            if name.lower().startswith(incomplete.lower())
        ]
        if self.files == "too" or (self.files == "else" and not found):
            found.append(CompletionItem(incomplete, type="file"))
        return found


def _one_of(name: str, known: Iterable[str], stand_for: Mapping[str, str] = {}) -> Type:
    """The type of an option that takes some words and nothing else; stand_for: their values."""
    words = dict.fromkeys(known, "")

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"is not one of {', '.join(words)}")
        return stand_for.get(text, text)

    return Type(name, read, lambda incomplete: words)


def _name_and_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError("is not name=value")
    return name, param_value(value)


def _heads(text: str) -> tuple[int, int]:
    q, colon, kv = text.partition(":")
    counts = (q, kv if colon else q)
    if not all(one.isdecimal() and int(one) for one in counts):
        raise ValueError("is not 32 or 32:8")
    return int(counts[0]), int(counts[1])


def _q_offset(text: str) -> int | str:
    try:
        return text if text == "end" else int(text)
    except ValueError:
        raise ValueError("is not a number or end") from None


def _seconds(given: str | float) -> float:
    with suppress(ValueError):
        if 0 <= float(given) < math.inf:  # False for NaN
            return float(given)
    raise ValueError("is not a number of seconds, 0 or more")


class _OutputPath(click.Path):
    """The type of a file to write. It raises FileNotFoundError before the work is done."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        path = os.fsdecode(super().convert(value, param, ctx))
        if fault := fault_of_output(Path(path)):
            raise FileNotFoundError(f"cannot write {path}: {fault}")
        return path


_TARGETS = ("host", *CPU_TARGETS, *CUDA_TARGETS)
TARGET = _one_of("target", (*_TARGETS, *EMULATED_TARGETS))
SIZE = Type("size", env.parse_bytes)
HEADS = Type("heads", _heads)
SECONDS = Type("seconds", _seconds)
OUTPUT = _OutputPath(dir_okay=False)
Q_OFFSET = Type(
    "q-offset", _q_offset, lambda incomplete: {"end": "The last row is at the last key."}
)
_LONG = {short: name for name, short in SHORT_DTYPES.items()}
DTYPE = _one_of("dtype", (*_LONG, *KV_DTYPES), _LONG)
VARIANT = Type("variant", choices=library_variants, files="else")
MANIFEST_OR_VARIANT = Type("manifest|variant", choices=library_variants, files="too")


def _keys(prefix: str) -> dict[str, str]:
    from .kernels import key_names  # imports the cache

    return key_names(prefix)


KEY = Type("key", choices=_keys)
SPEC = Type("key|manifest|spec", choices=_keys, files="too")

_GROUPS = _one_of("target", (*_TARGETS, "cpu", "cuda", "all"))
_DTYPES = Type("dtype", dtypes_of, DTYPE.choices)
_PARAM = Type("name=value", _name_and_value)

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def _several(flag: str, name: str, kind: Any, text: str) -> Callable[..., Option]:
    """An option that may be given several times."""

    def option(text: str = text, default: Sequence[str] = ()) -> Option:
        return click.option(flag, name, type=kind, multiple=True, default=default, help=text)

    return option


_KINDS = "Only kernels of these kinds of calls: dense, paged, ...; else of all."
_HEAD_DIMS = "Head dims of a variant's kernels: 64, or 192/128 for q and k, and v."
_KERNELS_FOR = "Only kernels for these: targets, or host, cpu, cuda or all."

targets_option = _several("--target", "targets", _GROUPS, _KERNELS_FOR)
head_dims_option = _several("--head-dim", "head_dims", Type("head-dim", head_dims_of), _HEAD_DIMS)
dtypes_option = _several("--dtype", "dtypes", _DTYPES, "Dtypes of a variant's kernels.")
formats_option = _several("--format", "formats", _one_of("format", FORMATS), _KINDS)
keys_option = _several("--key", "keys", KEY, "Only these kernels.")
params_option = _several("--param", "params", _PARAM, "A param of the variant.")

allow_cpp_option = click.option(
    "--allow-cpp",
    is_flag=True,
    help="Take manifests with hooks given as C++ text, which is code: trust who wrote them.",
)
