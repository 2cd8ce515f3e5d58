"""The real nvcc: contents and dependencies of CUDA artifacts, errors, unchanged global state."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.codegen.targets import CUDA_TARGETS, sm_version
from flashattn_jit.errors import CompileError, TargetError
from flashattn_jit.jit.cache.layers import oldest_driver
from flashattn_jit.jit.compilation import nvcc, toolchain
from flashattn_jit.jit.compilation.compile_job import BuildFailure, Compiler, SpillError
from flashattn_jit.jit.compilation.ptxas_report import load_report
from flashattn_jit.jit.compilation.toolchain import ask_version, find_compiler
from flashattn_jit.jit.module import KernelCache
from tests.harness.toolkit import needs_nvcc

SOURCE = (Path(__file__).parents[1] / "minimal_artifact.cu").read_text()
KEY = "0123456789abcdef" * 4
FILES = {"artifact.so", "kernel.cu", "kernel.ptx", "build.log", "command", "resources.json"}


def build(staging: Path, source: str = SOURCE, target: str = "sm_80") -> bytes:
    """The bytes of the artifact of `source`, built in `staging`."""
    staging.mkdir(parents=True)
    toolchain.build(source, KEY, target, find_compiler(target), staging)
    return staging.joinpath("artifact.so").read_bytes()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one build for sm_80."""
    staging = tmp_path_factory.mktemp("built") / "a"
    build(staging)
    return staging


@needs_nvcc
def test_an_artifact_needs_libc_alone_and_exports_its_entry_points(built: Path) -> None:
    def ask(*command: str) -> str:
        return subprocess.run(
            [*command, str(built / "artifact.so")], check=True, capture_output=True, text=True
        ).stdout

    dynamic = ask("readelf", "-d", "--wide")
    needed = {line.split("[")[1].split("]")[0] for line in dynamic.splitlines() if "NEEDED" in line}
    assert needed == {"libc.so.6"}
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    names = {line.split()[0] for line in ask("nm", "-D", "--defined-only", "-P").splitlines()}
    assert names == {"fajit_classify", "fajit_describe", "fajit_code", "fajit_plan_launch"}
    # A static CUDA runtime would take a key of threads, of which a process has 1024, and
    # thread-local storage for each artifact.
    undefined = {line.split()[0] for line in ask("nm", "-D", "--undefined-only", "-P").splitlines()}
    assert not {name for name in undefined if name.startswith(("cu", "__cuda", "pthread", "dl"))}
    assert " TLS " not in ask("readelf", "-l", "--wide")


