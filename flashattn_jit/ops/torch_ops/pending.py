"""Changes that a compiled function makes to existing objects before a call.

Dynamo applies them after the graph (``config.window = 9`` of an object, module, cell or list made
outside): while the graph is traced, and when it runs, the objects are still as they were. Traced
code that reads a number or a tensor by a path (`paths`) gets the new one, also in another tuple,
list, dict or object of the same form (`forms`). Nothing sees another flag, function, kind of
number, length of a list, or global: that is an error, where a hook is known to read it. It is not
known of modules, as what their ``forward`` names counts as read.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import VariantError
from ...variants.capture.objects import ABSENT, attribute
from ...variants.capture.walk import Walk
from .forms import UNKNOWN, Change, Form, Real, compare, symbolic_contents, symbolic_form
from .paths import CONTENT

Assignment = tuple[int, str, Form | Real]
"""The id of an object or of a module's globals; the name of an attribute or global, or "" for the
items of a list or a dict; the new form."""

_found: dict[int, list[Assignment] | VariantError] = {}
_numbers = itertools.count(1)


def changes_before_call() -> int:
    """A number for the changes so far, for `take`; 0 for none. Dynamo runs this symbolically."""
    if not torch.compiler.is_dynamo_compiling():
        return 0
    number: list[Any] = []
    from torch._dynamo.comptime import comptime

    comptime(_look_at_changes)
    return number[0] if number else 0


def take(number: int) -> list[Assignment]:
    """The changes of a number, which is valid once. Raises VariantError if they are unknown."""
    changes = _found.pop(number, [])
    if isinstance(changes, VariantError):
        raise changes
    return changes


def _look_at_changes(context: Any) -> None:
    """Fills the list of `changes_before_call`."""
    from torch._dynamo import variables

    try:
        found: list[Assignment] | VariantError = _changes(context)
    except Exception as error:  # Dynamo's variables differ between versions of torch
        found = VariantError(
            "what the compiled function changes before the call cannot be read with this version "
            f"of torch ({torch.__version__}; {type(error).__name__}: {error}); call outside of it"
        )
    if found:
        number = next(_numbers)
        _found[number] = found
        held = context.get_local("number")._i_will_not_complain_if_bc_breaks_VariableTracker()
        held.realize().items.append(variables.ConstantVariable.create(number))


def _changes(context: Any) -> list[Assignment]:
    """The changes in Dynamo's own variables."""
    from torch._dynamo import source, variables

    def form(of: Callable[..., Any], x: Any) -> Any:
        try:
            return of(x, mutations)
        except Exception:  # Dynamo's variables differ between versions of torch
            return UNKNOWN

    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    effects = output.side_effects
    mutations = effects.store_attr_mutations
    changes: list[Assignment] = []
    for key, x in list(effects.id_to_variable.items()):
        if x.source is None or x.mutation_type is None or not effects.is_modified(x):
            continue
        owner = key
        if isinstance(x, variables.NewGlobalVariable):
            if not isinstance(x.source, source.GlobalSource):
                continue  # of another module than that of the compiled function
            owner = id(output.global_scope)
        changes += [
            (owner, name, form(symbolic_form, y)) for name, y in mutations.get(x, {}).items()
        ]
        items = form(symbolic_contents, x)
        if items is not None:
            changes.append((owner, "", items))
    return changes


def changes_values(walk: Walk, changes: Sequence[Assignment]) -> bool:
    """Whether numbers or tensors that a walk found have changed.

    Raises VariantError where something has changed that a hook reads and nothing sees.
    """
    objects = {id(x): x for x in walk.values}
    for x in walk.values:
        if type(x) is tuple and x and type(x[0]) is types.CellType:  # a closure
            objects.update((id(cell), cell) for cell in x)
    is_certain = not any(isinstance(x, torch.nn.Module) for x in walk.values)
    found = False
    for owner, name, new in changes:
        if owner not in objects:
            if is_certain and name in walk.names and _is_found_in_class(walk, owner, name):
                raise _unseen(f"{name!r} of a class")
            continue
        x = objects[owner]
        scope = x if type(x) is dict and "__builtins__" in x else None
        if scope is None and name not in ("", CONTENT) and name not in walk.names:
            continue
        if scope is not None and name not in _read_from(walk, scope):
            continue
        old = x if not name else attribute(x, name) if scope is None else scope[name]
        if old is ABSENT and not _may_be_absent(walk, x, name):
            continue
        change = compare(Real(old), new, walk.names)
        if scope is not None:
            is_unseen = is_certain and change > Change.NOTHING
        else:  # of a number's kinds, the graph has the one, the site the other
            is_unseen = change is Change.KIND or is_certain and change is Change.STRUCTURE
        if is_unseen:
            what = f"{name!r} of a {type(x).__name__}" if name else _content(x, new)
            raise _unseen(what if scope is None else f"the global {name}")
        found |= change is Change.VALUES or not name and change is Change.NOTHING
    return found


def _unseen(what: str) -> VariantError:
    return VariantError(
        f"the compiled function changes {what}, which a hook of a later call in it reads: the call "
        "cannot see that; pass the value by keyword, make the variant in the compiled function, or "
        "change it outside"
    )


def _is_found_in_class(walk: Walk, owner: int, name: str) -> bool:
    """Whether the class with this id gives an object or class that a walk found the attribute:
    Dynamo's traced code would find the old one."""
    for x in walk.values:
        found = x if isinstance(x, type) else type(x)
        if found is x or name not in getattr(x, "__dict__", {}):
            bases = (base for base in found.__mro__ if name in base.__dict__)
            if id(next(bases, None)) == owner:
                return True
    return False


def _may_be_absent(walk: Walk, x: object, name: str) -> bool:
    """Whether a hook may see that an object has no such attribute."""
    return any(
        kind == "without" and name in names
        for value, location in zip(walk.values, walk.locations, strict=True) if value is x
        for kind, names in location.guards
    )  # fmt: skip


def _content(x: Any, new: Form | Real) -> str:
    is_length = not isinstance(new, Real) and len(new[2]) != len(x)
    return f"{'the length' if is_length else 'an item'} of a {type(x).__name__}"


def _read_from(walk: Walk, scope: object) -> set[str]:
    """The globals that a walk found in a module's dict."""
    return {
        x.steps[-1][1] for x in walk.locations
        if x.base >= 0 and walk.values[x.base] is scope and x.steps and x.steps[-1][0] == "item"
    }  # fmt: skip
