"""Builds flashattn_jit._C and _emulator, and puts kernel templates and headers into the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DATA = {"templates": Path("templates"), "include": Path("csrc/include")}
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("runtime", "scheduler")
    for path in (ROOT / "csrc" / folder).glob("*.cpp")
)
EMULATOR = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "emulator").glob("*.cpp")
)
HEADERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))


class BuildWithData(build_py):
    """Copies templates/ and csrc/include/ to flashattn_jit/_data, where a wheel looks for them.

    An editable install copies nothing: there the package reads the checkout's own folders.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name, source in DATA.items():
            target = Path(self.build_lib) / "flashattn_jit" / "_data" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns(".*", "*~"))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = list(super().get_outputs(include_bytecode))
        if not self.editable_mode:
            for name, source in DATA.items():
                target = Path(self.build_lib) / "flashattn_jit" / "_data" / name
                files = (path for path in (ROOT / source).rglob("*") if path.is_file())
                outputs += [str(target / path.relative_to(ROOT / source)) for path in files]
        return outputs


ParallelCompile("FLASHATTN_JIT_BUILD_JOBS").install()
setup(
    ext_modules=[
        Pybind11Extension(
            "flashattn_jit._C",
            SOURCES,
            include_dirs=["csrc/include", "csrc/runtime"],
            depends=HEADERS,
            cxx_std=17,
            extra_compile_args=["-O2", "-fopenmp", "-Wall", "-Wextra"],
            # One OpenMP runtime a process: torch is imported first and ships libgomp under its
            # own soname, which this then resolves to.
            extra_link_args=["-fopenmp"],
            libraries=["dl"],
        ),
        Pybind11Extension(
            "flashattn_jit._emulator",
            EMULATOR,
            include_dirs=["csrc/emulator"],
            depends=HEADERS,
            cxx_std=17,
            # Arithmetic is what the instructions say: no contraction to fused operations.
            extra_compile_args=[
                "-O3",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-Wall",
                "-Wextra",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
        ),
    ],
    cmdclass={"build_ext": build_ext, "build_py": BuildWithData},
)
