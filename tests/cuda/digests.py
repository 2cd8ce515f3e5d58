"""The table of digests of every kernel. `python -m tests.cuda.digests [JOBS] [CASE ...]` writes it.

With names of cases it updates only these; JOBS is the number of concurrent nvcc processes.

digests.json has, for each case and target, the digest of the rendered sources of both tile kinds,
and, for targets whose PTX differs from that of any other target, the digest of the PTX of one tile
kind. PTX is digested without line information, so that a header may be rearranged. A change that
should not change kernels leaves the table as it is; another change shows here which kernels it
changed. PTX depends on the compiler, whose release the table names.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashattn_jit.codegen.render import render
from flashattn_jit.codegen.targets import CUDA_TARGETS
from flashattn_jit.jit.compilation.nvcc import cuda_version
from flashattn_jit.jit.compilation.toolchain import ask_version, find_compiler
from tests.cuda.kernels import KINDS, ptx_of, spec_of, twin, without_lines
from tests.registry.cases import CASES, by_name

TABLE = Path(__file__).with_name("digests.json")
_HEX_DIGITS = 16


def source_digest(name: str, target: str) -> str:
    """The digest of a case's rendered sources, prefill and few-row."""
    return _digest(render(spec_of(name, target, kind)) for kind in KINDS)


def ptx_digest(name: str, target: str) -> str:
    """The digest of the PTX of one of these kernels; the tile kind depends on case and target."""
    kind = KINDS[zlib.crc32(f"{name} {target}".encode()) % len(KINDS)]
    return _digest([without_lines(ptx_of(spec_of(name, target, kind)))])


def nvcc_release() -> str:
    """The release of nvcc, such as "13.0"; empty without nvcc."""
    compiler = find_compiler("sm_80")
    version = cuda_version(ask_version(compiler).version) if compiler else None
    return "{}.{}".format(*version) if version else ""


def read() -> dict[str, dict[str, dict[str, str]]]:
    """The committed table: "sources" and "ptx", each by case and target."""
    table: dict[str, dict[str, dict[str, str]]] = json.loads(TABLE.read_text())
    return table


def main(jobs: int, names: Sequence[str]) -> None:
    """Writes the table. All cases take 700 runs of nvcc: six minutes on two idle cores."""
    cases = [by_name(name) for name in names] or CASES
    kept = read() if names else {"sources": {}, "ptx": {}}
    sources, ptx = kept["sources"], kept["ptx"]
    sources |= {c.name: {t: source_digest(c.name, t) for t in CUDA_TARGETS} for c in cases}
    wanted = [(c.name, t) for c in cases for t in CUDA_TARGETS if twin(c.name, t) is None]
    with ThreadPoolExecutor(jobs) as pool:
        for done, ((name, target), digest) in enumerate(
            zip(wanted, pool.map(lambda w: ptx_digest(*w), wanted), strict=True), 1
        ):
            ptx.setdefault(name, {})[target] = digest
            sys.stderr.write(f"\r{done} of {len(wanted)}")
    table = {"nvcc": nvcc_release(), "sources": sources, "ptx": ptx}
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    sys.stderr.write(f"\n{TABLE}\n")


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:_HEX_DIGITS]


if __name__ == "__main__":
    jobs = int(sys.argv.pop(1)) if sys.argv[1:] and sys.argv[1].isdigit() else 2
    main(jobs, sys.argv[1:])
