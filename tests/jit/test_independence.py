"""Keys and a real artifact do not depend on the versions of Python and torch."""

from __future__ import annotations

import itertools
import json
import platform
import re
import shutil
import subprocess
import sys

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.jit.cache.entry import Entry, kernel_key, sources_digest
from flashattn_jit.jit.cache.store import Store

# Makes each run's hook differ: a kernel that this process has loaded before is not built again.
_counts = itertools.count(71)


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    """The entry of a real kernel, built by a real call."""
    folder = tmp_path_factory.mktemp("cache")
    q, count = torch.randn(1, 1, 4, 16), next(_counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHATTN_JIT_CACHE_DIR", str(folder))
        fa.attention(q, q, q, fa.variant(score_mod=lambda s, b, h, i, j: sum([s] * count)))
    (found,) = Store(folder).entries()
    return Store(folder).verify(found.path)


def test_the_artifact_needs_no_library_of_torch_or_python(entry: Entry) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (binutils)")
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--dyn-syms", "--wide", str(entry.artifact)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert needed <= {"libgomp.so.1", "libm.so.6", "libc.so.6", "libstdc++.so.6", "libgcc_s.so.1"}
    assert "RUNPATH" not in dynamic and "RPATH" not in dynamic
    undefined = re.findall(r"\bUND +(\S+)", dynamic)
    assert not [name for name in undefined if name.startswith(("Py", "_Py", "_ZN2at", "_ZN3c10"))]


def test_neither_the_artifact_nor_its_document_names_a_version_or_a_place(entry: Entry) -> None:
    document = json.dumps(entry.meta["document"])
    content = entry.artifact.read_bytes()
    here = (torch.__version__, platform.python_version(), sys.prefix, str(entry.path.parents[4]))
    for text in here:
        assert text not in document
        assert text.encode() not in content


def test_the_source_includes_headers_of_ours_alone(entry: Entry) -> None:
    source = entry.path.joinpath("kernel.cpp").read_text()
    assert set(re.findall(r'#include [<"](\w+)/', source)) == {"fajit"}


def test_other_versions_make_the_same_key(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dict(entry.meta["document"])
    monkeypatch.setattr(torch, "__version__", "9.9.9+cu999")
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    monkeypatch.setattr(sys, "version_info", (4, 0, 0, "final", 0))
    monkeypatch.setattr(sys, "version", "4.0.0")
    sources_digest.cache_clear()
    flags = fields["flags"].split("\n")
    again = kernel_key(fields["spec"], "cpu/attention.cpp.j2", fields["target"], flags)
    assert again.hex == entry.key
    assert again.document == tuple((name, text) for name, text in entry.meta["document"])
