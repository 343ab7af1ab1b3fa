"""Scenes to detect digits in: real UCI handwritten digits pasted on textured backgrounds.

The digits are the "Optical Recognition of Handwritten Digits" set (Alpaydin and Kaynak, 1998), 8x8
pixels of 0 to 16. A detector trains on one split; the package ships the other for its scores.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS = Path(__file__).parent / "weights"
INK = 0.3  # share of full ink from which a pixel counts as part of the digit's box


def heldout_digits() -> tuple[Tensor, Tensor]:
    """Digits (N, 8, 8) uint8 with values 0 to 16 that no shipped model saw, and labels (N,)."""
    tensors = load_file(WEIGHTS / "vit_digits_heldout.safetensors")
    return tensors["images"], tensors["labels"]


def texture(height: int, width: int, generator: torch.Generator) -> Tensor:
    """Coloured noise (3, height, width) of several coarsenesses around a random colour."""
    image = torch.rand(3, 1, 1, generator=generator).expand(3, height, width)
    for cells in ((3, 3), (8, 8), (20, 20), (height // 2, width // 2)):
        noise = torch.rand(1, 3, *cells, generator=generator) - 0.5
        strength = 0.35 * torch.rand(1, generator=generator)
        image = image + strength * F.interpolate(noise, size=(height, width), mode="bilinear")[0]
    return image.clamp(0, 1)


def contrasting_colour(background: Tensor, generator: torch.Generator) -> Tensor:
    """A random colour (3, 1, 1) that lies well off the background's mean (3, H, W)."""
    mean = background.mean(dim=(1, 2))
    colours = torch.rand(8, 3, generator=generator)
    return colours[(colours - mean).norm(dim=1).argmax()].reshape(3, 1, 1)


def ink_box(ink: Tensor) -> tuple[int, int, int, int]:
    """x1, y1, x2, y2 of the pixels (H, W) that hold ink; the far sides are exclusive."""
    rows = (ink > INK).any(dim=1).nonzero()
    columns = (ink > INK).any(dim=0).nonzero()
    x1, x2 = int(columns[0]), int(columns[-1]) + 1
    y1, y2 = int(rows[0]), int(rows[-1]) + 1
    return x1, y1, x2, y2


def overlaps(x: int, y: int, side: int, taken: list[tuple[int, int, int]]) -> bool:
    return any(
        x < other_x + other_side
        and other_x < x + side
        and y < other_y + other_side
        and other_y < y + side
        for other_x, other_y, other_side in taken
    )


def digit_scene(
    digits: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    height: int = 160,
    width: int = 160,
    max_digits: int = 6,
    sides: tuple[int, int] = (18, 72),
) -> tuple[Tensor, Tensor]:
    """A scene with 1 to max_digits digits that do not overlap.

    Args:
        digits: (N, 8, 8), values 0 to 16.
        labels: (N,) integers.
        generator: decides everything.
        height, width: of the scene in pixels.
        sides: smallest and largest side of a pasted digit, in pixels.

    Returns:
        The image (3, height, width) float32 in 0..1, and the boxes (max_digits, 5) float32 as
        x1, y1, x2, y2 in pixels and class; rows that hold no digit have class -1.

    Raises:
        ValueError: the largest digit does not fit into the scene.
    """
    if sides[1] > min(height, width):
        raise ValueError(f"digits of {sides[1]} pixels do not fit into a {height}x{width} scene")

    def below(stop: int) -> int:
        return int(torch.randint(stop, (), generator=generator))

    image = texture(height, width, generator)
    boxes = torch.zeros(max_digits, 5)
    boxes[:, 4] = -1
    taken: list[tuple[int, int, int]] = []
    for row in range(1 + below(max_digits)):
        chosen = below(len(digits))
        side = sides[0] + below(sides[1] - sides[0] + 1)
        x, y = below(width - side + 1), below(height - side + 1)
        if overlaps(x, y, side, taken):
            continue
        taken.append((x, y, side))
        small = digits[chosen].float()[None, None] / 16
        ink = F.interpolate(small, size=(side, side), mode="bilinear")[0, 0]
        patch = image[:, y : y + side, x : x + side]
        colour = contrasting_colour(patch, generator)
        image[:, y : y + side, x : x + side] = patch + ink * (colour - patch)
        corners = torch.tensor(ink_box(ink)) + torch.tensor([x, y, x, y])
        boxes[row] = torch.cat([corners, labels[chosen].reshape(1)])
    return image, boxes


def digit_scenes(
    digits: Tensor,
    labels: Tensor,
    count: int,
    generator: torch.Generator,
    height: int = 160,
    width: int = 160,
) -> tuple[Tensor, Tensor]:
    """Images (count, 3, height, width) and boxes (count, 6, 5) of as many scenes."""
    scenes = [digit_scene(digits, labels, generator, height, width) for _ in range(count)]
    images, boxes = zip(*scenes, strict=True)
    return torch.stack(images), torch.stack(boxes)
