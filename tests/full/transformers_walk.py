"""Compares the engine with eager code on every model type of transformers.

    python -m tests.full.transformers_walk [--write] [TYPE ...]

--write writes the table of docs/transformers.md; without it, rows that differ from the table are
counted. TYPE: run only these types. Each type runs in a process with a time and a memory limit, as
some cannot be made small.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.integrations.table import DOCUMENT, Row, read, table_of

_SECONDS, _BYTES = 150, 12 << 30


def walk(types: Sequence[str], jobs: int = 2) -> Iterator[Row]:
    """The row of each type, in order."""
    import torch

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    import tests.integrations.walk  # noqa: F401 - children are forked with it

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda name: _in_a_process(name, pathlib.Path(folder)), types)


def all_types() -> list[str]:
    """The model types that transformers can make configs of."""
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING.keys())


def _in_a_process(model_type: str, folder: pathlib.Path) -> Row:
    path = folder / f"{model_type}.json"
    child = multiprocessing.get_context("fork").Process(target=_child, args=(model_type, path))
    child.start()
    child.join(_SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        return Row(model_type, "", "not built", f"took more than {_SECONDS} s")
    if not path.exists():
        return Row(model_type, "", "not built", f"its process ended with {child.exitcode}")
    return Row(**json.loads(path.read_text()))


def _child(model_type: str, path: pathlib.Path) -> None:
    from tests.integrations import walk as walker

    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    # Warnings of eager code are of no interest here.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    path.write_text(json.dumps(dataclasses.asdict(walker.outcome(model_type).row())))


def main() -> int:
    """The command line; returns 1 where a row differs from the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    types = arguments.types or all_types()
    known = (
        {} if arguments.write and not arguments.types else {row.model_type: row for row in read()}
    )
    rows, changed = [], 0
    for number, row in enumerate(walk(types), 1):
        rows.append(row)
        differs = known.get(row.model_type) not in (None, row)
        changed += differs
        print(f"{number}/{len(types)} {row.model_type}: {row.outcome} {row.remark}", flush=True)
    if arguments.write:
        kept = [row for name, row in known.items() if name not in types]
        version = importlib.metadata.version("transformers")
        head = DOCUMENT.read_text().partition("\n## The table")[0]
        DOCUMENT.write_text(f"{head}\n{table_of([*kept, *rows], version)}")
    elif changed:
        print(f"{changed} rows differ from {DOCUMENT.name}")
    return 0 if arguments.write or not changed else 1


if __name__ == "__main__":
    sys.exit(main())
