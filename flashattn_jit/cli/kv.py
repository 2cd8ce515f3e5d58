"""`flashattn-jit kv`: what a KV cache holds and reads, and which format fits a workload."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import output
from .command import Group
from .options import DTYPE, OUTPUT, SIZE, Type

if TYPE_CHECKING:
    from ..kv import Estimate, Option, Recommendation, Request

NO_FORMAT = "none"


_SCALES = ("tensor", "head", "token_head", "page_head", "channel")
_FLAGS = ("zero", "rotate")


def _kv_format(text: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The code and the options of the format of both sides, or of that of keys and of values."""
    sides = []
    for side in text.split("/"):
        name, *parts = side.split(":")
        options: dict[str, Any] = {}
        for part in parts:
            if part.isdecimal() and int(part):
                options["group"] = int(part)
            elif part in _FLAGS:
                options[part] = True
            elif part in _SCALES:
                options["scale"] = part
        if not name or len(options) < len(parts) or (name == NO_FORMAT and parts):
            raise ValueError(
                "is not a code such as int8, one with channels a scale, e4m3:128, or with other "
                "scales, int4:channel:zero; two for keys and values, int4:channel/int4:64"
            )
        sides.append((name, options))
    if len(sides) > 2:
        raise ValueError("has more than two formats: of keys, a slash, and of values")
    return tuple(sides)


_FORMAT = Type("kv-format", _kv_format)
_CONFIG = click.argument("config", metavar="CONFIG")
_COUNT = click.IntRange(min=1)


def _format(given: tuple[tuple[str, dict[str, Any]], ...] | None) -> Any:
    from ..kv import Format

    sides = [
        None if name == NO_FORMAT else Format(name, **options) for name, options in given or ()
    ]
    return tuple(sides) if len(sides) == 2 else sides[0] if sides else None


def _with_config(function: Callable[..., None]) -> Callable[..., None]:
    """The argument CONFIG and --dtype, which the command gets as a config and a torch dtype."""

    def command(config: str, dtype: str, **rest: Any) -> None:
        import torch

        from ..integrations.configs import read_config

        function(read_config(config), dtype=getattr(torch, dtype), **rest)

    wrapped: Callable[..., None] = update_wrapper(command, function)
    dtype = click.option(
        "--dtype", type=DTYPE, default="bf16", show_default=True, help="Of what is not quantised."
    )
    return _CONFIG(dtype(wrapped))


@click.group("kv", cls=Group)
def kv_command() -> None:
    """What a KV cache will cost, before there is a model or a cache."""


@kv_command.command("estimate")
@_with_config
@click.option("--kv-len", type=click.IntRange(min=0), default=4096, show_default=True,
              help="Tokens of each sequence.")  # fmt: skip
