"""Builds flashattn_jit._C, and puts the sources that are compiled on demand into the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from pybind11.setup_helpers import build_ext as build_pybind11
from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DATA = {
    "templates": Path("templates"),
    "include": Path("csrc/include"),
    "emulator": Path("csrc/emulator"),
}
FOLDERS = ("runtime", "scheduler", "interval")
HEADERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))
SOURCES = {
    folder: sorted(path.relative_to(ROOT) for path in (ROOT / "csrc" / folder).rglob("*.cpp"))
    for folder in FOLDERS
}


class BuildInUnits(build_pybind11):
    """Compiles each folder of sources as one unit; half of its time is for pybind11's headers."""

    def build_extensions(self) -> None:
        units = Path(self.build_temp)
        units.mkdir(parents=True, exist_ok=True)
        for extension in self.extensions:
            extension.depends += map(str, (path for paths in SOURCES.values() for path in paths))
            extension.sources = []
            for folder, paths in SOURCES.items():
                unit = units / f"unit_{folder}.cpp"
                text = "".join(f'#include "{path.as_posix()}"\n' for path in paths)
                if not unit.exists() or unit.read_text() != text:  # a new mtime means a rebuild
                    unit.write_text(text)
                extension.sources.append(str(unit))
        super().build_extensions()


class BuildWithData(build_py):
    """Copies templates, headers and the emulator to flashattn_jit/_data, where a wheel has them.

    An editable install copies nothing: the package reads the folders of the checkout.
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
                files = (path for path in (ROOT / source).rglob("[!.]*[!~]") if path.is_file())
                outputs += [str(target / path.relative_to(ROOT / source)) for path in files]
        return outputs


ParallelCompile("FLASHATTN_JIT_BUILD_JOBS").install()
setup(
    ext_modules=[
        Pybind11Extension(
            "flashattn_jit._C",
            [str(path) for paths in SOURCES.values() for path in paths],
            include_dirs=[".", "csrc/include", "csrc/runtime"],
            depends=HEADERS,
            cxx_std=17,
            extra_compile_args=["-O2", "-fopenmp", "-Wall", "-Wextra"],
            # One OpenMP runtime per process: torch is imported first and ships libgomp with its
            # usual soname, so the extension resolves to that one.
            extra_link_args=["-fopenmp"],
            libraries=["dl"],
        ),
    ],
    cmdclass={"build_ext": BuildInUnits, "build_py": BuildWithData},
)
