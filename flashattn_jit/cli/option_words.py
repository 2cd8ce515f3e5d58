"""Messages of the library in the words of the command line: `--head-dim 64`, not `head_dim=64`.

The library speaks to who calls it from Python. Where such an error ends a command, `app.fail`
passes its message through `in_options`, the one place that knows both.
"""

from __future__ import annotations

import re

from ..errors import FlashAttnJitError, InputError, PackError, ParamError, TargetError
from .problem import SIZES, size_flag

_ABOUT_ARGUMENTS = (InputError, ParamError, TargetError, PackError)
"""Errors of arguments; others quote the user's code, which stays as it is."""

_FLAGS = {
    "dtypes": "--dtype", "formats": "--format", "params": "--param",
    "device": "--device", "target": "--target", "plot": "--plot", "directory": "--directory",
    "path": "PATH", "config": "CONFIG", "workload": "--workload", "code": "--kv-format",
}  # fmt: skip
_FIRST = re.compile(rf"^({'|'.join(_FLAGS)})(?:[ =]'([^']*)')?=?(?=[: ])")
"""The argument that a message begins with, and its value."""

_AT_THE_CALL = r"; pass (\w+)=\.\.\. at the call or when making the variant"
_RULES = {
    r"^variants need head_dims= and dtypes=, such as .*":
        "a variant needs --head-dim and --dtype, such as --head-dim 64 --dtype bf16",
    r"^variants need head_dims=, such as .*": "a variant needs --head-dim, such as --head-dim 64",
    r"^variants need dtypes=, such as .*": "a variant needs --dtype, such as --dtype bf16",
    r"^head_dims, dtypes, formats, num_q_heads, num_kv_heads, params, kv_format and v_in_k are":
        "--head-dim, --dtype, --format, --heads and --param are",
    rf"{_AT_THE_CALL}; for warm, params=\{{'\w+': torch\.empty\((.+?), dtype=\.\.\.\)\}}":
        r"; give --param \1=float32[\2]",
    rf"{_AT_THE_CALL}(?:; for warm, params=\{{'\w+': \.\.\.\}})?": r"; give --param \1=...",
    r"^(param '(\w+)' expects a tensor .*); pass (?:a torch\.Tensor|torch\.\w+\(.*\))$":
        r"\1; give --param \2=float32[...], a tensor of zeros",
    r"^(param '(\w+)' expects dtype .*); convert it with `\.to\(\.\.\.\)`":
        r"\1; give --param \2=... of that dtype",
    r"\bgive num_q_heads= and num_kv_heads=": "give --heads, such as --heads 32:8",
    r"^num_kv_heads=(\d+) does not divide num_q_heads=(\d+)$":
        r"--heads \2:\1: \1 KV heads do not divide \2 query heads",
    r"^dims: ": "",
    r"^q has dtype torch\.(\w+); supported: (.+?)\. Convert it first":
        r"--dtype \1 is not for queries; --dtype takes \2",
    r"^CUDA kernels of (\w+) take .*; got q torch\.(\w+),.* with \.to\(torch\.(\w+)\).*":
        r"CUDA kernels of \1 do not take --dtype \2; give --dtype \3",
    r"; did you mean (\w+)=\?": r"; did you mean --param \1=...?",
    r"\bdevice='(\w+)'": r"--device \1",
    r"^(group|zero)=(\w+) goes with": r"--kv-format: \1=\2 goes with",
    r"^group=(\d+) does not divide (\w+)=(\d+)$":
        r"--kv-format: group=\1 does not divide the model's \2, \3",
    r"^(\w+)=(\d+) is odd, but": r"--kv-format: the model's \1, \2, is odd, but",
    r"\bread it with allow_cpp=True": "add --allow-cpp",
}  # fmt: skip
_NUMBERS = {
    **{name: size_flag(name) for name in SIZES},
    "budget_bytes": "--budget", "cross_len": "--cross-len", "prompt_len": "--prompt-len",
    "prefix_len": "--prefix-len", "max_step_tokens": "--max-step-tokens",
}  # fmt: skip
_SIZE = re.compile(rf"\b({'|'.join(_NUMBERS)})=(\d+)\b")
_SPACES = re.compile(r"(?<=float32\[)[\d, ]+(?=\])")


def in_options(error: FlashAttnJitError) -> str:
    """An error's message, Python's arguments in it replaced by the options that they come from."""
    message = str(error)
    if not isinstance(error, _ABOUT_ARGUMENTS):
        return message
    for pattern, text in _RULES.items():
        message = re.sub(pattern, text, message, count=1)
    message = _FIRST.sub(lambda m: " ".join(filter(None, (_FLAGS[m[1]], m[2]))), message)
    message = _SIZE.sub(lambda found: f"{_NUMBERS[found[1]]} {found[2]}", message)
    return _SPACES.sub(lambda found: found[0].replace(" ", ""), message)
