"""zentorch, AMD's extension of torch: its SDPA.

Only its library of operators is loaded: importing the package would change how torch compiles.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engines.case import (
    Case,
    Engine,
    Inputs,
    NotAvailable,
    Prepared,
    Source,
    dense,
    packed,
)


def _make(case: Case, inputs: Inputs) -> Mapping[str, Prepared]:
    q, k, v = (dense(t, len(case.q_lens)) for t in (inputs.q, inputs.k, inputs.v))
    is_causal = case.causal and case.q_lens[0] > 1
    run = partial(torch.ops.zentorch.zentorch_sdpa, q, k, v, is_causal=is_causal)

    def result() -> Tensor:
        out: Tensor = run()[0]
        return packed(out)

    return {"zentorch": Prepared(run, result)}


def _open() -> Engine:
    found = importlib.util.find_spec("zentorch")
    if found is None or found.origin is None:
        raise NotAvailable("not installed")
    version = importlib.metadata.version("zentorch")
    wanted, here = version.split(".")[:2], str(torch.__version__).split(".")[:2]
    if wanted != here:
        raise NotAvailable(f"{version} is for torch {'.'.join(wanted)}, this is {'.'.join(here)}")
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("libzentorch.so")))
    except OSError as error:
        raise NotAvailable(str(error)) from error
    return Engine(version, _make)


SOURCE = Source(_open, "pip install --no-deps zentorch==<torch's version>.*", held=False)
