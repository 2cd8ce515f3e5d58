"""Variants as they are named on a command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.cli.variant_names import param_value, variant_of
from flashattn_jit.deploy.wanted.structures import library_names
from flashattn_jit.errors import InputError


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("Causal", fa.Causal()),
        ("causal", fa.Causal()),
        ("fa.Causal()", fa.Causal()),
        ("SlidingWindow(64)", fa.SlidingWindow(64)),
        ("SlidingWindow(window=64)", fa.SlidingWindow(64)),
        ("Causal & ~Chunked(8)", fa.Causal() & ~fa.Chunked(8)),
        ("Causal | Chunked(8)", fa.Causal() | fa.Chunked(8)),
    ],
)
def test_expressions_make_the_variant_that_they_say(text: str, same: fa.Variant) -> None:
    found = variant_of(text)
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    torch.testing.assert_close(found.reference(q, k, v), same.reference(q, k, v))


def test_makers_take_names_of_the_library_as_arguments() -> None:
    assert isinstance(variant_of("RoPE(scaling=LinearScaling(2.0))"), fa.Variant)
    assert "RoPE" in library_names()


@pytest.mark.parametrize(
    "text",
    ["__import__('os').system('true')", "open('x')", "Causal.__class__", "[x for x in ()]",
     "Causal(", "lambda: 0", "1", "(Causal)(2)(3)", "alibi_slopes.__globals__"],
)  # fmt: skip
def test_nothing_but_the_library_is_evaluated(text: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, fa.VariantError)):
        variant_of(text)


def test_a_file_and_a_module_may_hold_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("mine_for_names.py").write_text(
        "import flashattn_jit as fa\n"
        "class Half(fa.Variant):\n"
        "    def score_mod(self, score, b, h, q_idx, kv_idx):\n"
        "        return score * 0.5\n"
        "made = Half()\n"
        "def mask(b, h, q_idx, kv_idx):\n"
        "    return q_idx >= kv_idx\n"
    )
    for name in ("Half", "made", "mask"):
        assert isinstance(variant_of(f"{tmp_path}/mine_for_names.py:{name}"), fa.Variant)
    monkeypatch.chdir(tmp_path)
    assert isinstance(variant_of("mine_for_names:Half"), fa.Variant)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("absent.py:X", "there is no file"),
        ("no_such_module_here:X", "no module named"),
        ("flashattn_jit.env:X", "defines no 'X'"),
        ("SlidingWindw(3)", "did you mean SlidingWindow?"),
        ("Causal(1, 2, 3)", "at most 0 positional"),
        ("Natten", "needs arguments"),
    ],
)
def test_errors_say_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        variant_of(text)


def test_params_are_literals_texts_and_tensors() -> None:
    assert param_value("4") == 4
    assert param_value("(1, 2)") == (1, 2)
    assert param_value("yarn") == "yarn"
    tensor = param_value("bfloat16[8,2]")
    assert (tensor.shape, tensor.dtype) == ((8, 2), torch.bfloat16)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import torch\n\ntorch.arange(3).view(2)\n", ", line 3: RuntimeError: shape"),
        ("def f():\n    return 1 / 0\n\nf()\n", ", line 4: ZeroDivisionError: division by zero"),
        ("import no_such_module_here\n", ", line 1: ModuleNotFoundError: No module named"),
        ("if\n", r": SyntaxError: .*\(broken_for_names.py, line 1\)"),
    ],
)
def test_code_that_raises_is_named_with_its_line(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broken_for_names.py"
    path.write_text(body)
    monkeypatch.chdir(tmp_path)
    for source in (str(path), "broken_for_names"):
        monkeypatch.delitem(sys.modules, "broken_for_names", raising=False)
        with pytest.raises(fa.VariantError, match=f"broken_for_names.*{words}"):
            variant_of(f"{source}:X")
