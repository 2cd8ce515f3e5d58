"""torch: its SDPA and compiled FlexAttention, as `benchmarks/parts/peers.py` has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.engines.case import Case, Engine, Inputs, Prepared, Source, dense, packed
from benchmarks.parts.measure import Run
from benchmarks.parts.peers import decode_peers, prefill_peers


def _make(case: Case, inputs: Inputs) -> Mapping[str, Prepared]:
    batch, (num_q_heads, _), head_dim = len(case.q_lens), case.heads, case.head_dim
    q, k, v = (dense(t, batch) for t in (inputs.q, inputs.k, inputs.v))
    runs = decode_peers(q, k, v) if case.q_lens[0] == 1 else prefill_peers(q, k, v, case.causal)

    def result(run: Run) -> Tensor:
        out = run()
        assert isinstance(out, Tensor)
        # Heads packed by hand are rows of their kv head.
        return packed(out.reshape(batch, num_q_heads, -1, head_dim))

    return {name: Prepared(run, partial(result, run)) for name, run in runs.items()}


def _open() -> Engine:
    return Engine(str(torch.__version__), _make)


SOURCE = Source(_open, "installed with this package")
