"""Errors of the command line name options, not arguments of Python functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit.cli.option_words import in_options
from flashattn_jit.codegen.document import line_of
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.deploy.manifest.file import write_manifest
from flashattn_jit.errors import InputError, TraceError
from flashattn_jit.variants.ir.ir import VariantIR

WARM = ("--head-dim", "8", "--dtype", "fp32")
CASES = [
    (("warm", "Causal"), "a variant needs --head-dim and --dtype, such as --head-dim 64 --dtype"),
    (("warm", "Causal", "--head-dim", "64"), "a variant needs --dtype, such as --dtype bf16"),
    (("warm", "Causal", "--dtype", "bf16"), "a variant needs --head-dim, such as --head-dim 64"),
    (("warm", "{manifest}", "--dtype", "bf16"), "--head-dim, --dtype, --format, --heads and --pa"),
    (("warm", "Causal", *WARM, "--param", "foo=1"), "--param: no variant has a param 'foo'"),
    (("warm", "ALiBi", *WARM, "--format", "max_scores"), "--format: no calls of ALiBi are"),
    (("warm", "AdditiveBias", *WARM), "; give --param bias=float32[2,2,2,2]: its dtype, rank"),
    (("warm", "Sink", *WARM), "; give --param sink=float32[2]: its dtype"),
    (("warm", "PaddingMask", *WARM, "--param", "keep=3"),
     "got int 3; give --param keep=float32[...], a tensor of zeros\n"),
    (("warm", "SlidingWindow(8)", *WARM, "--param", "window=abc"), "(int), got str 'abc'\n"),
    (("warm", "Causal", *WARM, "--heads", "8:3"), "error: --heads 8:3: 3 KV heads do not divide 8"),
    (("warm", "{text}", *WARM[:0]), "add --allow-cpp"),
    (("explain", "Causal", "--kv-heads", "3"), "error: --kv-heads 3 does not divide --q-heads 8"),
    (("explain", "AdditiveBias"), "; give --param bias=..."),
    (("explain", "Causal", "--param", "target=1"), "Causal has no param 'target'"),
    (("explain", "Causal", "--device", "H100"),
     "error: CUDA kernels of sm_90 do not take --dtype float32; give --dtype bfloat16\n"),
    (("explain", "Causal", "--target", "sm_75"), "--dtype float32; give --dtype float16\n"),
    (("explain", "Causal", "--dtype", "fp8"), "--dtype float8_e4m3fn is not for queries; --dtype"),
    (("explain", "Causal", "--head-dim", "577"), "error: --head-dim 577 is not supported; it must"),
    *((("explain", "Causal", flag, "99999999999"), f"{flag} 99999999999")
      for flag in ("--q-len", "--kv-len", "--batch", "--q-heads")),
    (("explain", "Causal", "--device", "cuda:0"), "name one: --device H100"),
    (("explain", "Causal", "--device", "H100", "--target", "cpu:avx2"), "--target cpu:avx2 is not"),
    (("explain", "TreeMask", "--param", "prefix_len=int32[1]", "--param", "bits=int32[1,2,1]"),
     "; give --param bits=... of that dtype"),
    (("explain", "PaddingMask", "--param", "keep=bool[2,2]"), "with --batch 1 at dim 0"),
    (("bench", "SoftCap", "--param", "capp=1"), "; did you mean --param cap=...?"),
    (("bench", "Causal", "--device", "Z"), "error: --device Z is not there"),
    (("bench", "Causal", "--head-dim", "600"), "error: --head-dim 600 is not supported"),
    (("bench", "Causal", "--dtype", "fp8"), "--dtype float8_e4m3fn is not for queries; --dtype"),
    (("unpack", "{manifest}", "--directory", "~nobodyhere/x"), "--directory ~nobodyhere/x begins"),
]  # fmt: skip
PYTHON = re.compile(r"(?<![\w-])(?:head_dims?|dtypes|formats|params|num_\w+_heads|allow_cpp|device"
                    r"|plot|q_offset|target|torch\.\w+)\b ?[=({]")  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A manifest, and one with a hook given as C++ text."""
    folder = tmp_path_factory.mktemp("manifests")
    found = {name: folder / f"{name}.jsonl" for name in ("manifest", "text")}
    for name, cpp in (("manifest", ()), ("text", (("score_mod", "return score;"),))):
        ir = VariantIR((), cpp=cpp)
        spec = KernelSpec(ir, *("float32",) * 3, 8, 8, "cpu:generic", "prefill", 96, 96)
        write_manifest(found[name], [line_of(spec)])
    return found


@pytest.mark.parametrize(
    ("args", "words"), CASES, ids=lambda x: x if isinstance(x, str) else " ".join(x)
)
def test_errors_name_options(
    run, cache: Path, files: dict[str, Path], args: tuple[str, ...], words: str
) -> None:
    result = run(*(arg.format(**files) for arg in args))
    assert result.exit_code not in (0, 1), result.output
    assert words in result.stderr
    assert not PYTHON.search(result.stderr), result.stderr


def test_json_has_the_same_words(run, cache: Path) -> None:
    result = run("warm", "Causal", "--json")
    assert '"message": "a variant needs --head-dim and --dtype' in result.stdout


def test_what_quotes_code_stays_as_it_is() -> None:
    code = "mask_mod(m) (m.py:3: `return f(head_dim=64)`): cannot be traced"
    assert in_options(TraceError(code)) == code
    assert in_options(InputError("head_dim=64 is odd")) == "--head-dim 64 is odd"


def test_python_is_told_python(cache: Path) -> None:
    with pytest.raises(fa.InputError, match="head_dims= and dtypes="):
        fa.warm(fa.Causal())
