"""Random changes of image batches: drawn on the CPU from a named generator, applied where the batch lies."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def crop_and_flip(x: Tensor, generator: np.random.Generator, padding: int, border: Tensor) -> Tensor:
    """Crop each padded image back to its size at a random place, then mirror every other one on average.

    x: (b, c, h, w); border: (c,), what `padding` pixels on each side are filled with. The result has the
    shape and the memory format of x. Draws: b row offsets and b column offsets, 0 to 2·padding (`padding`
    leaves the image where it was), then b flips (1: left and right change places).
    """
    b, c, h, w = x.shape
    top, left = generator.integers(0, 2 * padding + 1, (2, b))
    flipped = generator.integers(0, 2, b)
    rows = top[:, None] + np.arange(h)
    ahead = np.arange(w)
    columns = left[:, None] + np.where(flipped[:, None] == 1, ahead[::-1], ahead)
    # Channels last, so that one index fetches a whole pixel.
    padded = border.to(x).expand(b, h + 2 * padding, w + 2 * padding, c).contiguous()
    padded[:, padding : padding + h, padding : padding + w] = x.permute(0, 2, 3, 1)
    at = [torch.from_numpy(i).to(x.device) for i in (np.arange(b), rows, columns)]
    pixels = padded[at[0][:, None, None], at[1][:, :, None], at[2][:, None, :]]
    return torch.empty_like(x).copy_(pixels.permute(0, 3, 1, 2))
