"""A key depends on everything that the artifact is made of, and on nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashattn_jit import env
from flashattn_jit.jit.cache import entry
from flashattn_jit.jit.cache.entry import kernel_key, reached_sources, read_sources
from flashattn_jit.jit.compilation.toolchain import flags_for


def digest(root: Path) -> str:
    return read_sources("kernel.cpp.j2", root / "templates", root / "include", root / "package")


def test_same_sources_elsewhere_and_later_have_the_same_digest(
    sources: Path, tmp_path: Path
) -> None:
    first = digest(sources)
    shutil.copytree(sources, tmp_path / "moved" / "checkout")
    for path in sources.rglob("*"):
        os.utime(path, (1, 1))
    assert digest(sources) == first
    assert digest(tmp_path / "moved" / "checkout") == first


@pytest.mark.parametrize(
    "name",
    [
        "templates/kernel.cpp.j2",
        "templates/macros.j2",
        "include/fajit/a.h",
        "include/fajit/nested/b.h",
        "include/fajit/cpu/x.h",
        "include/fajit/cpu/y.h",
        "package/codegen/render.py",
        "package/codegen/spec.py",
        "package/variants/lower/hooks.py",
        "package/variants/lower/row.py",
        "package/variants/ir/ir.py",
    ],
)
def test_an_edit_of_anything_reached_changes_the_digest(sources: Path, name: str) -> None:
    first = digest(sources)
    with (sources / name).open("a") as file:
        file.write("\n")
    assert digest(sources) != first


@pytest.mark.parametrize(
    "name",
    [
        "templates/unused.j2",
        "include/fajit/other.h",
        "package/codegen/other.py",
        "package/variants/trace/tracer.py",
        "package/errors.py",
    ],
)
def test_an_edit_of_what_is_not_reached_does_not(sources: Path, name: str) -> None:
    first = digest(sources)
    (sources / name).write_text("changed")
    assert digest(sources) == first


GENERATOR = {
    *(f"codegen/{name}.py" for name in ("budget", "render", "spec", "targets")),
    "variants/ir/ir.py",
    *(
        f"variants/lower/{name}.py"
        for name in (
            "block",
            "channels",
            "expressions",
            "hooks",
            "pair",
            "row",
            "row_numbers",
            "score",
        )
    ),
}


def test_the_generator_is_what_renders_and_what_lowers() -> None:
    """A module that the generator imported by accident would change every key with each edit."""
    places = env.templates_dir(), env.include_dir(), env.PACKAGE_DIR
    reached = reached_sources("cpu/attention.cpp.j2", *places)
    modules = {name.removeprefix("package/") for name in reached if name.startswith("package/")}
    interval_form = {m for m in modules if m.startswith("variants/interval/")}
    assert modules - interval_form == GENERATOR


def test_text_moved_from_one_file_to_the_next_changes_the_digest(sources: Path) -> None:
    (sources / "package/variants/ir/ir.py").write_text("ab")
    (sources / "package/variants/lower/row.py").write_text("c")
    first = digest(sources)
    (sources / "package/variants/ir/ir.py").write_text("a")
    (sources / "package/variants/lower/row.py").write_text("bc")
    assert digest(sources) != first


def test_a_missing_header_is_an_error(sources: Path) -> None:
    (sources / "include/fajit/nested/b.h").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.h"):
        digest(sources)


def test_every_field_of_the_document_counts(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(
        spec: str = "{}", target: str = "cpu:avx2", flags: tuple[str, ...] = ("-a", "-b")
    ) -> str:
        return kernel_key(spec, "kernel.cpp.j2", target, flags).hex

    found = [
        key(),
        key(spec="{ }"),
        key(target="cpu:avx512"),
        key(flags=("-b", "-a")),
        key(flags=("-a", "-b", "-c")),
    ]
    monkeypatch.setattr(entry, "SCHEMA", entry.SCHEMA + 1)
    found.append(key())
    assert len(set(found)) == len(found)
    assert key() == key()
    assert len(key()) == 64


def test_fields_cannot_run_into_each_other(sources: Path) -> None:
    one = kernel_key("b", "kernel.cpp.j2", "a", ()).hex
    other = kernel_key("", "kernel.cpp.j2", "ab", ()).hex
    assert one != other


def test_targets_have_flags_of_their_own() -> None:
    targets = ("cpu:generic", "cpu:avx2", "cpu:avx512", "cpu:avx512_bf16")
    assert len({flags_for(target) for target in targets}) == len(targets)


def test_the_hash_seed_has_no_say(sources: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from flashattn_jit.jit.cache.entry import *\n"
        "root = Path(sys.argv[1])\n"
        "print(read_sources('kernel.cpp.j2', *(root / n for n in "
        "('templates', 'include', 'package'))))\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, str(sources)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert printed == {digest(sources) + "\n"}


def test_a_change_after_the_digest_was_taken_is_seen(sources: Path) -> None:
    entry.sources_digest("kernel.cpp.j2")
    assert not entry.sources_changed("kernel.cpp.j2")
    (sources / "include/fajit/a.h").write_text("int changed;\n")
    assert entry.sources_changed("kernel.cpp.j2")
