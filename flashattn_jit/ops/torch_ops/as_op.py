"""Calls as one torch op, for dispatch modes, profilers, tensor subclasses and tracers.

Calls on plain tensors do not use this module (`is_direct`). A mode, a profiler or a tensor subclass
sees the op of the call, which makes the ordinary call inside. Fake tensors and tracers have no
values to plan with: there the op's inputs are everything that the call depends on (`graphs`), and
the op makes the ordinary call when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ...errors import FlashAttnJitError, GradError, InputError
from ...torch_modes import VMAP_MESSAGE, grad_message, has_no_values, refuse_transforms, unreadable
from ...variants.variant import as_variant, is_pointwise
from ..arguments import checks
from ..arguments.torch_inputs import autocast
from ..keys.block_mask import lists_of
from ..keys.paged import Paged
from . import definitions, sites
from .outline import derivatives
from .sites import Hooks, Use

Values = Mapping[str, Any]
Flags = Callable[[bool], list[bool]]
"""Returns the flags of an op (`definitions.Op`), given whether the variant is pointwise."""

_KEYS = torch._C._TorchDispatchModeKey
_active = torch._C._get_dispatch_mode
_OPS = torch.ops.flashattn_jit


# --- the calls -----------------------------------------------------------------------------------


def states(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    variant: Any,
    params: Values,
    arguments: Values,
    out: Any,
    given_lse: Any,
    pointwise: bool | None = None,
) -> Any:
    """A call whose result is out, or (out, lse): of `attention`, `varlen_attention` or a batch.

    arguments: the named arguments of the ordinary call, except the variant, its params, `out` and
    `lse`. pointwise: whether the variant has no lse, if known.
    """
    partial = arguments["partial"]
    with_lse = return_lse = arguments["return_lse"] or given_lse is not None

    def flags(no_lse: bool) -> list[bool]:
        nonlocal with_lse
        no_lse = no_lse if pointwise is None else pointwise
        with_lse = return_lse or (partial and not no_lse)
        return [partial, with_lse]

    named = {"q": q, "k": k, "v": v}
    result, lse = _call(op, named, variant, params, arguments, flags, (out, given_lse))
    return (result, lse) if with_lse else result


def batch(
    owner: Any,
    q: Any,
    k: Any,
    v: Any,
    more: Any,
    params: Values,
    scale: Any,
    return_lse: bool,
    partial: bool,
    out: Any,
    lse: Any,
) -> Any:
    """`BatchAttention.run` as one op, which looks up the object, its variant and its plan when it
    runs: a new plan does not change a graph. more: k and v of further levels of a cascade."""
    number = owner.number
    others = [t for pair in more for t in pair]
    if is_traced((q, k, v, *others, scale, out, lse, *params.values())):
        if _use() == "exported":
            from . import graphs  # imports Dynamo

            number = graphs.exported_number(owner)
    else:
        owner.check_placed(q, k, v, out, lse, others)
        if _is_transformed():
            owner.in_force().check_transforms(params)
    arguments = {
        "batch": number, "scale": scale, "return_lse": return_lse, "partial": partial, "more": more,
    }  # fmt: skip
    return states("batch_attention", q, k, v, None, params, arguments, out, lse, owner.pointwise)


def flex(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    want_lse: bool,
    want_max: bool,
) -> tuple[Any, Any, Any]:
    """`flex.run_flex` as one op."""
    arguments = {
        "block_mask": block_mask, "scale": scale, "enable_gqa": enable_gqa, "want_lse": want_lse,
        "want_max": want_max,
    }  # fmt: skip
    hooks = Hooks(score_mod, None)
    if block_mask is not None and is_traced((query, key, value)):
        hooks = Hooks(score_mod, block_mask.mask_mod)
        lists = lists_of(block_mask)
        arguments["block_mask"] = (lists, block_mask.BLOCK_SIZE, block_mask.shape)
    named = _autocast({"query": query, "key": key, "value": value})
    out, lse, max_scores = _call(
        "flex_attention", named, hooks, {}, arguments, lambda _: [want_lse, want_max]
    )
    return out, lse if want_lse else None, max_scores if want_max else None


def sdpa(query: Any, key: Any, value: Any, **arguments: Any) -> Any:
    """`sdpa.run_sdpa` as one op."""
    named = _autocast({"query": query, "key": key, "value": value})
    (out,) = _call(
        "scaled_dot_product_attention", named, None, {}, arguments,
        lambda _: [bool(arguments["enable_gqa"])],
    )  # fmt: skip
    return out


def append(
    run: Callable[..., None],
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    q_indptr: Any,
    paged: Any,
    target: Any,
) -> None:
    """`append.run_append` as one op; calls `run`, that function, if no op takes the arguments."""
    given = (k, v, k_pages, v_pages)
    if not is_traced((*given, q_indptr)) and not (_fit_an_op(given) and isinstance(paged, Paged)):
        run(*given, q_indptr, paged, target)
        return
    if not torch.compiler.is_dynamo_compiling():
        _refuse_functionalize("k_pages or v_pages", (k_pages, v_pages))
        if _is_transformed():
            _check_transforms(given, ("k", "v", "k_pages", "v_pages"))
    if not isinstance(paged, Paged):
        raise InputError(f"paged must be an fa.Paged, got {type(paged).__name__}")
    tables = (paged.page_indptr, paged.page_indices, paged.last_page_len)
    _run(_OPS.append_paged_kv, (*given, q_indptr, *tables, paged.page_size, target))


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    target: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge.merge_into` as one op."""
    is_traced([x for x in (*outs, *lses, mask, out, lse) if x is not None])
    if out is None and lse is None:
        return _run(  # type: ignore[no-any-return]
            _OPS.merge_states, (outs, lses), mask=mask, dtype=dtype, target=target
        )
    if not torch.compiler.is_dynamo_compiling():
        _refuse_functionalize("out or lse", (out, lse))
    if out is None:
        out = outs[0].new_empty(outs[0].shape, dtype=dtype)
    if lse is None:
        lse = outs[0].new_empty(outs[0].shape[:-1] if lses else (0,))
    _run(_OPS.merge_states_out, (outs, lses, mask, out, lse), target=target)
    return out, lse


