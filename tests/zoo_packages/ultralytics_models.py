"""Models of the ultralytics package, made from its own model files with random weights."""

from __future__ import annotations

from dataclasses import dataclass

from attn_export.models.spec import ExportSpec
from attn_export.source import resolve


@dataclass(frozen=True)
class Ultralytics:
    """A model file of the package and the softmax attentions in it, on images of 64 pixels."""

    name: str
    sites: int

    def build(self) -> ExportSpec:
        source = resolve(f"ultralytics:{self.name}", ["images=float32[2,3,64,64]"])
        return source.components["model"]


ULTRALYTICS: dict[str, Ultralytics] = {
    "yolo11": Ultralytics("yolo11n", 1),
    "yolo11-classifier": Ultralytics("yolo11n-cls", 1),
    "yolo11-segments": Ultralytics("yolo11n-seg", 1),
    "yolo11-poses": Ultralytics("yolo11n-pose", 1),
    "yolo12": Ultralytics("yolo12n", 8),
    "yolo10": Ultralytics("yolov10n", 1),
    "yolo26": Ultralytics("yolo26n", 2),
    "yolo-world": Ultralytics("yolov8s-world", 4),
    "rt-detr": Ultralytics("rtdetr-l", 7),
    "yolo8": Ultralytics("yolov8n", 0),
}
