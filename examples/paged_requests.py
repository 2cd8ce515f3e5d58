"""The page table of a KV cache: which request uses which pages, as a serving engine keeps it.

Pages are counted by their users. A full page is found again by all tokens up to its end, so that a
later request whose prompt begins with these tokens uses it instead of computing it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flashattn_jit as fa


@dataclass(eq=False)
class Request:
    """A prompt, int64 [tokens], and how many tokens are wanted after it."""

    prompt: Tensor
    wanted: int
    tokens: list[int] = field(default_factory=list)  # the prompt and the tokens generated so far
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the pages

    @property
    def done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.wanted


class PageTable:
    """Allocates and frees `num_pages` pages of `page_size` slots."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.free = list(range(num_pages))
        self.users = [0] * num_pages
        self.known: dict[tuple[int, ...], int] = {}  # tokens up to a page's end -> the page

    def admit(self, request: Request) -> Request:
        """Begin a request with the known pages of its prompt; at least one token stays to run."""
        request.tokens = request.prompt.tolist()
        for end in range(self.page_size, len(request.tokens), self.page_size):
            page = self.known.get(tuple(request.tokens[:end]))
            if page is None:
                break
            self.users[page] += 1
            request.pages.append(page)
            request.cached = end
        return request

    def extend(self, request: Request, most: int) -> Tensor:
        """The next tokens to run, at most `most`, and pages for their keys."""
        new = request.tokens[request.cached : request.cached + most]
        request.cached += len(new)
        while len(request.pages) * self.page_size < request.cached:
            page = self.free.pop()
            self.users[page] = 1
            request.pages.append(page)
        return torch.tensor(new)

    def batch(self, requests: Sequence[Request], new: Sequence[Tensor]) -> tuple[Tensor, fa.Paged]:
        """(q_indptr, paged) of a step that runs the tokens `new` of each request."""
        last = [(r.cached - 1) % self.page_size + 1 for r in requests]
        paged = fa.Paged(
            _indptr([len(r.pages) for r in requests]),
            torch.tensor([page for r in requests for page in r.pages], dtype=torch.int32),
            torch.tensor(last),
            self.page_size,
        )
        return _indptr([len(tokens) for tokens in new]), paged

    def finish_step(self, requests: Sequence[Request], tokens: Sequence[int]) -> list[Request]:
        """Registers full pages and adds each request's next token; returns unfinished requests.

        tokens: one per request; not used while a part of its prompt has not run.
        """
        for request, token in zip(requests, tokens, strict=True):
            for end in range(self.page_size, request.cached + 1, self.page_size):
                text = tuple(request.tokens[:end])
                self.known.setdefault(text, request.pages[end // self.page_size - 1])
            if request.cached == len(request.tokens):  # else a part of the prompt has not run
                request.tokens.append(token)
            if request.done:
                self._release(request.pages)
        return [r for r in requests if not r.done]

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.users[page] -= 1
        empty = {page for page in pages if not self.users[page]}
        self.free.extend(empty)
        self.known = {text: page for text, page in self.known.items() if page not in empty}


def _indptr(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)
