"""Task scores: worked-out values, batches, and files that hold none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_export.errors import FileError
from attn_export.parity.detections import map50
from attn_export.parity.generate import exact_match
from attn_export.parity.metrics import evaluate, read_metric, top1, write_metric


def test_top1_is_the_share_of_rows_whose_largest_entry_is_right() -> None:
    logits = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    assert top1(logits, np.array([1, 1, 1, 0])) == 0.75


def test_every_sample_is_scored_once_also_in_a_last_batch_that_is_short() -> None:
    seen: list[int] = []

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append(len(inputs["x"]))
        return {"y": np.eye(3)[inputs["x"]]}

    x = np.array([0, 1, 2, 0, 1])
    manifest = {"metric": {"kind": "top1", "component": "model", "output": "y"}}
    target = np.array([0, 1, 2, 0, 2])
    assert evaluate(manifest, {"model": run}, {"x": x}, target, batch=2) == 0.8
    assert seen == [2, 2, 1]


def test_samples_survive_the_file(tmp_path: Path) -> None:
    images = np.arange(6, dtype=np.float32).reshape(2, 3).T  # not contiguous
    write_metric(tmp_path / "m.safetensors", {"image": images}, np.array([1, 0, 1]))
    inputs, target = read_metric(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(inputs["image"], [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(target, [1, 0, 1])


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_without_samples_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError, match="holds no held-out samples"):
        read_metric(path)


BOX = [10.0, 10.0, 20.0, 20.0]
FAR = [50.0, 50.0, 60.0, 60.0]
NONE = [0.0, 0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("detections", "expected"),
    [
        ([[*BOX, 0.9, 1], [*FAR, 0.1, 1]], 1.0),
        ([[*BOX, 0.1, 1], [*FAR, 0.9, 1]], 0.5),  # the wrong one comes first
        ([[*BOX, 0.9, 2], [*FAR, 0.1, 1]], 0.0),  # the right place, another class
        ([[10, 10, 20, 15.1, 0.9, 1], [*FAR, 0.1, 1]], 1.0),  # an overlap of 0.51
        ([[10, 10, 20, 14.9, 0.9, 1], [*FAR, 0.1, 1]], 0.0),  # of 0.49
    ],
)
def test_map50_of_one_object(detections: list[list[float]], expected: float) -> None:
    target = np.array([[[*BOX, 1.0], NONE]])
    assert map50(np.array([detections], np.float32), target) == pytest.approx(expected)


def test_sequences_match_up_to_the_end_token() -> None:
    tokens = np.array([[5, 6, 2, 2], [5, 7, 2, 2], [5, 6, 7, 8]])
    target = np.array([[5, 6, 2, 0, 0], [5, 6, 2, 0, 0], [5, 6, 7, 8, 2]])
    assert exact_match(tokens, target, eos=2) == pytest.approx(2 / 3)
