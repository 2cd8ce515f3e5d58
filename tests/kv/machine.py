"""Random operations on a cache: what the machines of several tests have in common.

A machine keeps the tokens of each sequence beside the cache. After every operation the cache is
checked, and what it holds of some sequence is compared with what the machine knows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import flashattn_jit as fa
from tests.kv.engine import contents, same

Items = list[tuple[fa.kv.Sequence, list[int]]]


class Machine:
    """One run of random operations; `log` tells what was done, for failures.

    A test sets `cache`, and implements `open`, `verify` and `write`.
    """

    weights: Mapping[str, float]
    """How often each operation, a method's name, is chosen."""

    sizes: Sequence[int]
    """How many tokens a step may give a sequence."""

    max_len: int
    most: int
    """No sequence is opened or forked beside more than this number."""

    cache: fa.kv.Cache

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tokens: dict[int, list[int]] = {}
        self.longest: dict[int, int] = {}
        self.log: list[str] = []
        self.refused = 0

    def run(self, steps: int) -> None:
        """Random operations, then closes all sequences; prints the last operations on failure."""
        try:
            for _ in range(steps):
                self.pass_time()
                (name,) = self.random.choices(list(self.weights), [*self.weights.values()])
                self.log.append(name)
                getattr(self, name)()
                self.cache.check()
                if live := self.live():
                    self.verify(self.random.choice(live))
            for seq in self.live():
                self.verify(seq)
            for seq in self.cache.sequences:
                seq.close()
            self.cache.clear()
            self.cache.check()
            assert all(p.num_free == p.num_pages for p in self.cache.pools), "a page is lost"
        except BaseException:
            print("\n".join(self.log[:1] + self.log[-30:]))
            raise

    def live(self) -> list[fa.kv.Sequence]:
        """The sequences that are not suspended."""
        return [s for s in self.cache.sequences if not s.is_suspended]

    def new_tokens(self, count: int) -> list[int]:
        """Of an alphabet of two, so that sequences often continue each other."""
        return [self.random.randrange(2) for _ in range(count)]

    # --- what tests say ---------------------------------------------------------------------------

    def pass_time(self) -> None:
        """Runs before each operation."""

    def open(self) -> None:
        """Opens a sequence, and notes the tokens of it that were cached."""
        raise NotImplementedError

    def verify(self, seq: fa.kv.Sequence) -> None:
        """Compares what the cache holds of a sequence."""
        raise NotImplementedError

    def write(self, step: fa.kv.Step, items: Items) -> None:
        """Appends the rows of a step."""
        raise NotImplementedError

    def write_some(self, step: fa.kv.Step, items: Items) -> None:
        """Appends rows of a step that fails."""
        self.write(step, items)

    def backs(self, seq: fa.kv.Sequence) -> list[int]:
        """By how many tokens a sequence may be trimmed."""
        raise NotImplementedError

    def kept(self, seq: fa.kv.Sequence) -> int:
        """The length to which a sequence can be trimmed for certain."""
        return self.longest[seq.number] - self.cache.lookback

    # --- operations -------------------------------------------------------------------------------

    def items(self) -> Items:
        """New tokens of some sequences."""
        live = self.live()
        return [
            (s, self.new_tokens(min(self.max_len - s.kv_len, self.random.choice(self.sizes))))
            for s in self.random.sample(live, self.random.randrange(len(live) + 1))
        ]

    def step(self) -> None:
        """A step that does not find enough pages changes nothing."""
        items, before = self.items(), contents(self.cache)
        try:
            with self.cache.step(items) as step:
                self.write(step, items)
                step.commit()
        except fa.OutOfPages as error:
            assert error.needed > error.free + error.evictable
            assert same(before, contents(self.cache))
            return
        for seq, new in items:
            self.tokens[seq.number] += new
            self.longest[seq.number] = max(self.longest[seq.number], seq.kv_len)

    def fork(self) -> None:
        """A sequence with the tokens of another."""
        if (live := self.live()) and len(self.cache.sequences) <= self.most:
            seq = self.random.choice(live)
            child = seq.fork()
            self.tokens[child.number] = list(self.tokens[seq.number])
            self.longest[child.number] = self.longest[seq.number]

    def trim(self) -> None:
        """A refused trim changes nothing."""
        if not (live := self.live()):
            return
        seq = self.random.choice(live)
        back = self.random.choice(self.backs(seq))
        kv_len, before = max(0, seq.kv_len - back), contents(self.cache)
        try:
            seq.trim(kv_len)
        except fa.InputError:
            assert kv_len < self.kept(seq), "lookback did not bound what was given up"
            assert same(before, contents(self.cache))
            self.refused += 1
        else:
            del self.tokens[seq.number][kv_len:]

    def close(self) -> None:
        """Closes a sequence."""
        if self.cache.sequences:
            self.random.choice(self.cache.sequences).close()

    def suspend(self) -> None:
        """Suspends a sequence."""
        if live := self.live():
            self.random.choice(live).suspend()

    def resume(self) -> None:
        """A resumed sequence holds what it held."""
        suspended = [s for s in self.cache.sequences if s.is_suspended]
        if not suspended:
            return
        seq = self.random.choice(suspended)
        try:
            seq.resume()
        except fa.OutOfPages:
            assert seq.is_suspended
        else:
            self.verify(seq)

    def fail(self) -> None:
        """The model fails in the middle of a step, after some layers were written."""
        items = self.items()
        try:
            with self.cache.step(items) as step:
                self.write_some(step, items)
                raise ZeroDivisionError
        except (ZeroDivisionError, fa.OutOfPages):
            pass

    def clear(self) -> None:
        """Clears the cache of what no sequence has."""
        self.cache.clear()
