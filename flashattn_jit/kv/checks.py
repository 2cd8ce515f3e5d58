"""Whether a cache contradicts itself, for tests and for looking into a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .pages import NULL, Pages
from .tree import DIGEST_BYTES, Node, Root, page_digest

if TYPE_CHECKING:
    from .cache import Cache


def check_cache(cache: Cache) -> None:
    """Raises AssertionError if one of these does not hold.

    Pages: each is free, used or evictable; refs counts the tables that name it; the owner is the
    node that holds it; the null page is all zeros. Tables: as long as their sequence needs, each
    page once. Tree: tokens, digests and pages of a node have one length; children are found by the
    digest of their first page and begin where their parent ends; digests follow from the tokens.
    """
    for group, pages in enumerate(cache.pools):
        _check_pages(cache, group, pages)
    for node in cache.tree.nodes():
        _check_node(cache, node)
    known = {node.number for node in cache.tree.nodes()}
    assert known == cache.tree.known(), "nodes that are in no tree, or unknown ones"


def _check_pages(cache: Cache, group: int, pages: Pages) -> None:
    where = f"group {group}: "
    size = cache.spec.page_size
    refs = np.zeros(pages.num_pages + 1, np.int32)
    for seq in cache.sequences:
        if seq.is_suspended:
            continue
        table = seq.tables[group].view
        held = table[table != NULL]
        assert len(np.unique(held)) == len(held), f"{where}{seq} names a page twice"
        refs[held] += 1
        assert seq.removed[group] % size == 0
        if not seq.in_step:
            length = seq.tokens.length - seq.removed[group]
            least = -(-length // size)
            assert len(table) == least, f"{where}{seq} has {len(table)} pages, needs {least}"
            assert length % size == 0 or table[-1] != NULL, f"{where}{seq} lacks its last page"
    assert (refs == pages.refs).all(), f"{where}refs differ from the tables"
    owner = np.full(pages.num_pages + 1, -1, np.int32)
    for node in cache.tree.nodes():
        held = node.pages[group].view
        held = held[held != NULL]
        assert (owner[held] == -1).all(), f"{where}a page is in two nodes"
        owner[held] = node.number
    assert (owner == pages.owner).all(), f"{where}owners differ from the tree"
    free = pages.free_pages()
    assert len(np.unique(free)) == len(free) and NULL not in free, f"{where}free pages repeat"
    assert (refs[free] == 0).all() and (owner[free] == -1).all(), f"{where}a free page is in use"
    used, evictable = int((refs > 0).sum()), int(pages.evictable().sum())
    assert used == pages.num_used, f"{where}{pages.num_used} used pages, counted {used}"
    assert evictable == pages.num_evictable, f"{where}evictable pages are miscounted"
    assert len(free) + used + evictable == pages.num_pages, f"{where}a page is lost"
    for tensor in pages.memory:
        page = tensor[NULL]
        if page.element_size() == 1:  # torch has no any() of fp8 on devices
            page = page.view(torch.uint8)
        assert page.is_meta or not page.any(), f"{where}the null page was written"


def _check_node(cache: Cache, node: Node) -> None:
    size = cache.spec.page_size
    length = node.length
    assert node.attached, "a detached node is in the tree"
    assert node.tokens.length == length * size, "tokens of a node do not fit its pages"
    assert len(node.digests) == length * DIGEST_BYTES, "digests of a node do not fit its pages"
    assert all(own.length == length for own in node.pages), "groups of a node differ in length"
    assert isinstance(node, Root) == (node.parent is None), "a node without a parent"
    if node.parent is not None:
        assert length, "an empty node"
        assert node.start == node.parent.end, "a node does not begin where its parent ends"
        digest = node.parent.digest(node.start)
        for at in range(length):
            digest = page_digest(digest, node.tokens.view[at * size : (at + 1) * size])
            assert digest == node.digest(node.start + at + 1), "a digest differs from its tokens"
    for key, child in node.children.items():
        assert child.parent is node, "a child has another parent"
        assert key == bytes(child.digests[:DIGEST_BYTES]), "a child under another digest"
