"""The catalogue of library variants: docs/guides/catalogue.md, from their docstrings.

    python -m docs.generator.catalogue

writes the page; `python -m docs.generator.pictures` its pictures.
"""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import flashattn_jit as fa
import flashattn_jit.variants.library as library

from .pictures import svg, weights

PAGE = Path(__file__).resolve().parents[1] / "guides" / "catalogue.md"

LENGTH, HEADS, HEAD_DIM = 48, 4, 64

INTRODUCTION = f"""# Catalogue of the library's variants

<!-- Written by `python -m docs.generator.catalogue` from the docstrings: edit those. -->

Every variant that comes with the package: its formula, its params, models that use it, its source,
and a call. `s` is the scaled score of the pair of the query at position `i` (`q_idx`) and the key
at position `j` (`kv_idx`), `h` the query head. They compose:
[variants.md](../variants.md#composition).

A picture shows how much each query row (down) weighs each key (across) where all scores are equal,
in the call below it, in head 0; a variant that treats all keys alike has none. The calls run with
these inputs:

```python
import torch
import flashattn_jit as fa

q, k, v = (torch.randn(1, {HEADS}, {LENGTH}, {HEAD_DIM}) for _ in range(3))
```
"""


@dataclass(frozen=True)
class Entry:
    """A variant of the catalogue. call: an expression of the variant; lines: what it needs;
    options: further arguments of the call, as text. drawn: false where weights have no picture."""

    name: str
    call: str
    lines: str = ""
    options: str = ""
    rows: int = LENGTH
    drawn: bool = True

    @property
    def snippet(self) -> str:
        """The code of the page."""
        q = "q" if self.rows == LENGTH else f"q[:, :, :{self.rows}]"
        given = f", {self.options}" if self.options else ""
        lines = f"{self.lines}\n" if self.lines else ""
        return f"{lines}out = fa.attention({q}, k, v, {self.call}{given})"


SECTIONS: dict[str, tuple[Entry, ...]] = {
    "Masks of positions": (
        Entry("Full", "fa.Full()"),
        Entry("Causal", "fa.Causal()"),
        Entry("SlidingWindow", "fa.SlidingWindow(12)"),
        Entry("Chunked", "fa.Chunked(16)"),
        Entry("Dilated", "fa.Dilated(window=24, dilation=4)"),
        Entry("PrefixLM", "fa.PrefixLM(torch.tensor([16]))"),
        Entry("StreamingLLM", "fa.StreamingLLM(window=12, num_sinks=4)"),
        Entry("BlockCausal", "fa.BlockCausal(8)"),
        Entry("BlockDiffusion", "fa.BlockDiffusion(length=24, block=8)"),
        Entry("Natten", "fa.Natten((6, 8), kernel=3)"),
    ),
    "Masks of tokens": (
        Entry(
            "DocumentMask", "fa.DocumentMask(documents) & fa.Causal()",
            "documents = fa.document_ids([20, 8, 20])[None]",
        ),
        Entry(
            "PaddingMask", "fa.PaddingMask(keep)",
            "keep = (torch.arange(48) >= 10)[None]  # padding on the left",
        ),
        Entry(
            "TreeMask", "fa.TreeMask(prefix, bits)",
            "bits = fa.tree_bits([-1, 0, 0, 1, 1, 2, 2, 3])  # the parent of each draft token\n"
            "prefix = torch.tensor([40])",
            'q_offset="end"', rows=8,
        ),
    ),
    "Biases and soft caps": (
        Entry("ALiBi", "fa.ALiBi() & fa.Causal()"),
        Entry("SoftCap", "fa.SoftCap(50.0)"),
        Entry(
            "AdditiveBias", "fa.AdditiveBias(bias)",
            "bias = torch.cos(torch.arange(48.0) / 4).expand(1, 1, 48, 48)",
        ),
        Entry(
            "RelativeBias", "fa.RelativeBias(table)",
            "table = torch.linspace(2, -2, 32)[:, None].expand(32, 4).contiguous()",
            "scale=1.0",
        ),
        Entry(
            "RelativeTable", "fa.RelativeTable(table, reach=20)",
            "table = torch.linspace(-3, 3, 41).expand(4, 41).contiguous()",
        ),
    ),
    "Normalisers": (
        Entry("Sink", "fa.Sink(torch.zeros(4))"),
        Entry("SoftmaxOffByOne", "fa.SoftmaxOffByOne()"),
        Entry("Sigmoid", "fa.Sigmoid()"),
        Entry("ReluSquared", "fa.ReluSquared()"),
    ),
    "Queries, keys and outputs": (
        Entry("RoPE", "fa.RoPE(500.0) & fa.Causal()"),
        Entry("QKNorm", "fa.QKNorm() & fa.Causal()"),
        Entry("LogN", "fa.LogN(train_len=24)"),
        Entry("TemperatureTuning", "fa.TemperatureTuning(floor_scale=8.0)"),
        Entry(
            "GatedOutput", "fa.GatedOutput()",
            "gate = torch.randn(1, 4, 48, 64)", "gate=gate", drawn=False,
        ),
    ),
}  # fmt: skip

