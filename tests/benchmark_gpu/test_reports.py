"""Reports of the GPU benchmark: failures, limits, files, packs."""

from __future__ import annotations

import json
import lzma
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import pack, smoke
from benchmarks.gpu.machine import Emulated
from benchmarks.gpu.sections import Clock, Measurement, measured
from benchmarks.parts.measure import Row, save, table
from tests.harness import processes
from tests.harness.toolkit import needs_nvcc

ROOT = Path(__file__).resolve().parents[2]


def test_what_fails_or_begins_too_late_is_a_row_and_the_others_follow(capsys):
    def broken() -> Iterator[Row]:
        yield Row("before", None, 1.0, "x")
        raise RuntimeError("a kernel failed")

    rows = measured(
        Emulated(),
        Clock(limit_s=5.0),
        [
            Measurement("first", 1, broken),
            Measurement("long", 60, lambda: [Row("never", None, 1.0, "x")]),
            Measurement("last", 1, lambda: [Row("after", None, 2.0, "x")]),
        ],
    )
    assert [(r.claim, r.measured, r.unit) for r in rows] == [
        ("before", 1.0, "x"),
        ("first: FAILED", 1.0, "errors"),
        ("long: left out, no time", 0.0, ""),
        ("after", 2.0, "x"),
    ]
    assert "a kernel failed" in capsys.readouterr().out


def test_rows_are_saved_beside_those_of_other_benchmarks(tmp_path):
    rows = [Row("a", 1.0, 2.0, "x"), Row("b", None, 3.0, "us", "lower", (2.0, 4.0), "", 5.0)]
    save("cpu", "card", {"commit": "abc"}, rows[:1], tmp_path)
    path = save("gpu", "card", {"commit": "abc"}, rows, tmp_path)
    written = json.loads(path.read_text())
    assert set(written) == {"cpu", "gpu"} and path.name.startswith("card-20")
    assert written["gpu"]["commit"] == "abc"
    assert [r["verdict"] for r in written["gpu"]["rows"]] == ["met", ""]
    assert "2 .. 4" in table(rows) and "5 us" in table(rows) and "predicted" in table(rows)
    assert "predicted" not in table(rows[:1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(tmp_path):
    for name in command.CALLS:
        done = processes.run(["-m", "benchmarks.gpu", name, str(tmp_path)], cwd=ROOT)
        assert done.returncode == command.NO_DEVICE == 2
        assert "no CUDA device" in done.stdout


def test_a_folder_without_a_pack_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"benchmarks\.gpu pack"), pack.used(tmp_path):
        pass


def test_a_pack_is_where_kernels_are_taken_from(tmp_path, monkeypatch):
    for name in ("FLASHATTN_JIT_CACHE_PATH", "FLASHATTN_JIT_COMPILE", "FLASHATTN_JIT_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    about = tmp_path / pack.ABOUT
    about.write_text(json.dumps({"sources": pack.sources()}))
    with lzma.open(tmp_path / pack.KERNELS, "wb") as packed:
        packed.write(b"kernels")
    with pack.used(tmp_path):
        assert Path(os.environ["FLASHATTN_JIT_CACHE_PATH"]).read_bytes() == b"kernels"
        assert os.environ["FLASHATTN_JIT_COMPILE"] == "never"
    about.write_text(json.dumps({"sources": "others"}))
    with pytest.raises(SystemExit, match="other sources"), pack.used(tmp_path):
        pass


@needs_nvcc
def test_a_pack_holds_what_a_gpu_needs(tmp_path, monkeypatch):
    for name in ("FLASHATTN_JIT_CACHE_PATH", "FLASHATTN_JIT_COMPILE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "cache"))
    wanted = {"head_dims": 64, "dtypes": "bf16", "targets": pack.TARGET, "formats": ("dense",)}
    made = fa.warm(fa.Full(), **wanted, jobs=1, progress=False)
    assert pack.write_kernels(tmp_path) == len(made.built) > 0
    (tmp_path / pack.ABOUT).write_text(json.dumps({"sources": pack.sources()}))
    with pack.used(tmp_path):
        with zipfile.ZipFile(os.environ["FLASHATTN_JIT_CACHE_PATH"]) as packed:
            names = {name.rpartition("/")[2] for name in packed.namelist()}
        found = fa.warm(fa.Full(), **wanted, jobs=1, progress=False)
    assert names == {"artifact.so", "meta.json", "resources.json"}
    assert {result.layer for result in found.results} == {"read_only"}


def test_a_wrong_value_of_a_smoke_call_is_seen():
    exact = torch.randn(4, 8, dtype=torch.float64)
    eager = exact.bfloat16()
    assert smoke.Result(eager, exact, eager).share < 1
    assert smoke.Result(1.1 * eager, exact, eager).share > 1
    broken = eager.clone()
    broken[2, 3] = torch.nan
    assert smoke.Result(broken, exact, eager).share == float("inf")
