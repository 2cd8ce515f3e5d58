"""The recipes of docs/guides/cookbook.md, as the tests, the pictures and the benchmark run them.

    python -m docs.generator.cookbook

writes what `python -m benchmarks.cookbook --save` measured, in `RESULTS`, below the pictures.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .pictures import CELLS, shrink, svg, weights
from .snippets import Snippet, execute, snippets

PAGE = Path(__file__).resolve().parents[1] / "guides" / "cookbook.md"
_FOLDER = PAGE.parents[2] / "benchmarks" / "results"
RESULTS = {
    "AVX-512": _FOLDER / "amd-epyc-2c-avx512_bf16-2026-11-28.json",
    "AVX2": _FOLDER / "amd-epyc-2c-avx2-2026-11-28.json",
}


@dataclass(frozen=True)
class Recipe:
    """A section: its number and title, the code of the engine, the code of torch."""

    number: str
    title: str
    engine: Snippet
    in_torch: Snippet

    def run(self, tokens: int | None = None) -> dict[str, Any]:
        """The names that both blocks define: q, k, v, attend and in_torch among them.

        tokens: the length in place of the page's.
        """
        scope: dict[str, Any] = {}
        text = self.engine.text
        if tokens is not None:
            text, found = re.subn(r"(tokens, dim = (?:\d+, )+)512\b", rf"\g<1>{tokens}", text)
            assert found == 1, f"recipe {self.number} has no line of sizes"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            execute(PAGE, self.engine, scope, text)
            execute(PAGE, self.in_torch, scope)
        return scope


def recipes() -> list[Recipe]:
    """All recipes, in the order of the page."""
    by_section: dict[str, list[Snippet]] = {}
    for snippet in snippets(PAGE):
        by_section.setdefault(snippet.section, []).append(snippet)
    found = []
    for section, (engine, in_torch) in by_section.items():
        number, title = section.split(". ", 1)
        found.append(Recipe(f"{int(number):02}", title, engine, in_torch))
    return found


def picture(recipe: Recipe) -> str | None:
    """The SVG of a recipe; None if every row weighs all keys alike."""
    names = recipe.run()
    if "variant" not in names:
        return svg(shrink(names["kept"][0].double().numpy()), recipe.title)
    q_len, heads, dim, kv_len = *(names["q"].shape[i] for i in (2, 1, 3)), names["k"].shape[2]
    options = {"q_offset": names["q_offset"]} if "q_offset" in names else {}
    found = weights(names["variant"], q_len, kv_len, heads, dim, **options)
    found = shrink(found[:, -CELLS:] if q_len < CELLS else found)
    return None if np.allclose(found, 1.0) else svg(found, recipe.title)


def times(recipe: Recipe) -> str:
    """The line of a recipe that says how much more time its peers take; empty if not measured."""
    cells = []
    for target, path in RESULTS.items():
        measured = {row["claim"]: row for row in json.loads(path.read_text())["cookbook"]["rows"]}
        words = []
        for peer, label in (("torch", "eager torch"), ("FlexAttention", "compiled FlexAttention")):
            row = measured.get(f"{recipe.number} {recipe.title}: times {peer}")
            if row is not None:
                words.append(f"{label} {row['measured']:.2g}x")
        if words:
            cells.append(f"{', '.join(words)} ({target})")
    return f"Times of its peers over its own: {'; '.join(cells)}.\n\n" if cells else ""


def with_times(text: str) -> str:
    """The page, each recipe's line of times in front of its first block."""
    text = re.sub(r"^Times of its peers.*\n\n", "", text, flags=re.MULTILINE)
    head, *sections = re.split(r"^(?=## \d+\. )", text, flags=re.MULTILINE)
    made = [
        section.replace("```python\n", f"{times(recipe)}```python\n", 1)
        for recipe, section in zip(recipes(), sections, strict=True)
    ]
    return head + "".join(made)


@functools.cache
def cookbook_pictures() -> dict[str, str]:
    """The text of each picture, by its path below docs/pictures."""
    made = {f"cookbook/{recipe.number}.svg": picture(recipe) for recipe in recipes()}
    return {name: text for name, text in made.items() if text is not None}


if __name__ == "__main__":
    PAGE.write_text(with_times(PAGE.read_text()))
