"""A griffe extension: examples in docstrings (``>>> ...``) become code blocks of the page."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """The text with each run of lines that begins with ``>>>`` in a fence."""
    out: list[str] = []
    inside, fence_indent = False, ""
    for line in text.splitlines():
        bare = line.lstrip()
        indent = line[: len(line) - len(bare)]
        if bare.startswith(">>>") and not inside:
            if out and out[-1].strip() and not out[-1].strip().endswith(":"):
                out.append("")
            out.append(f"{indent}```pycon")
            inside, fence_indent = True, indent
        elif inside and not bare:
            out.append(f"{fence_indent}```")
            inside = False
        out.append(line)
    if inside:
        out.append(f"{fence_indent}```")
    return "\n".join(out)


class Doctests(griffe.Extension):
    """Applies `fenced` to every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