SCALINGS = (
    "NoScaling", "LinearScaling", "DynamicNTKScaling", "Llama3Scaling", "YarnScaling",
    "LongRopeScaling",
)  # fmt: skip
"""Scalings of RoPE, `fa.RoPE(scaling=...)`."""

HELPERS = (
    "RopeScaling", "alibi_slopes", "document_ids", "pack_bits", "rope_scaling_from_config",
    "rope_tables", "rotate", "t5_buckets", "tree_bits",
)  # fmt: skip
"""What makes params of variants: documented with the API."""


def entries() -> list[Entry]:
    """All entries, in the order of the page."""
    return [entry for section in SECTIONS.values() for entry in section]


def description(name: str) -> str:
    """A docstring as Markdown, without its examples."""
    text = inspect.getdoc(getattr(library, name)) or ""
    text = re.sub(r"^>>> .*(\n(\.\.\. |>>> ).*)*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"``(.*?)``", r"`\1`", text, flags=re.DOTALL)
    return text.strip()


def scope() -> dict[str, object]:
    """The names that the page's first snippet defines."""
    made: dict[str, object] = {"torch": torch, "fa": fa}
    q, k, v = (torch.ones(1, HEADS, LENGTH, HEAD_DIM) for _ in range(3))
    return {**made, "q": q, "k": k, "v": v}


def picture(entry: Entry) -> str | None:
    """The SVG of an entry; None if every row weighs all keys alike."""
    if not entry.drawn:
        return None
    names = scope()
    exec(entry.lines, names)
    variant = eval(entry.call, names)
    options = eval(f"dict({entry.options})", names)
    found = weights(variant, entry.rows, LENGTH, HEADS, HEAD_DIM, **options)
    return None if np.allclose(found, 1.0) else svg(found, entry.name)


@functools.cache
def catalogue_pictures() -> dict[str, str]:
    """The text of each picture, by its path below docs/pictures."""
    made = {f"catalogue/{entry.name}.svg": picture(entry) for entry in entries()}
    return {name: text for name, text in made.items() if text is not None}


def page() -> str:
    """The Markdown of the catalogue."""
    pictures = catalogue_pictures()
    out = [INTRODUCTION]
    for title, section in SECTIONS.items():
        out.append(f"## {title}\n")
        for entry in section:
            out.append(f"### {entry.name}\n\n{description(entry.name)}\n")
            if (name := f"catalogue/{entry.name}.svg") in pictures:
                alt = f"the weights of fa.{entry.name}"
                out.append(f"![{alt}](../pictures/{name})\n")
            out.append(f"```python\n{entry.snippet}\n```\n")
    out.append("## Scalings of RoPE\n\n`fa.RoPE(scaling=...)` takes one of these.\n")
    out += [f"### {name}\n\n{description(name)}\n" for name in SCALINGS]
    return "\n".join(out)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
