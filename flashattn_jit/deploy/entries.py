"""The entries that serve a kernel, in whatever layer they are."""

from __future__ import annotations

from collections.abc import Sequence

from ..jit import toolchain
from ..jit.key import Request, kernel_key
from ..jit.layers import Found, Layer


def key_of(request: Request) -> str:
    """The key of a request's kernel."""
    flags = toolchain.flags_for(request.target)
    return kernel_key(request.spec, request.template, request.target, flags).hex


def entries_of(requests: Sequence[Request], places: Sequence[Layer]) -> list[Found]:
    """The newest entry of the first request, and those on the way to one that has an artifact.

    requests: a kernel and what may take its place, as `requests_of` makes them. Raises LookupError
    where an entry is in none of the places.
    """
    keys = [key_of(request) for request in requests]
    way: list[Found] = []
    place = 0
    while True:
        answers = (layer.search(keys[place], None).found for layer in places)
        entry = next((found[0] for found in answers if found), None)
        if entry is None:
            raise LookupError(keys[place])
        way.append(entry)
        step = entry.stepped_down_to
        if step is None:
            return way
        smaller = keys[place + 1 :]
        if not smaller:
            raise LookupError(keys[place])
        place += 1 + (smaller.index(step) if step in smaller else 0)
