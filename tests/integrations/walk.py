"""The outcome of a model type of transformers under the engine: equal to eager, refused by name, or
not called.

`outcome(model_type)` builds two small models of the type and compares the engine's results with
eager's for each way to call a model: whole prompts, padding on either side, packed rows, generation
with each kind of cache.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from flashattn_jit.errors import FlashAttnJitError
from flashattn_jit.integrations import transformers as integration
from tests.integrations import tiny_models
from tests.integrations.table import Row
from tests.integrations.tiny_models import FIRST_WORD, VOCABULARY, CannotBuildError, Tiny

LENGTH, BATCH, NEW = 24, 3, 6
TOLERANCE = 5e-5


@dataclasses.dataclass
class Outcome:
    """One model type's results: by check, "equal", "refused: ...", "differs by ...", "fails: ..."
    or "eager fails"."""

    model_type: str
    model: str = ""
    width: str = ""
    calls: int = 0
    warned: bool = False
    layers: str = ""
    checks: dict[str, str] = dataclasses.field(default_factory=dict)
    not_built: str = ""

    @property
    def verdict(self) -> str:
        """The type's row in the table."""
        if self.not_built:
            return "not built"
        found = {
            check: text.split(":")[0].split(" by ")[0]
            for check, text in self.checks.items()
            if not (check == "output_attentions" and text.startswith("refused"))
        }
        kinds = set(found.values())
        for worst in ("differs", "fails"):
            if worst in kinds:
                return worst
        if "refused" in kinds:
            return "refused" if "equal" not in kinds else "equal or refused"
        return "equal" if self.calls else "not called" if self.warned else "no attention"

    def row(self) -> Row:
        """The row of the table."""
        if self.not_built:
            return Row(
                self.model_type, self.model, "not built", " ".join(self.not_built.split())[:200]
            )
        remarks = collections.defaultdict(list)
        for check, text in self.checks.items():
            kind, _, reason = text.partition(": ")
            if kind in ("refused", "fails") or kind.startswith("differs"):
                reason = reason.split(";")[0]
                remarks[reason if kind == "refused" else f"{kind}: {reason}"].append(check)
            elif kind == "eager fails":
                remarks["eager fails"].append(check)
        said = [
            why if len(checks) > 3 else f"{why} ({', '.join(checks)})"
            for why, checks in remarks.items()
            if checks != ["output_attentions"] or not why.startswith("output_attentions")
        ]
        if self.layers and self.verdict == "equal":
            said.insert(0, self.layers)
        remark = " ".join("; ".join(said).split())[:300]
        return Row(self.model_type, self.model, self.verdict, remark)


@contextmanager
def engine_calls() -> Iterator[list[torch.nn.Module]]:
    """The layers whose attention the engine computes, one entry for each finished call."""
    served: list[torch.nn.Module] = []
    inner = integration.attention_forward

    def counted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = inner(module, *args, **kwargs)
        served.append(module)
        return out

    integration.attention_forward = counted
    integration.register()
    try:
        yield served
    finally:
        integration.attention_forward = inner
        integration.register()


