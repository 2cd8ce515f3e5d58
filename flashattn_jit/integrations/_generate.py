"""`generate_batch`: continuous batching of a transformers model over an `fa.kv.Cache`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_jit import kv
from flashattn_jit.errors import InputError, OutOfPages
from flashattn_jit.integrations._batch_requests import (
    Generated,
    Request,
    bar_of,
    check_fits,
    checked_model,
    checked_options,
    chosen_token,
    requests_of,
)
from flashattn_jit.integrations._packed_cache import PackedCache
from flashattn_jit.integrations._paged_cache import cache_for
from flashattn_jit.ops.arguments.checks import check_int

OnToken = Callable[[int, int], object]


def generate_batch(
    model: Any,
    prompts: Iterable[Any],
    *,
    max_new_tokens: int | Sequence[int] = 64,
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
        max_new_tokens: of each prompt, or one number for each.
        cache: an `fa.kv.Cache` for the model. It keeps the pages of prompts for later calls. By
            default one is made that holds max_requests of the longest requests.
        max_requests: that run at once.
        max_step_tokens: tokens of a step: longer prompts are computed in chunks.
        on_token: called as ``on_token(prompt, token)`` for each new token.
        seed: of sampling, for each request anew, as if it ran alone after
            ``torch.manual_seed(seed)``. None: torch's own generator.
        progress: show a bar.
        generation_config, options: as for ``model.generate``: do_sample, temperature, top_p,
            repetition_penalty, eos_token_id and others that choose tokens. One sequence a prompt.

    Returns:
        The results, in the order of the prompts.

    Raises:
        InputError: a prompt is empty or longer than the cache, the model does not run on the
            engine, or an option is not supported.

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
        max_new_tokens: int | Sequence[int] = 64,
        cache: kv.Cache | None = None,
        max_requests: int = 64,
        max_step_tokens: int = 512,
        on_token: OnToken | None = None,
        seed: int | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> None:
        self._model = checked_model(model)
        self._max_requests = check_int("max_requests", max_requests, 1)
        self._max_step_tokens = check_int("max_step_tokens", max_step_tokens, 1)
        self._on_token = on_token
        self._config = checked_options(model, generation_config, options)
        requests = requests_of(list(prompts), max_new_tokens, seed, self._model.device)
        self.results = [r.result for r in requests]
        self._waiting = requests[::-1]
        self._running: list[Request] = []
        self._suspended: list[Request] = []
        self._may_resume = True
        self._open_step: kv.Step | None = None
        longest = max((len(r.prompt) + r.most for r in requests), default=1)
        if cache is None:
            most = min(len(requests), max_requests) or 1
            cache = cache_for(model, most * (longest + 16), max_kv_len=longest)
        self.packed, self._cache = PackedCache(cache), cache
        eos = self._config.eos_token_id
        self._stop = {*(eos if isinstance(eos, list | tuple) else [eos])} - {None}
        for r in requests:
            check_fits(cache, r)
            r.processors = self._model._get_logits_processor(
                self._config, input_ids_seq_length=len(r.prompt), device=self._model.device
            )
        taken = inspect.signature(self._model.forward).parameters
        self._takes = [n for n in ("position_ids", "logits_to_keep") if n in taken]
        self._begin = time.perf_counter()
        self.steps = 0
        self.seconds = {"model": 0.0, "all": 0.0}

    def run(self, *, progress: bool = False) -> list[Generated]:
        """Generate until all requests are done. Called once."""
        bar = bar_of(sum(r.most for r in self._waiting)) if progress else None
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
        """Whether a request is not done."""
        return bool(self._waiting or self._running or self._suspended)

    def close(self) -> None:
        """End all requests, done or not, and close their sequences."""
        if self._open_step is not None and self._open_step.is_open:
            self._open_step.abort()
        for request in (*self._running, *self._suspended):
            if request.seq is not None and not request.seq.closed:
                request.seq.close()
        self._waiting, self._running, self._suspended = [], [], []

    def step(self, bar: Any = None) -> None:
        """One forward pass: choose its tokens, make room for them, compute, choose new tokens."""
        begin = time.perf_counter()
        self._resume()
        room = self._max_step_tokens
        items: list[tuple[Request, Any]] = []
        for request in self._running:
            tokens = request.next_tokens(room)
            if len(tokens) and room:
                items.append((request, tokens))
                room -= len(tokens)
        while room and self._waiting and not self._suspended and self._admits(items):
            request = self._open(self._waiting.pop())
            tokens = request.next_tokens(room)
            items.append((request, tokens))
            room -= len(tokens)
        step = self._open_step = self._make_room(items)
        with step:
            ready = []
            for request, tokens in items:
                request.computed += len(tokens)
                ready.append(not request.pending)
            logits = self._forward(step, ready)
            step.commit()
        done = [request for (request, _), is_ready in zip(items, ready, strict=True) if is_ready]
        self._choose(done, logits, bar)
        self.seconds["all"] += time.perf_counter() - begin

    def _admits(self, items: list[tuple[Request, Any]]) -> bool:
        """Whether the next request may join: not while another computes tokens that both have."""
        if len(self._running) >= self._max_requests:
            return False
        request, size = self._waiting[-1], self._cache.spec.page_size
        for other, _ in items:
            if not other.pending:
                continue
            both = min(len(request.prompt) - 1, len(other.prompt))
            same = request.prompt[:both] == other.prompt[:both]
            common = both if same.all() else int(same.argmin())
            if common // size > other.computed // size:
                return False
        return True

    def _open(self, request: Request) -> Request:
        request.seq = self._cache.open(request.prompt)
        request.computed = request.result.num_cached = request.seq.num_cached
        self._running.append(request)
        return request

    def _make_room(self, items: list[tuple[Request, Any]]) -> kv.Step:
        """The step of the items; requests that came last are suspended until it fits."""
        while True:
            try:
                return self._cache.step([(r.seq, tokens) for r, tokens in items])  # type: ignore[misc]
            except OutOfPages as error:
                if len(self._running) == 1:
                    raise InputError(
                        f"prompts[{self._running[0].number}] does not fit the cache alone: {error}"
                    ) from error
                victim = self._running.pop()
                items[:] = [item for item in items if item[0] is not victim]
                assert victim.seq is not None
                victim.seq.suspend()
                victim.result.preempted += 1
                self._suspended.append(victim)
                self._may_resume = False
                if not items:
                    raise

    def _resume(self) -> None:
        """Bring suspended requests back, the first ones first, when another request has ended."""
        while self._suspended and (self._may_resume or not self._running):
            request = self._suspended[-1]
            assert request.seq is not None
            try:
                request.seq.resume()
            except OutOfPages:
                if self._running:
                    break
                raise
            self._running.append(self._suspended.pop())
        self._may_resume = False

    def _forward(self, step: kv.Step, ready: list[bool]) -> Tensor:
        """Logits [ready requests, vocabulary] of the last tokens, fp32."""
        device = self._model.device
        last = step.q_indptr[1:].long() - 1
        wanted = last[torch.tensor(ready, device="cpu")]
        given: dict[str, Any] = {
            "input_ids": torch.from_numpy(step.token_ids)[None].to(device),
            "past_key_values": self.packed, "use_cache": True,
        }  # fmt: skip
        if "position_ids" in self._takes:
            given["position_ids"] = step.positions[None].to(device)
        sliced = "logits_to_keep" in self._takes
        if sliced:
            given["logits_to_keep"] = (wanted if len(wanted) else last[:1]).to(device)
        self.packed.begin(step)
        begin = time.perf_counter()
        logits: Tensor = self._model(**given).logits[0]
        self.seconds["model"] += time.perf_counter() - begin
        self.packed.check_complete()
        self.steps += 1
        if not sliced:
            logits = logits[wanted.to(device)]
        return logits[: len(wanted)].to(torch.float32)

    def _choose(self, done: list[Request], logits: Tensor, bar: Any) -> None:
        """The next token of each request whose last token was computed."""
        if not self._config.do_sample and not any(len(r.processors) for r in done):
            tokens = logits.argmax(-1).tolist()
        else:
            rows = zip(done, logits, strict=True)
            tokens = [chosen_token(r, row, self._config.do_sample) for r, row in rows]
        now = time.perf_counter() - self._begin
        for request, token in zip(done, tokens, strict=True):
            result = request.result
            if not result.tokens:
                result.first_s = now
            result.tokens.append(token)
            if token in self._stop:
                result.finish = "stop"
            elif len(result.tokens) == request.most:
                result.finish = "length"
            if result.finish:
                self._running.remove(request)
                assert request.seq is not None
                request.seq.close()
                self._may_resume = True
            if bar is not None:
                bar.update(request.most - len(result.tokens) + 1 if result.finish else 1)
            if self._on_token is not None:
                self._on_token(request.number, token)
