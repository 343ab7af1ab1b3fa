"""Detections (B, K, 6) as x1, y1, x2, y2 in pixels, score, class: matched and scored."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_export.errors import RuntimeUnavailable
from attn_export.parity.tolerance import Array, Group

Floats = NDArray[np.float64]
SAME_BOX, SAME_SCORE = 0.9, 0.05  # overlap and score difference of what may be one detection


def align(found: Array, reference: Array, edge: float) -> Array:
    """`found` with its rows in the order of `reference`, image by image.

    Rows of nearly equal score may change places from one runtime to the next, and at the end of the
    list one may push out another; neither is an error. Each reference row takes the unused row of
    its class with the nearest score among those that overlap it, if any. A reference row without a
    partner whose score is within `edge` of the list's last one is taken to have been pushed out;
    any other keeps an unmatched row of `found`, so that a comparison sees the difference.
    """
    aligned = np.array(found)
    if found.shape != reference.shape or found.ndim != 3:
        return aligned
    for image, wanted in enumerate(reference):
        rows, mine = np.asarray(wanted, np.float64), np.asarray(found[image], np.float64)
        free = np.ones(len(mine), dtype=bool)
        order: dict[int, int] = {}
        for index, row in enumerate(rows):
            distance = np.abs(mine[:, 4] - row[4])
            same = free & (mine[:, 5] == row[5]) & (_overlaps(mine, row) >= SAME_BOX)
            candidates = np.flatnonzero(same & (distance <= SAME_SCORE))
            if candidates.size:
                order[index] = int(candidates[distance[candidates].argmin()])
                free[order[index]] = False
        left = iter(np.flatnonzero(free))
        last = rows[:, 4].min()
        for index, row in enumerate(rows):
            partner = order.get(index)
            other = mine[next(left)] if partner is None else mine[partner]
            pushed_out = partner is None and row[4] - last <= edge and other[4] - last <= edge
            aligned[image, index] = wanted[index] if pushed_out else other
    return aligned


def matched_share(found: Array, reference: Array) -> float:
    """The share of the reference's detections with a partner of the same class, box and score."""
    if found.shape != reference.shape:
        return 0.0
    aligned = align(found, reference, edge=-1.0)
    rows = zip(aligned.reshape(-1, 6), reference.reshape(-1, 6), strict=True)
    same = [
        mine[5] == wanted[5]
        and abs(mine[4] - wanted[4]) <= SAME_SCORE
        and _overlaps(mine[None].astype(np.float64), wanted.astype(np.float64))[0] >= SAME_BOX
        for mine, wanted in rows
    ]
    return float(np.mean(same))


def score_allowance(allowed: Mapping[str, float], groups: Sequence[Group]) -> float:
    """The allowed error of the group that holds the scores, column 4."""
    names = [group.name for group in groups if group.start <= 4 < group.stop]
    return allowed[names[0]] if names else max(allowed.values())


def _overlaps(boxes: Floats, box: Floats) -> Floats:
    """Intersection over union of each of `boxes` (K, 4+) with one box; 1 for two equal ones."""
    low, high = np.maximum(boxes[:, :2], box[:2]), np.minimum(boxes[:, 2:4], box[2:4])
    inner = np.prod(np.clip(high - low, 0, None), axis=1)
    area = np.prod(boxes[:, 2:4] - boxes[:, :2], axis=1) + np.prod(box[2:4] - box[:2])
    with np.errstate(divide="ignore", invalid="ignore"):
        overlap = np.where(area > inner, inner / (area - inner), 0.0)
    return np.where((boxes[:, :4] == box[:4]).all(axis=1), 1.0, overlap)


def map50(detections: Array, target: Array) -> float:
    """mAP at an overlap of 0.5, averaged over classes.

    Args:
        detections: (B, K, 6) as x1, y1, x2, y2 in pixels, score, class.
        target: (B, M, 5) as x1, y1, x2, y2, class; rows of class -1 are no object.

    Raises:
        RuntimeUnavailable: pycocotools is not installed.
    """
    if find_spec("pycocotools") is None:
        raise RuntimeUnavailable(
            "the detector's score needs pycocotools, which is not installed",
            "run `pip install pycocotools`",
        )
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth: list[dict[str, Any]] = [
        {"image_id": image, "category_id": int(row[4]), "bbox": _xywh(row), "iscrowd": 0,
         "area": float(np.prod(_xywh(row)[2:]))}
        for image, rows in enumerate(target)
        for row in rows
        if row[4] >= 0
    ]  # fmt: skip
    found = [
        {"image_id": image, "category_id": int(row[5]), "bbox": _xywh(row), "score": float(row[4])}
        for image, rows in enumerate(detections)
        for row in rows
    ]
    classes = sorted({box["category_id"] for box in truth})
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints as it goes
        coco: Any = COCO()
        coco.dataset = {
            "info": {},
            "images": [{"id": image} for image in range(len(target))],
            "categories": [{"id": label} for label in classes],
            "annotations": [{**box, "id": 1 + index} for index, box in enumerate(truth)],
        }
        coco.createIndex()
        evaluation: Any = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.params.iouThrs = np.array([0.5])
        evaluation.params.maxDets = [detections.shape[1]]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, 0]  # recall thresholds x classes
    valid = precision[:, (precision > -1).all(axis=0)]
    return float(valid.mean()) if valid.size else 0.0


def _xywh(row: Array) -> list[float]:
    x1, y1, x2, y2 = (float(value) for value in row[:4])
    return [x1, y1, x2 - x1, y2 - y1]
