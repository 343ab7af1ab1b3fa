"""What a detector returns -> boxes x1, y1, x2, y2 in pixels of its input, scores and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attn_export.parity.tolerance import Array
from attn_export.predict.scores import activate
from attn_export.predict.telling import Detect

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """The detections of one image, best first: boxes (K, 4), scores (K,), classes (K,) int64."""

    boxes: Floats
    scores: Floats
    classes: NDArray[np.int64]

    def take(self, index: NDArray[np.intp]) -> Found:
        return Found(self.boxes[index], self.scores[index], self.classes[index])


def detections(outputs: Mapping[str, Array], post: Detect, shown: tuple[int, int]) -> Found:
    """Those of one image that are above the threshold, without its duplicates.

    Args:
        outputs: of one sample, without the axis of the batch.
        shown: height and width of the model's input, for boxes that are fractions of it.
    """
    found = _columns(outputs, post)
    found = found.take(np.flatnonzero(found.scores >= post.threshold))
    found = found.take(np.argsort(-found.scores, kind="stable"))
    corners = _corners(found.boxes, post.box)
    if post.units != "pixels":
        corners = corners * np.array([shown[1], shown[0]] * 2)
    found = Found(corners, found.scores, found.classes)
    if post.overlap is not None:
        found = found.take(suppress(found, post.overlap))
    return found.take(np.arange(min(post.limit, len(found.scores))))


def _columns(outputs: Mapping[str, Array], post: Detect) -> Found:
    values = np.asarray(outputs[post.output], np.float64)
    if post.form == "rows":
        return Found(values[:, :4], values[:, 4], values[:, 5].astype(np.int64))
    if post.form == "anchors":
        boxes, scores = values[:4].T, activate(values[4:].T, post.activation)
    else:
        boxes = np.asarray(outputs[str(post.boxes)], np.float64)
        scores = activate(values, post.activation)
    if post.background == "first":
        scores[:, 0] = -1.0
    elif post.background == "last":
        scores = scores[:, :-1]
    classes = scores.argmax(axis=1)
    if post.background == "first":
        return Found(boxes, scores.max(axis=1), classes - 1)
    return Found(boxes, scores.max(axis=1), classes)


def _corners(boxes: Floats, form: str) -> Floats:
    if form == "xyxy":
        return boxes
    place, size = boxes[:, :2], boxes[:, 2:]
    low = place - size / 2 if form == "cxcywh" else place
    return np.concatenate([low, low + size], axis=1)


def suppress(found: Found, overlap: float) -> NDArray[np.intp]:
    """Rows that stay where each box takes away those of its class that overlap it more.

    Greedy non-maximum suppression, best first ("Efficient Non-Maximum Suppression", Neubeck and Van
    Gool, 2006).
    """
    kept: list[int] = []
    free = np.ones(len(found.scores), np.bool_)
    for row in range(len(found.scores)):
        if free[row]:
            kept.append(row)
            same = found.classes == found.classes[row]
            free &= ~(same & (_overlaps(found.boxes, found.boxes[row]) > overlap))
    return np.array(kept, np.intp)


def _overlaps(boxes: Floats, box: Floats) -> Floats:
    low, high = np.maximum(boxes[:, :2], box[:2]), np.minimum(boxes[:, 2:], box[2:])
    inner = np.prod(np.clip(high - low, 0, None), axis=1)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    union = areas + np.prod(box[2:] - box[:2]) - inner
    return np.asarray(np.divide(inner, union, out=np.zeros_like(inner), where=union > 0))