@click.option("--batch", type=_COUNT, default=1, show_default=True, help="Sequences.")
@click.option(
    "--kv-format", type=_FORMAT, help="int8, e4m3:128, int4:channel/int4:64, ...; or none."
)
@click.option("--page-size", type=_COUNT, default=16, show_default=True, help="Tokens of a page.")
@click.option("--cross-len", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens of an encoder's output.")  # fmt: skip
@click.option("--budget", "budget_bytes", type=SIZE, help="Memory for pages, such as 24G.")
@click.option("--plot", type=OUTPUT, help="Draw bytes by length to a file.")
def estimate_command(config: Any, *, kv_format: Any, plot: str | None, **options: Any) -> None:
    """Bytes that the cache of a model holds and that a decode step reads.

    CONFIG is a JSON file or a folder with a config.json, or a model type, such as deepseek_v3, for
    the sizes that transformers' class of it has by default.
    """
    from ..kv import estimate

    found = estimate(config, kv_format=_format(kv_format), **options)
    if plot is not None:
        found.plot(plot)
    output.emit(_estimate_document(found), found)


def _estimate_document(found: Estimate) -> dict[str, Any]:
    names = ("kv_len", "cross_len", "batch", "token_bytes", "sequence_bytes", "held_bytes",
             "rounding_bytes", "cache_bytes", "num_pages", "decode_bytes", "decode_flops",
             "intensity", "budget_bytes", "max_batch")  # fmt: skip
    costs = found.absorption
    return {
        **{name: getattr(found, name) for name in names},
        "page_size": found.spec.page_size,
        "dtype": str(found.spec.dtype).removeprefix("torch."),
        "groups": [
            asdict(g) | {"token_bytes": g.token_bytes, "held_bytes": g.held_bytes,
                         "decode_bytes": g.decode_bytes}
            for g in found.groups
        ],
        "absorption": costs and {
            "break_even_q_len": costs.break_even_q_len,
            "expanded_token_bytes": costs.expanded_token_bytes,
            "absorbed_decode_flops": costs.flops(1, True),
            "expanded_decode_flops": costs.flops(1, False),
        },
    }  # fmt: skip


@kv_command.command("recommend")
@_with_config
@click.option("--budget", "budget_bytes", type=SIZE, required=True,
              help="Memory for pages, such as 24G.")  # fmt: skip
@click.option("--workload", type=click.Path(exists=True, dir_okay=False, allow_dash=True),
              help="JSON objects, one a line: prompt_len, output_len, ...")  # fmt: skip
@click.option("--requests", type=_COUNT, default=64, show_default=True,
              help="How many, without a file.")  # fmt: skip
@click.option("--prompt-len", type=_COUNT, default=1024, show_default=True,
              help="Tokens of a prompt.")  # fmt: skip
@click.option("--output-len", type=_COUNT, default=128, show_default=True,
              help="Tokens that follow.")  # fmt: skip
@click.option("--prefix-len", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens that prompts share.")  # fmt: skip
@click.option("--arrival-steps", type=click.IntRange(min=0), default=0, show_default=True,
              help="Steps from one arrival to the next.")  # fmt: skip
@click.option("--kv-format", "formats", type=_FORMAT, multiple=True,
              help="Formats, the most precise first; else none, int8 and int4:64.")  # fmt: skip
@click.option("--page-size", "page_sizes", type=_COUNT, multiple=True, default=(16, 32, 64),
              show_default=True, help="Tokens of a page.")  # fmt: skip
@click.option("--max-batch", type=_COUNT, default=256, show_default=True,
              help="Sequences that run at a time.")  # fmt: skip
@click.option("--max-step-tokens", type=_COUNT, default=512, show_default=True,
              help="Tokens of a step.")  # fmt: skip
@click.option("--gain", type=click.FloatRange(min=1.0), default=1.25, show_default=True,
              help="Times fewer steps that a less precise format must have.")  # fmt: skip
def recommend_command(
    config: Any, *, workload: str | None, requests: int, prompt_len: int, output_len: int,
    prefix_len: int, arrival_steps: int, formats: tuple[Any, ...], **options: Any,
) -> None:  # fmt: skip
    """Replay a workload through caches of several formats and page sizes, and choose one.

    CONFIG is as for `estimate`. The replay has the real allocator, prefix index and reclaiming of
    pages, and no keys. A less precise format is chosen where it takes fewer steps by --gain.
    """
    from ..kv import Request, recommend

    asked = (
        _read_workload(workload) if workload is not None
        else [Request(prompt_len, output_len, prefix_len, arrival_step=i * arrival_steps)
              for i in range(requests)]
    )  # fmt: skip
    if formats:
        options["formats"] = [_format(one) for one in formats]
    with output.activity("replaying the workload"):
        found = recommend(config, workload=asked, **options)
    output.emit(_recommendation_document(found), found)


def _read_workload(path: str) -> list[Request]:
    from ..kv import Request

    known = {f.name for f in fields(Request)}
    requests = []
    with click.open_file(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                given = json.loads(line)
            except ValueError as error:
                raise InputError(f"workload: line {number} is not JSON: {error}") from error
            least = {"prompt_len", "output_len"}
            if not isinstance(given, dict) or not least <= set(given) <= known:
                raise InputError(
                    f"workload: line {number} must be an object with prompt_len and output_len, "
                    f"and may have {', '.join(sorted(known - least))}"
                )
            requests.append(Request(**given))
    if not requests:
        raise InputError(f"workload: {path} is empty; give an object of each request, on a line")
    return requests


def _recommendation_document(found: Recommendation) -> dict[str, Any]:
    return {
        "budget_bytes": found.budget_bytes,
        "max_kv_len": found.max_kv_len,
        "best": found.options.index(found.best),
        "options": [_option_document(option) for option in found.options],
    }


def _option_document(option: Option) -> dict[str, Any]:
    from ..inspect.explanation.kv_capacity import format_name

    return {
        "kv_format": format_name(option.kv_format),
        "page_size": option.spec.page_size,
        "num_pages": option.num_pages,
        "cache_bytes": option.cache_bytes,
        "serves": option.serves,
        **asdict(option.replay),
    }
