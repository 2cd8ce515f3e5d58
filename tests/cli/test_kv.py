"""`flashattn-jit kv`: configs that it reads, what it prints, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_documents import check_row

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with the sizes of a model, which no transformers is asked about."""
    tmp_path.joinpath("config.json").write_text(json.dumps(SIZES))
    return tmp_path


def test_estimate(run, run_json, config: Path) -> None:
    found = run_json("kv", "estimate", config, "--kv-len", 100, "--batch", 3, "--budget", "1M")
    assert found["token_bytes"] == 2 * 2 * 64 * 2
    assert found["held_bytes"] == 3 * 7 * 16 * 512
    assert found["max_batch"] == ((1 << 20) - 16 * 512) // (7 * 16 * 512)
    assert found["groups"][0]["kind"] == "MHA, Causal" and found["absorption"] is None
    check_row("kv estimate", found)
    int4 = run_json("kv", "estimate", config, "--kv-format", "int4:8", "--dtype", "fp16")
    assert int4["token_bytes"] == 2 * 2 * (32 + 8 * 4) and int4["dtype"] == "float16"
    asked = "kv", "estimate", config, "--page-size", 64, "--kv-format"
    by_channel = run_json(*asked, "int4:channel:zero/int8")
    # 2 layers of 4 heads: codes, two numbers a channel of 64 keys, one a value.
    assert by_channel["token_bytes"] == 2 * 4 * ((8 + 16 * 2 * 4 // 64) + (16 + 4))
    assert run_json(*asked, "int8/none")["token_bytes"] == 2 * 4 * ((16 + 4) + 32)
    text = run("kv", "estimate", config / "config.json", "--kv-len", 100).stdout
    assert "a token 512 bytes" in text


def test_estimate_of_a_family(run, run_json, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = run_json("kv", "estimate", "deepseek_v3", "--kv-len", 131072, "--budget", "80G")
    assert (found["token_bytes"], found["max_batch"]) == (70_272, 9)
    assert found["absorption"]["break_even_q_len"] == 171
    check_row("kv estimate", found | found["absorption"])
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))
    assert run_json("kv", "estimate", file)["token_bytes"] == 3 * 2 * 4096 * 2
    kimi = {**SIZES, "model_type": "kimi_k2", "kv_lora_rank": 32, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16}  # fmt: skip
    file.write_text(json.dumps(kimi))  # its class comes with the model
    assert run_json("kv", "estimate", file)["token_bytes"] == 2 * 40 * 2


def test_estimate_draws(run, config: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("kv", "estimate", config, "--plot", config / "a.png").exit_code == 0
    assert (config / "a.png").read_bytes().startswith(b"\x89PNG")


def test_recommend(run, run_json, config: Path) -> None:
    asked = ("kv", "recommend", config, "--budget", "200K", "--requests", 4, "--prompt-len", 60,
             "--output-len", 4, "--page-size", 16)  # fmt: skip
    found = run_json(*asked)
    assert [x["kv_format"] for x in found["options"]] == ["none", "int8", "int4:16"]
    assert found["best"] == 0 and found["options"][0]["serves"]
    check_row("kv recommend", found)
    assert "best: format none, pages of 16" in run(*asked).stdout
    few = run_json(*asked, "--kv-format", "int8", "--prefix-len", 32, "--arrival-steps", 2)
    assert len(few["options"]) == 1 and few["options"][0]["hit_tokens"] == 3 * 32


def test_recommend_for_a_file(run_json, run, config: Path) -> None:
    file = config / "workload.jsonl"
    file.write_text('{"prompt_len": 60, "output_len": 4}\n\n{"prompt_len": 9, "output_len": 90}\n')
    found = run_json("kv", "recommend", config, "--budget", "1M", "--workload", file)
    assert found["max_kv_len"] == 98 and found["options"][0]["num_steps"] == 90
    file.write_text("\n")
    result = run("kv", "recommend", config, "--budget", "1M", "--workload", file)
    assert result.exit_code == 2 and f"--workload: {file} is empty" in result.stderr
    for text in ("{", "[]", '{"prompt_len": 3}', '{"prompt_len": 3, "output_len": 1, "x": 1}'):
        file.write_text(f'{{"prompt_len": 60, "output_len": 4}}\n{text}\n')
        result = run("kv", "recommend", config, "--budget", "1M", "--workload", file)
        assert result.exit_code == 2 and "--workload: line 2" in result.stderr, result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("estimate", "rwkv"), "CONFIG rwkv is no file, no folder with a config.json and no known"),
        (("estimate", "{broken}"), "is not JSON"), (("estimate", "{list}"), "is a list"),
        (("estimate", "{unknown}"), "model_type='rwkv' is no family whose layout is known; known"),
        (("estimate", "{refused}"), "CONFIG: transformers refuses it for llama"),
        (("estimate", "{folder}", "--kv-format", "int9"), "--kv-format int9 must be one of"),
        (("estimate", "{folder}", "--kv-format", "int8:7"),
         "error: --kv-format: group=7 does not divide the model's head_dim, 16"),
        (("estimate", "{odd}", "--kv-format", "int4"),
         "error: --kv-format: the model's head_dim, 15, is odd, but int4 stores pairs"),
        (("estimate", "{folder}", "--kv-format", "int8:0"), "int8:0' is not a code such as int8"),
        (("estimate", "{folder}", "--kv-format", "int8:x"), "int8:x' is not a code such as int8"),
        (("estimate", "{folder}", "--kv-format", "int8/int8/int8"), "has more than two formats"),
        (("estimate", "{folder}", "--kv-format", "int8:channel:8"), "--kv-format: group=8 goes"),
        (("estimate", "{folder}", "--cross-len", "3"), "--cross-len 3, but the model's layers"),
        (("estimate", "{folder}", "--budget", "9X"), "must be a number of bytes"),
        (("recommend", "{folder}"), "Missing option '--budget'"),
        (("recommend", "{folder}", "--budget", "1K"), "--budget 1024 has no room"),
        (("recommend", "{folder}", "--budget", "1M", "--prefix-len", "2000"),
         "--prefix-len 2000 is more than --prompt-len 1024"),
        (("recommend", "{folder}", "--budget", "1M", "--max-step-tokens", "9"),
         "--max-step-tokens 9 must be 256"),
    ],
)  # fmt: skip
def test_errors(run, config: Path, args: tuple[str, ...], words: str) -> None:
    files = {"folder": config}
    for name, text in (("broken", "{"), ("list", "[]"), ("unknown", '{"model_type": "rwkv"}'),
                       ("odd", json.dumps({**SIZES, "hidden_size": 60})),
                       ("refused", '{"model_type": "llama", "hidden_size": "wide"}')):  # fmt: skip
        files[name] = config / f"{name}.json"
        files[name].write_text(text)
    result = run("kv", *(arg.format(**files) for arg in args))
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split()), result.stderr
