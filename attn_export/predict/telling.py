"""What is told of outputs, as a manifest declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_export.predict.declared_values import number, one_of, text, whole


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
