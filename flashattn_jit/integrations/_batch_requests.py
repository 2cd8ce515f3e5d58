"""The requests of a `generate_batch`, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flashattn_jit import kv
from flashattn_jit.errors import InputError
from flashattn_jit.integrations import transformers as integration
from flashattn_jit.integrations._own_attention import IMPLEMENTATIONS
from flashattn_jit.integrations._packed_models import check_positions
from flashattn_jit.kv.step import read_tokens
from flashattn_jit.ops.arguments.checks import check_int, shown


@dataclass(slots=True)
class Generated:
    """The result of one prompt.

    tokens: the new ones, with the end token where there is one. finish: "stop" at an end token,
    "length" after max_new_tokens. num_cached: tokens of the prompt that the cache had. first_s:
    seconds from the start to the first token. preempted: how often the request was suspended.
    """

    tokens: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", ""] = ""
    num_cached: int = 0
    first_s: float = 0.0
    preempted: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way. processors: of logits."""

    number: int
    prompt: np.ndarray[Any, np.dtype[np.int64]]
    most: int
    result: Generated
    generator: torch.Generator | None
    seq: kv.Sequence | None = None
    processors: Any = ()

    @property
    def computed(self) -> int:
        """Tokens whose keys are in the cache."""
        return 0 if self.seq is None else self.seq.kv_len

    @property
    def longest(self) -> int:
        """Tokens of the cache that it may need: nothing follows its last one."""
        return len(self.prompt) + self.most - 1

    @property
    def pending(self) -> int:
        """Tokens of the prompt that are still to be computed."""
        return max(0, len(self.prompt) - self.computed)

    def next_tokens(self, room: int) -> Any:
        """The next tokens to compute: a chunk of the prompt, or the last new token."""
        if self.pending:
            return self.prompt[self.computed : self.computed + room]
        return self.result.tokens[-1:]

    def so_far(self) -> Tensor:
        """[1, length]: the prompt and the new tokens, for logits processors."""
        return torch.tensor([[*self.prompt.tolist(), *self.result.tokens]], device="cpu")


