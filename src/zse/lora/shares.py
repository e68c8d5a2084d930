"""An adapter's matrices as one rank of several needs them: where it has some rows of a weight those of B, where it has some columns
those of A. What it adds then is its part of a sum, or the whole of its rows (docs/design/0011-several-devices.md)."""

from typing import Any

from zse.lazy import numpy as np
from zse.lora.targets import Image, Targets, merged


def cut(image: Image, whole: Targets, mine: Targets, share: Any) -> Image:
    """image: of the whole model, whose products are `whole`. mine: the rank's; share: its ModelShare."""
    rank = image.rank
    numbers = np.zeros(whole.size * rank, np.float16)
    for at, data in image.parts:
        numbers[at : at + len(data) // 2] = np.frombuffer(data, np.float16)
    parts: list[tuple[int, Any]] = []
    for (layer, name), product in whole.by_name.items():
        own = mine.by_name[layer, name]
        sides = zip((product.down, product.up), (own.down, own.up), (product.columns, product.rows), strict=True)
        for (at, to, width), spans in zip(sides, reversed(share.spans_of(layer, name)), strict=True):
            side = numbers[at * rank : (at + width) * rank].reshape(rank, width)
            part = np.concatenate([side[:, first:stop] for first, stop in spans or [(0, width)]], axis=1)
            if part.any():
                parts.append((to * rank, np.ascontiguousarray(part)))
    return image._replace(parts=merged(parts))