@needs_nvcc
def test_it_loads_and_describes_itself_where_there_is_no_driver(built: Path) -> None:
    program = (
        "import ctypes, sys\n"
        "artifact = ctypes.CDLL(sys.argv[1])\n"
        "artifact.fajit_describe.restype = ctypes.c_char_p\n"
        "print(artifact.fajit_describe().decode())\n"
        "print(*(line for line in open('/proc/self/maps') if 'libcu' in line))\n"
    )
    described, libraries = subprocess.run(
        [sys.executable, "-c", program, str(built / "artifact.so")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert json.loads(described)["key"] == KEY
    assert libraries == "", "opening an artifact opens no library of CUDA"


@needs_nvcc
def test_a_build_leaves_exactly_the_files_of_an_entry(built: Path) -> None:
    assert {path.name for path in built.iterdir()} == FILES
    command = built.joinpath("command").read_text()
    assert "-gencode=arch=compute_80,code=sm_80" in command
    assert command.count("compute_") == 1
    report = load_report(built / "resources.json")
    assert [k.name for k in report.kernels] == ["fajit_attention_kernel"]
    assert report.kernels[0].shared_bytes == 512
    assert report.complaints() == []
    assert report.budgets["fajit_attention_kernel"].registers == 255


@needs_nvcc
def test_ptx_names_its_sources_and_no_folder(tmp_path: Path) -> None:
    source = SOURCE.replace(
        "params.out[i] = plus_one(row[threadIdx.x]);",
        'params.out[i] = plus_one(\n#line 3 "hook:Mine.score_mod"\nrow[threadIdx.x]);',
    )
    build(tmp_path / "a", source)
    text = tmp_path.joinpath("a/kernel.ptx").read_text()
    assert set(re.findall(r'\.file\s+\d+\s+"([^"]*)"', text)) == {
        "kernel.cu",
        "hook:Mine.score_mod",
    }
    assert ".target sm_80" in text
    assert ".loc" in text
    assert str(tmp_path) not in text


@needs_nvcc
def test_where_and_when_it_is_built_does_not_show(tmp_path: Path) -> None:
    source = "#include <fajit/context.h>\nextern const char here[] = __FILE__;\n" + SOURCE
    folders = tmp_path / "a", tmp_path / "b with spaces" / "deeper"
    first, second = (build(folder, source) for folder in folders)
    assert first == second
    texts = [folder.joinpath("kernel.ptx").read_bytes() for folder in folders]
    assert texts[0] == texts[1]


@needs_nvcc
@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_every_target_compiles_for_itself_alone(tmp_path: Path, target: str) -> None:
    arch = 10 * sm_version(target)
    guard = f"#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != {arch}\n#error\n#endif\n"
    build(tmp_path / "a", guard + SOURCE, target)
    assert f".target {target}\n" in tmp_path.joinpath("a/kernel.ptx").read_text()
    codes = re.findall(r",code=(\w+)", tmp_path.joinpath("a/command").read_text())
    assert codes == [target], "more than the target's machine code is embedded"


@needs_nvcc
def test_a_kernel_compiles_in_seconds(tmp_path: Path) -> None:
    seconds = []
    for name in "abc":  # a machine that is busy with other things gets another try
        staging = tmp_path / name
        staging.mkdir()
        compiler = find_compiler("sm_80")
        compile_s = toolchain.build(SOURCE, KEY, "sm_80", compiler, staging)
        seconds.append(compile_s)
        if seconds[-1] < 3:
            break
    assert min(seconds) < 3


@needs_nvcc
def test_environment_and_module_globals_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.utils.cpp_extension as cpp_extension

    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0+PTX")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DUSELESS")
    names = ("CUDA_HOME", "CUDNN_HOME", "JIT_EXTENSION_VERSIONER")
    environment, values = dict(os.environ), [getattr(cpp_extension, name) for name in names]
    loaded = set(torch.ops.loaded_libraries)
    build(tmp_path / "a")
    assert "USELESS" not in tmp_path.joinpath("a/command").read_text()
    with pytest.raises(BuildFailure):
        build(tmp_path / "b", "#error no\n")
    assert dict(os.environ) == environment
    assert [getattr(cpp_extension, name) for name in names] == values
    assert set(torch.ops.loaded_libraries) == loaded


@needs_nvcc
@pytest.mark.parametrize("define", ["SPILL 400", "CALLED 1"])
def test_a_kernel_that_needs_memory_for_its_registers_is_told(tmp_path: Path, define: str) -> None:
    with pytest.raises(SpillError, match="bytes of local memory") as error:
        build(tmp_path / "a", f"#define {define}\n{SOURCE}")
    assert error.value.compile_s > 0
    assert {path.name for path in tmp_path.joinpath("a").iterdir()} == FILES
    report = load_report(tmp_path / "a" / "resources.json")
    assert report.complaints() == list(error.value.complaints)


@needs_nvcc
@pytest.mark.parametrize(
    ("code", "location", "says"),
    [
        ("__device__ float f() { return oops; }", ("hook:Mine.score_mod", 3), "oops"),
        ("int f() { return oops; }", ("hook:Mine.score_mod", 3), "oops"),
        ('__device__ void f() { asm volatile("nonsense.f32;"); }', None, "nonsense"),
    ],
)
def test_an_error_names_the_hooks_line(
    tmp_path: Path, code: str, location: tuple[str, int] | None, says: str
) -> None:
    source = SOURCE.replace(
        "struct Params",
        f'#line 3 "hook:Mine.score_mod"\n{code}\n#line 5 "kernel.cu"\nstruct Params',
    )
    if location is None:
        source = source.replace("plus_one(row", "(f(), plus_one)(row")
    with pytest.raises(BuildFailure) as error:
        build(tmp_path / "a", source)
    assert error.value.location == location
    assert says in error.value.first_error or says in tmp_path.joinpath("a/build.log").read_text()


@needs_nvcc
def test_an_undefined_symbol_is_an_error(tmp_path: Path) -> None:
    source = SOURCE.replace("return FAJIT_OK", "return missing()")
    source = source.replace("struct Params", "int missing();\nstruct Params", 1)
    with pytest.raises(BuildFailure, match="missing"):
        build(tmp_path / "a", source)


@needs_nvcc
def test_the_toolkits_own_header_serves_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvcc.Toolkit, "takes_lean_header", lambda self: False)
    build(tmp_path / "a")
    assert "cuda/lean" not in tmp_path.joinpath("a/command").read_text()


