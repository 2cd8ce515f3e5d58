"""Why the cache has, or lacks, a kernel: searches every layer, compiles and loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from .. import env
from ..codegen.spec import AnySpec, name_of
from ..errors import Nearest, Searched
from ..jit.cache.entry import KernelKey
from ..jit.cache.layers import Found, Layer, unfit
from ..jit.cache.misses import build_command, nearest_in
from ..jit.cache.remote import layers
from ..jit.cache.store import Store
from ..jit.compilation.toolchain import find_compiler, identify, key_of
from ..planner.tiles import build_requests


@dataclass(frozen=True, slots=True)
class LookUp:
    """The result of a look-up of one kernel. `str()` gives a few lines.

    mode: FLASHATTN_JIT_COMPILE, which decides whether another compiler's build counts. compiler_id:
    the compiler whose build was searched for, "" for any. layer, path: where the kernel was found,
    "" for a miss. stepped_down_to: the key of the smaller tile that replaces it, if any. searched:
    the layers without a usable kernel. nearest, command: for a miss, the entry that differs least
    and the shell command that builds the kernel.
    """

    name: str
    key: str
    target: str
    mode: str
    compiler_id: str
    layer: str = ""
    path: str = ""
    stepped_down_to: str | None = None
    searched: tuple[Searched, ...] = ()
    nearest: Nearest | None = None
    command: str = ""

    def __str__(self) -> str:
        lines = [f"{self.name} for {self.target}, kernel {self.key}"]
        lines += [f"  {searched}" for searched in self.searched]
        if self.stepped_down_to:
            lines.append(f"  spills registers: {self.stepped_down_to[:16]} takes its place")
        if self.layer:
            lines.append(f"  found: {self.layer} {self.path}")
            return "\n".join(lines)
        lines.append(f"  not found; {_CONSEQUENCES[self.mode]}")
        if self.nearest:
            lines.append(f"  nearest: {self.nearest.key[:16]} in {self.nearest.location}")
            lines += [f"    {difference}" for difference in self.nearest.differences]
        if self.command:
            lines.append(f"to build it:\n{self.command}")
        return "\n".join(lines)


_CONSEQUENCES = {
    "missing": "a call compiles it",
    "never": "FLASHATTN_JIT_COMPILE=never makes a call fail",
    "always": "a call compiles it, as FLASHATTN_JIT_COMPILE=always does with every kernel",
}


def look_up(spec: AnySpec) -> LookUp:
    """Search every layer for the kernel of a spec, as a call in this process would.

    Raises UnsafeCacheError where the user's folder is not safe, TargetError for a target without
    flags on this kind of machine.
    """
    mode = env.compile_mode()
    compiler = None if mode == "never" else find_compiler(spec.target)
    recall = Store(env.cache_dir()).recall_compiler
    compiler_id = identify(compiler, recall).id if compiler else None
    tiles = [key_of(request) for request in build_requests(spec)]
    searched_in = layers()
    key, stepped = tiles[0], None
    while True:
        found, searched = _ask(searched_in, key, compiler_id, spec.target)
        smaller = {k.hex: k for k in tiles[1 + tiles.index(key) :]}
        if found is None or found.stepped_down_to is None or not smaller:
            break
        stepped = found.stepped_down_to
        key = smaller[found.smaller_tile([*smaller])]
    missing = found is None
    return LookUp(
        name_of(spec),
        tiles[0].hex,
        spec.target,
        mode,
        compiler_id or "",
        layer=found.layer if found else "",
        path=str(found.path) if found else "",
        stepped_down_to=stepped,
        searched=searched,
        nearest=nearest_in(key, searched_in) if missing else None,
        command=build_command(spec.document(), name_of(spec)) if missing else "",
    )


def _ask(
    searched_in: tuple[Layer, ...], key: KernelKey, compiler_id: str | None, target: str
) -> tuple[Found | None, tuple[Searched, ...]]:
    """The first kernel that this machine can run, and why the layers before it have none."""
    searched: list[Searched] = []
    for layer in searched_in:
        answer = layer.search(key.hex, compiler_id)
        reason = answer.reason
        for found in answer.found:
            if found.stepped_down_to or not (reason := unfit(found, target, compiler_id)):
                return found, tuple(searched)
        searched.append(Searched(layer.name, layer.location, reason))
    return None, tuple(searched)
