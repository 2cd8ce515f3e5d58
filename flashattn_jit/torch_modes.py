"""Torch's modes and unusual tensors: tests for them, and a context without active modes.

A default device, FakeTensorMode, a tracer, a functional transform, autocast and inference mode
change the results of torch functions. A tensor that is cached must not be created under a mode, or
later calls would be affected.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from flashattn_jit import _C
from flashattn_jit.errors import GradError, InputError, LaunchError, ParamError

VMAP_MESSAGE = (
    "this op does not run under torch.vmap: batch is a dim of its inputs; fold the mapped dim into "
    "batch, or loop over it"
)

PLAN_FIRST = "plan before the capture, then capture run(), and plan again before each replay"
"""The remedy in errors for a plan() during a capture."""


def grad_message(what: str) -> str:
    """The message of the error for a tensor that requires grad. what: its name."""
    return (
        f"{what} requires grad while grad mode is on, but this engine is inference only; call it "
        "under torch.no_grad() (frozen parameters pass there) or pass the tensor's detach()"
    )


_P = ParamSpec("_P")
_R = TypeVar("_R")

_function_modes = torch._C._len_torch_function_stack
_pop_function_mode = torch._C._pop_torch_function_stack
_push_function_mode = torch._C._push_on_torch_function_stack
_included_keys = torch._C._dispatch_tls_local_include_set

increment_version: Callable[[Sequence[torch.Tensor]], None] = torch._C._increment_version
"""Raises the version counters of tensors that were written, which autograd compares: it takes 0.3
us, a third of the time of `torch.autograd.graph.increment_version` (by hand). Tensors of inference
mode have no counter."""


class _Inside(threading.local):
    depth = 0  # of `outside_modes` in this thread


_inside = _Inside()


class outside_modes:  # lower case like torch.no_grad
    """A context in which code creates ordinary CPU tensors, whatever modes are active around it.

    >>> with outside_modes():
    ...     kept = torch.ones(3, device="cpu")
    """

    __slots__ = ("_functions", "_others")

    def __enter__(self) -> None:
        _inside.depth += 1
        self._functions = [_pop_function_mode() for _ in range(_function_modes())]
        self._others: contextlib.ExitStack | None = None
        try:
            others = _leave_others()
            if others:
                self._others = contextlib.ExitStack()
                for context in others:
                    self._others.enter_context(context)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self._others is not None:
            self._others.close()
        for mode in reversed(self._functions):
            _push_function_mode(mode)
        _inside.depth -= 1


def is_outside() -> bool:
    """Whether this thread is inside `outside_modes`."""
    return _inside.depth > 0


def _leave_others() -> list[AbstractContextManager[Any]]:
    """Contexts that leave the active modes and transforms, except for torch-function modes."""
    found: list[AbstractContextManager[Any]] = []
    if torch.is_inference_mode_enabled():
        # inference_mode(False) enables gradients.
        found += [torch.inference_mode(False), torch.no_grad()]
    if torch._C._is_any_autocast_enabled():
        found += [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda")]
    if not torch._C._is_torch_function_enabled():  # inside a call of a tensor subclass
        found.append(torch._C._EnableTorchFunction())
    if torch._C._functorch.peek_interpreter_stack() is not None:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        found.append(temporarily_clear_interpreter_stack())
    pre_dispatch = torch._ops._len_torch_dispatch_stack_pre_dispatch()
    if torch._C._len_torch_dispatch_stack() or pre_dispatch:
        # This imports tracers, which are loaded already where such a mode is active.
        from torch.utils._python_dispatch import _disable_current_modes

        found.append(_disable_current_modes())
    return found


def on_host(work: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator for functions that read and create host values alone: runs them outside modes."""

    @functools.wraps(work)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling() or is_quiet():
            return work(*args, **kwargs)
        with outside_modes():
            return work(*args, **kwargs)

    return run


def _both(read: Callable[[], _R]) -> set[_R]:
    """The results of a function outside modes, with inference mode off and on."""
    found = set()
    with outside_modes():
        for inference in (False, True):
            with torch.inference_mode(inference):
                found.add(read())
    return found


_C.learn_quiet(list(_both(lambda: _included_keys().raw_repr())))  # keys of a thread without modes


def is_quiet(functions: bool = False) -> bool:
    """Whether no mode or transform is active in this thread, except for inference mode and
    autocast, which do not change calls of plain tensors. functions: except for torch-function
    modes, such as a default device, as well."""
    return _C.is_quiet(functions)


_tensor_keys = torch._C._dispatch_keys
_CPU = torch.device("cpu")
_learned: set[torch.device] = set()

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that always have an address, if their layout has."""


def _learn_device(device: torch.device) -> None:
    """Add the dispatch keys of plain tensors on a device to those that `is_direct` accepts."""
    _learned.add(device)
    _C.learn_plain(list(_both(lambda: _tensor_keys(torch.empty(0, device=device)).raw_repr())))


_learn_device(_CPU)


def _learn_devices_of(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there is a new device; keys of a CUDA device are learned from the first tensor on
    it."""
    new = {x.device for x in tensors if type(x) in PLAIN and x.is_cuda and x.device not in _learned}
    if not new or not torch.cuda.is_initialized():
        return False
    for device in new:
        _learn_device(device)
    return True


def is_direct(*tensors: torch.Tensor) -> bool:
    """Whether torch's dispatcher would only call the implementation of an op on these tensors.

    Such calls bypass the dispatcher, which takes 6 to 9 us (measured, 2 cores): more than a small
    kernel.
    """
    if _C.is_direct(*tensors):
        return True
    return not _C.is_profiling() and _learn_devices_of(tensors) and _C.is_direct(*tensors)


