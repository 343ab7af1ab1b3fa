"""How images and texts become inputs, as a manifest declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_export.predict.declared_values import (
    build,
    floats,
    lengths,
    number,
    one_of,
    pixels,
    text,
    whole,
)

INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos", "linear")


@dataclass(frozen=True)
class Resize:
    """How an image gets its size.

    Attributes:
        size: height and width, or one number for both.
        fit: "stretch" to `size`; "letterbox" keeps the aspect and pads to `size`; "shortest" keeps
            the aspect and makes the shorter side `size` (a crop follows).
        interpolation: a filter of Pillow, or "linear": two by two pixels without widening the
            filter where the image shrinks, as OpenCV does.
        pad: the colour that a letterbox is padded with, one value or one for each channel, 0..255.
        align: where a letterbox puts the image, "center" or "corner" (top left).
    """

    size: tuple[int, int]
    fit: str = "stretch"
    interpolation: str = "bilinear"
    pad: tuple[float, ...] = (0.0,)
    align: str = "center"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", lengths("size", self.size))
        object.__setattr__(self, "pad", pixels("pad", self.pad))
        one_of("fit", self.fit, ("stretch", "letterbox", "shortest"))
        one_of("interpolation", self.interpolation, INTERPOLATIONS)
        one_of("align", self.align, ("center", "corner"))
        if self.fit == "shortest" and self.size[0] != self.size[1]:
            raise ValueError("fit 'shortest' takes one number as its size")


@dataclass(frozen=True)
class Crop:
    """The middle of an image.

    Attributes:
        size: height and width, or one number for both.
        rounding: of half a pixel: "down" (transformers), or "even" (torchvision, timm).
    """

    size: tuple[int, int]
    rounding: str = "down"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", lengths("size", self.size))
        one_of("rounding", self.rounding, ("down", "even"))


@dataclass(frozen=True)
class ImageSteps:
    """An image file -> one input: colours, resize, crop, times `scale`, minus `mean`, over `std`.

    Attributes:
        channels: "rgb", "bgr" or "gray".
        scale: what the pixels 0..255 are multiplied with.
        layout: "chw" or "hwc".
        mask: another input, that is 1 (or True) on the image's pixels and 0 on padding.
    """

    channels: str = "rgb"
    resize: Resize | None = None
    crop: Crop | None = None
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: str = "chw"
    mask: str | None = None

    def __post_init__(self) -> None:
        one_of("channels", self.channels, ("rgb", "bgr", "gray"))
        one_of("layout", self.layout, ("chw", "hwc"))
        for name, kind in (("resize", Resize), ("crop", Crop)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                object.__setattr__(self, name, build(kind, value, name))
        number("scale", self.scale)
        for name in ("mean", "std"):
            values = floats(name, getattr(self, name))
            if len(values) not in (1, self.count):
                raise ValueError(f"{name} has {len(values)} numbers for {self.count} channels")
            object.__setattr__(self, name, values)
        if 0.0 in self.std:
            raise ValueError("std is 0")
        if self.resize and len(self.resize.pad) not in (1, self.count):
            raise ValueError(f"pad has {len(self.resize.pad)} numbers for {self.count} channels")
        if self.resize and self.crop and self.resize.fit == "letterbox":
            raise ValueError("a letterbox is cropped")
        if self.resize and self.crop and min(self.resize.size) < max(self.crop.size):
            raise ValueError(f"crop {self.crop.size} is larger than {self.resize.size}")
        if self.mask is not None:
            text("mask", self.mask)

    @property
    def count(self) -> int:
        """Of channels."""
        return 1 if self.channels == "gray" else 3


@dataclass(frozen=True)
class TextSteps:
    """A text -> token ids and masks.

    Attributes:
        file: of the bundle, as the tokenizers package reads it (tokenizer.json).
        inputs: input -> "ids", "mask" (1 on tokens, 0 on padding) or "types".
        max_length: most tokens, special ones among them.
        truncate: cut longer texts, which their answers then say; otherwise they are refused.
        padding: "longest" of a batch, or "max_length".
        side: "right" or "left" is where padding goes.
    """

    file: str
    inputs: Mapping[str, str]
    max_length: int
    truncate: bool = True
    padding: str = "longest"
    pad_id: int = 0
    side: str = "right"
    special_tokens: bool = True

    def __post_init__(self) -> None:
        text("file", self.file)
        if not isinstance(self.inputs, Mapping) or "ids" not in self.inputs.values():
            raise ValueError("inputs names none that takes the ids")
        for name, what in self.inputs.items():
            one_of(f"inputs.{name}", what, ("ids", "mask", "types"))
        whole("max_length", self.max_length, 1)
        whole("pad_id", self.pad_id, 0)
        one_of("padding", self.padding, ("longest", "max_length"))
        one_of("side", self.side, ("right", "left"))
        for name in ("truncate", "special_tokens"):
            one_of(name, getattr(self, name), (True, False))
