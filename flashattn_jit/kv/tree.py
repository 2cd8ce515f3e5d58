"""The prefix index: a radix tree of full pages, found by their tokens.

A node is a run of pages with their tokens; children continue it. Two children of a node differ in
their first page. A page has the digest

    sha256(digest of the page before it, tokens of the page as little-endian int64)

and the root of a namespace sha256(fingerprint of the spec, namespace). Children are keyed by the
digest of their first page, and their tokens are compared as well. Digests are the same in every
process. Namespaces share nothing, as long as nobody finds two texts of one sha256.

A node has one array of page numbers a group; 0 stands for a page that the group does not hold:
evicted, or given up by the group's mask before it was full.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from .int_buffer import IntBuffer, Ints
from .pages import NULL, Pages

DIGEST_BYTES = 32


class Node:
    """A run of `length` pages from page number `start` of a sequence on.

    order, time: of its last use. A detached node (`attached` False) is in no tree any more.
    """

    __slots__ = (
        "attached",
        "children",
        "digests",
        "num_uses",
        "number",
        "order",
        "pages",
        "parent",
        "priority",
        "start",
        "time",
        "tokens",
    )  # fmt: skip

    def __init__(self, number: int, parent: Node | None, start: int, num_groups: int) -> None:
        self.number = number
        self.parent = parent
        self.start = start
        self.tokens = IntBuffer(dtype=np.int64)
        self.digests = bytearray()
        self.pages = [IntBuffer() for _ in range(num_groups)]
        self.children: dict[bytes, Node] = {}
        self.attached = True
        self.order = self.num_uses = self.priority = 0
        self.time = 0.0

    @property
    def length(self) -> int:
        """Pages of the run."""
        return self.pages[0].length

    @property
    def end(self) -> int:
        """The page number behind the run."""
        return self.start + self.pages[0].length

    def digest(self, position: int) -> bytes:
        """The digest of the page before page number `position`, start < position <= end."""
        at = (position - self.start) * DIGEST_BYTES
        return bytes(self.digests[at - DIGEST_BYTES : at])


class Root(Node):
    """The empty node in front of all sequences of a namespace."""

    __slots__ = ("namespace", "own_digest")

    def __init__(self, number: int, num_groups: int, namespace: bytes, digest: bytes) -> None:
        super().__init__(number, None, 0, num_groups)
        self.namespace = namespace
        self.own_digest = digest

    def digest(self, position: int) -> bytes:
        """The root's digest."""
        return self.own_digest


class Place(NamedTuple):
    """Where a sequence stands in the tree: behind page number `position` - 1, in or above `node`.

    digest: of that page. A place stays usable when nodes are split. Where its node has lost the
    page since then, the digest tells, and the tree looks from its root on.
    """

    node: Node
    position: int
    digest: bytes


