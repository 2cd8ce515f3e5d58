"""The sdist builds a wheel that works in an empty environment with the checkout gone.

The wheel has the extension of this environment. `pip install .` in `.ci/run` compiles it anew, and
tests/full/test_clean_build.py compiles it from the sdist.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flashattn_jit import _C
from tests.deploy import test_no_compiler
from tests.deploy.test_no_compiler import run_without_compiler

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCES = (
    "__pycache__",
    "*.pyc",
    "*.so",
    "*.o",
    ".git",
    "build",
    "dist",
    "*.egg-info",
    ".*_cache",
)

BACKEND = """
import sys, warnings
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""

RUN = """
import sys
from pathlib import Path

import torch

import flashattn_jit as fa
from flashattn_jit import env

home, checkout = Path(sys.argv[1]), sys.argv[2]
assert not any(path.startswith(checkout) for path in sys.path), sys.path
for path in (
    Path(fa.__file__), env.templates_dir(), env.include_dir(), env.emulator_dir()
):
    assert path.is_relative_to(home), path

slopes = torch.tensor([0.5, 0.25])


def score_mod(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


torch.manual_seed(0)
q, k, v = (torch.randn(2, 2, 37, 40) for _ in range(3))
out = fa.attention(q, k, v, score_mod)
position = torch.arange(37)
bias = slopes[:, None, None] * (position[None, :] - position[:, None])
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
torch.testing.assert_close(out, expected)
print("ran")
"""

COMMAND = """
import sys
from importlib.metadata import entry_points

(command,) = entry_points(group="console_scripts", name="flashattn-jit")
sys.argv = ["flashattn-jit", *sys.argv[1:]]
command.load()()
"""


def build(hook: str, source: Path, output: Path) -> Path:
    """Runs a hook of the build backend in `source`; returns the file that it made."""
    done = subprocess.run(
        [sys.executable, "-c", BACKEND, hook, str(output)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy of the checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    archive = build("build_sdist", folder / "checkout", folder)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def reuse_extension(source: Path) -> None:
    """Puts this environment's extension where a build in `source` takes it for up to date."""
    platform = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    folder = source / "build" / f"lib.{platform}" / "flashattn_jit"
    folder.mkdir(parents=True)
    copy = Path(shutil.copy(_C.__file__, folder))
    later = time.time() + 3600  # newer than any file that the build makes
    os.utime(copy, (later, later))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist builds."""
    reuse_extension(sdist)
    return build("build_wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which sees the dependencies of this environment."""
    home = tmp_path_factory.mktemp("environment")
    command = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(home)]
    subprocess.run(command, check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # A folder that a .pth file names comes after `site` on the path, and .pth files in it, such as
    # that of an editable install, are not read.
    site.joinpath("dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


kernels = test_no_compiler.site


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


def test_constraints_name_what_the_package_asks_for() -> None:
    """Every pin is of a dependency and within its bounds; torch has no upper bound."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    asked = [Requirement(found[1]) for line in lines if (found := re.match(r' +"([^":]+)",', line))]
    extras = re.findall(r"^(?:dev|plot|docs|examples) = \[(.*)\]", "\n".join(lines), re.MULTILINE)
    asked += [Requirement(text) for extra in extras for text in re.findall(r'"([^"]+)"', extra)]
    bounds = {requirement.name: requirement.specifier for requirement in asked}
    assert str(bounds["torch"]) == ">=2.11"
    pins = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "==" and exact.version in bounds[pin.name], pin
    assert "torch" in {pin.name for pin in pins}


def test_the_sdist_holds_all_that_is_built_and_tested(sdist: Path) -> None:
    for folder in ("flashattn_jit", "csrc", "templates", "tests", "examples", "benchmarks"):
        expected = {name for name in files_below(ROOT / folder) if not name.endswith(".o")}
        assert expected <= files_below(sdist / folder), folder
    for name in ("setup.py", "pyproject.toml", "constraints.txt", "LICENSE", "MANIFEST.in"):
        assert (sdist / name).is_file()


def test_the_wheel_holds_package_templates_and_headers(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"flashattn_jit/{name}" for name in files_below(ROOT / "flashattn_jit")} <= names
    for folder, source in (
        ("templates", "templates"),
        ("include", "csrc/include"),
        ("emulator", "csrc/emulator"),
    ):
        files = (name for name in files_below(ROOT / source) if "/." not in f"/{name}")
        expected = {f"flashattn_jit/_data/{folder}/{name}" for name in files}
        assert expected == {n for n in names if n.startswith(f"flashattn_jit/_data/{folder}/")}
    tops = {name.split("/")[0] for name in names}
    assert tops == {"flashattn_jit", "flashattn_jit-0.1.0.dist-info"}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {name for name in names if name.endswith(".so")} == {f"flashattn_jit/_C{suffix}"}
    assert "flashattn_jit-0.1.0.dist-info/licenses/LICENSE" in names


def printed(environment: Path, folder: Path, *arguments: str) -> str:
    """What the environment's Python prints in `folder`, without this checkout on its path."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["FLASHATTN_JIT_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [str(environment / "bin" / "python"), *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_wheel_compiles_and_runs_a_new_variant_without_the_checkout(
    environment: Path, tmp_path: Path
) -> None:
    program = tmp_path / "run.py"  # hooks are read from a file
    program.write_text(RUN)
    assert printed(environment, tmp_path, str(program), str(environment), str(ROOT)) == "ran\n"
    assert list((tmp_path / "cache").glob("v1/[!.]*/??/*/meta.json"))


def test_a_wheel_brings_the_command_line(environment: Path, tmp_path: Path) -> None:
    listed = printed(environment, tmp_path, "-c", COMMAND, "cache", "ls", "--json")
    assert '"command": "cache ls"' in listed


def test_a_wheel_and_one_of_kernels_need_no_compiler(
    environment: Path, kernels: Path, tmp_path: Path
) -> None:
    found = run_without_compiler(environment / "bin" / "python", tmp_path, kernels)
    assert found == f"{kernels / 'acme_kernels' / 'kernels.pack'}\n"