# --- one call ------------------------------------------------------------------------------------


def _call(
    op: str,
    named: Values,
    variant: Any,
    params: Values,
    arguments: Values,
    flags: Flags,
    results: tuple[Any, Any] = (None, None),
) -> Sequence[torch.Tensor]:
    """The results of a call. results: given out and lse, which are the first two of them."""
    values = (*named.values(), *results, *arguments.values(), *params.values())
    if not (is_traced(values) or _is_transformed()):
        # The call runs now; its arguments are stored in its site.
        q, k, v = named.values()
        if not _fit_an_op([q, k, v, *(x for x in results if x is not None)]):
            call = sites.UserCall(variant, dict(params), dict(arguments), None, {})
            return definitions.OPS[op].run(q, k, v, call, *results)
        pointwise = not isinstance(variant, Hooks) and is_pointwise(as_variant(variant))
        number = sites.once(variant, params, arguments)
        site_inputs: tuple[Any, ...] = ([], definitions.NO_FLOATS, [], number, flags(pointwise))
        return _results(op, (q, k, v, *site_inputs), results, number)
    if not torch.compiler.is_dynamo_compiling():
        _refuse_functionalize("out or lse", results)
    from . import graphs  # imports Dynamo

    use = _use()
    info, inputs = graphs.inputs(use, variant, params, arguments)
    held = ["a tensor of the variant"] * (len(inputs.tensors) - len(info.names))
    held += [checks.variants_tensor(name) for name in info.names]
    if torch.compiler.is_dynamo_compiling():
        # The op of a refusal would not run if only derivatives are used.
        names = (*named, "out", "lse", *held)
        for why in derivatives((*named.values(), *results, *inputs.tensors), names):
            raise GradError(why)
    problem = _problem(named, params, inputs.tensors, held, results)
    if use == "once" and _is_transformed():
        problem = problem or _lost_transform(
            (*values, *inputs.tensors), (*named, "out", "lse", *arguments, *params, *held)
        )
    if problem is not None:
        if use == "once":
            sites.release(info.number)
        inputs = graphs.Inputs([], definitions.NO_FLOATS, [], graphs.refusal(use, *problem))
        named = {name: _placeholder(x) for name, x in named.items()}
        out, lse = (x if isinstance(x, torch.Tensor) else None for x in results)
        results = (out, lse)
    return _results(op, (*named.values(), *inputs, flags(info.pointwise)), results, inputs.site)


def _results(
    op: str, given: Sequence[Any], results: tuple[Any, Any], number: int
) -> Sequence[torch.Tensor]:
    out, lse = results
    if out is None and lse is None:
        found = _run(getattr(_OPS, op), given, number)
        return (found,) if isinstance(found, torch.Tensor) else found
    found = _run(getattr(_OPS, f"{op}_out"), (*given, out, lse), number)
    return found[0] if out is None else out, found[1] if lse is None else lse


def _run(op: Any, given: Sequence[Any], site: int = -1, **more: Any) -> Any:
    """Calls the op; under a tracer this adds a node to its graph. site: the call's, or -1."""
    if torch.compiler.is_dynamo_compiling():
        return op(*given, **more)
    try:
        return op(*_as_inputs(given), **more)
    finally:
        sites.release(site)


# --- checks --------------------------------------------------------------------------------------