def checked_model(model: Any) -> Any:
    """The model, if its attention layers are this engine's. Raises InputError."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if chosen not in IMPLEMENTATIONS:
        raise InputError(
            f"the model's attn_implementation is {chosen!r}; generate_batch needs this engine's: "
            "model.set_attn_implementation(register())"
        )
    layers = integration.served(model)
    others = [layer.name for layer in layers if layer.reason]
    if others or not list(layers):
        raise InputError(
            f"{type(model).__name__} has attention layers that the engine does not serve: "
            f"{', '.join(others[:3]) or 'all'}; see served(model)"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError("generate_batch is for decoders; this model has an encoder")
    check_positions(model)
    if model.training:
        raise InputError("the model is in training mode; call model.eval() first")
    return model


_ONE = ("num_beams", "num_return_sequences")
_NONE = (
    "assistant_early_exit", "constraints", "diversity_penalty", "dola_layers", "force_words_ids",
    "guidance_scale", "max_time", "num_beam_groups", "output_logits", "output_scores",
    "penalty_alpha", "prompt_lookup_num_tokens", "return_dict_in_generate", "stop_strings",
    "token_healing", "use_mtp",
)  # fmt: skip
"""Options of the generation config that are not served."""
_WITHOUT_EFFECT = {"guidance_scale": 1, "num_beam_groups": 1}
"""Values of them, besides None and 0, that change nothing."""


def checked_options(model: Any, config: Any, options: dict[str, Any]) -> Any:
    """The generation config with the options. Raises InputError for those that are not served."""
    chosen, rest = model._prepare_generation_config(config, **options)
    if rest:
        raise InputError(f"options {', '.join(rest)} are not known to generate_batch")
    if options.get("max_length") is not None:
        raise InputError("max_length is not supported by generate_batch; give max_new_tokens")
    for name in _ONE:
        if (getattr(chosen, name, None) or 1) != 1:
            raise InputError(f"{name}={getattr(chosen, name)}: generate_batch makes one sequence")
    for name in _NONE:
        if getattr(chosen, name, None) not in (None, 0, _WITHOUT_EFFECT.get(name)):
            raise InputError(f"{name} is not supported by generate_batch; use model.generate")
    if chosen.use_cache is False:
        raise InputError("use_cache=False: generate_batch needs its cache; use model.generate")
    model._prepare_special_tokens(chosen, True, device=model.device)
    return chosen


def stop_tokens(config: Any) -> set[int]:
    """The ids that end a request: none, one or several, as a number, a sequence or a tensor."""
    eos = config.eos_token_id
    return set() if eos is None else {*torch.as_tensor(eos, device="cpu").flatten().tolist()}


def requests_of(
    prompts: Iterable[Any], most: int | Sequence[int], seed: int | None, model: Any
) -> list[Request]:
    """The requests of the prompts. Raises InputError for wrong prompts, counts and seeds."""
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be lists of token ids, got {shown(prompts)}")
    prompts = list(prompts)
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if isinstance(most, Iterable) and getattr(most, "ndim", None) != 0:
        counts: list[Any] = list(most)
    else:
        counts = [most] * len(prompts)
    if len(counts) != len(prompts):
        raise InputError(f"max_new_tokens has {len(counts)} entries for {len(prompts)} prompts")
    found = []
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        tokens = read_tokens(f"prompts[{i}]", prompt)
        if not len(tokens):
            raise InputError(f"prompts[{i}] is empty; a prompt has at least one token")
        if vocabulary is not None and (largest := int(tokens.max())) >= vocabulary:
            raise InputError(
                f"prompts[{i}] has token {largest}, but the model's ids end at {vocabulary - 1}"
            )
        count = check_int(f"max_new_tokens[{i}]", count, 1)
        generator = None
        if seed is not None:
            generator = torch.Generator(model.device).manual_seed(check_int("seed", seed, 0))
        found.append(Request(i, tokens, count, Generated(), generator))
    return found


def check_fits(cache: kv.Cache, request: Request) -> None:
    """Raises InputError for a request that the cache cannot hold."""
    length = request.longest
    name = f"prompts[{request.number}]"
    words = f"{name} has {len(request.prompt)} tokens and up to {request.most} new ones"
    if length > cache.max_kv_len:
        raise InputError(f"{words}, but the cache's max_kv_len={cache.max_kv_len}")
    size = cache.spec.page_size
    for group, pages in enumerate(cache.stats().groups):
        if group not in cache.reclaiming and -(-length // size) > pages.num_pages:
            raise InputError(
                f"{words}: {-(-length // size)} pages of {size}, but group {group} of the "
                f"cache has {pages.num_pages}"
            )


def processors_of(model: Any, config: Any, request: Request) -> Any:
    """The logits processors that ``generate`` has for the request alone."""
    config.max_length = len(request.prompt) + request.most
    prompt = request.so_far().to(model.device)
    return model._get_logits_processor(
        config, input_ids_seq_length=len(request.prompt), encoder_input_ids=prompt,
        device=model.device,
    )  # fmt: skip


def bar_of(total: int) -> Any:
    """A progress bar of new tokens."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # a requirement of transformers

    return tqdm(total=total, unit="token", desc="generate_batch")


def chosen_token(request: Request, logits: Tensor, do_sample: bool) -> int:
    """The next token of a request, as ``generate`` chooses it. logits: [vocabulary], fp32."""
    scores = logits[None]
    if len(request.processors):
        scores = request.processors(request.so_far().to(logits.device), scores)
    if not do_sample:
        return int(scores.argmax(-1))
    weights = torch.nn.functional.softmax(scores, dim=-1)
    return int(torch.multinomial(weights, 1, generator=request.generator))
