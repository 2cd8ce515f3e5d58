"""The code of Markdown pages, in order: what is shown, and set-up in comments that is not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PARTS = re.compile(
    r"^<!-- run:\n(?P<hidden>.*?)^-->$|^```(?P<kind>[^\n]*)\n(?P<shown>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Snippet:
    """A fenced block, or a comment ``<!-- run:``, whose code the tests run where it stands.

    kind: the words after the fence, such as ``python``, or ``run`` of a comment. line: of the first
    line of the code in its file. text: the code. section: the last heading before it.
    """

    kind: str
    line: int
    text: str
    section: str


def snippets(page: Path) -> list[Snippet]:
    """All blocks and comments of a page."""
    text = page.read_text()
    found = []
    for part in _PARTS.finditer(text):
        name = "hidden" if part["hidden"] is not None else "shown"
        line = text.count("\n", 0, part.start(name)) + 1
        headings = re.findall(r"^#+ (.*)$", _PARTS.sub("", text[: part.start()]), re.MULTILINE)
        section = headings[-1] if headings else ""
        found.append(
            Snippet("run" if name == "hidden" else part["kind"], line, part[name], section)
        )
    return found


def execute(page: Path, snippet: Snippet, scope: dict[str, object], text: str = "") -> None:
    """Run a snippet, or `text` in its place; tracebacks and traced hooks name the page's lines."""
    padded = "\n" * (snippet.line - 1) + (text or snippet.text)
    exec(compile(padded, str(page), "exec"), scope)
