"""`ultralytics:NAME_OR_PATH`: a detector of the ultralytics package, as its own exporter sets it.

NAME is one of the package's model files (yolo11n, yolo12s, rtdetr-l), with random weights; PATH is
a trained .pt file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from attn_export.errors import UsageError
from attn_export.models.spec import ExportSpec, Group
from attn_export.packages.built import Built, images, needs, random_weights, refused, unknown

DETECTION_SIDE, CLASSIFICATION_SIDE = 640, 224


def build(name: str) -> Built:
    """The model with its head in export mode, so that it returns predictions alone.

    Raises:
        RuntimeUnavailable: ultralytics is not installed.
        UsageError: it has no such model, or there is no such file.
        ExportError: it does not build it.
    """
    trained = name.endswith(".pt")
    if trained and not Path(name).is_file():
        raise UsageError(f"there is no file {name}", "check the path, nothing is downloaded")
    ultralytics = needs("ultralytics")
    if not trained and not Path(name).is_file():
        _check(ultralytics, name)
    try:
        file = name if Path(name).suffix in (".pt", ".yaml", ".yml") else f"{name}.yaml"
        kind = (
            ultralytics.RTDETR if "rtdetr" in Path(name).stem and not trained else ultralytics.YOLO
        )
        model = kind(file).model.float()
    except Exception as error:
        raise refused(f"ultralytics:{name}", error) from error
    spec = _described(model, trained)
    if trained:
        return spec, [f"{name} was unpickled, which runs the code that such a file holds"]
    return spec, [random_weights(name, f"ultralytics:PATH/{name}.pt")]


def _described(model: Any, trained: bool) -> ExportSpec:
    """Names, sizes and groups as the package's own exporter and documentation have them."""
    head = model.model[-1]
    kinds = {kind.__name__ for kind in type(head).__mro__}
    head.export, head.format, head.dynamic = True, "onnx", True
    channels = int(model.yaml.get("channels", 3))
    side = CLASSIFICATION_SIDE if "Classify" in kinds else DETECTION_SIDE
    side = model.args.get("imgsz", side) if trained else side
    spec = ExportSpec(model, {"x": images(channels, side, side)}, names={"x": "images"})
    spec.outputs = ("output0", "output1") if "Segment" in kinds else ("output0",)
    if "Detect" in kinds and head.end2end:  # (B, K, 6): x1, y1, x2, y2, score, class
        spec.compare = {"output0": "detections"}
        spec.groups = {
            "output0": (
                Group("boxes", 2, 0, 4),
                Group("scores", 2, 4, 5),
                Group("classes", 2, 5, 6),
            )
        }
    elif "Detect" in kinds:  # (B, 4 + classes, anchors): boxes in pixels
        spec.groups = {"output0": (Group("boxes", 1, 0, 4), Group("scores", 1, 4, 4 + head.nc))}
    return spec


def _check(ultralytics: Any, name: str) -> None:
    """Raise UsageError unless a model file of the package has this name, its scale letter apart."""
    folder = Path(ultralytics.__file__).parent / "cfg" / "models"
    names = {file.stem for file in folder.rglob("*.yaml")}
    stem = Path(name).stem if name.endswith((".yaml", ".yml")) else name
    unscaled = re.sub(r"(\d+)([nsmlxtbce])(.*)$", r"\1\3", stem)
    if not {stem, unscaled} & names:
        raise unknown("ultralytics", name, names)