@needs_nvcc
def test_the_host_compilers_arguments_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "g++ -DEXTRA=1")
    build(tmp_path / "a", "#ifndef EXTRA\n#error no EXTRA\n#endif\n" + SOURCE)


def test_an_unknown_target_is_told_the_known_ones() -> None:
    with pytest.raises(TargetError, match=r"sm_70.*sm_75.*sm_120"):
        toolchain.flags_for("sm_70")


def test_a_missing_compiler_is_told_with_the_remedy(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CUDA_HOME", str(tmp_path / "nothing"))
    with pytest.raises(CompileError, match=r"install a CUDA toolkit.*FLASHATTN_JIT_CUDA_HOME"):
        KernelCache().load_stepping([BuildRequest("{}", "kernel.cpp.j2", "sm_80", lambda: SOURCE)])[
            1
        ]


def test_a_toolkit_is_found_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def toolkit(name: str, version: int) -> Path:
        home = tmp_path / name
        for path in ("bin/nvcc", "include/cuda_runtime_api.h"):
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(f"#define CUDART_VERSION  {version}\n")
        (home / "bin" / "nvcc").chmod(0o755)
        return home

    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    on_path, others, ours = toolkit("on path", 12080), toolkit("o", 14000), toolkit("u", 13000)
    script = tmp_path / "scripts" / "nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {on_path}/bin/nvcc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{on_path}/bin:/usr/bin:/bin")
    found = nvcc.find_toolkit()
    assert found is not None
    assert (found.home, found.runtime_version()) == (on_path, 12080)
    assert not found.takes_lean_header()
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    assert nvcc.find_toolkit() != found, "a script has no headers beside it"
    monkeypatch.setenv("CUDA_HOME", str(others))
    assert nvcc.find_toolkit() == nvcc.Toolkit(others)
    monkeypatch.setenv("FLASHATTN_JIT_CUDA_HOME", str(ours))
    assert nvcc.find_toolkit() == nvcc.Toolkit(ours)
    assert nvcc.Toolkit(ours).takes_lean_header()


