"""One row of a model's outputs -> the answer that is told about a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.errors import FileError
from attn_export.parity.tolerance import Array
from attn_export.predict.boxes import detections
from attn_export.predict.declared import Declared
from attn_export.predict.reading import Sample
from attn_export.predict.scores import activate
from attn_export.predict.telling import Classify, Detect, Embed

Answer = dict[str, Any]


def tell(outputs: Mapping[str, Array], sample: Sample, declared: Declared) -> Answer:
    """The answer as JSON holds it; without a declared `postprocess`, all outputs.

    Raises:
        FileError: what is told would not be finite, or has other axes than declared.
    """
    post = declared.post
    if isinstance(post, Classify):
        scores = activate(_vector(outputs, post.output), post.activation)
        best = np.argsort(-scores, kind="stable")[: post.top_k]
        return {"top": [_labelled(int(i), scores[i], declared.labels) for i in best]}
    if isinstance(post, Embed):
        vector = _vector(outputs, post.output)
        length = float(np.linalg.norm(vector))
        scaled = vector / length if post.normalise and length else vector
        return {"embedding": scaled.astype(np.float32).tolist()}
    if isinstance(post, Detect):
        return _detected(outputs, sample, post, declared.labels)
    return {"outputs": {name: _raw(array) for name, array in outputs.items()}}


def _detected(
    outputs: Mapping[str, Array], sample: Sample, post: Detect, labels: Sequence[str]
) -> Answer:
    for name in (post.output, post.boxes):
        if name is not None:
            _finite(name, outputs[name])
    place, shown = sample.placement, sample.shown
    if post.units == "image" and place:
        found = detections(outputs, post, (place.height, place.width))
        boxes = np.clip(found.boxes, 0, np.array([place.width, place.height] * 2))
    else:
        found = detections(outputs, post, shown)
        boxes = place.back(found.boxes) if place else found.boxes
    rows = zip(boxes, found.scores, found.classes, strict=True)
    told = [{**_labelled(int(c), s, labels), "box": box.tolist()} for box, s, c in rows]
    answer: Answer = {"detections": told}
    if sample.placement:
        answer["image"] = {"width": sample.placement.width, "height": sample.placement.height}
    return answer


def _vector(outputs: Mapping[str, Array], name: str) -> Any:
    values = np.asarray(outputs[name], np.float64)
    if values.ndim != 1:
        raise FileError(
            f"output '{name}' has {values.ndim} axes a sample, `postprocess` is for one",
            "export it with another postprocess",
        )
    _finite(name, values)
    return values


def _finite(name: str, values: Array) -> None:
    if not np.isfinite(values).all():
        raise FileError(f"output '{name}' is not finite", "look at the input, and run verify")


def _labelled(index: int, score: float, labels: Sequence[str]) -> Answer:
    label = labels[index] if 0 <= index < len(labels) else str(index)
    return {"label": label, "index": index, "score": float(score)}


def _raw(array: Array) -> Answer:
    """JSON has no NaN and no infinity: they become the strings "nan", "inf" and "-inf"."""
    values = array.tolist() if np.isfinite(array).all() else _strings(array.tolist())
    return {"dtype": str(array.dtype), "shape": list(array.shape), "values": values}


def _strings(value: Any) -> Any:
    if isinstance(value, list):
        return [_strings(each) for each in value]
    return value if math.isfinite(value) else str(value)
