"""An answer drawn into its image: boxes, or the best classes beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from attn_export.predict.answers import Answer
from attn_export.storage import write_errors

SMALLEST = 240  # pixels of the longer side; what is smaller is enlarged, so that text is readable
COLOURS = (
    "#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000",
    "#808000", "#000075",
)  # fmt: skip
PAPER, INK, BAR = "#ffffff", "#202020", "#4363d8"


def draw(image: Image.Image, answer: Answer, path: Path) -> None:
    """Write a PNG.

    Raises:
        FileError: it could not be written.
    """
    picture = image.convert("RGB")
    enlarged = max(1, -(-SMALLEST // max(picture.size)))
    size = (picture.width * enlarged, picture.height * enlarged)
    picture = picture.resize(size, Image.Resampling.NEAREST)
    if "detections" in answer:
        _boxes(picture, answer["detections"], enlarged)
    elif "top" in answer:
        picture = _beside(picture, answer["top"])
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        picture.save(partial, "PNG")
        partial.replace(path)


def _boxes(picture: Image.Image, found: list[dict[str, Any]], enlarged: int) -> None:
    canvas = ImageDraw.Draw(picture)
    size = max(12, min(picture.size) // 40)
    font = ImageFont.load_default(size)
    for row in reversed(found):  # the best one on top
        colour = COLOURS[row["index"] % len(COLOURS)]
        x1, y1, x2, y2 = (value * enlarged for value in row["box"])
        canvas.rectangle((x1, y1, x2, y2), outline=colour, width=max(2, size // 7))
        text = f"{row['label']} {row['score']:.2f}"
        left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
        height = bottom - top + 4
        y = y1 - height if y1 >= height else y1
        canvas.rectangle((x1, y, x1 + right - left + 6, y + height), fill=colour)
        canvas.text((x1 + 3, y + 2 - top), text, fill=PAPER, font=font)


def _beside(picture: Image.Image, top: list[dict[str, Any]]) -> Image.Image:
    """The picture with the best classes on its right, a bar for each score."""
    size = max(14, picture.height // 24)
    font = ImageFont.load_default(size)
    step = size * 2
    width, height = size * 18, max(picture.height, step * len(top) + size)
    sheet = Image.new("RGB", (picture.width + width, height), PAPER)
    sheet.paste(picture, (0, 0))
    canvas = ImageDraw.Draw(sheet)
    for index, row in enumerate(top):
        y = size // 2 + index * step
        x = picture.width + size // 2
        canvas.text((x, y), f"{row['label'][:24]}  {row['score']:.3f}", fill=INK, font=font)
        bar = max(1, round((width - size) * min(1.0, max(0.0, row["score"]))))
        canvas.rectangle((x, y + size * 1.3, x + bar, y + size * 1.5), fill=BAR)
    return sheet