def test_a_toolkit_may_come_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "nvidia" / "cu13"
    for path in ("bin/nvcc", "include/cuda_runtime_api.h"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text("")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    exists = Path.is_file
    monkeypatch.setattr(
        Path, "is_file", lambda self: exists(self) and not self.is_relative_to("/usr/local")
    )
    assert nvcc.find_toolkit() == nvcc.Toolkit(home)


@pytest.mark.parametrize(
    ("words", "version", "driver"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.88", (13, 0), 580),
        ("Cuda compilation tools, release 12.8, V12.8.61", (12, 8), 525),
        ("Cuda compilation tools, release 19.1, V19.1.2", (19, 1), 580),
    ],
)
def test_a_toolkit_needs_a_driver(words: str, version: tuple[int, int], driver: int) -> None:
    assert nvcc.cuda_version(words) == version
    assert oldest_driver(version[0]) == driver
    assert nvcc.cuda_version("gcc 12.2") is None


@needs_nvcc
def test_identities_name_both_compilers() -> None:
    compiler = find_compiler("sm_80")
    assert compiler is not None
    assert compiler.host == find_compiler("cpu:generic")
    identity = ask_version(compiler)
    assert identity.id.startswith("nvcc-")
    assert "release" in identity.version
    other = Compiler(compiler.command, "", Compiler(("/bin/true",), ""))
    assert ask_version(other).id != identity.id
    assert find_compiler("sm_90") == compiler


@pytest.fixture
def cache(sources: Path) -> KernelCache:
    include = Path(__file__).parents[3] / "csrc" / "include" / "fajit"
    for name in ("abi.h", "cuda/registration.h", "cuda/lean/cuda_runtime.h"):
        path = sources / "include" / "fajit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((include / name).read_text())
    return KernelCache()


@needs_nvcc
def test_a_kernel_is_kept_with_its_ptx_and_the_driver_it_needs(
    cache: KernelCache, cache_root: Path
) -> None:
    module = cache.load_stepping([BuildRequest("{}", "kernel.cpp.j2", "sm_80", lambda: SOURCE)])[1]
    entry = Path(module.path).parent
    assert {path.name for path in entry.iterdir()} == FILES | {"meta.json"}
    assert entry.is_relative_to(cache_root)
    meta = json.loads(entry.joinpath("meta.json").read_text())
    assert meta["compiler"]["id"].startswith("nvcc-")
    assert meta["min_driver"] == cache.min_driver(module) >= 525
    assert set(meta["files"]) == FILES
    assert cache.ptx(module) == entry.joinpath("kernel.ptx").read_text()
    again = KernelCache()
    assert (
        again.load_stepping([BuildRequest("{}", "kernel.cpp.j2", "sm_80", never)])[1].path
        == module.path
    )


def never() -> str:
    raise AssertionError("a hit renders nothing")


@needs_nvcc
def test_ptx_is_there_where_nothing_can_be_kept(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", os.devnull + "/cache")
    module = cache.load_stepping([BuildRequest("{}", "kernel.cpp.j2", "sm_80", lambda: SOURCE)])[1]
    assert ".entry fajit_attention_kernel" in cache.ptx(module)
    assert (cache.min_driver(module) or 0) >= 525


@needs_nvcc
def test_a_hook_that_spills_takes_a_smaller_tile(
    cache: KernelCache, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tile(size: int, render: Callable[[], str]) -> BuildRequest:
        return BuildRequest(f'{{"tile":{size}}}', "kernel.cpp.j2", "sm_80", render)

    requests = [
        tile(128, lambda: f"#define SPILL 400\n{SOURCE}"),
        tile(64, lambda: f"#define SPILL 64\n{SOURCE}"),
    ]
    place, module = cache.load_stepping(requests)
    assert place == 1
    assert load_report(Path(module.path).with_name("resources.json")).complaints() == []
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    place, again = KernelCache().load_stepping([tile(128, never), tile(64, never)])
    assert (place, again.path) == (1, module.path)


@needs_nvcc
def test_the_key_holds_the_flags_and_what_nvcc_includes(sources: Path) -> None:
    from flashattn_jit.jit.cache import entry

    template = sources / "templates" / "kernel.cu.j2"
    template.write_text("#include <fajit/a.h>\n")
    lean = sources / "include" / "fajit" / "cuda" / "lean" / "cuda_runtime.h"
    lean.parent.mkdir(parents=True)
    digests = set()
    for text in ("one", "two"):
        lean.write_text(text)
        entry.sources_digest.cache_clear()
        key = entry.kernel_key("{}", "kernel.cu.j2", "sm_90", nvcc.flags("sm_90"))
        digests.add(key.hex)
    assert len(digests) == 2
    assert "code=sm_90" in dict(key.document)["flags"]
