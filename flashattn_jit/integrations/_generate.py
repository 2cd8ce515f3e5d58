"""`generate_batch`: continuous batching of a transformers model over an `fa.kv.Cache`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_jit import kv
from flashattn_jit.errors import InputError, SequenceError
from flashattn_jit.integrations._batch_requests import (
    Generated,
    Request,
    bar_of,
    check_fits,
    checked_model,
    checked_options,
    chosen_token,
    processors_of,
    requests_of,
    stop_tokens,
)
from flashattn_jit.integrations._packed_models import check_lengths, takes_positions
from flashattn_jit.integrations._paged_cache import PackedCache, cache_for
from flashattn_jit.integrations._request_queue import RequestQueue
from flashattn_jit.ops.arguments.checks import check_int, shown

OnToken = Callable[[int, int], object]


def generate_batch(
    model: Any,
    prompts: Iterable[Any],
    *,
    max_new_tokens: int | Sequence[int] | None = None,
    cache: kv.Cache | None = None,
    max_requests: int = 64,
    max_step_tokens: int = 512,
    on_token: OnToken | None = None,
    seed: int | None = None,
    progress: bool = False,
    generation_config: Any = None,
    **options: Any,
) -> list[Generated]:
    """New tokens for many prompts, with continuous batching over pages.

    Each step is one forward pass over the tokens of all running requests, without padding: one
    token of each that generates, and chunks of prompts in what room is left. Prompts that share
    tokens share pages, and compute them once. Where the pages do not suffice, the request that came
    last is suspended to host memory, and goes on when another has ended.

    Args:
        model: a decoder of transformers with ``attn_implementation="attn_jit"`` (`register`).
        prompts: token ids of each prompt: 1-D ints, at least one.
        max_new_tokens: of each prompt, or one number for each. By default that of the generation
            config, else 64.
        cache: an `fa.kv.Cache` for the model. It keeps the pages of prompts for later calls. By
            default one is made that holds max_requests of the longest requests.
        max_requests: that run at once.
        max_step_tokens: tokens of a step: longer prompts are computed in chunks.
        on_token: called as ``on_token(prompt, token)`` for each new token. To end the call, raise
            an exception there.
        seed: of sampling, for each request anew, as if it ran alone after
            ``torch.manual_seed(seed)``. None: torch's own generator.
        progress: show a bar.
        generation_config, options: as for ``model.generate``: do_sample, temperature, top_p,
            repetition_penalty, eos_token_id and others that choose tokens. One sequence a prompt.

    Returns:
        The results, in the order of the prompts.

    Raises:
        InputError: a prompt is empty or longer than the cache, the model does not run on the
            engine or not with several requests in a row, or an option is not supported.
        SequenceError: on_token used sequences of this call, or called its generator.

    Whatever ends the call, an exception of on_token or Ctrl-C included, the cache is left without
    open sequences.

    Example:
        >>> results = generate_batch(model, tokenizer(texts)["input_ids"], max_new_tokens=100)
    """
    batch = BatchGenerator(
        model, prompts, max_new_tokens=max_new_tokens, cache=cache, max_requests=max_requests,
        max_step_tokens=max_step_tokens, on_token=on_token, seed=seed,
        generation_config=generation_config, **options,
    )  # fmt: skip
    return batch.run(progress=progress)


class BatchGenerator:
    """The state of a `generate_batch`, which takes the same arguments.

    results: of each prompt. steps: forward passes. seconds: "model", spent in them, and "all".
    packed: the model's cache; its ``paged.plans`` are those of the last step by kind of layer.
    """

    def __init__(
        self,
        model: Any,
        prompts: Iterable[Any],
        *,
        max_new_tokens: int | Sequence[int] | None = None,
        cache: kv.Cache | None = None,
        max_requests: int = 64,
        max_step_tokens: int = 512,
        on_token: OnToken | None = None,
        seed: int | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> None:
        self._model = checked_model(model)
        max_requests = check_int("max_requests", max_requests, 1)
        self._max_step_tokens = check_int("max_step_tokens", max_step_tokens, 1)
        if on_token is not None and not callable(on_token):
            raise InputError(f"on_token={shown(on_token)} must be a function (number, token)")
        self._on_token = on_token
        self._config = checked_options(model, generation_config, options)
        most = max_new_tokens
        if most is None:
            most = self._config.max_new_tokens or 64
        requests = requests_of(prompts, most, seed, self._model)
        self.results = [r.result for r in requests]
        self._is_busy = False
        self._news: list[tuple[Request, int]] = []
        longest = max((r.longest for r in requests), default=1)
        check_lengths(model, longest, self._max_step_tokens)
        if cache is None:
            count = min(len(requests), max_requests) or 1
            cache = cache_for(model, count * (longest + 16), max_kv_len=longest)
        self.packed = PackedCache(cache)
        self._stop = stop_tokens(self._config)
        for r in requests:
            check_fits(cache, r)
            r.processors = processors_of(model, self._config, r)
        self._queue = RequestQueue(cache, requests, max_requests)
        self._takes_positions = takes_positions(model)
        self._slices = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._begin = time.perf_counter()
        self.steps = 0
        self.seconds = {"model": 0.0, "all": 0.0}

    def run(self, *, progress: bool = False) -> list[Generated]:
        """Generate until all requests are done. Called once."""
        bar = bar_of(sum(r.most for r in self._queue.waiting)) if progress else None
        try:
            with torch.inference_mode():
                while self.is_running:
                    self.step(bar)
        finally:
            self.close()
            if bar is not None:
                bar.close()
        return self.results

    @property
    def is_running(self) -> bool:
        """Whether a request is not done, or a token of it not given to on_token."""
        return self._queue.is_running or bool(self._news)

    def close(self) -> None:
        """End all requests, done or not, and close their sequences.

        Raises SequenceError in on_token, as `step` does.
        """
        self._check_idle("close()")
        self._queue.close()
        self._news = []

    def step(self, bar: Any = None) -> None:
        """One forward pass: choose its tokens, make room for them, compute, choose new tokens.

        After an exception it may be called again: what was not computed is computed then, and
        on_token is called for the tokens that follow the one that it failed at.
        """
        self._check_idle("step()")
        self._is_busy = True
        begin = time.perf_counter()
        try:
            if not self._news:  # of a step whose on_token raised
                self._step()
            while self._news:
                request, token = self._news.pop(0)
                if bar is not None:
                    left = request.most - len(request.result.tokens)
                    bar.update(1 + left if request.result.finish else 1)
                if self._on_token is not None:
                    self._on_token(request.number, token)
        finally:
            self._is_busy = False
            self.seconds["all"] += time.perf_counter() - begin

    def _check_idle(self, what: str) -> None:
        if self._is_busy:
            raise SequenceError(f"{what} in the middle of a step; raise an exception to end it")

    def _step(self) -> None:
        items = self._queue.next_items(self._max_step_tokens)
        with self._queue.make_room(items) as step:
            ready = [len(tokens) >= request.pending for request, tokens in items]
            logits = self._forward(step, ready)
            done = [items[i][0] for i, is_ready in enumerate(ready) if is_ready]
            chosen = self._choose(done, logits)
            step.commit()
        now = time.perf_counter() - self._begin
        for request, token in zip(done, chosen, strict=True):
            result = request.result
            if not result.tokens:
                result.first_s = now
            result.tokens.append(token)
            self._news.append((request, token))
            if token in self._stop or len(result.tokens) == request.most:
                result.finish = "stop" if token in self._stop else "length"
                self._queue.end(request)

    def _forward(self, step: kv.Step, ready: list[bool]) -> Tensor:
        """Logits [ready requests, vocabulary] of the last tokens, fp32."""
        device = self._model.device
        last = step.q_indptr[1:].long() - 1
        wanted = last[torch.tensor(ready, device="cpu")]
        given: dict[str, Any] = {
            "input_ids": torch.from_numpy(step.token_ids)[None].to(device),
            "past_key_values": self.packed, "use_cache": True,
        }  # fmt: skip
        if self._takes_positions:
            given["position_ids"] = step.positions[None].to(device)
        if self._slices:
            given["logits_to_keep"] = (wanted if len(wanted) else last[:1]).to(device)
        self.packed.begin(step)
        begin = time.perf_counter()
        logits: Tensor = self._model(**given).logits[0]
        self.seconds["model"] += time.perf_counter() - begin
        self.packed.check_complete()
        self.steps += 1
        if not self._slices:
            logits = logits[wanted.to(device)]
        return logits[: len(wanted)].to(torch.float32)

    def _choose(self, done: list[Request], logits: Tensor) -> list[int]:
        """The next token of each request whose last token was computed."""
        if not self._config.do_sample and not any(len(r.processors) for r in done):
            tokens: list[int] = logits.argmax(-1).tolist()
            return tokens
        rows = zip(done, logits, strict=True)
        return [chosen_token(r, row, self._config.do_sample) for r, row in rows]
