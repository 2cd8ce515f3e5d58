"""`reachable` lists exactly the kernels that calls ask the cache for, so that warming misses none.

Calls of all kinds run against a cache that records kernel requests. They must be exactly what
`reachable` lists for the kind of call: more would be compiled in vain, fewer would be missed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.document import spec_from_document
from flashattn_jit.codegen.spec import KernelSpec, default_target, takes_dtypes
from flashattn_jit.codegen.targets import CPU_TARGETS, CUDA_TARGETS, compiled_target
from flashattn_jit.deploy.wanted.compositions import compositions
from flashattn_jit.deploy.wanted.structures import bound_for
from flashattn_jit.errors import InputError
from flashattn_jit.planner.reachable import (
    COMPOSED,
    FORMATS,
    formats_of,
    reachable,
    retarget,
    utilities,
)
from flashattn_jit.planner.tiles import build_requests
from flashattn_jit.variants.ir.ir import VariantIR
from flashattn_jit.variants.params import Dims
from tests.harness import rotation
from tests.planner.asked import Asked, intercept, nothing_module
from tests.planner.calls import BATCHED, Calls


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return nothing_module(tmp_path_factory.mktemp("nothing"))


@pytest.fixture
def asked(nothing: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    log = Asked(nothing)
    intercept(monkeypatch, log)
    yield log
    intercept(monkeypatch, log)  # forgets the plans that were made with it
    gc.collect()


def listed(variant: Any, dims: tuple[int, int], dtype: str, target: str, name: str) -> set[str]:
    """The documents that `reachable` lists for calls of one format."""
    found: set[str] = set()
    for made in compositions(variant, (name,)):
        sizes = (dims[0], made.head_dim_v or dims[1])
        ir = bound_for(made.variant, sizes, None, made.params).ir
        specs = reachable(ir, sizes, (dtype,) * 3, target, made.formats)
        found |= {s.document() for s in specs}
    return found


VARIANTS = {
    "plain": fa.Full,
    "causal": fa.Causal,
    "alibi": lambda: fa.ALiBi() & fa.SlidingWindow(7),
    "rope": lambda: fa.RoPE() & fa.Causal(),
    "sigmoid": fa.Sigmoid,
}


def in_turns(others: Sequence[Any]) -> list[tuple[Any, str]]:
    """A sixth of the pairs of `others` and a kind of batch, by turns, with every kind of batch."""
    pairs = [(other, name) for other in others for name in BATCHED]
    return rotation.chosen(pairs, 6, lambda pair: pair[1])


@pytest.mark.parametrize(("variant", "name"), in_turns(list(VARIANTS)), ids=str)
def test_cpu_calls_ask_for_exactly_what_is_listed(asked: Asked, variant: str, name: str) -> None:
    chosen = VARIANTS[variant]()
    for dtype, dims in ((torch.float32, (32, 32)), (torch.bfloat16, (40, 16))):
        asked.requests.clear()
        getattr(Calls(chosen, dims, dtype), name)()
        text = str(dtype).removeprefix("torch.")
        assert set(asked.documents) == listed(chosen, dims, text, default_target(), name)


CUDA_CALLS = [
    ("causal", "sm_80", (64, 64)),
    ("plain", "sm_90", (128, 128)),
    ("alibi", "sm_86", (64, 128)),
    ("rope", "sm_120", (32, 32)),
    ("sigmoid", "sm_75", (256, 256)),
    ("causal", "sm_100", (20, 64)),  # rows that are never aligned
]


@pytest.mark.parametrize(("call", "name"), in_turns(CUDA_CALLS), ids=str)
def test_cuda_calls_ask_for_exactly_what_is_listed(
    asked: Asked, call: tuple[str, str, tuple[int, int]], name: str
) -> None:
    variant, target, dims = call
    chosen = VARIANTS[variant]()
    for unaligned in (False, True):
        getattr(Calls(chosen, dims, torch.float16, f"emulated:{target}", unaligned), name)()
    assert set(asked.documents) == listed(chosen, dims, "float16", target, name)


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (kv_idx - q_idx)


@pytest.mark.parametrize("score", [None, _biased])
@pytest.mark.parametrize("mask", [None, _causal])
def test_flex_calls_ask_for_exactly_what_is_listed(asked: Asked, score: Any, mask: Any) -> None:
    chosen = fa.variant(score_mod=score, mask_mod=mask)
    Calls(None, (32, 32), torch.float32).flex(score, mask)
    target = default_target()
    own = listed(chosen, (32, 32), "float32", target, "block_mask" if mask else "dense")
    second = listed(chosen, (32, 32), "float32", target, "max_scores")
    documents = set(asked.documents)
    assert own <= documents <= own | second
    assert len(documents) == 4


def test_block_masks_on_cuda_ask_for_what_is_listed(asked: Asked, monkeypatch: Any) -> None:
    # flex_attention takes no target: it is put in below.
    ops = sys.modules["flashattn_jit.ops.launching.launches"]
    monkeypatch.setattr(ops, "call_target", lambda q, k, v, target: "emulated:sm_80")
    for unaligned in (False, True):
        Calls(None, (64, 64), torch.bfloat16, None, unaligned).flex(None, _causal, aux=False)
    chosen = fa.variant(mask_mod=_causal)
    assert set(asked.documents) == listed(chosen, (64, 64), "bfloat16", "sm_80", "block_mask")


def test_merging_and_appending_ask_for_the_utilities(asked: Asked) -> None:
    for target in ("sm_75", "sm_90"):
        asked.requests.clear()
        for dtype in (torch.float32, torch.int8):
            states = [torch.zeros(2, 3, 4, 8, dtype=torch.float32) for _ in range(2)]
            lses = [torch.zeros(2, 3, 4) for _ in range(2)]
            fa.merge_states(states, lses, target=f"emulated:{target}")
            for dim in (1, 2, 4, 8, 16, 24):
                new = torch.zeros(2, 1, dim).to(dtype)
                pages = [torch.zeros(1, 16, 1, dim).to(dtype) for _ in range(2)]
                paged = fa.Paged(
                    torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32),
                    torch.tensor([2]), 16,
                )  # fmt: skip
                fa.append_paged_kv(
                    new, new.clone(), *pages, torch.tensor([0, 2]), paged,
                    target=f"emulated:{target}",
                )  # fmt: skip
        wanted = {u.document() for u in utilities(("int8",), target)}
        assert len(wanted) == 6 and set(asked.documents) == wanted
    assert utilities(("int8",), "cpu:avx2") == ()
    narrow = {u.unit_bytes for u in utilities(("bfloat16",), "sm_90")}
    assert narrow == {0, 2, 4, 8, 16}


@pytest.mark.parametrize("target", ["cpu:generic", "emulated:sm_75", "emulated:sm_90"])
def test_appends_with_a_transform_ask_for_exactly_what_is_listed(asked: Asked, target: str) -> None:
    for head_dims in ((64, 64), (20, 12)):
        asked.requests.clear()
        new = [torch.zeros(2, 1, n, dtype=torch.float16) for n in head_dims]
        pages = [torch.zeros(1, 16, 1, n, dtype=torch.float16) for n in head_dims]
        paged = fa.Paged(
            torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32), torch.tensor([2]), 16
        )
        transform = fa.RoPE() & fa.Causal()
        fa.append_paged_kv(
            *new, *pages, torch.tensor([0, 2]), paged, transform=transform, target=target
        )
        bound = transform.only("key_mod").bind(Dims(head_dim=head_dims[0], kv_len=2))
        wanted = reachable(bound.ir, head_dims, ("float16",) * 3, target, ["append"])
        assert len(wanted) == 1 and set(asked.documents) == {wanted[0].document()}


@pytest.mark.parametrize("target", ["cpu:generic", "emulated:sm_90"])
def test_appends_that_quantise_ask_for_exactly_what_is_listed(asked: Asked, target: str) -> None:
    new = [torch.zeros(2, 1, n, dtype=torch.float16) for n in (32, 16)]
    pages = [torch.zeros(1, 16, 1, n, dtype=torch.float16) for n in (32, 16)]
    paged = fa.Paged(
        torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32), torch.tensor([2]), 16
    )
    stored = fa.kv.Format("int4", zero=True).quantize(pages[0]), pages[1]
    for transform in (None, fa.RoPE()):
        asked.requests.clear()
        fa.append_paged_kv(
            *new, *stored, torch.tensor([0, 2]), paged, transform=transform, target=target
        )
        ir = PLAIN
        if transform is not None:
            ir = transform.only("key_mod").bind(Dims(head_dim=32, kv_len=2)).ir
        dtypes = ("float16", "bits4x2", "float16")
        (wanted,) = reachable(ir, (32, 16), dtypes, target, ["append"])
        assert set(asked.documents) == {wanted.document()}


# --- the lists themselves -------------------------------------------------------------------------

PLAIN = VariantIR(())


def test_lists_are_short() -> None:
    for target in CPU_TARGETS:
        assert len(reachable(PLAIN, (64, 64), ("float32",) * 3, target)) == 6
        assert len(reachable(PLAIN, (64, 64), ("float32",) * 3, target, ("dense",))) == 2
    for target in CUDA_TARGETS:
        for dims, every, dense in (((64, 64), 42, 6), ((60, 64), 21, 3)):
            kinds = len({s.tile_q for s in
                         reachable(PLAIN, dims, ("float16",) * 3, target, ("dense",))})  # fmt: skip
            specs = reachable(PLAIN, dims, ("float16",) * 3, target)
            # Pages that TMA does not copy: prefill of two classes of rows.
            wgmma = 2 * any(s.tile_kind == "prefill_wgmma" for s in specs)
            assert len(specs) == every * kinds // 3 + wgmma
            assert bool(wgmma) == (target == "sm_90" and dims == (64, 64))
            assert len(reachable(PLAIN, dims, ("float16",) * 3, target, ("dense",))) == (
                dense * kinds // 3
            )
            assert len({s.document() for s in specs}) == len(specs)


def test_unknown_formats_and_dtypes() -> None:
    with pytest.raises(InputError, match=r"unknown format 'pagd'; formats are dense"):
        reachable(PLAIN, (64, 64), ("float32",) * 3, "cpu:avx2", ("pagd",))
    assert reachable(PLAIN, (64, 64), ("float32",) * 3, "sm_90") == ()
    assert reachable(PLAIN, (64, 64), ("bfloat16",) * 3, "sm_75") == ()
    assert takes_dtypes("emulated:sm_80", ("bfloat16", "int8", "bfloat16"))
    assert not takes_dtypes("sm_80", ("bfloat16", "int8", "float16"))


def of_another_format(spec: KernelSpec, name: str) -> bool:
    """Whether it is listed for steps of cascades that share nothing: no feature names a cascade."""
    return name == "cascade" and not {"indirect", "mixed_rows"} & set(spec.features)


@pytest.mark.parametrize("target", ["cpu:avx2", "sm_80"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_recorded_kernel_brings_back_its_whole_format(target: str, name: str) -> None:
    specs = reachable(PLAIN, (64, 80), ("float16",) * 3, target, (name,))
    for spec in specs:
        again = {s.document() for s in retarget(spec, target)}
        assert spec.document() in again
        if name not in COMPOSED and not of_another_format(spec, name):
            assert name in formats_of(spec)
            assert {s.document() for s in specs} <= again or name in ("sparse", "cascade")


@pytest.mark.parametrize("name", [f for f in FORMATS if f not in COMPOSED])
def test_what_a_cpu_recorded_serves_a_device_and_the_other_way(name: str) -> None:
    dtypes = ("bfloat16",) * 3
    there = {s.document() for s in reachable(PLAIN, (64, 64), dtypes, "sm_90", (name,))}
    for spec in reachable(PLAIN, (64, 64), dtypes, "cpu:avx512", (name,)):
        if of_another_format(spec, name):
            continue
        found = retarget(spec, "sm_90")
        assert there <= {s.document() for s in found}
        assert {u.document() for u in utilities(dtypes, "sm_90")} <= {s.document() for s in found}
    here = {s.document() for s in reachable(PLAIN, (64, 64), dtypes, "cpu:avx512", (name,))}
    for spec in reachable(PLAIN, (64, 64), dtypes, "sm_90", (name,)):
        found = {s.document() for s in retarget(spec, "cpu:avx512")}
        if of_another_format(spec, name):
            assert found <= here
        elif name == "cascade" and "paged" in spec.features:
            assert found <= here and found
        else:
            assert found >= here


@pytest.mark.parametrize(
    ("target", "asked", "keys"),
    [
        ("sm_90", ("paged", "mixed_rows"), ("paged",)),
        ("sm_90", ("mixed_rows",), ()),
        ("sm_90", ("paged", "sparse"), ("paged",)),
        ("sm_90", ("sparse",), ()),
        ("cpu:avx512", ("indirect",), ()),
    ],
)
def test_a_recorded_cascade_or_list_brings_keys_alone(
    target: str, asked: tuple[str, ...], keys: tuple[str, ...]
) -> None:
    specs = reachable(PLAIN, (64, 64), ("bfloat16",) * 3, target)
    recorded = [s for s in specs if set(s.features) == set(asked)]
    wanted = {s.document() for s in specs if set(s.features) - {"unaligned"} == set(keys)}
    assert recorded and wanted
    for spec in recorded:
        assert wanted <= {s.document() for s in retarget(spec, target)}


def test_targets_without_a_kernel_get_nothing() -> None:
    fp8 = "float8_e4m3fn"
    (spec, *_) = reachable(PLAIN, (64, 64), ("float32", fp8, fp8), "cpu:avx2")
    assert retarget(spec, "sm_90") == ()
    merge = utilities((), "sm_90")[0]
    assert retarget(merge, "cpu:avx2") == ()
    assert [u.target for u in retarget(merge, "emulated:sm_80")] == ["sm_80"]


def test_requests_are_the_kernel_and_its_smaller_tiles() -> None:
    for target in ("cpu:avx2", "sm_80"):
        for spec in reachable(PLAIN, (128, 128), ("float16",) * 3, target):
            requests = build_requests(spec)
            assert requests[0].spec == spec.document()
            assert len({r.spec for r in requests}) == len(requests)
            for request in requests:
                step = spec_from_document(request.spec)
                assert isinstance(step, KernelSpec)
                assert step.tile_kind == spec.tile_kind and set(step.features) == set(spec.features)
                assert request.target == compiled_target(target)