def outcome(model_type: str) -> Outcome:
    """Builds and calls one type; errors of the type become part of the outcome."""
    try:
        tiny, eager, inputs = _first_that_runs(model_type)
    except CannotBuildError as error:
        return Outcome(model_type, not_built=str(error))
    result = Outcome(model_type, tiny.model_class.__name__, tiny.width)
    with engine_calls() as served:
        name = integration.NAME
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                ours = tiny.build(name)
            except FlashAttnJitError as error:
                result.checks["build"] = f"refused: {error}"
                return result
            except Exception as error:
                result.checks["build"] = f"fails: {type(error).__name__}: {error}"
                return result
        for check, run in _checks(tiny, inputs).items():
            result.checks[check] = _compared(eager, ours, run)
        result.calls = len(served)
        result.layers = _layers_called(ours, served)
        result.warned = any("this engine is not called" in str(each.message) for each in caught)
        wrong = _wrongly_listed(ours, served, result.warned)
        if wrong:
            result.checks["served()"] = f"fails: {wrong}"
        again = tiny.build("eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again.set_attn_implementation(name)
        prefill = next(iter(_checks(tiny, inputs).values()))
        result.checks["set_attn_implementation"] = _compared(eager, again, prefill)
    return result


def _layers_called(model: PreTrainedModel, called: list[torch.nn.Module]) -> str:
    """How many layers that `served` lists ran, or "" for all: text reaches no vision layers."""
    listed = {layer.name for layer in integration.served(model) if layer.served}
    ran = {name for name, part in model.named_modules() if any(part is each for each in called)}
    missing = len(listed - ran)
    return f"{len(listed) - missing} of {len(listed)} served layers ran" if missing else ""


def _wrongly_listed(model: PreTrainedModel, called: list[torch.nn.Module], warned: bool) -> str:
    """How `served` or the warning contradicts the calls of the engine, or ""."""
    reasons = {layer.name: layer.reason for layer in integration.served(model)}
    # A layer that passes a refused argument may pass None for it.
    possible = {name for name, why in reasons.items() if not why or why.startswith("passes")}
    calling = {name for name, part in model.named_modules() if any(part is each for each in called)}
    if calling - possible:
        return f"the engine was called by {', '.join(sorted(calling - possible))}"
    if warned != any("code of its own" in why for why in reasons.values()):
        return f"warned: {warned}, and listed: {sorted(set(reasons.values()))}"
    return ""


def _first_that_runs(model_type: str) -> tuple[Tiny, PreTrainedModel, dict[str, torch.Tensor]]:
    reasons = []
    for tiny in tiny_models.candidates(model_type):
        try:
            if tiny.config is None:
                raise CannotBuildError(tiny.failure)
            count = tiny_models.parameters(tiny)
            if count > tiny_models.LIMIT:
                raise CannotBuildError(f"{count / 1e6:.0f} million parameters")
            eager = tiny.build("eager")
            return tiny, eager, _inputs_that_run(tiny, eager)
        except CannotBuildError as error:
            reasons.append(f"{tiny.width}: {error}")
        except Exception as error:
            reasons.append(f"{tiny.width}: {tiny_models.line(error)}")
    raise CannotBuildError("; ".join(reasons))


def _tokens(length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(FIRST_WORD, VOCABULARY, (batch, length), generator=generator)


@torch.no_grad()
def _inputs_that_run(tiny: Tiny, eager: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's main input, and the other inputs that it needs."""
    name = tiny.model_class.main_input_name
    possible = _possible_inputs(tiny)
    if name not in possible:
        raise CannotBuildError(f"its main input is {name}")
    inputs = {name: possible[name]}
    if getattr(tiny.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _tokens()[:, :11]
    takes = inspect.signature(tiny.model_class.forward).parameters
    others = [key for key in possible if key in takes and key not in inputs]
    failure: Exception | None = None
    for more in ([], *([key] for key in others), others):
        given = {**inputs, **{key: possible[key] for key in more}}
        try:
            out = _main(eager(**given))
        except Exception as error:
            failure = failure or error
            continue
        if not torch.isfinite(out).all():
            raise CannotBuildError("its outputs are not finite")
        return given
    assert failure is not None
    raise failure


def _possible_inputs(tiny: Tiny) -> dict[str, torch.Tensor]:
    config = tiny.config
    generator = torch.Generator().manual_seed(3)

    def size_of(name: str, default: Any) -> Any:
        for part in (
            config,
            getattr(config, "vision_config", None),
            getattr(config, "text_config", None),
            getattr(config, "audio_config", None),
        ):
            if getattr(part, name, None) is not None:
                return getattr(part, name)
        return default

    size = size_of("image_size", 32)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    bins = size_of("num_mel_bins", None) or size_of("feature_size", 80)
    frames = 2 * size_of("max_source_positions", 64)
    pixels = torch.randn(BATCH, size_of("num_channels", 3), height, width, generator=generator)
    ids = _tokens()
    end = size_of("eos_token_id", None)
    if isinstance(end, int) and not tiny.model_class.can_generate():
        ids[:, -1] = end  # CLIP's text models pool the position of this token
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "bbox": torch.arange(4).expand(BATCH, LENGTH, 4).contiguous(),
        "input_values": torch.randn(BATCH, 4000, generator=generator),
        "input_features": torch.randn(BATCH, bins, frames, generator=generator),
    }


def _main(output: Any) -> torch.Tensor:
    """The logits, or the last hidden state, or the first tensor of the output."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    for value in output.to_tuple():
        if isinstance(value, torch.Tensor):
            return value
    raise CannotBuildError("its output has no tensor")


Run = Callable[[PreTrainedModel], torch.Tensor]


def _checks(tiny: Tiny, inputs: dict[str, torch.Tensor]) -> dict[str, Run]:
    """The ways to call a model of this kind, by name."""
    checks: dict[str, Run] = {"prefill": lambda model: _main(model(**_as(model, inputs)))}
    checks["output_attentions"] = lambda model: _weights(
        model(**_as(model, inputs), output_attentions=True)
    )
    takes = inspect.signature(tiny.model_class.forward).parameters
    if "input_ids" not in inputs or "attention_mask" not in takes:
        return checks
    for side in ("left", "right"):
        mask = _padding(side)
        arguments = {"attention_mask": mask}
        if "position_ids" in takes and not getattr(tiny.config, "is_encoder_decoder", False):
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)

        def padded(
            model: PreTrainedModel, mask: torch.Tensor = mask, given: Any = arguments
        ) -> torch.Tensor:
            out = _main(model(**_as(model, inputs), **given))
            return out[mask.bool()] if out.shape[:2] == mask.shape else out

        checks[f"padded {side}"] = padded
    if not tiny.model_class.can_generate():
        return checks
    if "position_ids" in takes and not getattr(tiny.config, "is_encoder_decoder", False):
        positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None]
        checks["packed"] = lambda model: _main(
            model(input_ids=_tokens(batch=1), position_ids=positions, use_cache=False)
        )
    if not getattr(tiny.config, "is_encoder_decoder", False):
        checks["causal"] = _causality
    for cache in ("dynamic", "static"):
        checks[f"generate, {cache} cache"] = lambda model, cache=cache: _generated(model, cache)
    return checks


def _causality(model: PreTrainedModel) -> torch.Tensor:
    """1 + the relative change of the first tokens' logits when the last tokens change."""
    ids = _tokens()
    changed = ids.clone()
    changed[:, -8:] = FIRST_WORD + (ids[:, -8:] + 7) % (VOCABULARY - FIRST_WORD)
    first, second = (_main(model(input_ids=each)) for each in (ids, changed))
    change = (first[:, :-8] - second[:, :-8]).abs().max() / first.abs().max()
    # A change within rounding counts as 0; a larger one is compared between the models.
    return torch.stack([change.where(change > 1e-4, 0) + 1])


def _weights(output: Any) -> torch.Tensor:
    """All attention weights of an output, concatenated."""
    layers = [found for name, found in output.items() if name.endswith("attentions")]
    flat = torch.utils._pytree.tree_leaves(layers)
    return torch.cat([each.flatten() for each in flat if each is not None])


def _as(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs in the model's dtype."""
    return {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def _generated(model: PreTrainedModel, cache: str) -> torch.Tensor:
    """The logits of every new token, for a prompt with padding."""
    ids, mask = _tokens()[:, :14], _padding("left")[:, -14:]
    config = model.generation_config
    if model.config.is_encoder_decoder and config.decoder_start_token_id is None:
        config.decoder_start_token_id = FIRST_WORD
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        num_beams=1,
        disable_compile=True,
        cache_implementation=cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(made.logits)


def _padding(side: str) -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for row, length in enumerate((0, 3, 9)):
        if length:
            mask[row, slice(None, length) if side == "left" else slice(-length, None)] = 0
    return mask


@torch.no_grad()
def _compared(eager: PreTrainedModel, ours: PreTrainedModel, run: Run) -> str:
    try:
        torch.manual_seed(4)
        expected = run(eager)
    except Exception as error:
        return f"eager fails: {type(error).__name__}: {error}"
    try:
        torch.manual_seed(4)
        got = run(ours)
    except FlashAttnJitError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"
    if got.shape != expected.shape:
        return f"differs by its shape: {tuple(got.shape)}, not {tuple(expected.shape)}"
    error = _error(got, expected)
    if not error <= TOLERANCE:
        # For wide or discontinuous models the error against fp64 may be 4 times that of eager.
        torch.manual_seed(4)
        exact = run(copy.deepcopy(eager).double())
        # Masks overflow in fp64 where a row attends to no key; the eager result replaces it there.
        exact = torch.where(torch.isfinite(exact), exact, expected.double())
        error, eagers = _error(got, exact), _error(expected, exact)
        if not error <= 4 * eagers:
            return f"differs by {error:.1e} (eager by {eagers:.1e})"
    return "equal"


def _error(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values.double() - expected.double()).abs().max() / expected.double().abs().max())
