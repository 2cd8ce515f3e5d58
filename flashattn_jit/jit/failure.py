"""How a build fails, and which of a compiler's words say why."""

from __future__ import annotations

import re
from collections.abc import Sequence

# gcc:   file:line:column: error: text
# nvcc:  file(line): error: text, error #20: text; ptxas file, line n; error : text
_FIRST_ERROR = re.compile(
    r"^(?:(?P<file>[^\n]*?):(?P<line>\d+)(?::\d+)?: )?[^\n:()]*?(?:fatal )?error: (?P<text>[^\n]*)$"
    r"|^(?P<file2>[^\n(]*?)\((?P<line2>\d+)\): [^\n:]*?error(?: #[\w-]+)?: (?P<text2>[^\n]*)$"
    r"|^(?:nvcc|ptxas|cicc|nvlink|fatbinary)[^\n]*?(?:fatal|error)\s*: (?P<text3>[^\n]*)$",
    re.MULTILINE,
)
_LINK_ERROR = re.compile(r"^[^\n]*(?:undefined reference|cannot find)[^\n]*$", re.MULTILINE)
_DRIVER_ERROR = "Error building extension"


class BuildFailure(Exception):
    """The compiler failed; its words are in the staged build log."""

    def __init__(self, first_error: str, location: tuple[str, int] | None) -> None:
        super().__init__(first_error)
        self.first_error = first_error
        self.location = location


class SpillError(BuildFailure):
    """The kernel compiled, but keeps registers in memory: a smaller tile may not.

    The staging folder holds a whole entry; `complaints` says what exceeds what.
    """

    def __init__(self, complaints: Sequence[str], compile_s: float) -> None:
        super().__init__("; ".join(complaints), None)
        self.complaints = tuple(complaints)
        self.compile_s = compile_s


def failure(words: str, driver_error: str) -> BuildFailure:
    """The first error in the compiler's words; in the driver's, where it did not get that far."""
    if found := _FIRST_ERROR.search(words):
        file, line = found["file"] or found["file2"], found["line"] or found["line2"]
        text = found["text"] or found["text2"] or found["text3"]
        return BuildFailure(text.strip(), (file, int(line)) if file else None)
    if found := _LINK_ERROR.search(words):
        return BuildFailure(found.group().strip(), None)
    if not words.strip() and driver_error.startswith(_DRIVER_ERROR):
        return BuildFailure("the compiler failed and said nothing", None)
    return BuildFailure((words.strip() or driver_error).splitlines()[0], None)
