"""`ultralytics:NAME_OR_PATH`: a detector of the ultralytics package, as its own exporter sets it.

NAME is one of the package's model files (yolo11n, yolo12s, rtdetr-l), with random weights; PATH is
a trained .pt file.
"""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
        model = kind(file).model.float().eval()
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
    head.export, head.format = True, "onnx"
    head.dynamic = "Detect" in kinds  # with a fixed image size a decoder of queries needs it not
    side = CLASSIFICATION_SIDE if "Classify" in kinds else DETECTION_SIDE
    side = model.args.get("imgsz", side) if trained else side
    pixels = images(int(model.yaml.get("channels", 3)), side, side).sigmoid()  # from 0 to 1
    spec = ExportSpec(model, {"x": pixels}, names={"x": "images"}, outputs=("output0",))
    if "Segment" in kinds:
        spec.outputs = ("output0", "output1")
    if "Detect" in kinds and not head.end2end:  # (B, 4 + classes + others, anchors)
        spec.groups = {"output0": _groups(head, ("boxes", 4), ("scores", head.nc))}
        if not trained:
            _spread(head)
    _declare(spec, model, kinds, side)
    return spec


def _declare(spec: ExportSpec, model: Any, kinds: set[str], side: int) -> None:
    """What the package's own prediction does around an exported model of this kind."""
    pixels = {"scale": 1 / 255}
    if kinds & {"Segment", "Pose", "OBB"}:  # whose answers are more than boxes
        return
    if kinds & {"Detect", "RTDETRDecoder"}:
        square = {"size": side, "interpolation": "linear"}
        fit = {"fit": "stretch"} if "RTDETRDecoder" in kinds else {"fit": "letterbox", "pad": 114}
        spec.preprocess["x"] = {"resize": {**square, **fit}, **pixels}
        spec.postprocess = _boxes(model.model[-1], kinds)
    elif "Classify" in kinds:
        resize = {"size": side, "fit": "shortest"}
        crop = {"size": side, "rounding": "even"}
        spec.preprocess["x"] = {"resize": resize, "crop": crop, **pixels}
        spec.postprocess = {"kind": "classify", "activation": "none"}
    spec.labels = tuple(str(model.names[index]) for index in sorted(model.names))


def _boxes(head: Any, kinds: set[str]) -> dict[str, Any]:
    if "RTDETRDecoder" in kinds:  # (B, queries, 4 + classes), which no form of ours has
        return {}
    if head.end2end:
        return {"kind": "detect"}
    return {"kind": "detect", "form": "anchors", "box": "cxcywh", "overlap": 0.7}


def _groups(head: Any, *parts: tuple[str, int]) -> tuple[Group, ...]:
    """Boxes in pixels, scores, and what a head of another task adds, one behind another."""
    others = (("masks", "nm"), ("keypoints", "nk"), ("angle", "ne"))
    rows = [*parts, *((name, getattr(head, size)) for name, size in others if hasattr(head, size))]
    stops = list(accumulate(size for _, size in rows))
    return tuple(
        Group(name, 1, stop - size, stop) for (name, size), stop in zip(rows, stops, strict=True)
    )


def _spread(head: Any) -> None:
    """Class biases as a trained head has them, so that its scores tell anchors and classes apart.

    A fresh head scores every anchor near 1e-5 and a comparison of such scores says nothing.
    """
    with torch.no_grad():
        for layers in head.cv3:
            bias = [m for m in layers.modules() if isinstance(m, nn.Conv2d)][-1].bias
            if bias is not None:
                bias.normal_()


def _check(ultralytics: Any, name: str) -> None:
    """Raise UsageError unless a model file of the package has this name, its scale letter apart."""
    folder = Path(ultralytics.__file__).parent / "cfg" / "models"
    names = {file.stem for file in folder.rglob("*.yaml")}
    stem = Path(name).stem if name.endswith((".yaml", ".yml")) else name
    unscaled = re.sub(r"(\d+)([nsmlxtbce])(.*)$", r"\1\3", stem)
    if not {stem, unscaled} & names:
        raise unknown("ultralytics", name, names)
