"""Specs as JSON documents: exact round trips, and untrusted documents that cannot inject code."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashattn_jit as fa
from flashattn_jit import variants
from flashattn_jit.codegen.document import MAX_DOCUMENT, has_cpp, spec_from_document
from flashattn_jit.codegen.render import render
from flashattn_jit.codegen.spec import (
    FEATURES,
    AnySpec,
    KernelSpec,
    UtilitySpec,
    append_kernel,
    host_target,
)
from flashattn_jit.codegen.targets import CPU_TARGETS, CUDA_TARGETS
from flashattn_jit.errors import FlashAttnJitError, ManifestError
from flashattn_jit.jit.cache.entry import ARTIFACT
from flashattn_jit.jit.module import KernelCache
from flashattn_jit.planner.reachable import reachable, retarget, utilities
from flashattn_jit.planner.tiles import build_request, build_requests
from flashattn_jit.variants.ir.ir import OPS, VariantIR, unscaled_integers
from flashattn_jit.variants.lower.expressions import CPP_TYPE, TAG
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant
from tests.harness.toolkit import needs_nvcc
from tests.registry.case import Case
from tests.registry.cases import CASES


def bound(case: Case) -> tuple[VariantIR, tuple[int, int], str]:
    variant, params = case.build()
    chosen = as_variant(variant)
    ir = chosen.bind(Dims(*case.shape), params).ir
    return ir, (case.shape.head_dim, case.shape.head_dim_v), chosen.name


def same_spec(a: AnySpec, b: AnySpec) -> None:
    assert a.document() == b.document()
    assert a.template == b.template and a.target == b.target


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_variant_comes_back_exact(case: Case) -> None:
    ir, dims, name = bound(case)
    for target, dtype in (
        ("cpu:generic", "float32"), ("cpu:avx512_bf16", "bfloat16"), ("sm_80", "bfloat16"),
    ):  # fmt: skip
        specs = reachable(ir, dims, (dtype,) * 3, target)
        for spec in specs:
            again = spec_from_document(spec.document(), name)
            same_spec(again, spec)
            assert isinstance(again, KernelSpec) and again.name == name
        for spec in specs[-1:]:
            assert render(spec_from_document(spec.document())) == render(spec)


@pytest.mark.parametrize("target", [*CPU_TARGETS, *CUDA_TARGETS])
def test_every_dtype_feature_and_target_comes_back(target: str) -> None:
    ir, dims, _ = bound(next(c for c in CASES if "row" in c.tags))
    kv = ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"]  # float8_e5m2 is as e4m3
    triples = [(q, k, v) for q in kv[:3] for k in kv for v in kv]
    count = 0
    for dtypes in triples:
        for spec in reachable(ir, dims, dtypes, target):
            same_spec(spec_from_document(json.loads(spec.document())), spec)
            count += 1
    served = [t for t in triples if not unscaled_integers(ir.has, *t[1:])]
    assert len(served) == 48  # of 75: int8 without a hook that scales it is refused
    assert count == 48 * 6 if target.startswith("cpu") else count >= 14
    for spec in utilities((), target):
        again = spec_from_document(spec.document())
        assert again == spec
        assert render(again) == render(spec)  # type: ignore[arg-type]


def cpp_spec(name: str = "mine") -> KernelSpec:
    class Scaled(fa.Variant):
        factor: float = fa.scalar(2.0)
        table: Any = fa.tensor("num_q_heads")
        score_mod = fa.cpp("return score * factor + table(h);")

    import torch

    ir = Scaled().bind(Dims(1, 2, 2, 8, 8, 32, 32), {"table": torch.zeros(2)}).ir
    assert ir.cpp
    (spec, *_) = reachable(ir, (32, 32), ("float32",) * 3, "cpu:avx2", ("dense",))
    return replace(spec, name=name)


def test_hooks_given_as_cpp_text_come_back_and_are_marked() -> None:
    spec = cpp_spec()
    again = spec_from_document(spec.document(), "another name")
    same_spec(again, spec)
    assert isinstance(again, KernelSpec) and again.name == "mine"
    assert has_cpp(again) and render(again) == render(spec)
    assert not has_cpp(spec_from_document(plain().document()))
    assert set(json.loads(spec.document())["variant"]["cpp"]) == {"score_mod"}


def test_requests_go_to_other_processes() -> None:
    for spec in (cpp_spec(), plain(), UtilitySpec("append_paged_kv", "sm_80", 4)):
        request = pickle.loads(pickle.dumps(build_request(spec)))
        assert request.spec == spec.document() and request.template == spec.template
        assert request.render() == render(spec)


@pytest.mark.parametrize("target", ["cpu:avx2", "sm_80"])
def test_appends_that_quantise(target: str) -> None:
    ir = fa.RoPE().only("key_mod").bind(Dims(head_dim=32, head_dim_v=16, kv_len=64)).ir
    for stored in (("int8", "float8_e5m2"), ("float8_e4m3fn", "bfloat16")):
        spec = append_kernel(ir, (32, 16), stored, target, new_dtype="bfloat16")
        same_spec(spec_from_document(spec.document()), spec)
        for other, new in (("cpu:generic", "New = bfloat16_t"), ("sm_90", "cuda::Bfloat16")):
            (again,) = (s for s in retarget(spec, other) if isinstance(s, KernelSpec))
            assert (again.q_dtype, again.k_dtype, again.v_dtype) == ("bfloat16", *stored)
            assert new in render(again)
        assert not any(isinstance(s, KernelSpec) for s in retarget(spec, "sm_75"))
        doc = json.loads(spec.document())
        for dtypes in (["int8", *stored], ["float32", "int8", "bfloat16"]):
            with pytest.raises(ManifestError, match="dtypes"):
                spec_from_document({**doc, "dtypes": dtypes})
        with pytest.raises(ManifestError, match=r"target|dtypes|tile|warps"):
            spec_from_document({**doc, "target": "sm_80" if target == "cpu:avx2" else "sm_75"})


@pytest.mark.parametrize("target", ["cpu:avx2", "sm_80"])
def test_appends_with_a_transform(target: str) -> None:
    dtypes = ("float32", "bfloat16") if target == "cpu:avx2" else ("bfloat16",) * 2
    ir = fa.RoPE().only("key_mod").bind(Dims(head_dim=32, head_dim_v=16, kv_len=64)).ir
    spec = append_kernel(ir, (32, 16), dtypes, target)
    same_spec(spec_from_document(spec.document()), spec)
    assert "key_mod" in render(spec) and spec.template.endswith(("append.cpp.j2", "append.cu.j2"))
    (again,) = (s for s in retarget(spec, target) if isinstance(s, KernelSpec))
    same_spec(again, spec)
    doc = json.loads(spec.document())
    for field, value, message in (
        ("tile", ["append", 32, 16], "appending has one kernel"),
        ("features", ["block_mask"], "appending has one kernel"),
        ("dtypes", ["float16", *dtypes], "appending has one kernel|dtypes"),
        ("variant", json.loads(rich(target).document())["variant"], "variant.hooks"),
    ):
        with pytest.raises(ManifestError, match=message):
            spec_from_document({**doc, field: value})


# --- what is refused ------------------------------------------------------------------------------


def plain() -> KernelSpec:
    ir, dims, _ = bound(next(c for c in CASES if c.name == "Causal" or "mask" in c.tags))
    return reachable(ir, dims, ("float32",) * 3, "cpu:avx2")[0]


def rich(target: str = "cpu:avx2") -> KernelSpec:
    """A spec with gathers, scalars, row hooks and a mask."""
    variant = fa.RoPE() & fa.SlidingWindow(9) & fa.Sink() & fa.ALiBi()
    import torch

    ir = variant.bind(Dims(1, 4, 2, 8, 8, 32, 32), {"sink": torch.zeros(4)}).ir
    dtype = "float32" if target.startswith("cpu") else "bfloat16"
    return reachable(ir, (32, 32), (dtype,) * 3, target)[0]


def edited(spec: AnySpec, *path: Any, value: Any) -> dict[str, Any]:
    doc: dict[str, Any] = json.loads(spec.document())
    where: Any = doc
    for step in path[:-1]:
        where = where[step]
    where[path[-1]] = value
    return doc


INJECTIONS = (
    'x"); system("true"); //',
    '1; }; struct Evil { int x = system("true"); }; struct Y {',
    "\n#include <cstdlib>\n",
    "float32*/ evil /*",
    "add, evil(",
    "true",
    "\\",
    "??/",
    "\u202e",
    "\0",
    "",
)
_NODE = ("variant", "hooks", "mask_mod", "nodes")


@pytest.mark.parametrize("text", INJECTIONS)
def test_text_reaches_no_place_where_it_would_be_code(text: str) -> None:
    spec = rich()
    doc = json.loads(spec.document())
    places = [
        ("target",), ("dtypes", 0), ("dtypes", 1), ("dtypes", 2), ("tile", 0), ("tile", 1),
        ("head_dims", 0), ("features",), ("warps", 0),
        ("variant", "hooks", "mask_mod", "inputs", 0), ("variant", "hooks", "mask_mod", "output"),
    ]  # fmt: skip
    for hook, graph in doc["variant"]["hooks"].items():
        for i, node in enumerate(graph["nodes"]):
            base = ("variant", "hooks", hook, "nodes", i)
            places += [(*base, 0), (*base, 2)]
            places += [(*base, 1, a) for a in range(len(node[1]))]
            places += [(*base, 3, n) for n in range(len(node[3]))]
            for a in range(len(node[4])):
                places += [(*base, 4, a, 0), (*base, 4, a, 1)]
    for i in range(len(doc["variant"]["tensors"])):
        places += [("variant", "tensors", i, field) for field in range(1, 5)]
    for i in range(len(doc["variant"]["scalars"])):
        places.append(("variant", "scalars", i, 1))
    for place in places:
        with pytest.raises(ManifestError):
            spec_from_document(edited(spec, *place, value=text))
    if text:  # without C++ text a document may name no tensor and no scalar
        for place in (("variant", "tensors", 0, 0), ("variant", "scalars", 0, 0)):
            with pytest.raises(ManifestError, match="names only beside C"):
                spec_from_document(edited(spec, *place, value=text))


@pytest.mark.parametrize(
    "name", ['a"b', "a\\", "a\nb", "", "x" * 201, "a?b", "\u202eabc", "\ud800"]
)
def test_names_cannot_leave_their_line_directive(name: str) -> None:
    with pytest.raises(ManifestError, match="name"):
        spec_from_document(plain().document(), name)
    with pytest.raises(ManifestError, match=r"variant\.name"):
        spec_from_document(edited(cpp_spec(), "variant", "name", value=name))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 1, "schema: 2 is what this version reads, got 1"),
        (("schema",), True, "schema"),
        (("more",), 1, "unknown: 'more'"),
        (("head_dims", 0), 0, "from 1 to 576"),
        (("head_dims", 0), 577, "from 1 to 576"),
        (("head_dims", 0), True, "an integer"),
        (("head_dims", 0), 32.0, "an integer"),
        (("head_dims", 0), 31, "rows of 31 are expected"),
        (("dtypes",), ["float32"], "a list of 3"),
        (("dtypes", 0), "int8", r"dtypes\[0\]"),
        (("tile",), ["prefill", 0, 96], r"tile\[1\]"),
        (("warps",), [4, 2], r"warps\[0\]"),
        (("features",), ["paged"], r"features\[0\]"),
        (("features",), ["indirect", "block_mask"], "do not go together"),
        (("features",), ["block_mask", "block_mask"], "do not go together"),
        (("variant", "cpp"), {"score_mod": 3}, "name"),
        (("variant", "hooks"), [], "hooks"),
        ((*_NODE, 0, 1), [0], r"nodes\[0\]"),
        ((*_NODE, 0, 3), [2], r"nodes\[0\]"),
        (("variant", "tensors", 0, 2), 9, "rank"),
        (("variant", "tensors", 0, 3), "2", "strides"),
        (("variant", "tensors", 0, 4), [2**40], "sizes"),
    ],
)
def test_errors_name_the_field(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        spec_from_document(edited(rich(), *path, value=value))


def test_features_of_cuda_kernels_that_exclude_each_other() -> None:
    for other in ("block_mask", "mixed_rows"):
        features = sorted([other, "sparse"], key=FEATURES.index)
        with pytest.raises(ManifestError, match="do not go together"):
            spec_from_document(edited(rich("sm_80"), "features", value=features))


def test_cpp_text_is_taken_for_the_hooks_that_may_have_it() -> None:
    for hooks in ({"query_mod": "x"}, {"score_mod": 3}, {"score_mod": "\0"}, {"sink": "\ud800"}):
        with pytest.raises(ManifestError, match="cpp"):
            spec_from_document(edited(cpp_spec(), "variant", "cpp", value=hooks))


def test_what_is_no_json() -> None:
    for text in ("", "{", "[]", "3", "null", '{"schema":2,"schema":2}', '{"a":NaN}', "[" * 10**5,
                 "9" * 10**4, "x" * (MAX_DOCUMENT + 1)):  # fmt: skip
        with pytest.raises(ManifestError):
            spec_from_document(text)
    for doc in ({"a": object()}, {"a": {1, 2}}, {3: 4}, {"a": float("nan")}):
        with pytest.raises(ManifestError):
            spec_from_document(doc)  # type: ignore[arg-type]


# --- random changes -------------------------------------------------------------------------------

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["add", "mul", "where", "cast", "gather", "slice", "cat", "sum", "input", "const", "row",
         "score", "b", "int32", "int64", "float32", "float64", "bool", "float16", "0", "1", "n",
         "n1", "sm_80", "cpu:avx2", "few_row", "prefill", "block_mask", "mask_mod", "EVIL"]
    ),
    st.text(max_size=5),
    st.lists(st.integers(-1, 9), max_size=4),
    st.builds(lambda x: {"f": x}, st.sampled_from(["inf", "nan", "0x1.8000000000000p+1", "EVIL"])),
)  # fmt: skip


def _places(doc: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    if isinstance(doc, dict | list):
        for key, value in doc.items() if isinstance(doc, dict) else enumerate(doc):
            found += [(key, *rest) for rest in _places(value)]
    return found


@st.composite
def mutated(draw: st.DrawFn) -> tuple[dict[str, Any], KernelSpec]:
    spec = draw(st.sampled_from(SEEDS))
    doc = json.loads(spec.document())
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(doc)))
        if not path:
            continue
        where: Any = doc
        for step in path[:-1]:
            where = where[step]
        kind = draw(st.sampled_from(["set", "delete", "copy", "swap"]))
        if kind == "delete":
            del where[path[-1]]
        elif kind == "copy" and isinstance(where, list):
            where.insert(path[-1], copy.deepcopy(where[path[-1]]))
        elif kind == "swap":
            other = draw(st.sampled_from(_places(doc)))
            value: Any = doc
            for step in other:
                value = value[step]
            where[path[-1]] = copy.deepcopy(value)
        else:
            where[path[-1]] = draw(_VALUES)
    return doc, spec


SEEDS = [rich(), rich("sm_80"), plain()]

_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_OWN = re.compile(r"[a-z]{0,3}_?\d+\w{0,2}|\w{1,16}_\d+")
"""Numbered names of values, and literals."""


def words(source: str) -> set[str]:
    """The identifiers of a source without numbered names."""
    return {w for w in _WORD.findall(source) if not _OWN.fullmatch(w)}


# The identifiers that sources may have: those of the seeds' sources and of the generator.
VOCABULARY = {w for spec in SEEDS for w in words(render(spec))} | {
    *OPS, *(f"i_{op}" for op in OPS), *TAG.values(), *CPP_TYPE.values(),
    "and_", "or_", "xor_", "not_", "b1", "wrap", "cast",
    "generic", "avx2", "avx512", "avx512_vnni", "avx512_fp16", "avx512_bf16",
    "amx_bf16", "float16", "bfloat16", "half_t",
    "bfloat16_t", "Float16", "Bfloat16",
    *(w for room in ("interval", "lower")
      for f in (Path(variants.__file__).parent / room).glob("*.py") for w in words(f.read_text())),
}  # fmt: skip


@settings(max_examples=600, deadline=None, derandomize=True)
@given(mutated())
def test_changed_documents_are_refused_or_mean_what_they_say(
    made: tuple[dict[str, Any], KernelSpec],
) -> None:
    doc, _ = made
    try:
        spec = spec_from_document(doc)
    except ManifestError:
        return
    assert json.loads(spec.document()) == doc
    assert isinstance(spec, KernelSpec)
    try:
        source = render(spec)
    except FlashAttnJitError:
        return  # such as more shared memory than there is
    assert source.isascii() and sorted(words(source) - VOCABULARY) == []


_TABLES = {
    "target": [*CPU_TARGETS, *CUDA_TARGETS],
    "dtype": ["bool", "int8", "int32", "int64", "uint8", "float32", "float64"],
}


@st.composite
def varied(draw: st.DrawFn) -> dict[str, Any]:
    """A document with changes that often keep it well-formed: other operations, numbers, dtypes."""
    doc = json.loads(draw(st.sampled_from(SEEDS)).document())
    if doc["target"].startswith("cpu"):
        doc["target"] = draw(st.sampled_from(_TABLES["target"][:4]))
    if draw(st.booleans()):
        doc["dtypes"] = draw(st.sampled_from([["float16"] * 3, doc["dtypes"]]))
    for _ in range(draw(st.integers(1, 6))):
        graph = draw(st.sampled_from(sorted(doc["variant"]["hooks"].items())))[1]
        node = draw(st.sampled_from(graph["nodes"]))
        info = OPS[node[0]]
        kind = draw(st.integers(0, 5))
        if kind == 0:
            node[0] = draw(st.sampled_from(
                [n for n, o in OPS.items() if (o.arity, o.attrs) == (info.arity, info.attrs)]
            ))  # fmt: skip
        elif kind == 1 and node[1]:
            at = draw(st.integers(0, len(node[1]) - 1))
            node[1][at] = draw(st.integers(0, max(node[1][at], 1)))
        elif kind == 2 and node[0] == "cast":
            node[2] = draw(st.sampled_from(_TABLES["dtype"]))
        elif kind == 3 and node[0] == "const" and isinstance(node[4][0][1], int):
            node[4][0][1] = draw(st.integers(-(2**31), 2**31 - 1))
        elif kind == 4 and node[0] == "slice":
            node[4] = [[k, draw(st.integers(-2, 20))] for k, _ in node[4]]
            node[3] = [node[4][2][1]]
        elif kind == 5 and doc["variant"]["tensors"]:
            tensor = draw(st.sampled_from(doc["variant"]["tensors"]))
            tensor[3] = "".join(draw(st.sampled_from("01n")) for _ in tensor[3])
    return doc


@settings(max_examples=600, deadline=None, derandomize=True)
@given(varied())
def test_what_is_accepted_can_be_rendered(doc: dict[str, Any]) -> None:
    try:
        spec = spec_from_document(doc)
    except ManifestError:
        return
    assert json.loads(spec.document()) == doc
    source = render(spec)
    assert source.isascii() and sorted(words(source) - VOCABULARY) == []


UTILITY = UtilitySpec("merge_states", "sm_80")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_nvcc)])
def test_what_comes_back_compiles_to_the_same_artifact(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: AnySpec = rich(host_target()) if kind == "cpu" else UTILITY
    found = []
    for number, one in enumerate((spec, spec_from_document(spec.document(), "read back"))):
        monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / str(number)))
        prepared = KernelCache().prepare(build_requests(one)).found
        assert prepared.layer == "compiler"
        artifact = prepared.path / ARTIFACT
        found.append((prepared.key, artifact.read_bytes()))
    assert found[0] == found[1]
