"""`_C.IntervalForm` runs the functions that kernels have compiled in, and nothing else."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.variants.interval.range_tables import build_tables
from flashattn_jit.variants.interval.simplify import range_tables
from flashattn_jit.variants.interval.statements import Code, CodeClause, Statement, code_of
from flashattn_jit.variants.interval.tile_runs import MaskParams
from flashattn_jit.variants.ir.ir import OPS, Graph, GraphBuilder

from .bounds_oracle import Mask, described, traced
from .bounds_random import RandomMask
from .test_bounds_lower import captured_masks, random_boxes, registry_masks
from .tile_states import classify_boxes

ROOT = Path(__file__).parents[3]
STATEMENTS = {"meet", "any", "i_gather", "t_gather", "f_gather", "gather_bits", "i_searchsorted"}
"""Statements that are more than a call of a function; see `statements.Statement`."""


def statements(code: Code) -> Iterator[Statement]:
    """All statements of a code."""
    clauses = [*code.keep, *code.drop]
    todo = [*code.once, *code.guards, *(s for c in clauses for s in c.statements)]
    while todo:
        statement = todo.pop()
        yield statement
        todo += [s for clause in statement.clauses for s in clause.statements]


def code(graph: Graph, tensors: Sequence[torch.Tensor]) -> Code:
    params = [(t.dtype, t.rank) for t in described(tensors)]
    return code_of(graph, params)


# --- names ----------------------------------------------------------------------------------------

TENSORS = [torch.zeros(300, dtype=getattr(torch, d)) for d in ("bool", "int32", "int64", "float32")]
ROWS = [t[:, None].expand(300, 70) for t in TENSORS]  # longer than what is written out as scalars


def operation_graphs() -> Iterator[Graph]:
    """Every operation of the IR on every kind of value, scalar and long vector."""
    dtypes = ("bool", "int32", "int64", "float32", "float64")
    for dtype in dtypes:
        for shape in ((), (70,)):
            for op, info in OPS.items():
                if info.kind not in ("map", "reduce") or (info.kind == "reduce" and not shape):
                    continue
                for target in dtypes if op == "cast" else (dtype,):
                    g = GraphBuilder(("b", "h", "q_idx", "kv_idx"))
                    args = [_value(g, dtype, shape, name) for name in ("q_idx", "kv_idx")]
                    if op == "where":
                        args = [_value(g, "bool", shape, "q_idx"), *args]
                    truth = "ge gt le lt eq ne isnan isinf any all".split()
                    made = "bool" if op in truth else target
                    length = () if info.kind == "reduce" else shape
                    node = g.add(op, args[: info.arity], made, length)
                    if length:
                        node = g.add("any" if made == "bool" else "amax", [node], made)
                    yield g.finish(node if made == "bool" else g.add("cast", [node], "bool"))
        g = GraphBuilder(("b", "h", "q_idx", "kv_idx"))
        halves = [_value(g, dtype, (70,), name) for name in ("q_idx", "kv_idx")]
        if dtype != "bool":
            halves[0] = g.add("iota", dtype=dtype, shape=(70,), length=70)
        node = g.add("cat", halves, dtype, (140,))
        node = g.add("any" if dtype == "bool" else "amin", [node], dtype)
        yield g.finish(node if dtype == "bool" else g.add("cast", [node], "bool"))


def _value(g: GraphBuilder, dtype: str, shape: tuple[int, ...], name: str) -> int:
    index = g.add("input", dtype="int32", name=name)
    if shape:
        known = {"bool": 0, "int32": 1, "int64": 2}
        slot = len(TENSORS) + known.get(dtype, 3)
        row = g.add("gather", [index], "float32" if slot == 7 else dtype, shape, slot=slot)
        return g.add("cast", [row], dtype, shape) if dtype == "float64" else row
    if dtype == "bool":  # no comparison, which would become a formula
        return g.add("gather", [index], "bool", slot=0)
    return index if dtype == "int32" else g.add("cast", [index], dtype)


def other_masks() -> Iterator[Mask]:
    """Masks that `operation_graphs` lacks: captured numbers, lengths, ranks of reals."""
    edges, rows = torch.tensor([1.0, 5.0, 9.0]), torch.arange(60.0).view(3, 20)
    half = torch.tensor(0.5, dtype=torch.float64)
    yield traced(lambda b, h, q, k: torch.searchsorted(edges, q * 0.3) > h)
    yield traced(lambda b, h, q, k: torch.searchsorted(edges.long(), q) > h)
    # A sum of reals keeps its vector, and with it all others of the mask.
    yield traced(lambda b, h, q, k: (rows[b] + torch.arange(20.0)).sum() > q)
    yield traced(lambda b, h, q, k: (q * 0.25 > half) & torch.isinf(q / k))
    yield traced(lambda b, h, q, k: (q < fa.q_len(b)) & (k < fa.kv_len(b)))
    yield traced(lambda b, h, q, k: fa.q_row(b, q) > fa.kv_slot(b, k))
    yield traced(lambda b, h, q, k: (((q * h) >> k) & 1) == 1)


def test_it_has_exactly_the_functions_that_are_called() -> None:
    called = {s.name for g in operation_graphs() for s in statements(code(g, [*TENSORS, *ROWS]))}
    masks = [*registry_masks()[1], *(traced(f) for _, f in captured_masks()), *other_masks()]
    masks += [RandomMask(random.Random(s).randrange, s).finish(2 + s % 3) for s in range(300)]
    called |= {s.name for m in masks for s in statements(code(m.graph, m.params.tensors))}
    assert called == {*_C.interval_functions(), *STATEMENTS}


# --- malformed codes -----------------------------------------------------------------------------


def mutated(code: Code, choose: random.Random) -> Code:
    """The code with a few fields of a few statements changed."""
    everything = [s.name for s in statements(code)] + _C.interval_functions() + sorted(STATEMENTS)
    registers = [-1, 0, 1, 2, 3, 4, *(s.result for s in statements(code)), 10**6, 2**70]
    numbers = [0, 1, -1, 2, 7, 63, 64, 65, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64, 0.5,
               float("nan"), float("inf"), "1", None]  # fmt: skip

    def changed(values: tuple, options: list) -> tuple:
        made = list(values)
        at = choose.randrange(len(made) + 1)
        made[at : at + choose.randrange(2)] = [choose.choice(options)]
        return tuple(made)

    def of(statement: Statement) -> Statement:
        clauses = tuple(map(clause, statement.clauses))
        statement = replace(statement, clauses=clauses)
        if choose.random() > rate:
            return statement
        match choose.randrange(5):
            case 0:
                return replace(statement, name=choose.choice(everything))
            case 1:
                return replace(statement, result=choose.choice(registers))
            case 2:
                return replace(statement, operands=changed(statement.operands, registers))
            case 3:
                return replace(statement, numbers=changed(statement.numbers, numbers))
            case _:
                return replace(statement, clauses=(*clauses, CodeClause((statement,))))

    def clause(source: CodeClause) -> CodeClause:
        return replace(source, statements=tuple(map(of, source.statements)))

    rate = choose.choice((0.05, 0.2))
    periods = code.periods
    if choose.random() < 0.1:
        periods = ((choose.choice(registers), choose.choice(registers), choose.choice(registers)),)
    return Code(
        tuple(map(of, code.once)), tuple(map(of, code.guards)), tuple(map(clause, code.keep)),
        tuple(map(clause, code.drop)), periods,
    )  # fmt: skip


def arguments(mask: Mask) -> dict:
    tensors = [*mask.params.tensors, *build_tables(range_tables(mask.graph), mask.params.tensors)]
    params = mask.params
    lengths = (params.q_len, params.kv_len, params.q_offset, params.q_token0, params.kv_token0)
    return {
        "tensors": [t.data_ptr() if t.numel() else 0 for t in tensors],
        "layouts": [(tuple(t.shape), t.stride()) for t in tensors],
        "scalars": list(params.scalars),
        "lengths": [list(values) for values in lengths],
    }


def form(mask: Mask, changed: Code | None = None) -> _C.IntervalForm:
    params = [(t.dtype, t.rank) for t in described(mask.params.tensors)]
    return _C.IntervalForm(
        changed or code(mask.graph, mask.params.tensors),
        tensors=params,
        num_tables=len(range_tables(mask.graph)),
        scalar_kinds="".join("f" if isinstance(s, float) else "i" for s in mask.params.scalars),
    )


def run_mutants(count: int) -> None:
    """Malformed codes are refused or give some states; prints how many of each."""
    masks = [*registry_masks()[1], *(traced(f) for _, f in captured_masks())]
    masks += [RandomMask(random.Random(s).randrange, s).finish(3) for s in range(40)]
    boxes = np.concatenate([
        random_boxes(70, ((-2, 4, 5), (0, 4, 3), (-30, 1600, 900), (0, 1600, 900)), 1),
        np.random.default_rng(1).integers(-(2**63), 2**63 - 1, (20, 8)),
        np.random.default_rng(2).integers(-3, 3, (40, 8)),
    ])  # fmt: skip
    refused = answered = 0
    for seed in range(count):
        mask = masks[seed % len(masks)]
        source = code(mask.graph, mask.params.tensors)
        try:
            made = form(mask, mutated(source, random.Random(seed)))
            states = np.frombuffer(made.classify(boxes, **arguments(mask)), np.uint8)
        except (ValueError, TypeError):
            refused += 1
            continue
        assert len(states) == len(boxes) and states.max() <= 2
        answered += 1
    print(refused, answered)


def test_malformed_code_is_refused_or_harmless() -> None:
    """In a separate process: a wrong read or a division by zero would kill it."""
    script = "from tests.variants.interval.test_interval_form import run_mutants; run_mutants(700)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused, answered = map(int, done.stdout.split())
    assert refused > 200 and answered > 200


DOCS = torch.arange(3000) // 70
DOCUMENTS = traced(lambda b, h, q, k: (DOCS[q] == DOCS[k]) & (k < 2000 - b))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tensors": [1]}, "addresses"),
        ({"tensors": [0, 0, 0]}, "address 0"),
        ({"layouts": [((3000,), (1,))] * 2 + [((46,), (1,))]}, "size of a table does not match"),
        ({"layouts": [((6000,), (1,))] + [((47,), (1,))] * 2}, "size of a table does not match"),
        ({"scalars": [1, 2]}, "scalars must have"),
        ({"lengths": [[1], [1], [1], [1]]}, "5 entries"),
        ({"lengths": [[1], [1], [1], [1], []]}, "kv_token0 must have 1"),
        ({"lengths": [[2**31]] * 5}, "does not fit 32 bits"),
    ],
)
def test_what_does_not_fit_the_form_is_named(changed: dict, says: str) -> None:
    given = arguments(DOCUMENTS)
    boxes = np.zeros((1, 8), np.int64)
    with pytest.raises(ValueError, match=says):
        form(DOCUMENTS).classify(boxes, **{**given, **changed})


@pytest.mark.parametrize(
    "boxes", [np.zeros((3, 7), np.int64), np.zeros((3, 8), np.int32), np.zeros(8, np.int64),
              np.zeros((3, 16), np.int64)[:, ::2], np.zeros((3, 8))]
)  # fmt: skip
def test_boxes_are_eight_integers_each(boxes: np.ndarray) -> None:
    with pytest.raises(ValueError, match="int64"):
        form(DOCUMENTS).classify(boxes, **arguments(DOCUMENTS))


def test_a_box_of_no_request_is_not_looked_up() -> None:
    """Lengths are known for two requests; boxes of others, and empty intervals, are partial."""
    lengths = {name: [100, 100] for name in ("q_len", "kv_len", "q_offset", "q_token0",
                                             "kv_token0")}  # fmt: skip
    mask = traced(lambda b, h, q, k: k < fa.kv_len(b), **lengths)
    bs = [(0, 0), (1, 1), (0, 1), (2, 2), (1, 2), (-1, 0), (5, 0), (2**62, 2**62)]
    boxes = np.array([[*b, 0, 0, 0, 9, 0, 9] for b in bs])
    assert classify_boxes(mask.graph, mask.params, boxes).tolist() == [2, 2, 2, 1, 1, 1, 1, 1]
    unknown = MaskParams(mask.params.tensors, mask.params.scalars)
    assert (classify_boxes(mask.graph, unknown, boxes) == 1).all()


def test_threads_share_a_form() -> None:
    mask, made = DOCUMENTS, form(DOCUMENTS)
    sets = [
        random_boxes(2000, ((0, 0, 1), (0, 0, 1), (0, 2999, 300), (0, 2999, 300)), seed)
        for seed in range(16)
    ]
    alone = [made.classify(boxes, **arguments(mask)) for boxes in sets]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda boxes: made.classify(boxes, **arguments(mask)), sets))
    assert together == alone


def test_params_in_any_memory_are_read() -> None:
    """Lazily negated tensors and those that require grad, as torch's own operations read them."""
    values = torch.arange(40, dtype=torch.float64)
    lazy = torch.complex(values, -values).conj().imag  # its memory holds the negative
    assert lazy.is_neg()
    boxes = np.array([[0, 0, 0, 0, 0, 9, 0, 9], [0, 0, 0, 0, 10, 19, 0, 9]])
    mask = traced(lambda b, h, q, k: values[q] >= 10)
    for tensor in (values, lazy, values.clone().requires_grad_()):
        params = MaskParams([tensor], mask.params.scalars)
        assert classify_boxes(mask.graph, params, boxes).tolist() == [0, 2]
