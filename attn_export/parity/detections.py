"""Mean average precision of detections, by pycocotools."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from typing import Any

import numpy as np

from attn_export.errors import RuntimeUnavailable
from attn_export.parity.tolerance import Array


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
