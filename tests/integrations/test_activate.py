"""`integrations.torch.activate`: torch's attention on the CPU is the engine's, or torch's own."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashattn_jit as fa
from flashattn_jit.codegen.targets import included
from flashattn_jit.integrations import torch as integration

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
B, H, S, L, D = 2, 4, 33, 50, 64


class Calls:
    """Counts the calls that the engine serves."""

    def __init__(self) -> None:
        self.served = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    counted = Calls()

    def counting(attend: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            results = attend(*args, **kwargs)
            counted.served += results is not None
            return results

        return count

    for name in ("run_dense", "call_again"):
        monkeypatch.setattr(integration, name, counting(getattr(integration, name)))
    monkeypatch.setattr(integration, "least_flops", lambda *call: 1)
    yield counted
    assert not integration.is_active()


def qkv(dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    q, k, v = (torch.randn(B, H, n, D).to(dtype) for n in (S, L, L))
    return {"query": q, "key": k, "value": v} | options


def packed(dtype: torch.dtype) -> dict[str, Any]:
    """q, k and v as views of one projection, as models make them."""
    q, k, v = torch.randn(B, S, 3, H, D).to(dtype).permute(2, 0, 3, 1, 4)
    return {"query": q, "key": k, "value": v, "is_causal": True}


def outcome(call: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """The result of a call, or what it raises."""
    try:
        out = call(**arguments)
    except Exception as error:  # any error must be torch's
        return type(error), str(error)
    return out, out.stride(), out.dtype


def same(arguments: dict[str, Any]) -> None:
    """Whether a call gives the same with and without the engine: values, strides or error."""
    expected = outcome(sdpa, arguments)
    with integration.activate():
        found = outcome(sdpa, arguments)
    assert found[1:] == expected[1:]
    if not isinstance(expected[0], torch.Tensor):
        assert found == expected
        return
    tolerance = TOLERANCES.get(expected[0].dtype, 0.0)
    torch.testing.assert_close(
        found[0], expected[0], atol=tolerance, rtol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_torch_calls_run_on_the_engine(calls: Calls, dtype: torch.dtype) -> None:
    few = qkv(dtype)
    few["key"], few["value"] = few["key"][:, :2], few["value"][:, :2]
    cases = [
        qkv(dtype), qkv(dtype, is_causal=True), qkv(dtype, scale=0.3), few | {"enable_gqa": True},
        packed(dtype),
    ]  # fmt: skip
    with torch.no_grad():
        for case in cases:
            same(case)
    assert calls.served == len(cases)


MASKS = [(S, L), (1, L), (S, 1), (1, 1), (B, 1, 1, L), (1, H, S, L), (B, 1, S, L), (B, H, 1, 1)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_every_broadcast(calls: Calls, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    keep = torch.rand(shape) < 0.7  # some rows of the masks with one key keep none
    masks = (keep, torch.randn(shape).to(dtype), torch.randn(shape), keep.expand(B, H, S, L))
    with torch.no_grad():
        for mask in masks:
            same(qkv(dtype, attn_mask=mask))
    assert calls.served == len(masks)


HIDDEN = torch.zeros(B, 1, S, L)
HIDDEN[0, 0, :, 40:] = torch.finfo(torch.float32).min  # padding, as older models mask it
HIDDEN[1, 0, 3] = torch.finfo(torch.float32).min  # a row whose keys are all hidden
EMPTY = torch.rand(S, L) < 0.7
EMPTY[3] = False


@pytest.mark.parametrize("name", ["finfo.min", "a row without a key"])
def test_rows_that_see_nothing(calls: Calls, name: str) -> None:
    with torch.no_grad():
        same(qkv(attn_mask=HIDDEN if name == "finfo.min" else EMPTY))
    assert calls.served == 1


LAYOUTS = {
    "several heads and rows": qkv(),
    "one head": {n: t[:, :1] for n, t in qkv().items()},
    "one row": qkv() | {"query": torch.randn(B, H, 1, D)},
    "a row without a key": qkv(attn_mask=torch.zeros(S, L).masked_fill(~EMPTY, -torch.inf)),
    "rows before heads": {
        n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in qkv().items()
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_outputs_of_the_op(calls: Calls, name: str) -> None:
    call = dict(LAYOUTS[name])
    mask = call.pop("attn_mask", None)
    with torch.no_grad():
        expected = OP(*call.values(), attn_mask=mask)
        with integration.activate():
            found = OP(*call.values(), attn_mask=mask)
    assert calls.served == 1
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


LEFT: dict[str, dict[str, Any]] = {
    "dropout": qkv(dropout_p=1.0),
    "float64": qkv(torch.float64),
    "head_dim over 256": {n: torch.randn(1, 1, 9, 300) for n in ("query", "key", "value")},
    "last dim not contiguous": {n: t[..., ::2] for n, t in qkv().items()},
    "no query rows": qkv() | {"query": torch.randn(B, H, 0, D)},
    "no keys": qkv() | {n: torch.randn(B, H, 0, D) for n in ("key", "value")},
    "no requests": {n: t[:0] for n, t in qkv().items()},
    "three dims": {n: t[0] for n, t in qkv().items()},
    "one batch of keys": qkv() | {n: torch.randn(1, H, L, D) for n in ("key", "value")},
    "narrower values": qkv() | {"value": torch.randn(B, H, L, D // 2)},
    "wrong head_dim": qkv() | {"key": torch.randn(B, H, L, D // 2)},
    "wrong mask": qkv(attn_mask=torch.randn(7, 7)),
    "a scale that is not finite": qkv(scale=float("nan")),
    "mask and causal": qkv(attn_mask=torch.randn(S, L), is_causal=True),
    "mixed dtypes": qkv() | {"key": torch.randn(B, H, L, D).double()},
    "integers": {n: t.int() for n, t in qkv().items()},
    "meta": {n: t.to("meta") for n, t in qkv().items()},
}


@pytest.mark.parametrize("name", LEFT)
def test_the_rest_is_torchs(calls: Calls, name: str) -> None:
    with torch.no_grad():
        if name == "meta":
            with integration.activate():
                assert sdpa(**LEFT[name]).is_meta
        else:
            same(LEFT[name])
    assert not calls.served


def test_small_calls_are_torchs(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    call = qkv()
    flops = 4 * B * H * S * L * D
    for least, served in ((flops + 1, 0), (flops, 1)):
        monkeypatch.setattr(integration, "least_flops", lambda *call, least=least: least)
        with torch.no_grad():
            same(call)
        assert calls.served == served


def test_what_is_too_small_depends_on_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    least = integration.least_flops
    assert least(fp16, 1, False) < least(fp32, 1, False) == least(fp32, 8, False)
    assert least(fp32, 9, False) == least(fp32, 32, False) > least(fp32, 33, False)
    assert least(fp32, 2, True) < least(fp32, 2, False)
    avx512, vnni, wide, amx = (
        f"cpu:{t}" for t in ("avx512", "avx512_vnni", "avx512_bf16", "amx_bf16")
    )
    # What the machine runs, its own target, and that of calls.
    for runs, host, target, as_fp16, torch_is_fast in (
        (wide, wide, wide, False, False),
        (wide, wide, avx512, True, False),
        (avx512, avx512, avx512, True, False),
        (vnni, vnni, vnni, True, False),
        # torch is fast where Intel's CPUs have its instructions, whatever the engine's target is.
        (wide, vnni, vnni, False, True),
        (wide, vnni, wide, False, True),
        (amx, amx, amx, False, True),
        (amx, amx, wide, False, True),
    ):
        monkeypatch.setattr(integration, "host_targets", lambda runs=runs: included(runs))
        monkeypatch.setattr(integration, "host_target", lambda host=host: host)
        monkeypatch.setattr(integration, "default_target", lambda target=target: target)
        assert (least(bf16, 12, False) == least(fp16, 12, False)) == as_fp16
        assert (least(bf16, 1, False) > least(fp16, 1, False)) == torch_is_fast
        assert least(bf16, 1, True) <= 4e6


def test_a_chosen_backend_stays(calls: Calls) -> None:
    with torch.no_grad(), integration.activate():
        with sdpa_kernel(SDPBackend.MATH):
            sdpa(**qkv())
        assert not calls.served
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            sdpa(**qkv())
    assert calls.served == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_torchs(calls: Calls) -> None:
    rows = [torch.randn(n, H, D) for n in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with torch.no_grad():
        expected = sdpa(nested, nested, nested)
        with integration.activate():
            found = sdpa(nested, nested, nested)
    assert torch.equal(found.values(), expected.values())
    assert not calls.served


@pytest.mark.parametrize("which", ["query", "key", "value", "attn_mask"])
def test_gradients_are_torchs(calls: Calls, which: str) -> None:
    call = qkv(attn_mask=torch.randn(S, L))
    call[which].requires_grad_()
    sdpa(**call).sum().backward()
    expected, call[which].grad = call[which].grad, None
    with integration.activate():
        sdpa(**call).sum().backward()
        assert torch.equal(call[which].grad, expected)
        assert not calls.served
        with torch.inference_mode():
            sdpa(**call)
    # torch itself sends no mask that requires grad to its fused attention.
    assert calls.served == (which != "attn_mask")


def test_what_is_left_to_torch_does_not_ask_for_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_TARGET", "cpu:bogus")
    with integration.activate():
        sdpa(**qkv(torch.float64))
        sdpa(**qkv(torch.bfloat16, query=torch.randn(B, H, S, D).bfloat16().requires_grad_()))
        with torch.no_grad(), pytest.raises(fa.errors.EnvironmentVariableError, match="bogus"):
            sdpa(**qkv(torch.bfloat16))


def test_a_parameter_that_is_not_differentiated_is_served(calls: Calls) -> None:
    call = qkv()
    with integration.activate(), torch.no_grad():
        sdpa(**call | {"query": torch.nn.Parameter(call["query"])})
    assert calls.served == 1


def test_torch_compile_and_export(calls: Calls) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(q.shape[0], -1) * 2

    inputs = tuple(qkv().values())
    model = Model()
    with torch.no_grad():
        expected = model(*inputs)
        programs = [
            torch.compile(model, fullgraph=True),
            torch.export.export(model, inputs).module(),
        ]
        programs[0](*inputs)
        with integration.activate():
            programs.append(torch.compile(Model(), fullgraph=True))
            for count, program in enumerate(programs, 1):
                torch.testing.assert_close(program(*inputs), expected, atol=1e-4, rtol=1e-4)
                assert calls.served == count
        for program in programs:
            torch.testing.assert_close(program(*inputs), expected)
    assert calls.served == len(programs)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"attn_mask": EMPTY}], ids=["causal", "a row without a key"]
)
def test_compiled_training_has_torchs_gradients(calls: Calls, options: dict[str, Any]) -> None:
    call = qkv(**options)
    call["query"].requires_grad_()
    sdpa(**call).square().sum().backward()
    expected, call["query"].grad = call["query"].grad, None
    compiled = torch.compile(lambda **call: sdpa(**call).square().sum())
    with integration.activate():
        compiled(**call).backward()
    # A compiled forward pass runs without grad mode, so the engine's lse reaches torch's backward.
    assert calls.served == 1
    torch.testing.assert_close(call["query"].grad, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*batching rule.*")
def test_vmap(calls: Calls) -> None:
    call = {n: torch.randn(3, 1, H, S, D) for n in ("query", "key", "value")}
    mapped = torch.func.vmap(sdpa)
    with torch.no_grad():
        expected = mapped(*call.values())
        with integration.activate():
            torch.testing.assert_close(mapped(*call.values()), expected, atol=1e-5, rtol=1e-5)


def test_other_threads_are_served(calls: Calls) -> None:
    def work() -> None:
        with torch.no_grad():
            sdpa(**qkv())

    with integration.activate():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert calls.served == 1


def registered() -> str:
    return torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu")


def test_activations_nest_and_end(calls: Calls) -> None:
    before = registered()
    outer = fa.integrations.torch.activate()
    with integration.activate() as inner:
        inner.deactivate()
        assert integration.is_active()
    with pytest.raises(fa.InputError, match="has ended"), inner:
        pass
    assert integration.is_active()
    with torch.no_grad():
        sdpa(**qkv())
    assert calls.served == 1
    outer.deactivate()
    assert not integration.is_active()
    assert registered() == before
    integration.activate()
    integration.activate()
    integration.deactivate()
    integration.deactivate()
    assert registered() == before
    with torch.no_grad():
        sdpa(**qkv())
    assert calls.served == 1


def test_activations_are_not_copied(calls: Calls) -> None:
    with integration.activate() as active:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(fa.InputError, match="cannot be copied or pickled"):
                make(active)


def test_no_warning(calls: Calls) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.activate().deactivate()


def test_another_implementation_gets_the_rest(calls: Calls) -> None:
    theirs = []
    original = torch.library.get_kernel(OP, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def other(*args: Any, **kwargs: Any) -> Any:
        theirs.append(args[0].dtype)
        return original.call_boxed(keys, *args, **kwargs)

    with torch.library._scoped_library("aten", "IMPL") as library, torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(OP, other, "CPU")
        with integration.activate():
            sdpa(**qkv())
            assert (calls.served, theirs) == (1, [])
            sdpa(**qkv(torch.float64))
            assert (calls.served, theirs) == (1, [torch.float64])
        sdpa(**qkv())
        assert (calls.served, theirs) == (1, [torch.float64, torch.float32])


def test_another_implementation_that_ends_first(calls: Calls) -> None:
    original = torch.library.get_kernel(OP, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(OP, lambda *a, **k: original.call_boxed(keys, *a, **k), "CPU")
        activation = integration.activate()
    with pytest.raises(fa.InputError, match=r"deactivate\(\).*activate\(\)"):
        sdpa(**qkv(torch.float64))
    activation.deactivate()
    same(qkv(torch.float64))