def is_quiet_and_plain(*tensors: torch.Tensor, functions: bool = False) -> bool:
    """`is_direct`, or it is a profiler alone that would see the call; or, with functions, a
    torch-function mode."""
    if not _C.is_quiet(functions):
        return False
    if _C.are_plain(*tensors):
        return True
    return _learn_devices_of(tensors) and _C.are_plain(*tensors)


_examples: dict[torch.dtype, torch.Tensor] = {}


def example(dtype: torch.dtype) -> torch.Tensor:
    """An empty CPU tensor of a dtype."""
    found = _examples.get(dtype)
    if found is None:
        with outside_modes():
            found = _examples[dtype] = torch.empty(0, dtype=dtype, device=_CPU)
    return found


def is_plain(*values: object) -> bool:
    """Whether all tensors among the values are of torch's own class."""
    for value in values:
        if type(value) is not torch.Tensor and isinstance(value, torch.Tensor):
            return False
    return True


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of FakeTensorMode or of a tracer."""
    if type(tensor) is torch.Tensor:
        return False
    # Where the classes are not imported there are no such tensors.
    for module, name in (("fake_tensor", "FakeTensor"), ("functional_tensor", "FunctionalTensor")):
        loaded = sys.modules.get(f"torch._subclasses.{module}")
        if loaded is not None and isinstance(tensor, getattr(loaded, name)):
            return True
    return False


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    # The comparison takes a tenth of the time of reading the type.
    if device == _CPU or device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    # torch asks the current device.
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, doing: str, remedy: str) -> None:
    """Refuse to plan, compile or load during the capture of a CUDA graph.

    Raises:
        LaunchError: the device's current stream is being captured.
    """
    if is_capturing(device):
        raise LaunchError(f"{doing} while a CUDA graph is being captured: {remedy}")


def is_unknown(tensor: torch.Tensor) -> bool:
    """Whether values of a tensor cannot be read now: it has none, or a tracer would record it."""
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return traced or has_no_values(tensor)


def need_values(what: str, why: str, tensors: Iterable[object]) -> None:
    """Raises InputError where one of the tensors has no values. why: what needs the values."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and is_unknown(tensor):
            raise InputError(
                f"{what} is a tensor without values (a {type(tensor).__name__}), but {why}; call "
                "it outside of FakeTensorMode and of tracers"
            )


def refuse_transforms(tensor: torch.Tensor, what: str = "an input") -> None:
    """Raises GradError or InputError for a tensor of a functional transform such as
    `torch.func.grad` or `torch.vmap`, which work on the host would break. what: its name."""
    if torch._C._functorch.is_batchedtensor(tensor):
        raise InputError(VMAP_MESSAGE)
    follows = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if follows and torch._C._functorch.is_gradtrackingtensor(tensor):
        raise GradError(grad_message(what))


def remembered(most: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """`functools.lru_cache` for functions that create tensors; under a mode nothing is cached.

    There each call creates the tensors of that mode, such as fake tensors.
    """

    def decorate(make: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.lru_cache(maxsize=most)
        def kept(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with outside_modes():
                return make(*args, **kwargs)

        @functools.wraps(make)
        def made(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_dynamo_compiling() or not (_inside.depth or is_quiet()):
                return make(*args, **kwargs)
            return kept(*args, **kwargs)  # type: ignore[arg-type]  # hashable, as lru_cache wants

        return made

    return decorate


# --- tensors without dense entries ---------------------------------------------------------------

_REMEDIES = {
    "MaskedTensor": "pass its get_data(), and the mask as a mask_mod or an attn_mask",
    "DTensor": "pass its to_local(), or its full_tensor()",
}


def unreadable(tensor: torch.Tensor) -> str:
    """Why a tensor has no dense entries at an address, and what to pass instead; else empty.

    Nested, sparse, MKL-DNN and quantized tensors have none, nor have wrapper subclasses, which hold
    another tensor. Fake and functional tensors, with which torch traces, are accepted.
    """
    if type(tensor) in PLAIN:
        return _odd_layout(tensor)
    name = type(tensor).__name__
    if is_lazy(tensor):
        return f"is an {name}, which has no shape yet; run its module once before"
    with torch._C.DisableTorchFunctionSubclass():
        problem = _odd_layout(tensor)
        if problem or has_no_values(tensor) or _has_address(tensor):
            return problem
    remedy = _REMEDIES.get(name, "pass the tensor that it wraps")
    return f"is a {name}, a wrapper subclass without entries of its own; {remedy}"


def refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    """Raises ParamError for a captured tensor or a param that no kernel can read."""
    if problem := unreadable(tensor):
        raise ParamError(f"the variant's tensor {name!r} {problem}")


def _odd_layout(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return (
            "is a nested tensor; pass its values() to fa.varlen_attention, with its offsets() as "
            "indptr, or pad it with torch.nested.to_padded_tensor"
        )
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; pass a strided (dense) tensor, such as its to_dense()"
    if tensor.is_quantized:
        return (
            f"is a quantized tensor ({tensor.dtype}); pass its dequantize(), or its int_repr() "
            "with the scale as a param of a key_mod or value_mod"
        )
    return ""


def _has_address(tensor: torch.Tensor) -> bool:
    # A wrapper subclass has no storage, but may have no entries either.
    try:
        return tensor.data_ptr() != 0 or tensor.is_meta or tensor.numel() == 0
    except RuntimeError:
        return False
