"""A changed meta.json or file of an entry is refused, or the entry is what was published."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn_jit.errors import CacheError
from flashattn_jit.jit.cache.entry import ARTIFACT, META
from flashattn_jit.jit.cache.store import Store

from .entries import GCC, Made, adopt, make

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "a" * 64, GCC.id, ARTIFACT, "meta.json", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
MADE = make()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of keys and indices to every value of a JSON document."""
    if not isinstance(value, (dict, list)):
        return [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(p for name, one in inner for p in places(one, (*path, name)))]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """The meta.json of MADE with some values replaced, removed or added."""
    meta = json.loads(json.dumps(MADE.meta))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(meta)))
        if not path:
            if draw(st.booleans()):
                return draw(VALUES)
            meta[draw(st.text(max_size=8))] = draw(VALUES)
            continue
        owner = meta
        for name in path[:-1]:
            owner = owner[name]
        change = draw(st.sampled_from(["replace", "remove", "rename"]))
        if change == "replace":
            owner[path[-1]] = draw(VALUES)
        elif change == "remove" or isinstance(owner, list):
            del owner[path[-1]]
        else:
            owner[draw(st.text(max_size=8) | st.just("../../x"))] = owner.pop(path[-1])
        if not isinstance(meta, dict) or not meta:
            return meta
    return meta


def sound(root: Path, made: Made) -> bool:
    """Whether what is below `root` is MADE's one entry, or nothing."""
    found = Store(root).find(made.key, None)
    return found is None or found.artifact.read_bytes() == made.files[ARTIFACT]


@settings(max_examples=150, deadline=None)
@given(meta=mutated())
def test_a_changed_meta_is_refused_or_harmless(meta: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cache"
        store = Store(root)
        try:
            entry = store.adopt(MADE.key, GCC.id, MADE.files, meta, durable=False)
        except CacheError:  # the folder may have been made by then, but no entry
            assert not list(root.rglob(META))
        else:
            assert store.verify(entry.path).key == MADE.key
        assert {path.name for path in Path(folder).iterdir()} <= {"cache"}
        assert sound(root, MADE)

        entry = adopt(store, MADE)
        entry.path.joinpath("meta.json").write_text(json.dumps(meta))
        list(store.entries())
        with contextlib.suppress(CacheError):
            store.verify(entry.path)
        assert sound(root, MADE)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(MADE.files)),
    place=st.integers(0, 100),
    change=st.sampled_from(["flip", "cut", "append", "empty"]),
    bit=st.integers(0, 7),
)
def test_a_changed_file_is_refused(name: str, place: int, change: str, bit: int) -> None:
    content = bytearray(MADE.files[name])
    if change == "flip" and content:
        content[place % len(content)] ^= 1 << bit
    elif change == "cut":
        del content[place:]
    elif change == "append":
        content += b"\0"
    else:
        content.clear()
    changed = bytes(content) != MADE.files[name]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "cache")
        files = {**MADE.files, name: bytes(content)}
        try:
            store.adopt(MADE.key, GCC.id, files, MADE.meta, durable=False)
            assert not changed
        except CacheError:
            assert changed
        entry = adopt(store, MADE)
        entry.path.joinpath(name).write_bytes(bytes(content))
        try:
            store.verify(entry.path)
            assert not changed
        except CacheError:
            assert changed
        assert sound(store.root, MADE) or not changed


@settings(max_examples=80, deadline=None)
@given(text=st.binary(max_size=300))
def test_any_bytes_as_meta_are_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "cache")
        entry = adopt(store, MADE)
        entry.path.joinpath("meta.json").write_bytes(text)
        assert store.find(MADE.key, None) is None
        assert [one.meta for one in store.entries()] == [{}]
