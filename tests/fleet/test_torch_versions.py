"""Kernels do not depend on the version of Python or torch.

The first test uses a second interpreter with another version of torch, for which this checkout's
package is built: FLASHATTN_JIT_OTHER_PYTHON names it, and FLASHATTN_JIT_OTHER_PACKAGE
the folder that holds its flashattn_jit, unless it is installed there.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fleet.fleet import WORKER, Fleet, entries, package_folder, tree

OTHER_PYTHON = os.environ.get("FLASHATTN_JIT_OTHER_PYTHON", "")
OTHER_PACKAGE = os.environ.get("FLASHATTN_JIT_OTHER_PACKAGE", "")

PROGRAM = """
import json, sys
sys.path[:0] = filter(None, sys.argv[1:3])
import torch, worker
import flashattn_jit
answer = worker._attend(int(sys.argv[3]))
answer["key"] = worker.task_key()["key"]
answer["versions"] = [sys.version.split()[0], str(torch.__version__)]
print(json.dumps(answer))
"""


def attend(python: str, package: str, dim: int, env: dict[str, str]) -> dict[str, object]:
    """A call in a new process of this interpreter."""
    done = subprocess.run(
        [python, "-c", PROGRAM, package, str(WORKER.parent), str(dim)],
        env={n: v for n, v in env.items() if n != "PYTHONPATH"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{python}\n{done.stdout}{done.stderr}"
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(
    not OTHER_PYTHON, reason="needs FLASHATTN_JIT_OTHER_PYTHON, an interpreter with another torch"
)
def test_built_under_one_torch_found_and_loaded_under_another(fleet: Fleet) -> None:
    here, there = (sys.executable, package_folder()), (OTHER_PYTHON, OTHER_PACKAGE)
    for builder, user, dim in ((here, there, 8), (there, here, 12)):
        built = attend(*builder, dim, fleet.env)
        before = tree(fleet.cache)
        never = {**fleet.env, "FLASHATTN_JIT_COMPILE": "never", "PATH": "/nowhere"}
        found = attend(*user, dim, never)
        assert built["versions"] != found["versions"]
        assert (built["source"], found["source"]) == ("compiler", "disk")
        assert built["key"] == found["key"]
        assert found["mapped"] == built["mapped"] != []
        # With a compiler at hand it asks for that compiler's: it is the same one.
        assert attend(*user, dim, fleet.env)["source"] == "disk"
        assert tree(fleet.cache) == before
    assert fleet.compiler.compiles == 2
    assert len(entries(fleet.cache)) == 2


def test_an_artifact_names_neither(warm: Fleet) -> None:
    """The artifact has no name of a library or symbol of torch or Python."""
    (entry,) = entries(warm.cache)
    artifact = entry.joinpath("artifact.so").read_bytes()
    for word in (b"libtorch", b"libc10", b"libpython", b"_GLIBCXX", b"PyObject", b"c10::"):
        assert word not in artifact, word


def test_what_is_in_a_key_names_neither(warm: Fleet) -> None:
    """Nor does the entry's path."""
    (entry,) = entries(warm.cache)
    meta = json.loads(entry.joinpath("meta.json").read_text())
    texts = [json.dumps(meta["document"]), str(entry.relative_to(warm.cache))]
    versions = {
        torch.__version__, torch.__version__.partition("+")[0], platform.python_version(),
        f"cpython-{sys.version_info[0]}{sys.version_info[1]}",
    }  # fmt: skip
    for version in versions:
        assert not any(re.search(rf"(?<![\d.]){re.escape(version)}", text) for text in texts)
    assert "torch" not in meta["document"]


def test_flags_of_torchs_own_driver_do_not_reach_the_code(warm: Fleet) -> None:
    """The driver adds include folders and a C++ standard; our standard comes last, and no source
    includes a header of torch."""
    (entry,) = entries(warm.cache)
    compile_line, _ = entry.joinpath("command").read_text().splitlines()
    assert re.findall(r"-std=\S+", compile_line)[-1] == "-std=c++17"
    sources = [entry.joinpath("kernel.cpp"), *Path(package_folder()).glob("csrc/include/**/*.h")]
    for source in sources:
        assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10|pybind11|Python\.h)",
                             source.read_text()), source  # fmt: skip