def _problem(
    named: Values,
    params: Values,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    results: tuple[Any, Any],
) -> tuple[str, str] | None:
    """The class and message of the error for inputs that the op's schema cannot represent, and for
    gradients, which only the tracer sees; None if there is none. names: of the tensors."""
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            return "InputError", f"{name} must be a torch.Tensor, got {type(tensor).__name__}"
    for name, result in zip(("out", "lse"), results, strict=True):
        if result is not None and not isinstance(result, torch.Tensor):
            got = type(result).__name__
            return "InputError", f"{name} must be a torch.Tensor or None, got {got}"
    if torch.is_grad_enabled():
        given = (*named.items(), *params.items(), *zip(names, tensors, strict=True))
        for name, tensor in given:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                return "GradError", grad_message(name)
    return None


def _placeholder(x: Any) -> torch.Tensor:
    return x.detach() if isinstance(x, torch.Tensor) else torch.empty(1, 1, device="cpu")


def _fit_an_op(values: Sequence[Any]) -> bool:
    """Whether the dispatcher passes them to an implementation unchanged. Others go to the ordinary
    call, which raises the error for them."""
    return all(
        isinstance(x, torch.Tensor)
        and x.device.type in ("cpu", "cuda")
        and not (unreadable(x) or x.is_neg() or x.is_conj())
        for x in values
    )


def _is_transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode AD is active in this thread."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def _lost_transform(values: Sequence[object], names: Sequence[str]) -> tuple[str, str] | None:
    """The error, as `_problem` returns it, for a tensor whose transform an op would drop."""
    try:
        _check_transforms(values, names)
    except FlashAttnJitError as error:
        return type(error).__name__, str(error)
    return None


def _check_transforms(values: Sequence[object], names: Sequence[str]) -> None:
    """Raises GradError or InputError for a tensor whose transform an op would drop."""
    pairs = zip(names, values, strict=True)
    tensors = [(name, x) for name, x in pairs if isinstance(x, torch.Tensor)]
    checks.check_grad([x for _, x in tensors], [name for name, _ in tensors])
    for name, tensor in tensors:
        refuse_transforms(tensor, name)


def _refuse_functionalize(what: str, values: Iterable[object]) -> None:
    if any(isinstance(x, torch.Tensor) and torch._is_functional_tensor(x) for x in values):
        raise InputError(
            f"{what} is written to, which torch.func.functionalize cannot follow in an op that is "
            "not torch's own; call it outside"
        )


def _autocast(named: Values) -> Values:
    """The inputs in autocast's dtype, if all are tensors."""
    if not all(isinstance(x, torch.Tensor) for x in named.values()):
        return named
    return dict(zip(named, autocast(*named.values()), strict=True))


# --- tracers -------------------------------------------------------------------------------------


def is_traced(values: Iterable[object]) -> bool:
    """Whether a tracer or FakeTensorMode is active, or one of the values is a tensor of theirs.

    Raises InputError for tensors of `torch.vmap`, and under torch.jit.trace.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._get_tracing_state() is not None:
        raise InputError("torch.jit.trace is not followed; use torch.export or torch.compile")
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    if any(torch._C._functorch.is_batchedtensor(x) for x in tensors):
        raise InputError(VMAP_MESSAGE)
    if any(_active(key) is not None for key in (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)):
        return True
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return True
    return any(has_no_values(x) or torch._is_functional_tensor(x) for x in tensors)


def _use() -> Use:
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        return "compiled"
    return "exported" if _makes_graph() else "once"


def _makes_graph() -> bool:
    """Whether calls are being recorded in a graph that may run later."""
    if torch.compiler.is_exporting() or _active(_KEYS.PROXY) is not None:
        return True
    return bool(torch._ops._len_torch_dispatch_stack_pre_dispatch())


def _as_inputs(values: Sequence[Any]) -> list[Any]:
    """The values with ordinary tensors converted to the active fake mode, if there is one.

    Tensors that a variant holds are ordinary tensors. A graph gets them as constants.
    """
    mode = _fake_mode(values)
    if mode is None or mode.allow_non_fake_inputs:
        return list(values)
    from torch._subclasses.fake_tensor import (
        FakeTensor,
    )  # already imported, by the creator of the mode

    graph = _makes_graph()

    def entered(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [entered(item) for item in x]
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
            return x
        return torch.ops.aten.lift_fresh_copy(x) if graph else mode.from_tensor(x)

    return [entered(x) for x in values]


def _fake_mode(values: Sequence[Any]) -> Any:
    mode = _active(_KEYS.FAKE)
    if mode is not None:
        return mode
    flat = [y for x in values for y in (x if isinstance(x, (list, tuple)) else (x,))]
    return next((x.fake_mode for x in flat if hasattr(x, "fake_mode")), None)
