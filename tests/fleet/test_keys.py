"""What an artifact is made of changes its key, nothing else does: on copies of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet.fleet import WORKER, Fleet, entries, package_folder

HEADER = "csrc/include/fajit/abi.h"
NESTED = "csrc/include/fajit/cpu/vector/vec.h"
TEMPLATE = "templates/cpu/attention.cpp.j2"
KEY = (
    "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
    "import worker; print(worker.task_key()['key'])\n"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the checkout's package in another folder and with other mtimes."""
    root = Path(package_folder())
    if not (root / "csrc" / "include").is_dir():
        pytest.skip("needs a checkout: an installed package has no folder beside it to copy")
    made = tmp_path / "another place" / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "_data")
    for name in ("flashattn_jit", "templates", "csrc/include"):
        shutil.copytree(root / name, made / name, ignore=ignored)
    for path in (p for p in made.rglob("*") if p.is_file()):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return made


def key(fleet: Fleet, tree: Path | str, **arguments: object) -> str:
    """The key that a process with the package of this tree computes."""
    result = fleet.start("key", tree=str(tree), arguments=arguments).good()
    assert Path(result["package"]).is_relative_to(tree)
    return str(result["key"])


def test_place_and_times_have_no_say(fleet: Fleet, copy: Path) -> None:
    assert key(fleet, copy) == key(fleet, package_folder())


def test_hash_seed_user_and_folder_have_no_say(fleet: Fleet, tmp_path: Path) -> None:
    """In new interpreters, which read the hash seed when they start."""
    expected = key(fleet, package_folder())
    for seed, home in (("0", "/"), ("4294967295", str(tmp_path))):
        env = {**fleet.env, "PYTHONHASHSEED": seed, "HOME": home, "USER": seed, "LANG": "C"}
        printed = subprocess.run(
            [sys.executable, "-c", KEY, package_folder(), str(WORKER.parent)],
            env=env, cwd=home, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        assert printed.split() == [expected]


@pytest.mark.parametrize("name", [HEADER, NESTED, TEMPLATE, "flashattn_jit/codegen/spec.py"])
def test_an_edit_of_what_a_source_is_made_of_changes_it(
    fleet: Fleet, copy: Path, name: str
) -> None:
    with (copy / name).open("a") as file:
        file.write("\n")
    assert key(fleet, copy) != key(fleet, package_folder())


def test_a_nested_header_is_one_that_no_template_names(copy: Path) -> None:
    """So that the test above tests a header that is included by another header."""
    templates = "".join(path.read_text() for path in copy.glob("templates/cpu/*.j2"))
    assert Path(NESTED).relative_to("csrc/include").as_posix() not in templates


def test_an_edit_of_what_has_no_part_in_it_does_not(fleet: Fleet, copy: Path) -> None:
    with (copy / "flashattn_jit/inspect/cache.py").open("a") as file:
        file.write("\n# more\n")
    (copy / "csrc/include/fajit/cuda").mkdir(exist_ok=True)
    (copy / "csrc/include/fajit/cuda/another.h").write_text("int another;\n")
    assert key(fleet, copy) == key(fleet, package_folder())


def test_a_flag_and_the_abi_change_it(fleet: Fleet, copy: Path) -> None:
    expected = key(fleet, copy)
    flags = copy / "flashattn_jit/jit/compilation/toolchain.py"
    flags.write_text(flags.read_text().replace('"-O3",', '"-O2",'))
    assert key(fleet, copy) != expected


def test_the_target_and_the_spec_change_it(fleet: Fleet) -> None:
    found = {key(fleet, package_folder(), target=t) for t in ("cpu:avx2", "cpu:generic", "sm_80")}
    found.add(key(fleet, package_folder(), dim=16))
    assert len(found) == 4


def test_an_edited_header_compiles_anew_and_the_old_one_is_found_again(
    warm: Fleet, copy: Path
) -> None:
    assert warm.start(tree=str(copy)).good()["source"] == "disk"
    (copy / NESTED).write_text((copy / NESTED).read_text() + "// edited\n")
    assert warm.start(tree=str(copy)).good()["source"] == "compiler"
    assert warm.start(tree=str(copy)).good()["source"] == "disk"
    assert warm.start().good()["source"] == "disk"
    assert warm.compiler.compiles == 1
    assert len(entries(warm.cache)) == 2


def test_another_version_of_the_compiler_compiles_anew(warm: Fleet) -> None:
    """Found by its content: another script here, another executable there."""
    (old,) = entries(warm.cache)
    upgraded = warm.root / "upgraded-c++"
    upgraded.write_text(warm.compiler.command.read_text() + "# 99.1\n")
    upgraded.chmod(0o755)
    warm.compiler.folder.joinpath("version").write_text("g++ (Debian) 99.1.0\n")
    env = {"FLASHATTN_JIT_CXX": str(upgraded)}
    assert warm.start(env=env).good()["source"] == "compiler"
    assert warm.start(env=env).good()["source"] == "disk"
    both = entries(warm.cache)
    assert len(both) == 2
    # The same key below another compiler's name.
    assert {path.name for path in both} == {old.name}
    assert any("99.1.0" in str(path) for path in both)
    # The first compiler's is still its own, and without any compiler either will do.
    assert warm.start().good()["source"] == "disk"
    never = {"FLASHATTN_JIT_COMPILE": "never", "FLASHATTN_JIT_CXX": "no-such-compiler"}
    assert warm.start(env=never).good()["source"] == "disk"


def test_another_name_of_the_same_compiler_does_not(warm: Fleet) -> None:
    renamed = warm.root / "renamed-c++"
    renamed.write_text(warm.compiler.command.read_text() + "# another place\n")
    renamed.chmod(0o755)
    assert warm.start(env={"FLASHATTN_JIT_CXX": str(renamed)}).good()["source"] == "disk"
    assert warm.compiler.compiles == 0
