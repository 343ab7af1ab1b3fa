"""What a manifest declares around a model: `preprocess`, `tokenizer`, `postprocess`.

A field that is not known here is refused rather than left out: answers would be wrong without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from attn_export.predict.declared_values import (
    floats,
    lengths,
    number,
    one_of,
    pixels,
    text,
    whole,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

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


@dataclass(frozen=True)
class Classify:
    """Scores (B, classes), of which the best `top_k` are told."""

    output: str
    activation: str = "softmax"
    top_k: int = 5

    def __post_init__(self) -> None:
        text("output", self.output)
        one_of("activation", self.activation, ("softmax", "sigmoid", "none"))
        whole("top_k", self.top_k, 1)


@dataclass(frozen=True)
class Detect:
    """Boxes, scaled back to the image's own pixels.

    Attributes:
        form: "rows": `output` (B, K, 6) holds box, score, class. "queries": `output` (B, K, C) has
            a score for each class, `boxes` (B, K, 4) the boxes. "anchors": `output` (B, 4 + C, K).
        box: "xyxy", "cxcywh" or "xywh".
        units: of boxes, "pixels" of the model's input, "fraction" of its sides, or "image", a
            fraction of the sides of the image without a letterbox's padding.
        activation: of "queries" and "anchors", what makes scores 0 to 1.
        background: the class of "queries" that is none, "none", "first" or "last".
        threshold: the least score that is told.
        overlap: boxes of one class that overlap more (intersection over union) with a better one
            are left out (non-maximum suppression); null keeps all.
        limit: the most boxes of an image.
    """

    output: str
    form: str = "rows"
    boxes: str | None = None
    box: str = "xyxy"
    units: str = "pixels"
    activation: str = "none"
    background: str = "none"
    threshold: float = 0.25
    overlap: float | None = None
    limit: int = 300

    def __post_init__(self) -> None:
        text("output", self.output)
        one_of("form", self.form, ("rows", "queries", "anchors"))
        one_of("box", self.box, ("xyxy", "cxcywh", "xywh"))
        one_of("units", self.units, ("pixels", "fraction", "image"))
        one_of("activation", self.activation, ("softmax", "sigmoid", "none"))
        one_of("background", self.background, ("none", "first", "last"))
        number("threshold", self.threshold, 0.0, 1.0)
        whole("limit", self.limit, 1)
        if self.overlap is not None:
            number("overlap", self.overlap, 0.0, 1.0)
        if self.form == "queries":
            text("boxes", self.boxes)


@dataclass(frozen=True)
class Embed:
    """A vector a sample (B, D), divided by its length with `normalise`."""

    output: str
    normalise: bool = False

    def __post_init__(self) -> None:
        text("output", self.output)
        one_of("normalise", self.normalise, (True, False))


@dataclass(frozen=True)
class Generate:
    """Tokens of the bundle's loop: words of `labels`, or decoded by the tokenizer."""

    decode: str = "tokenizer"

    def __post_init__(self) -> None:
        one_of("decode", self.decode, ("tokenizer", "labels"))


Postprocess = Classify | Detect | Embed | Generate
KINDS: dict[str, type[Any]] = {
    "classify": Classify,
    "detect": Detect,
    "embed": Embed,
    "generate": Generate,
}


@dataclass(frozen=True)
class Declared:
    """Everything that a manifest says about reading inputs and telling answers."""

    images: Mapping[str, ImageSteps] = field(default_factory=dict)
    text: TextSteps | None = None
    post: Postprocess | None = None
    labels: tuple[str, ...] = ()


def read(manifest: Mapping[str, Any]) -> Declared:
    """The sections of a manifest, checked against each other and its inputs and outputs.

    Raises:
        ValueError: what is wrong, as a clause.
    """
    images = {
        name: build(ImageSteps, steps, f"preprocess.{name}")
        for name, steps in mapping(manifest.get("preprocess", {}), "preprocess").items()
    }
    tokenizer = manifest.get("tokenizer")
    steps = None if tokenizer is None else build(TextSteps, tokenizer, "tokenizer")
    declared = Declared(images, steps, _post(manifest), tuple(manifest.get("labels", ())))
    _check_names(declared, manifest)
    return declared


def _post(manifest: Mapping[str, Any]) -> Postprocess | None:
    given = manifest.get("postprocess")
    if given is None:
        return None
    kind = mapping(given, "postprocess").get("kind")
    one_of("postprocess.kind", kind, tuple(KINDS))
    assert isinstance(kind, str)
    rest = {key: value for key, value in given.items() if key != "kind"}
    found: Postprocess = build(KINDS[kind], rest, "postprocess")
    return found


def _check_names(declared: Declared, manifest: Mapping[str, Any]) -> None:
    inputs = {entry["name"] for entry in manifest["inputs"]}
    outputs = {entry["name"] for entry in manifest["outputs"]}
    wanted = [*declared.images, *(s.mask for s in declared.images.values() if s.mask)]
    wanted += declared.text.inputs if declared.text else ()
    for name in wanted:
        if name not in inputs:
            raise ValueError(f"'{name}' is no input, the inputs are {', '.join(sorted(inputs))}")
    for field_name in ("output", "boxes"):
        told = getattr(declared.post, field_name, None)
        if told is not None and told not in outputs:
            raise ValueError(f"'{told}' is no output, the outputs are {', '.join(sorted(outputs))}")
    if isinstance(declared.post, Generate):
        if "generate" not in manifest:
            raise ValueError("postprocess generates, and the model has no loop")
        if not (declared.labels if declared.post.decode == "labels" else declared.text):
            raise ValueError(f"postprocess decodes by {declared.post.decode}, which is not there")


def mapping(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r}, which is no object")
    return given


def build(kind: type[T], given: Any, where: str) -> T:
    """A dataclass of this page from what JSON holds."""
    known = {each.name: each for each in fields(kind)}
    for key in mapping(given, where):
        if key not in known:
            raise ValueError(f"{where} has '{key}', which is not known; fields: {', '.join(known)}")
    for name, each in known.items():
        required = each.default is MISSING and each.default_factory is MISSING
        if required and name not in given:
            raise ValueError(f"{where} lacks '{name}'")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
