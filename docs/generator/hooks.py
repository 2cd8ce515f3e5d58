"""MkDocs hooks: pages of files outside of docs/, and the links among all pages.

In the repository links are paths from one file to another. The site has docs/ at its root and the
files outside of it in the folder `repository`; a link to a file that is no page becomes text. A
link whose text is the name of a page's file has that page's title instead.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

OUTSIDE = (
    "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md", "benchmarks/measured/*.md",
    "examples/README.md", "examples/0*.py", "tests/README.md",
)  # fmt: skip

LINK = re.compile(r"\[([^\[\]]+)\]\(([\w./-]+)(#[\w-]*)?\)")

HIDDEN = re.compile(r"^<!-- run:\n.*?^-->\n", re.DOTALL | re.MULTILINE)
"""What the tests run and readers do not see."""

PIPES = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code in a table that has an escaped bar, which Python-Markdown shows with its backslash."""


def code_with_pipes(found: re.Match[str]) -> str:
    """The code as HTML, in which a bar needs no backslash."""
    return f"<code>{html.escape(found[1].replace(chr(92), '')).replace('|', '&#124;')}</code>"


def address(path: Path) -> str | None:
    """The page of a file, as a path within the site's sources; None if it has none."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix() if path.is_file() else None
    if path.is_relative_to(ROOT) and any(path in ROOT.glob(pattern) for pattern in OUTSIDE):
        return f"repository/{path.relative_to(ROOT).with_suffix('.md').as_posix()}"
    return None


def titles(nav: Any) -> dict[str, str]:
    """The titles that the navigation gives to pages, by address."""
    found: dict[str, str] = {}
    for entry in nav:
        for title, inside in entry.items() if isinstance(entry, dict) else ():
            found |= {inside: title} if isinstance(inside, str) else titles(inside)
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of files outside of docs/; Python files become listings."""
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        text = path.read_text()
        if path.suffix == ".py":
            text = f"# {path.relative_to(ROOT)}\n\n```python\n{text}```\n"
        uri = address(path)
        assert uri is not None
        files.append(File.generated(config, uri, content=text))
        sources[uri] = path
    return files


sources: dict[str, Path] = {}
"""The files of pages outside of docs/."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that cross the border of docs/, and drop what is for the tests alone."""
    uri = page.file.src_uri
    source = sources.get(uri, DOCS / uri)
    named = titles(config["nav"])

    def rewrite(found: re.Match[str]) -> str:
        text, link, anchor = found[1], found[2], found[3] or ""
        target = (source.parent / link).resolve()
        if not target.exists():
            return found[0]  # MkDocs reports it
        to = address(target)
        if to is None:
            return text
        if text.endswith(".md"):
            text = named.get(to, text)
        return f"[{text}]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}{anchor})"

    return LINK.sub(rewrite, PIPES.sub(code_with_pipes, HIDDEN.sub("", markdown)))
