"""Caches with entries that no compiler made; the command line in this process or in a new one."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashattn_jit.cli.app import app
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.jit.cache.entry import ARTIFACT, CompilerIdentity, Entry, kernel_key
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.compilation.toolchain import flags_for
from flashattn_jit.variants.ir.ir import VariantIR
from tests.harness import processes

COMPILER = CompilerIdentity("gcc-1.2.3-00000000", "a compiler")


def spec_of(head_dim: int = 64, target: str = "cpu:generic") -> KernelSpec:
    """Full attention in fp32."""
    dtypes = ("float32",) * 3
    return KernelSpec(VariantIR(()), *dtypes, head_dim, head_dim, target, "prefill", 96, 96)


def add_entry(root: Path, spec: KernelSpec, created: str = "2026-01-01T00:00:00+00:00") -> Entry:
    """Publishes an entry whose artifact is text with its key."""
    key = kernel_key(spec.document(), spec.template, spec.target, flags_for(spec.target))
    store = Store(root)
    with store.staging() as staging:
        staging.joinpath(ARTIFACT).write_text(f"not code; {key.hex}")
        staging.joinpath("kernel.cpp").write_text("// source\n")
        meta = {"document": key.document, "created": created, "compile_s": 1.5}
        return store.publish(staging, key.hex, COMPILER, meta)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, not made yet, as the only layer."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(folder))
    for name in ("CACHE_PATH", "CACHE_REMOTE", "CACHE_MAX_BYTES", "COMPILE", "RECORD"):
        monkeypatch.delenv(f"FLASHATTN_JIT_{name}", raising=False)
    return folder


@pytest.fixture(name="spec_of")
def _spec_of() -> Callable[..., KernelSpec]:
    return spec_of


@pytest.fixture(name="add_entry")
def _add_entry() -> Callable[..., Entry]:
    return add_entry


@pytest.fixture
def entries(cache: Path) -> list[Entry]:
    """Three entries in the user's folder, oldest first."""
    return [
        add_entry(cache, spec_of(head_dim), f"2026-01-0{i}T00:00:00+00:00")
        for i, head_dim in enumerate((32, 64, 128), 1)
    ]


@pytest.fixture
def run() -> Callable[..., Result]:
    """Runs a command in this process: `result.stdout`, `.stderr`, `.exit_code`."""

    def call(*args: object, **options: object) -> Result:
        return CliRunner().invoke(app, [str(a) for a in args], prog_name="flashattn-jit", **options)

    return call


@pytest.fixture
def run_json(run: Callable[..., Result]) -> Callable[..., dict]:
    """Runs a command with --json; returns the JSON object."""

    def call(*args: object, exit_code: int = 0) -> dict:
        result = run(*args, "--json")
        assert result.exit_code == exit_code, result.output
        document = json.loads(result.stdout)
        assert document["schema"] == 1
        return document

    return call


@pytest.fixture(name="process")
def _process(cache: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    return process


@pytest.fixture(name="on_terminal")
def _on_terminal(cache: Path) -> Callable[..., tuple[int, str]]:
    return on_terminal


def process(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a new process, with its output in pipes."""
    return processes.run(
        ["-m", "flashattn_jit", *map(str, args)], env={**os.environ, **environment}, timeout=120
    )


def on_terminal(*args: object, answer: str = "", **environment: str) -> tuple[int, str]:
    """Runs a command on a pseudo-terminal; returns its exit code and the terminal's output."""
    main, side = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "flashattn_jit", *map(str, args)],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", **environment},
        stdin=side,
        stdout=side,
        stderr=side,
        close_fds=True,
    )
    os.close(side)
    if answer:
        os.write(main, answer.encode())
    seen = b""
    while True:
        ready, _, _ = select.select([main], [], [], 60)
        assert ready, seen.decode()
        try:
            block = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not block:
            break
        seen += block
    os.close(main)
    return child.wait(60), seen.decode()
