"""Boxes, scores and embeddings worked out by hand from small outputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from attn_export.errors import FileError
from attn_export.predict.answers import tell
from attn_export.predict.boxes import detections
from attn_export.predict.declared import Declared
from attn_export.predict.images import Placement
from attn_export.predict.reading import Sample
from attn_export.predict.scores import activate
from attn_export.predict.telling import Classify, Detect, Embed

ROWS = np.array(
    [[0, 0, 10, 10, 0.5, 1], [1, 0, 11, 10, 0.9, 1], [0, 0, 10, 10, 0.4, 2], [5, 5, 6, 6, 0.2, 0]],
    np.float32,
)


def found(outputs: dict[str, Any], shown: tuple[int, int] = (100, 200), **post: Any) -> Any:
    got = detections({k: np.asarray(v) for k, v in outputs.items()}, Detect(**post), shown)
    return got.boxes.tolist(), [round(s, 6) for s in got.scores.tolist()], got.classes.tolist()


def test_rows_above_the_threshold_come_best_first() -> None:
    boxes, scores, classes = found({"d": ROWS}, output="d", threshold=0.4)
    assert scores == [0.9, 0.5, 0.4]
    assert classes == [1, 1, 2]
    assert boxes[0] == [1, 0, 11, 10]
    assert found({"d": ROWS}, output="d", threshold=0.5)[1] == [0.9, 0.5]  # the least one counts


def test_a_box_takes_away_those_of_its_class_that_overlap_it() -> None:
    """9 x 10 of 10 x 10 + 10 x 10 - 9 x 10: 90 / 110 = 0.818 of their union."""
    assert found({"d": ROWS}, output="d", overlap=0.8)[2] == [1, 2]
    assert found({"d": ROWS}, output="d", overlap=0.82)[2] == [1, 1, 2]
    assert found({"d": ROWS}, output="d", limit=1)[1] == [0.9]


def test_queries_have_a_class_that_is_none_and_boxes_around_a_centre() -> None:
    logits = np.log(np.array([[0.1, 0.7, 0.2], [0.3, 0.1, 0.6]]))
    boxes = np.array([[0.5, 0.5, 0.2, 0.4], [0.1, 0.1, 0.1, 0.1]])
    post = {"output": "l", "boxes": "b", "form": "queries", "box": "cxcywh", "units": "fraction",
            "activation": "softmax"}  # fmt: skip
    outputs = {"l": logits, "b": boxes}
    got, scores, classes = found(outputs, **post, background="last", threshold=0.29)
    assert (scores, classes) == ([0.7, 0.3], [1, 0])
    np.testing.assert_allclose(got[0], [80, 30, 120, 70])
    assert found(outputs, **post, background="first", threshold=0.29)[2] == [0, 1]
    assert found(outputs, **post, threshold=0.29)[2] == [1, 2]


def test_anchors_have_boxes_and_scores_in_columns() -> None:
    values = np.array([[10, 50], [20, 60], [4, 8], [2, 6], [0.1, 0.3], [0.8, 0.2]])
    got, scores, classes = found({"o": values}, output="o", form="anchors", box="cxcywh")
    assert got == [[8, 19, 12, 21], [46, 57, 54, 63]]
    assert (scores, classes) == ([0.8, 0.3], [1, 0])
    assert found({"o": values}, output="o", form="anchors", box="xywh")[0][0] == [10, 20, 14, 22]


def test_nothing_found_is_an_empty_list() -> None:
    answer = tell({"d": ROWS}, Sample("a"), Declared(post=Detect("d", threshold=0.95)))
    assert answer == {"detections": []}


def test_boxes_are_told_in_the_pixels_of_the_image() -> None:
    sample = Sample("a", placement=Placement(40, 20, (80, 80), 2.0, 2.0, 0, 20), shown=(80, 80))
    rows = np.array([[20, 24, 60, 44, 0.5, 1]])
    declared = Declared(post=Detect("d"), labels=("cat", "dog"))
    (row,) = tell({"d": rows}, sample, declared)["detections"]
    assert row == {"label": "dog", "index": 1, "score": 0.5, "box": [10, 2, 30, 12]}
    logits, boxes = np.array([[9.0, 0.0]]), np.array([[0.25, 0.5, 1.0, 0.2]])
    post = Detect("l", "queries", "b", box="cxcywh", units="image", activation="sigmoid")
    (row,) = tell({"l": logits, "b": boxes}, sample, Declared(post=post))["detections"]
    np.testing.assert_allclose(row["box"], [0, 8, 30, 12])  # of 40 by 20, cut at the left edge


def test_the_best_classes_have_their_share() -> None:
    values = {"logits": np.array([0.0, math.log(3.0), -np.log(2.0)], np.float32)}  # 1 : 3 : 1/2
    declared = Declared(post=Classify("logits", top_k=2), labels=("a", "b"))
    top = tell(values, Sample("x"), declared)["top"]
    assert [(row["label"], row["index"]) for row in top] == [("b", 1), ("a", 0)]
    assert [row["score"] for row in top] == pytest.approx([3 / 4.5, 1 / 4.5], rel=1e-6)
    sigmoid = Declared(post=Classify("logits", "sigmoid", 1))
    assert tell(values, Sample("x"), sigmoid)["top"][0] == {
        "label": "1", "index": 1, "score": pytest.approx(0.75)
    }  # fmt: skip


def test_scores_of_large_logits_do_not_overflow() -> None:
    values = np.array([1e4, -1e4, 0.0])
    assert activate(values, "softmax").tolist() == [1, 0, 0]
    assert activate(values, "sigmoid").tolist() == [1, 0, 0.5]


def test_an_embedding_may_be_normalised() -> None:
    values = {"v": np.array([3.0, 4.0], np.float32)}
    assert tell(values, Sample("x"), Declared(post=Embed("v")))["embedding"] == [3, 4]
    normalised = tell(values, Sample("x"), Declared(post=Embed("v", normalise=True)))
    assert normalised["embedding"] == pytest.approx([0.6, 0.8])
    zero = {"v": np.zeros(2, np.float32)}
    assert tell(zero, Sample("x"), Declared(post=Embed("v", True)))["embedding"] == [0, 0]


@pytest.mark.parametrize("post", [Classify("v"), Embed("v"), Detect("v")])
def test_what_is_not_finite_is_no_answer(post: Any) -> None:
    values = np.full((3, 6) if isinstance(post, Detect) else 3, np.nan)
    with pytest.raises(FileError, match="output 'v' is not finite"):
        tell({"v": values}, Sample("x"), Declared(post=post))


def test_without_a_declaration_all_outputs_are_told_as_they_are() -> None:
    outputs = {"a": np.array([[1.5, np.nan], [-np.inf, 2.0]], np.float32), "b": np.array([3, 4])}
    assert tell(outputs, Sample("x"), Declared()) == {
        "outputs": {
            "a": {"dtype": "float32", "shape": [2, 2], "values": [[1.5, "nan"], ["-inf", 2.0]]},
            "b": {"dtype": "int64", "shape": [2], "values": [3, 4]},
        }
    }
