"""Pictures of which keys a variant's query rows weigh, as SVG.

    python -m docs.generator.pictures

writes those of the catalogue and the cookbook to docs/pictures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import flashattn_jit as fa

PICTURES = Path(__file__).resolve().parents[1] / "pictures"

CELLS = 64
"""A side of a picture, at most."""

_SHADES = 8
_WEIGHTS_AT_ONCE = 64  # columns of one reference call: its head_dim_v


def weights(
    variant: fa.Variant, q_len: int, kv_len: int, num_heads: int, head_dim: int, **options: Any
) -> NDArray[np.float64]:
    """The weight of each key in each row of head 0, over the largest of the row: [q_len, kv_len].

    All queries and keys are ones, so that only positions differ. The values are the columns of the
    identity matrix, which makes output rows of weights. options: params, and q_offset.
    """
    q, k = (torch.ones(1, num_heads, n, head_dim) for n in (q_len, kv_len))
    identity = torch.eye(kv_len).expand(1, num_heads, -1, -1)
    parts = [
        variant.reference(q, k, columns, **options)[0, 0]
        for columns in identity.split(_WEIGHTS_AT_ONCE, dim=-1)
    ]
    found = torch.cat(parts, dim=-1).abs().numpy()
    return found / np.maximum(found.max(axis=1, keepdims=True), 1e-30)


def shrink(picture: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each cell of a map with at most CELLS rows and columns."""
    for axis in (0, 1):
        size = picture.shape[axis]
        cells = min(size, CELLS)
        edges = np.arange(cells) * size // cells
        sums = np.add.reduceat(picture, edges, axis=axis)
        widths = np.diff([*edges, size])
        picture = sums / (widths[:, None] if axis == 0 else widths)
    return picture


def svg(picture: NDArray[np.float64], title: str) -> str:
    """The map as SVG text: one path for each shade, queries down, keys across."""
    rows, columns = picture.shape
    level = np.ceil(np.clip(picture, 0.0, 1.0) * _SHADES - 1e-6).astype(int)
    paths = []
    for shade in range(1, _SHADES + 1):
        runs = []
        for y in range(rows):
            edges = np.flatnonzero(np.diff([False, *(level[y] == shade), False]))
            runs += [f"M{a} {y}h{b - a}v1h{a - b}z" for a, b in edges.reshape(-1, 2)]
        if runs:
            part = shade / _SHADES
            colour = "#{:02x}{:02x}{:02x}".format(
                *(round(255 + (dark - 255) * part) for dark in (31, 92, 168))
            )
            paths.append(f'<path fill="{colour}" d="{"".join(runs)}"/>')
    scale = min(4.0, 256.0 / columns)
    width, height = columns + 2, rows + 2
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * scale:.0f}" '
        f'height="{height * scale:.0f}" viewBox="-1 -1 {width} {height}" role="img">',
        f"<title>{title}: queries down, keys across</title>",
        f'<rect x="-0.5" y="-0.5" width="{columns + 1}" height="{rows + 1}" fill="#fff" '
        'stroke="#888" stroke-width="0.5"/>',
        *paths,
        "</svg>\n",
    ])  # fmt: skip


def main() -> None:
    """Write all pictures, and remove those that no page has any more."""
    from docs.generator.catalogue import catalogue_pictures
    from docs.generator.cookbook import cookbook_pictures

    made = {**catalogue_pictures(), **cookbook_pictures()}
    for folder in ("catalogue", "cookbook"):
        (PICTURES / folder).mkdir(parents=True, exist_ok=True)
        for path in (PICTURES / folder).glob("*.svg"):
            if f"{folder}/{path.name}" not in made:
                path.unlink()
    for name, text in made.items():
        (PICTURES / name).write_text(text)


if __name__ == "__main__":
    main()
