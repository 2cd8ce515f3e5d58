"""The real C++ compiler: contents and dependencies of artifacts, errors, unchanged global state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from flashattn_jit import _C
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.codegen.targets import CPU_TARGETS, compiled_here
from flashattn_jit.errors import CompileError, TargetError
from flashattn_jit.jit.compilation import toolchain
from flashattn_jit.jit.compilation.compile_job import BuildFailure
from flashattn_jit.jit.compilation.toolchain import ask_version, find_compiler
from flashattn_jit.jit.module import KernelCache
from tests.harness import processes

SOURCE = (Path(__file__).parents[1] / "minimal_artifact.cpp").read_text()
KEY = "0123456789abcdef" * 4


def build(staging: Path, source: str = SOURCE, target: str = "cpu:generic") -> bytes:
    """The bytes of the artifact of `source`, built in `staging`."""
    staging.mkdir(parents=True)
    toolchain.build(source, KEY, target, find_compiler(), staging)
    return staging.joinpath("artifact.so").read_bytes()


def test_an_artifact_needs_neither_torch_nor_cpp_runtime(tmp_path: Path) -> None:
    build(tmp_path / "a")
    dynamic = subprocess.run(
        ["readelf", "-d", "--wide", str(tmp_path / "a" / "artifact.so")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    needed = {line.split("[")[1].split("]")[0] for line in dynamic.splitlines() if "NEEDED" in line}
    assert needed <= {"libgomp.so.1", "libm.so.6", "libc.so.6", "libgcc_s.so.1"}
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_it_exports_its_entry_points_only(tmp_path: Path) -> None:
    build(tmp_path / "a")
    names = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", str(tmp_path / "a" / "artifact.so")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert {line.split()[0] for line in names.splitlines()} == {
        "fajit_attention",
        "fajit_merge",
        "fajit_classify",
        "fajit_describe",
    }


def test_where_and_when_it_is_built_does_not_show(tmp_path: Path) -> None:
    source = SOURCE + "\nextern const char here[] = __FILE__;\nnamespace { int x; }\n"
    assert build(tmp_path / "a", source) == build(tmp_path / "b with spaces" / "deeper", source)


def test_a_build_leaves_exactly_the_files_of_an_entry(tmp_path: Path) -> None:
    source = SOURCE + "\nnamespace deep { int twice(int x) { return 2 * x; } }\n"
    build(tmp_path / "a", source)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "artifact.so",
        "kernel.cpp",
        "build.log",
        "command",
        "resources.json",
    }
    assert "-march=x86-64" in tmp_path.joinpath("a/command").read_text()
    resources = json.loads(tmp_path.joinpath("a/resources.json").read_text())
    names = [name for name, _ in resources["stack_bytes"]]
    assert "int deep::twice(int)" in names
    assert all(size >= 0 for _, size in resources["stack_bytes"])


def test_warnings_are_kept_in_the_log(tmp_path: Path) -> None:
    build(tmp_path / "a", SOURCE + '\n#warning "mind this"\n')
    assert "mind this" in tmp_path.joinpath("a/build.log").read_text()


def test_other_threads_find_their_own_compiler_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.utils.cpp_extension as cpp_extension

    found, load = [find_compiler()], cpp_extension.load

    def loading(*args: Any, **options: Any) -> Any:
        found.append(find_compiler())
        return load(*args, **options)

    monkeypatch.setattr(cpp_extension, "load", loading)
    build(tmp_path / "a")
    assert len(found) == 2 and found[0] == found[1]


def test_environment_and_module_globals_are_as_before(tmp_path: Path) -> None:
    import torch.utils.cpp_extension as cpp_extension

    environment, versioner = dict(os.environ), cpp_extension.JIT_EXTENSION_VERSIONER
    loaded = set(torch.ops.loaded_libraries)
    build(tmp_path / "a")
    with pytest.raises(BuildFailure):
        build(tmp_path / "b", "#error no\n")
    assert dict(os.environ) == environment
    assert cpp_extension.JIT_EXTENSION_VERSIONER is versioner
    assert set(torch.ops.loaded_libraries) == loaded


def test_it_works_where_ninja_is_not_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert build(tmp_path / "a")


@pytest.mark.parametrize("target", [*filter(compiled_here, CPU_TARGETS)])
def test_every_target_compiles(tmp_path: Path, target: str) -> None:
    macros = {
        "cpu:generic": "!defined(__AVX__)",
        "cpu:avx2": "defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)",
        "cpu:avx512": "defined(__AVX512BW__) && !defined(__AVX512VNNI__)",
        "cpu:avx512_vnni": "defined(__AVX512VNNI__) && !defined(__AVX512BF16__)",
        "cpu:avx512_bf16": "defined(__AVX512BF16__) && defined(__AVX512VNNI__)",
        # AVX512-FP16 and AMX are written as asm.
        "cpu:avx512_fp16": "defined(__AVX512VNNI__) && !defined(__AVX512BF16__)",
        "cpu:amx_bf16": "defined(__AVX512BF16__) && !defined(__AMX_TILE__)",
    }
    assert build(tmp_path / "a", f"#if !({macros[target]})\n#error\n#endif\n{SOURCE}", target)


def test_an_unknown_target_is_told_the_known_ones() -> None:
    with pytest.raises(TargetError, match=r"cpu:mmx.*cpu:generic"):
        toolchain.flags_for("cpu:mmx")


@pytest.fixture
def cache(sources: Path) -> KernelCache:
    (sources / "include" / "fajit" / "abi.h").write_text(
        Path(__file__).parents[3].joinpath("csrc/include/fajit/abi.h").read_text()
    )
    return KernelCache()


def load(cache: KernelCache, source: str = SOURCE) -> _C.Module:
    return cache.load_stepping(
        [BuildRequest("{}", "kernel.cpp.j2", "cpu:generic", lambda: source)]
    )[1]


def test_a_kernel_compiles_loads_and_is_found_again(cache: KernelCache, cache_root: Path) -> None:
    module = load(cache)
    assert Path(module.path).is_relative_to(cache_root)
    assert json.loads(module.description)["abi_version"] == _C.ABI_VERSION
    assert load(KernelCache()).path == module.path
    assert cache.counters.compiles == 1
    assert 0 < cache.counters.compile_s < 60


def test_an_error_names_the_hooks_line_the_log_and_the_source(cache: KernelCache) -> None:
    source = SOURCE + '\n#line 2 "hook:Mine.score_mod"\nint f() {\n  return oops;\n}\n'
    with pytest.raises(CompileError) as error:
        load(cache, source)
    assert error.value.location == ("hook:Mine.score_mod", 3)
    assert "oops" in error.value.first_error
    assert "hook:Mine.score_mod:3: 'oops' was not declared" in str(error.value)
    assert "'oops' was not declared" in Path(error.value.log_path).read_text()
    assert "return oops;" in Path(error.value.source_path).read_text()


def test_an_undefined_symbol_is_a_compile_error(cache: KernelCache) -> None:
    source = SOURCE + "\nint missing_function();\nint use() { return missing_function(); }\n"
    source += "extern int (*const keep)();\nint (*const keep)() = use;\n"
    with pytest.raises(CompileError, match="missing_function"):
        load(cache, source)


def test_an_artifact_of_another_abi_is_refused(cache: KernelCache, cache_root: Path) -> None:
    from flashattn_jit.errors import AbiError

    with pytest.raises(AbiError, match="abi_version 7"):
        load(cache, SOURCE.replace("TEXT(FAJIT_ABI_VERSION)", '"7"'))
    assert not list(cache_root.glob("v1/[!.]*/??/*"))


def test_a_missing_compiler_is_told_with_the_remedy(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "no-such-compiler")
    with pytest.raises(CompileError, match=r"install g\+\+, or set FLASHATTN_JIT_CXX") as error:
        load(cache)
    assert "fajit_attention" in Path(error.value.source_path).read_text()
    assert Path(error.value.log_path).read_text()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 1", "said nothing"),
        ("echo 'libmpc.so.3: cannot open shared object file' >&2; exit 127", r"libmpc\.so\.3"),
        ("echo 'c++: fatal error: no input' >&2; exit 1", "no input"),
    ],
)
def test_a_broken_compiler_is_told_in_its_own_words(
    cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("FLASHATTN_JIT_CXX", str(compiler))
    with pytest.raises(CompileError, match=says):
        load(cache)


def test_the_compilers_command_may_have_arguments(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "g++ -DEXTRA=1")
    source = "#ifndef EXTRA\n#error no EXTRA\n#endif\n" + SOURCE
    assert load(cache, source)


def test_a_compiler_has_one_identity_under_all_its_names() -> None:
    gxx = shutil.which("g++")
    if gxx is None or find_compiler() is None:
        pytest.skip("needs c++ and g++")
    from flashattn_jit.jit.compilation.compile_job import Compiler

    by_default = find_compiler()
    assert by_default is not None
    if Path(gxx).resolve() != Path(by_default.command[0]).resolve():
        pytest.skip("c++ is not g++ here")
    assert ask_version(Compiler((gxx,), "")).id == ask_version(by_default).id


def test_arguments_that_change_the_code_change_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def identity(command: str) -> str:
        monkeypatch.setenv("FLASHATTN_JIT_CXX", command)
        compiler = find_compiler()
        assert compiler is not None
        return ask_version(compiler).id

    plain = identity("c++")
    others = [identity(c) for c in ("c++ -O0", "c++ -march=native", "c++ -O0 -g", "c++ '-O0 -g'")]
    assert len({plain, *others}) == 5
    # A launcher in front of it changes nothing.
    assert identity("env c++") == plain
    assert identity("env c++ -O0") == others[0]


def test_variables_that_compilers_read_reach_no_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tmp_path / "plain")
    evil = tmp_path / "evil"
    evil.mkdir()
    for header in ("stdint.h", "stddef.h"):
        evil.joinpath(header).write_text("#error of another folder\n")
    for name in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH"):
        monkeypatch.setenv(name, str(evil))
    monkeypatch.setenv("DEPENDENCIES_OUTPUT", str(tmp_path / "dependencies"))
    assert build(tmp_path / "changed") == plain
    assert not tmp_path.joinpath("dependencies").exists()
    assert os.environ["CPATH"] == str(evil)


HIT = """
import sys
import torch
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.jit import module
from flashattn_jit import env
from pathlib import Path
from typing import Any
root = Path(sys.argv[1])
env.templates_dir = lambda: root / "templates"
env.include_dir = lambda: root / "include"
env.PACKAGE_DIR = root / "package"
seen = []
def audit(event, args):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.mkdir", "os.rename"):
        seen.append((event, args))
    if event == "open" and isinstance(args[2], int) and args[2] & 3:
        seen.append((event, args))
sys.addaudithook(audit)
def render():
    raise AssertionError("a hit renders nothing")
module.load_stepping([BuildRequest("{}", "kernel.cpp.j2", "cpu:generic", render)])
slow = {"jinja2", "torch.utils.cpp_extension", "setuptools", "platformdirs", "ninja", "sympy",
        "torch._dynamo"}
print(seen, sorted(slow & set(sys.modules)))
"""


def test_a_hit_in_a_new_process_writes_and_starts_nothing(
    cache: KernelCache, sources: Path
) -> None:
    load(cache)
    hit = processes.run(["-c", HIT, str(sources)])
    assert hit.stderr == ""
    assert hit.stdout == "[] []\n"


def test_the_processs_one_openmp_runtime_is_torchs(tmp_path: Path) -> None:
    build(tmp_path / "a")
    program = (
        "import sys, torch\nfrom flashattn_jit import _C\n"
        "_C.Module(sys.argv[1])\n"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l}))\n"
    )
    printed = processes.run(["-c", program, str(tmp_path / "a" / "artifact.so")], check=True).stdout
    assert printed == "1\n"