class PageTree:
    """The trees of all namespaces over the pages of all groups."""

    def __init__(self, groups: Sequence[Pages], page_size: int, fingerprint: bytes) -> None:
        self._groups = groups
        self._page_size = page_size
        self._fingerprint = fingerprint
        self._roots: dict[bytes, Root] = {}
        self._nodes: dict[int, Node] = {}
        self._next = 0

    # --- looking up -------------------------------------------------------------------------------

    def root(self, namespace: bytes) -> Root:
        """The root of a namespace."""
        root = self._roots.get(namespace)
        if root is None:
            text = self._fingerprint + len(namespace).to_bytes(8, "little") + namespace
            root = Root(self._number(), len(self._groups), namespace, hashlib.sha256(text).digest())
            self._roots[namespace] = self._nodes[root.number] = root
        return root

    def forget(self, namespace: bytes) -> None:
        """Drop the root of a namespace if it has no pages; places in it stay usable."""
        root = self._roots.get(namespace)
        if root is not None:
            self._trim(root)

    def match(self, namespace: bytes, tokens: Ints) -> list[tuple[Node, int]]:
        """The longest known prefix of whole pages: nodes, and how many pages of each."""
        path: list[tuple[Node, int]] = []
        node: Node | None = self._roots.get(namespace)
        position, size = 0, self._page_size
        while node is not None and position + 1 <= len(tokens) // size:
            digest = self._next_digest(node, position, tokens[position * size :])
            node = node.children.get(digest)
            if node is None:
                break
            count = _equal_pages(node.tokens.view, tokens[position * size :], size)
            if not count:
                break
            path.append((node, count))
            position += count
            if count < node.length:
                break
        return path

    def _next_digest(self, node: Node, position: int, tokens: Ints) -> bytes:
        return page_digest(node.digest(position), tokens[: self._page_size])

    # --- adding -----------------------------------------------------------------------------------

    def publish(
        self, namespace: bytes, place: Place, tokens: Ints, tables: Sequence[Ints]
    ) -> Place:
        """Make the pages of a sequence findable from its place on; returns its new place.

        tokens: of the whole sequence, whole pages; tables: all its pages in each group, 0 for those
        that it does not hold. Where the tree has a page already, the sequence keeps its own one,
        which stays out of the tree.
        """
        size, total = self._page_size, len(tokens) // self._page_size
        while total and not any(table[total - 1] for table in tables):
            total -= 1  # a node ends with a page that some group holds
        node, position = self._locate(place) or self.root(namespace), place.position
        if isinstance(node, Root):
            position = 0
        while position < total:
            rest = tokens[position * size :]
            if position < node.end:
                inside = position - node.start
                count = _equal_pages(node.tokens.view[inside * size :], rest, size)
                self._complete(node, position, count, tables)
                position += count
                if position < node.end and position < total:
                    node = self._split(node, position - node.start)
                continue
            child = None
            if node.children:
                child = node.children.get(self._next_digest(node, position, rest))
            if child is None and (node.children or node.parent is None):
                child = self._child(node, position)
                self._extend(child, position, tokens, tables)
                node.children[bytes(child.digests[:DIGEST_BYTES])] = child
                position = total
            elif child is None:
                self._extend(node, position, tokens, tables)
                position = total
            node = node if child is None else child
        return self.place(node, position)

    def place(self, node: Node, position: int) -> Place:
        """The place behind page number `position` - 1 of a node, or at its beginning."""
        while position <= node.start and node.parent is not None:
            node = node.parent
        return Place(node, position, node.digest(position))

    def _locate(self, place: Place) -> Node | None:
        """The node that holds the page in front of a place; None if no node does any more."""
        node, position, digest = place
        if not node.attached or position > node.end:
            return None
        while position <= node.start and node.parent is not None:
            node = node.parent
        return node if node.digest(position) == digest else None

    def _child(self, parent: Node, start: int) -> Node:
        node = Node(self._number(), parent, start, len(self._groups))
        self._nodes[node.number] = node
        return node

    def _extend(self, node: Node, position: int, tokens: Ints, tables: Sequence[Ints]) -> None:
        """Append the pages from `position` on, the node's end, to its run."""
        assert position == node.end
        size = self._page_size
        digest = node.digest(position) if node.length else _before(node)
        digests = bytearray()  # a long prompt has thousands: an interrupt here changes nothing
        for at in range(position, len(tokens) // size):
            digest = page_digest(digest, tokens[at * size : (at + 1) * size])
            digests += digest
        node.digests += digests
        node.tokens.extend(tokens[position * size :])
        for group, own, table in zip(self._groups, node.pages, tables, strict=True):
            pages = table[position:]
            # A page that another node holds cannot be in two places.
            pages = np.where(group.owner[pages] < 0, pages, NULL)
            own.extend(pages)
            group.index(pages, node.number)

    def _complete(self, node: Node, position: int, count: int, tables: Sequence[Ints]) -> None:
        """Give the node pages that it lacks, of a sequence with the same tokens."""
        begin = position - node.start
        for group, own, table in zip(self._groups, node.pages, tables, strict=True):
            there, pages = own.view[begin : begin + count], table[position : position + count]
            lacking = (there == NULL) & (group.owner[pages] < 0)
            there[lacking] = pages[lacking]
            group.index(pages[lacking], node.number)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in front of its page `at`; returns the new node, of the pages before it."""
        parent = node.parent
        assert parent is not None and 0 < at < node.length
        upper = self._child(parent, node.start)
        parent.children[bytes(node.digests[:DIGEST_BYTES])] = upper
        tokens, digests = at * self._page_size, at * DIGEST_BYTES
        upper.tokens = IntBuffer(node.tokens.view[:tokens], np.int64)
        node.tokens = IntBuffer(node.tokens.view[tokens:], np.int64)
        upper.digests, node.digests = node.digests[:digests], node.digests[digests:]
        for number, group in enumerate(self._groups):
            view = node.pages[number].view
            upper.pages[number], node.pages[number] = IntBuffer(view[:at]), IntBuffer(view[at:])
            group.index(upper.pages[number].view, upper.number)
        for name in ("order", "time", "num_uses", "priority"):
            setattr(upper, name, getattr(node, name))
        node.parent, node.start = upper, node.start + at
        upper.children[bytes(node.digests[:DIGEST_BYTES])] = node
        return upper

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    # --- use and eviction -------------------------------------------------------------------------

    @staticmethod
    def note_growth(place: Place, order: int, time: float, priority: int) -> None:
        """Note a use of the node that a running sequence has come to, but not of those above it."""
        node = place.node
        node.order, node.time = order, time
        node.priority = max(node.priority, priority)

    def touch(self, place: Place, order: int, time: float, priority: int, uses: int) -> None:
        """Note a use of all pages in front of a place."""
        node = self._locate(place)
        while node is not None:
            if node.start < place.position:
                node.order, node.time = order, time
                node.priority = max(node.priority, priority)
                node.num_uses += uses
            node = node.parent

    def choose(
        self, group: int, count: int, key: Callable[[Node], Any], kept: Ints | None = None
    ) -> list[tuple[Node, Ints]]:
        """Up to `count` pages of a group to drop, which only the tree holds: nodes, and where their
        pages are. Nothing has changed yet.

        The node with the least key goes first, from its last page on; a node waits for those below
        it that have such pages. kept: pages that stay. Raises InputError for keys that do not
        compare, and what `key` raises.
        """
        pages = self._groups[group]
        evictable = pages.evictable()
        if kept is not None:
            evictable[kept] = False
        waiting: dict[int, int] = {}  # nodes with such pages whose next one above is this node
        nodes = [self._nodes[int(n)] for n in np.unique(pages.owner[evictable])]
        having = {node.number for node in nodes}
        above: dict[int, Node] = {}  # the next such node, past those that are in use
        for node in nodes:
            parent = node.parent
            while parent is not None and parent.number not in having:
                parent = parent.parent
            if parent is not None:
                above[node.number] = parent
                waiting[parent.number] = waiting.get(parent.number, 0) + 1
        heap = [(key(n), n.number) for n in nodes if n.number not in waiting]
        _compared(heapq.heapify, heap)
        chosen: list[tuple[Node, Ints]] = []
        while heap and count:
            node = self._nodes[_compared(heapq.heappop, heap)[1]]
            view = node.pages[group].view
            at = np.flatnonzero((view != NULL) & evictable[view])[-count:]
            chosen.append((node, at))
            count -= len(at)
            upper = above.get(node.number)
            if upper is not None:
                waiting[upper.number] -= 1
                if not waiting[upper.number]:
                    _compared(heapq.heappush, heap, (key(upper), upper.number))
        return chosen

    def drop(self, group: int, chosen: Sequence[tuple[Node, Ints]]) -> None:
        """Drop the pages of a group that `choose` gave."""
        for node, at in chosen:
            view = node.pages[group].view
            gone = view[at]
            view[at] = NULL
            self._groups[group].drop(gone)
            self._trim(node)

    def _trim(self, node: Node) -> None:
        """Shorten a leaf to its last page that some group holds; without pages it goes."""
        while not node.children:
            held = [np.flatnonzero(own.view) for own in node.pages]
            length = max((int(x[-1]) + 1 for x in held if len(x)), default=0)
            if length and length == node.length:
                return
            first = bytes(node.digests[:DIGEST_BYTES])
            node.tokens.truncate(length * self._page_size)
            del node.digests[length * DIGEST_BYTES :]
            for own in node.pages:
                own.truncate(length)
            if length:
                return
            node.attached = False
            del self._nodes[node.number]
            if isinstance(node, Root):
                del self._roots[node.namespace]
            if node.parent is None:
                return
            del node.parent.children[first]
            node = node.parent

    # --- for checks -------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots too, parents first."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def known(self) -> set[int]:
        """The numbers of the nodes that pages may have as owners."""
        return set(self._nodes)


def page_digest(before: bytes, tokens: Ints) -> bytes:
    """The digest of a page of tokens behind the page, or root, with the digest `before`."""
    return hashlib.sha256(before + tokens.astype("<i8").tobytes()).digest()


def _compared(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of heapq, which compares keys. Raises InputError if it cannot."""
    try:
        return call(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:  # the latter two: arrays and tensors
        raise InputError(
            f"two keys of the eviction policy do not compare ({error}): let it give an int, a "
            "float or a tuple of them for every entry"
        ) from error


def _before(node: Node) -> bytes:
    assert node.parent is not None
    return node.parent.digest(node.start)


def _equal_pages(one: Ints, other: Ints, size: int) -> int:
    """How many whole pages of tokens two arrays begin with alike."""
    length = min(len(one), len(other)) // size * size
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return (first if length and differs[first] else length) // size
