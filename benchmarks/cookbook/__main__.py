"""The recipes of docs/guides/cookbook.md against torch: eager torch, and compiled FlexAttention.

    python -m benchmarks.cookbook [--tokens 2048] [--only 02 09] [--save]

Each recipe's blocks are those of the page, with more tokens. torch is the recipe's second block,
which uses `scaled_dot_product_attention` where that can compute it, its masks and biases made in
each call; FlexAttention's block masks are made ahead, and its results are compared first. fp32, 8
heads of 64, no gradients. Compiling FlexAttention takes ten minutes for all recipes.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.cookbook.flex import FLEX
from benchmarks.parts.measure import Row, Run, arguments, interleave, median, ratio, report
from benchmarks.parts.progress import say
from docs.generator.cookbook import Recipe, recipes


def rows(recipe: Recipe, options: argparse.Namespace) -> list[Row]:
    """The speedup over torch, and over FlexAttention where it can express the recipe."""
    names = recipe.run(options.tokens)
    q, k, v = (names[name] for name in "qkv")
    runs: dict[str, Run] = {
        "ours": lambda: names["attend"](q, k, v),
        "torch": lambda: names["in_torch"](q, k, v),
    }
    if recipe.number in FLEX and not options.without_flex:
        flex = FLEX[recipe.number](names)
        torch.testing.assert_close(flex(), runs["ours"](), atol=1e-4, rtol=1e-3)
        runs["FlexAttention"] = flex
    times = interleave(runs, options.pairs)
    found = []
    for peer in list(runs)[1:]:
        value, spread = ratio(times[peer], times["ours"])
        detail = f"ours {median(times['ours']) * 1e3:.2f} ms, {median(times[peer]) * 1e3:.2f} ms"
        claim = f"{recipe.number} {recipe.title}: times {peer}"
        found.append(Row(claim, None, value, "x", "higher", spread, detail))
        say(f"  {claim}: {value:.2f}x ({detail})")
    return found


def main() -> None:
    """Measure and report."""

    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tokens", type=int, default=2048, help="of a sequence (%(default)s)")
        parser.add_argument("--only", nargs="+", default=(), help="numbers of recipes, such as 02")
        parser.add_argument("--without-flex", action="store_true", help="compile no FlexAttention")

    options = arguments(__doc__, extend)
    with torch.no_grad():
        chosen = [r for r in recipes() if not options.only or r.number in options.only]
        report("cookbook", [row for recipe in chosen for row in rows(recipe, options)], options)


if __name__ == "__main__":
    main()
