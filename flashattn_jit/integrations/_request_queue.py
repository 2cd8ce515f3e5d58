"""Which requests of a `generate_batch` compute in a step: admission, chunks and preemption."""

from __future__ import annotations

from typing import Any

from flashattn_jit import kv
from flashattn_jit.errors import InputError, OutOfPages
from flashattn_jit.integrations._batch_requests import Request

Items = list[tuple[Request, Any]]
"""Requests of a step, each with its new tokens."""


class RequestQueue:
    """The requests that are not done, each in one of three lists.

    waiting: not begun, the next one last. running: with pages, in the order in which they came.
    suspended: with their pages in host memory, the next one last.
    """

    def __init__(self, cache: kv.Cache, requests: list[Request], max_requests: int) -> None:
        self._cache, self._max_requests = cache, max_requests
        self.waiting = requests[::-1]
        self.running: list[Request] = []
        self.suspended: list[Request] = []
        self._may_resume = True

    @property
    def is_running(self) -> bool:
        """Whether a request is not done."""
        return bool(self.waiting or self.running or self.suspended)

    def next_items(self, room: int) -> Items:
        """What the next step computes, at most `room` tokens, if there are the pages for it."""
        self._resume()
        items: Items = []
        for request in self.running:
            tokens = request.next_tokens(room)
            if len(tokens) and room:
                items.append((request, tokens))
                room -= len(tokens)
        while room and self.waiting and not self.suspended and self._admits(items):
            request = self._open()
            tokens = request.next_tokens(room)
            items.append((request, tokens))
            room -= len(tokens)
        return items

    def make_room(self, items: Items) -> kv.Step:
        """The step of the items; requests that came last are suspended until it fits."""
        while True:
            try:
                return self._cache.step([(r.seq, tokens) for r, tokens in items])  # type: ignore[misc]
            except OutOfPages as error:
                if len(self.running) == 1:
                    raise InputError(
                        f"prompts[{self.running[0].number}] does not fit the cache alone: {error}"
                    ) from error
                victim = self.running[-1]
                items[:] = [item for item in items if item[0] is not victim]
                assert victim.seq is not None
                victim.seq.suspend()
                victim.result.preempted += 1
                self.suspended.append(self.running.pop())
                self._may_resume = False
                if not items:
                    raise

    def end(self, request: Request) -> None:
        """The request is done."""
        assert request.seq is not None
        request.seq.close()
        self.running.remove(request)
        self._may_resume = True

    def close(self) -> None:
        """End all requests, done or not, and close their sequences."""
        for request in (*self.running, *self.suspended):
            if request.seq is not None:
                with request.seq:  # closes it, and aborts a step that it may be in
                    pass
        self.waiting, self.running, self.suspended = [], [], []

    def _admits(self, items: Items) -> bool:
        """Whether the next request may join: not while another computes tokens that both have."""
        if len(self.running) >= self._max_requests:
            return False
        request, size = self.waiting[-1], self._cache.spec.page_size
        for other, _ in items:
            if not other.pending:
                continue
            both = min(len(request.prompt) - 1, len(other.prompt))
            same = request.prompt[:both] == other.prompt[:both]
            common = both if same.all() else int(same.argmin())
            if common // size > other.computed // size:
                return False
        return True

    def _open(self) -> Request:
        request = self.waiting[-1]
        request.seq = self._cache.open(request.prompt)
        request.result.num_cached = request.seq.num_cached
        self.running.append(self.waiting.pop())
        return request

    def _resume(self) -> None:
        """Bring suspended requests back, the first ones first, when another request has ended."""
        while self.suspended and (self._may_resume or not self.running):
            request = self.suspended[-1]
            assert request.seq is not None
            try:
                request.seq.resume()
            except OutOfPages:
                if self.running:
                    break
                raise
            self.running.append(self.suspended.pop())
        self._may_resume = False
