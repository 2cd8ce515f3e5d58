"""docs/architecture.md and CONTRIBUTING.md name files and functions that exist."""

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


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_paths_exist(document: str) -> None:
    """Those in backticks with a folder in front; a bare name is a file of the folder before it."""
    beside: Path | None = None
    missing = []
    for name in re.findall(r"`([\w./*-]+\.(?:py|h|cpp|j2|md))`", (ROOT / document).read_text()):
        if "*" in name:
            folder, _, pattern = name.rpartition("/")
            path = found(folder, beside)
            if path is None or not list(path.glob(pattern)):
                missing.append(name)
            continue
        path = found(name, beside)
        if path is None and "/" not in name:
            path = next((p for f in FOLDERS[1:] for p in f.rglob(name)), None) or next(
                (ROOT / "tests").rglob(f"*{name}"), None
            )
        if path is None:
            missing.append(name)
        else:
            beside = path.parent
    assert not missing, f"{document} names what does not exist: {missing}"
