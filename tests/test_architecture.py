"""The files, modules and functions that documents and comments name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT, ROOT / "flashattn_jit", ROOT / "csrc" / "include", ROOT / "csrc")
"""Where paths in texts begin."""

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
BOXES = re.findall(r'^ +[A-Z]+[\[(]"(.*)"[\])]$', ARCHITECTURE, flags=re.MULTILINE)


def found(path: str, beside: Path | None = None) -> Path | None:
    """The file or folder of this name; beside: the folder of the path before it in a list."""
    folders = (*FOLDERS, beside) if beside else FOLDERS
    return next((folder / path for folder in folders if (folder / path).exists()), None)


@pytest.mark.parametrize("box", BOXES)
def test_a_box_of_the_drawing_names_what_its_files_define(box: str) -> None:
    """``function, Class.method: words<br/>file, file``."""
    *lines, paths = box.split("<br/>")
    texts: list[str] = []
    beside: Path | None = None
    for name in paths.split(", "):
        path = found(name, beside)
        assert path is not None, f"there is no {name}"
        beside = path.parent
        files = [path] if path.is_file() else [p for p in path.glob("*.[phc]*") if p.is_file()]
        texts += [file.read_text() for file in files]
    for name in re.split(r"::|\.|, ", " ".join(lines).partition(": ")[0]):
        assert any(re.search(rf"\b{name}\b", text) for text in texts), f"{paths} has no {name}"


def test_the_drawing_is_there() -> None:
    assert len(BOXES) > 20


TOP = ("flashattn_jit", "csrc", "templates", "tests", "benchmarks", "examples", "docs", ".ci")

SOURCE = r"\.(?:pyi?|h|cpp|cu|j2|md)"
PATH = re.compile(rf"(?<![\w./$<{{}}-])((?:[\w.*-]+/)+[\w.*-]+{SOURCE})\b")
"""A path of folders and a file, which may be a pattern."""

QUOTED = re.compile(rf"`([\w./*-]+{SOURCE})`")
"""A path or the bare name of a file, in backticks."""

FOLDER = re.compile(rf"`((?:{'|'.join(map(re.escape, TOP))})/[\w/-]+)`")
MODULE = re.compile(r"`((?:flashattn_jit|tests|benchmarks)(?:\.\w+)+)`")
COMMAND = re.compile(r"python3? -m ((?:flashattn_jit|tests|benchmarks)(?:\.\w+)*)")
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]*)?\)")

OTHERS = {
    "service.py": "a user's",
    "kernel.cu": "of a build folder",
    "variant.cpp": "a message of the compiler, in rendered source",
    "ATen/native/TypeProperties.cpp": "torch's",
    "hopper/heuristics.h": "FlashAttention's",
    "vllm/v1/attention/backends/cpu_attn.py": "vLLM's",
    "csrc/flash_attn/src": "FlashAttention's",
    "flashattn_jit.kernels": "a group of entry points",
}
"""Names that look like those of files and modules of this repository."""

FILES = sorted(
    path
    for path in (*ROOT.glob("*.*"), *(p for top in TOP for p in (ROOT / top).rglob("*")))
    if path.is_file() and not {"__pycache__", "_data"} & set(path.parts)
)
PLACES = "\n".join(f"/{path.relative_to(ROOT).as_posix()}" for path in FILES)
TEXTS = [
    path
    for path in FILES
    if path.suffix in (".py", ".pyi", ".h", ".cpp", ".j2", ".md", ".toml")
    or path.parent.name == ".ci"
]


def is_path(name: str) -> bool:
    """Whether a file's path ends so: ``jit/module.py``; ``_masks.py`` is the end of a name."""
    pattern = re.escape(name).replace(r"\*", "[^/\n]*")
    begin = "" if name.startswith("_") else "/"
    return re.search(rf"{begin}{pattern}$", PLACES, flags=re.MULTILINE) is not None


def is_module(name: str) -> bool:
    """Whether it is a package, a module, or a name in the text of one."""
    path, words = ROOT, name.split(".")
    while words and (path / words[0]).is_dir():
        path /= words.pop(0)
    if words and path.joinpath(f"{words[0]}.py").is_file():
        path = path / f"{words.pop(0)}.py"
    elif words:
        path = path / "__init__.py"
    text = path.read_text() if words and path.is_file() else ""
    return all(re.search(rf"\b{word}\b", text) for word in words)


def missing_names(path: Path, text: str) -> list[str]:
    """What a text names that does not exist. Tests invent files too, but none in backticks."""
    paths = set(QUOTED.findall(text))
    if path.suffix != ".py" or "tests" not in path.relative_to(ROOT).parts:
        paths |= set(PATH.findall(re.sub(r"^ *#include.*", "", text, flags=re.MULTILINE)))
    missing = {name for name in paths if not is_path(name.replace("../", ""))}
    missing |= {name for name in FOLDER.findall(text) if not (ROOT / name).exists()}
    modules = {*MODULE.findall(text), *COMMAND.findall(text)}
    missing |= {name for name in modules if not is_module(name)}
    if path.suffix == ".md":
        missing |= {link for link in LINK.findall(text) if not (path.parent / link).exists()}
    return sorted(missing - set(OTHERS))


def test_what_texts_name_exists() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in TEXTS
        # This file invents names, and the changelog may name what has been removed since.
        if path not in (Path(__file__), ROOT / "CHANGELOG.md")
        for name in missing_names(path, path.read_text())
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("in `jit/module.py`, `module.py` and `csrc/emulator/ops/*.cpp`", []),
        ("in `jit/modules.py`", ["jit/modules.py"]),
        ("see jit/modules.py.", ["jit/modules.py"]),
        ("in `modules.py` and `odule.py`", ["modules.py", "odule.py"]),
        ("`tests/variants/library/test_library_*.py`, `_masks.py`", []),
        ("`tests/variants/library/test_lib_*.py`, `_masked.py`", [
            "_masked.py", "tests/variants/library/test_lib_*.py",
        ]),
        ("`flashattn_jit.inspect.dims.DEFAULT`, ``flashattn_jit.env``", []),
        ("`flashattn_jit.inspect.dims.DEFAULTS`", ["flashattn_jit.inspect.dims.DEFAULTS"]),
        ("`flashattn_jit.nowhere.verify`", ["flashattn_jit.nowhere.verify"]),
        ("`tests/fleet`, `csrc/emulator/ops/` and `.ci/full`", []),
        ("`tests/fleets`, `csrc/emulators/`", ["csrc/emulators/", "tests/fleets"]),
        ("python -m benchmarks.gpu check FOLDER", []),
        ("python -m benchmarks.gpus check FOLDER", ["benchmarks.gpus"]),
        ("[the map](tests/README.md), [a part](docs/cache.md#layers)", []),
        ("[the map](tests/MAP)", ["tests/MAP"]),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(text: str, missing: list[str]) -> None:
    assert missing_names(ROOT / "README.md", text) == missing


def test_the_map_names_the_folders_of_kernel_headers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `csrc/include/fajit` |"))
    folders = {p.name for p in (ROOT / "csrc/include/fajit").rglob("*") if p.is_dir()}
    assert not {f for f in folders if f"`{f}/`" not in row}
