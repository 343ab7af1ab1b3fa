"""Train the detector to find handwritten digits, and score it on scenes of held-out digits.

    python examples/train_detector_digits.py --steps 3000

Needs scikit-learn (the digits) and pycocotools (the score). The labels are assigned by alignment of
score and overlap ("TOOD", Feng et al., 2021), to ten cells a digit for an auxiliary head and to one
cell for the head that is kept ("YOLOv10", Wang et al., 2024).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from attn_export.models.detector import Detector, Head, anchor_points
from attn_export.models.detector_digits import DIGITS_CONFIG
from attn_export.models.digit_scenes import WEIGHTS, digit_scenes


def split_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images, labels) to train on, and those that every score is taken on."""
    data = load_digits()
    parts = train_test_split(
        data.images, data.target, test_size=0.2, random_state=0, stratify=data.target
    )
    train, heldout, train_labels, heldout_labels = (torch.from_numpy(p) for p in parts)
    return (train, train_labels), (heldout, heldout_labels)


def box_iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes (..., 4), and its generalised form (GIoU)."""
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(0)
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    area_a, area_b = ((t[..., 2:] - t[..., :2]).prod(dim=-1) for t in (a, b))
    overlap = inner.prod(dim=-1)
    union = area_a + area_b - overlap + 1e-9
    hull = outer.prod(dim=-1) + 1e-9
    return overlap / union, overlap / union - (hull - union) / hull


@torch.no_grad()
def assign(
    boxes: Tensor, logits: Tensor, points: Tensor, target: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Give each target the `count` best aligned cells.

    Returns the target's row for each cell (B, A) and the cell's score to reach (B, A), 0 where the
    cell has no target.
    """
    there = target[..., 4] >= 0  # (B, M)
    wanted = target[..., :4].unsqueeze(2)  # (B, M, 1, 4)
    iou, _ = box_iou(wanted, boxes.unsqueeze(1))  # (B, M, A)
    classes = target[..., 4].clamp(0).long().unsqueeze(1).expand(-1, logits.shape[1], -1)
    score = logits.sigmoid().gather(2, classes).mT  # (B, M, A)
    inside = ((points > wanted[..., :2]) & (points < wanted[..., 2:])).all(dim=-1)
    align = score.sqrt() * iou**6 * (inside & there.unsqueeze(-1))
    best = align.topk(count, dim=-1)
    kept = torch.zeros_like(align).scatter(-1, best.indices, best.values)
    scaled = kept / best.values[..., :1].clamp(1e-9) * iou.amax(dim=-1, keepdim=True)
    reached, row = scaled.max(dim=1)
    return row, reached


def detection_loss(
    predicted: tuple[Tensor, Tensor], maps: tuple[Tensor, ...], target: Tensor, count: int
) -> Tensor:
    """Scores towards what each cell should reach, and boxes where a cell has a target."""
    boxes, logits = predicted
    points, strides = anchor_points(maps)
    row, reached = assign(boxes, logits, points, target, count)
    assigned = target.gather(1, row.unsqueeze(-1).expand(-1, -1, 5))  # (B, A, 5)
    labels = F.one_hot(assigned[..., 4].clamp(0).long(), logits.shape[-1])
    wanted = labels * reached.unsqueeze(-1)
    total = reached.sum().clamp(1)
    score_loss = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum") / total
    _, giou = box_iou(boxes, assigned[..., :4])
    distance = ((boxes - assigned[..., :4]) / strides).abs().mean(dim=-1)
    box_loss = (reached * (2.0 * (1 - giou) + 0.3 * distance)).sum() / total
    return score_loss + box_loss


def map50(detections: Tensor, target: Tensor) -> float:
    """COCO's mean average precision at an overlap of 0.5, over all classes and sizes."""

    def xywh(row: list[float]) -> list[float]:
        return [row[0], row[1], row[2] - row[0], row[3] - row[1]]

    truth = [
        {
            "id": 1 + 100 * image + row,
            "image_id": image,
            "category_id": int(box[4]),
            "bbox": xywh(box),
            "area": xywh(box)[2] * xywh(box)[3],
            "iscrowd": 0,
        }
        for image, boxes in enumerate(target.tolist())
        for row, box in enumerate(boxes)
        if box[4] >= 0
    ]
    found = [
        {"image_id": image, "category_id": int(row[5]), "bbox": xywh(row), "score": row[4]}
        for image, rows in enumerate(detections.tolist())
        for row in rows
        if row[4] > 0.001
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": i} for i in range(len(target))],
            "annotations": truth,
            "categories": [{"id": c} for c in range(10)],
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.params.iouThrs = np.array([0.5])
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, -1]  # (recall, class)
    return float(precision[precision > -1].mean())


def score(model: Detector, digits: tuple[Tensor, Tensor], scenes: int) -> float:
    images, target = digit_scenes(*digits, scenes, torch.Generator().manual_seed(1))
    with torch.no_grad():
        detections = torch.cat([model(part) for part in images.split(16)])
    return map50(detections, target)


def train(digits: tuple[Tensor, Tensor], steps: int, batch: int, seed: int) -> Detector:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, auxiliary = Detector(DIGITS_CONFIG), Head(DIGITS_CONFIG)
    average = deepcopy(model).eval()
    parameters = [*model.parameters(), *auxiliary.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    started = time.perf_counter()
    for step in range(steps):
        images, target = digit_scenes(*digits, batch, generator)
        maps = model.features(images)
        many = detection_loss(auxiliary(maps), maps, target, count=10)
        apart = tuple(fmap.detach() for fmap in maps)
        one = detection_loss(model.head(apart), maps, target, count=1)
        optimizer.zero_grad()
        (many + one).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 10.0)
        optimizer.step()
        schedule.step()
        decay = 0.998 * (1 - math.exp(-step / 300))
        for kept, value in zip(
            average.state_dict().values(), model.state_dict().values(), strict=True
        ):
            kept.lerp_(value, 1 - decay) if kept.is_floating_point() else kept.copy_(value)
        if step % 50 == 0:
            print(
                f"step {step:5} one {one:.3f} many {many:.3f} "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
    return average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenes", type=int, default=256, help="held-out scenes for the score")
    parser.add_argument("--output", type=Path, default=WEIGHTS / "detector_digits.safetensors")
    arguments = parser.parse_args()
    digits, heldout = split_digits()
    model = train(digits, arguments.steps, arguments.batch, arguments.seed)
    print(
        f"mAP@0.5 on {arguments.scenes} held-out scenes: "
        f"{score(model, heldout, arguments.scenes):.4f}"
    )
    save_file(model.state_dict(), arguments.output)


if __name__ == "__main__":
    main()
