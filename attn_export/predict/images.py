"""An image file -> pixels -> what a model takes, and the way back for boxes.

Pillow decodes and resizes, as torchvision, timm and transformers have it do; scaling rounds as
theirs does (float64 product, float32 result; mean and std in float32), so that the arrays are
theirs bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from attn_export.errors import FileError, one_line
from attn_export.parity.tolerance import Array
from attn_export.predict.linear import linear
from attn_export.predict.steps import Crop, ImageSteps, Resize

Pixels = NDArray[np.uint8]
FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True)
class Placement:
    """Where the pixels of an image lie in what the model sees: x' = x * across + left.

    Attributes:
        width, height: of the image itself.
        shown: height and width of what the model sees.
    """

    width: int
    height: int
    shown: tuple[int, int]
    across: float = 1.0
    down: float = 1.0
    left: float = 0.0
    top: float = 0.0

    def back(self, boxes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Boxes (K, 4) x1, y1, x2, y2 of the model's pixels in the image's, cut to its edges."""
        scale = np.array([self.across, self.down] * 2)
        moved = (boxes - np.array([self.left, self.top] * 2)) / scale
        return np.asarray(np.clip(moved, 0, np.array([self.width, self.height] * 2)))


def decode(source: Path | bytes, where: str) -> Image.Image:
    """The image upright (EXIF orientation applied), in mode L, RGB or another of 8 bits.

    Raises:
        FileError: no image, a truncated or oversize one, or an animation.
    """
    way_out = "leave it out, or mend it"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as file:
                frames = getattr(file, "n_frames", 1)
                if frames != 1:
                    raise FileError(f"{where} holds {frames} frames", "give one image a file")
                file.load()
                upright = ImageOps.exif_transpose(file)
    except UnidentifiedImageError as error:
        raise FileError(f"{where} is not an image that Pillow reads", way_out) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise FileError(f"{where} is too large an image ({one_line(error)})", way_out) from error
    except FileNotFoundError as error:
        raise FileError(f"there is no file {where}", "check its path") from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:  # what Pillow's decoders raise
        raise FileError(f"{where} does not decode ({one_line(error)})", way_out) from error
    return _eight_bits(upright, where)


def _eight_bits(image: Image.Image, where: str) -> Image.Image:
    """Pillow cuts deeper pixels off at 255 where it converts them, which turns them white."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise FileError(f"{where} has pixels of 32 bits", "save it with 8 or 16")
    return image


def from_pixels(array: Array, where: str) -> Image.Image:
    """An image from uint8 (H, W), (H, W, 1) or (H, W, 3)."""
    plain = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if plain.dtype != np.uint8 or plain.ndim not in (2, 3) or plain.shape[2:] not in ((), (3,)):
        raise FileError(
            f"{where} holds {array.dtype} {array.shape}", "pixels are uint8 (H, W) or (H, W, 3)"
        )
    return Image.fromarray(np.ascontiguousarray(plain))


def prepare(image: Image.Image, steps: ImageSteps) -> tuple[Array, Placement]:
    """An image as the model takes it, float32 (or uint8 where nothing is scaled), without batch.

    Raises:
        FileError: it is smaller than the crop.
    """
    converted = image.convert("L" if steps.channels == "gray" else "RGB")
    placement = Placement(image.width, image.height, (image.height, image.width))
    pixels = np.asarray(converted)
    if steps.resize:
        pixels, placement = _resize(converted, steps.resize)
    if steps.crop:
        pixels, placement = _crop(pixels, placement, steps.crop)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if steps.channels == "bgr":
        pixels = pixels[:, :, ::-1]
    values = _normalised(pixels, steps)
    ordered = values.transpose(2, 0, 1) if steps.layout == "chw" else values
    return np.ascontiguousarray(ordered), placement


def shown_mask(placement: Placement) -> NDArray[np.bool_]:
    """True (H, W) on the image's own pixels, False on padding."""
    height, width = placement.shown
    top, left = max(0, round(placement.top)), max(0, round(placement.left))
    mask = np.zeros((height, width), np.bool_)
    down = round(placement.height * placement.down)
    mask[top : top + down, left : left + round(placement.width * placement.across)] = True
    return mask


def _normalised(pixels: Pixels, steps: ImageSteps) -> Array:
    plain = (steps.mean, steps.std) == ((0.0,), (1.0,))
    if plain and steps.scale == 1.0:
        return pixels
    scaled = (pixels.astype(np.float64) * steps.scale).astype(np.float32)
    if plain:
        return scaled
    mean, std = np.array(steps.mean, np.float32), np.array(steps.std, np.float32)
    return (scaled - mean) / std


def _resize(image: Image.Image, resize: Resize) -> tuple[Pixels, Placement]:
    (height, width), (W, H) = resize.size, image.size
    if resize.fit == "stretch":
        size = (height, width)
    elif resize.fit == "shortest":
        side, short, long = height, min(W, H), max(W, H)
        longer = int(side * long / short)
        size = (longer, side) if W <= H else (side, longer)
    else:
        ratio = min(height / H, width / W)
        size = (max(1, round(H * ratio)), max(1, round(W * ratio)))
    pixels = _resample(image, size, resize.interpolation)
    placement = Placement(W, H, size, across=size[1] / W, down=size[0] / H)
    return _padded(pixels, placement, resize) if resize.fit == "letterbox" else (pixels, placement)


def _resample(image: Image.Image, size: tuple[int, int], interpolation: str) -> Pixels:
    if size == (image.height, image.width):
        return np.asarray(image)
    if interpolation == "linear":
        return linear(np.asarray(image), size)
    return np.asarray(image.resize(size[::-1], FILTERS[interpolation]))


def _padded(pixels: Pixels, placement: Placement, resize: Resize) -> tuple[Pixels, Placement]:
    height, width = resize.size
    top, left = height - pixels.shape[0], width - pixels.shape[1]
    top, left = (top // 2, left // 2) if resize.align == "center" else (0, 0)
    canvas = np.empty((height, width, *pixels.shape[2:]), np.uint8)
    canvas[...] = _colour(resize.pad, pixels.ndim)
    canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas, Placement(
        placement.width, placement.height, resize.size, placement.across, placement.down, left, top
    )


def _colour(pad: Sequence[float], rank: int) -> Array:
    values = np.round(np.array(pad)).astype(np.uint8)
    return values if rank == 3 else values[0]


def _crop(pixels: Pixels, placement: Placement, crop: Crop) -> tuple[Pixels, Placement]:
    (height, width), (H, W) = crop.size, pixels.shape[:2]
    if height > H or width > W:
        raise FileError(
            f"the image has {W}x{H} pixels, the crop takes {width}x{height}", "give a larger one"
        )
    rooms = (H - height, W - width)
    top, left = (round(room / 2) if crop.rounding == "even" else room // 2 for room in rooms)
    return pixels[top : top + height, left : left + width], Placement(
        placement.width, placement.height, crop.size, placement.across, placement.down, -left, -top
    )
