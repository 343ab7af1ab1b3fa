"""The detector's parts on values worked out by hand, and the trained one on held-out digits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from attn_export.models.attention.position_sensitive import PositionSensitiveAttention
from attn_export.models.detector import (
    Detector,
    DetectorConfig,
    Head,
    anchor_points,
    detector,
    top_detections,
)
from attn_export.models.detector_blocks import C2PSA
from attn_export.models.detector_digits import detector_digits
from attn_export.models.digit_scenes import digit_scenes, heldout_digits
from attn_export.models.spec import ExportSpec

SMALL = DetectorConfig(num_classes=3, widths=(4, 4, 8, 8, 128), head_dim=8)
TRAINING = Path(__file__).parents[2] / "examples" / "train_detector_digits.py"


@pytest.fixture(scope="module")
def small() -> Detector:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Detector(SMALL).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def digits() -> ExportSpec:
    return detector_digits()


@pytest.fixture(scope="module")
def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_detector_digits", TRAINING)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def images(batch: int, height: int, width: int) -> Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(width))


def test_only_the_map_of_400_cells_is_attended_to_at_640_pixels(small: Detector) -> None:
    cells = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: cells.append(args[0].shape[-2:]))
        for layer in small.modules()
        if isinstance(layer, PositionSensitiveAttention)
    ]
    small(images(1, 640, 640))
    for hook in hooks:
        hook.remove()
    assert cells == [(20, 20), (20, 20)]  # the backbone's end and the neck


def test_attention_stands_at_the_backbones_end_and_in_the_neck(small: Detector) -> None:
    assert isinstance(list(small.backbone.stage32.children())[-1], C2PSA)
    where = {
        name.split(".blocks")[0]
        for name, layer in small.named_modules()
        if isinstance(layer, PositionSensitiveAttention)
    }
    assert where == {"backbone.stage32.3", "neck.down32"}


@pytest.mark.parametrize(
    ("height", "width", "cells"),
    [(640, 640, 6400 + 1600 + 400), (128, 256, 512 + 128 + 32), (171, 200, 550 + 143 + 42)],
)
def test_there_is_a_cell_for_every_8_16_and_32_pixels(
    small: Detector, height: int, width: int, cells: int
) -> None:
    boxes, logits = small.head(small.features(images(1, height, width)))
    assert boxes.shape == (1, cells, 4)
    assert logits.shape == (1, cells, 3)


def test_anchor_points_are_the_centres_of_cells_in_pixels() -> None:
    maps = tuple(torch.zeros(1, 1, *size) for size in ((1, 2), (2, 1), (1, 1)))
    points, strides = anchor_points(maps)
    assert points.tolist() == [[4, 4], [12, 4], [8, 8], [8, 24], [16, 16]]
    assert strides.flatten().tolist() == [8, 8, 16, 16, 32]


def test_a_box_lies_at_its_distances_from_the_cell_in_strides() -> None:
    head = Head(SMALL).eval()
    for level, branch in enumerate(head.box):
        torch.nn.init.zeros_(branch[-1].weight)
        # softplus(log(e^d - 1)) is d: 1, 2, 3 and 4 strides, halved on each coarser map
        wanted = torch.tensor([1.0, 2.0, 3.0, 4.0]) / 2**level
        branch[-1].bias.data = wanted.expm1().log()
    maps = tuple(torch.randn(2, width, 1, 1) for width in SMALL.widths[2:])
    boxes, _ = head(maps)
    expected = [[4 - 8, 4 - 16, 4 + 24, 4 + 32], [0, -8, 32, 40], [8, 0, 40, 48]]
    torch.testing.assert_close(boxes, torch.tensor([expected, expected], dtype=torch.float32))


def test_the_best_pairs_of_cell_and_class_come_first() -> None:
    boxes = torch.tensor([[[0.0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]])
    logits = torch.tensor([[[0.0, -1.0], [40.0, 50.0], [3.0, -2.0]]])
    best = top_detections(boxes, logits, 4)[0]
    assert best[:, 5].tolist() == [1, 0, 0, 0]
    assert best[:, 0].tolist() == [2, 2, 4, 0]  # a cell may be found twice, and scores of 1 rank
    torch.testing.assert_close(best[:, 4], torch.tensor([1.0, 1.0, 0.95257413, 0.5]))


@pytest.mark.parametrize(("batch", "height", "width"), [(2, 128, 192), (3, 160, 141)])
def test_each_row_of_a_batch_equals_its_own_run(
    small: Detector, batch: int, height: int, width: int
) -> None:
    x = images(batch, height, width).double()
    model = Detector(SMALL).double().eval()
    model.load_state_dict(small.state_dict())
    together = model(x)
    assert together.shape == (batch, 300, 6)
    for row in range(batch):
        alone = model(x[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-9)


def test_the_untrained_detector_ranks_clearly_on_640_pixels() -> None:
    state = torch.random.get_rng_state()
    spec = detector()
    assert torch.equal(state, torch.random.get_rng_state())
    assert spec.inputs["image"].shape == (2, 3, 640, 640)
    assert sum(p.numel() for p in spec.module.parameters()) < 3_000_000
    with torch.no_grad():
        gaps = -spec.module(spec.inputs["image"])[..., 4].diff(dim=1)
    assert gaps.median() > 1e-6


def test_scenes_hold_separate_digits_inside_the_image() -> None:
    pictures, labels = heldout_digits()
    scenes, boxes = digit_scenes(pictures, labels, 12, torch.Generator().manual_seed(4), 128, 150)
    again, _ = digit_scenes(pictures, labels, 12, torch.Generator().manual_seed(4), 128, 150)
    assert torch.equal(scenes, again)
    assert scenes.shape == (12, 3, 128, 150)
    assert scenes.min() >= 0
    assert scenes.max() <= 1
    for found in boxes:
        found = found[found[:, 4] >= 0]
        assert 1 <= len(found) <= 6
        assert found[:, :4].min() >= 0
        assert found[:, [1, 3]].max() <= 128
        assert found[:, [0, 2]].max() <= 150
        for first in range(len(found)):
            for second in range(first):
                a, b = found[first], found[second]
                assert (torch.min(a[2:4], b[2:4]) <= torch.max(a[:2], b[:2])).any()


def test_a_box_fits_the_ink_and_names_its_digit() -> None:
    bar = torch.zeros(1, 8, 8)
    bar[:, 2:6] = 16  # all columns, half of the rows
    _, boxes = digit_scenes(bar, torch.tensor([7]), 8, torch.Generator().manual_seed(0))
    found = boxes[boxes[..., 4] >= 0]
    assert set(found[:, 4].tolist()) == {7.0}
    side, height = (found[:, 2:4] - found[:, :2]).unbind(1)
    assert side.min() >= 18
    assert side.max() <= 72
    # ink fades over a pixel of the 8x8 at either edge and falls to 0.3 a fifth of one outside
    assert ((height - side * 4.4 / 8).abs() <= 1.5).all()


def test_the_score_is_1_for_perfect_answers_and_0_for_wrong_classes(
    digits: ExportSpec, training: ModuleType
) -> None:
    assert digits.metric is not None
    target = digits.metric.target
    score = (target[..., 4:] >= 0).float()
    perfect = torch.cat([target[..., :4], score, target[..., 4:]], dim=-1)
    assert training.map50(perfect, target) == 1.0
    wrong = torch.cat([target[..., :4], score, (target[..., 4:] + 1) % 10], dim=-1)
    assert training.map50(wrong, target) < 0.05


def test_held_out_digits_are_found(digits: ExportSpec, training: ModuleType) -> None:
    assert digits.metric is not None
    with torch.no_grad():
        parts = [digits.module(part) for part in digits.metric.inputs["image"].split(16)]
    assert training.map50(torch.cat(parts), digits.metric.target) >= 0.80


def test_targets_are_given_to_the_cells_that_fit_them_best(training: ModuleType) -> None:
    boxes = torch.tensor([[[0.0, 0, 16, 16], [0, 0, 16, 8], [40, 40, 56, 56]]])
    logits = torch.full((1, 3, 2), 2.0)
    points = torch.tensor([[4.0, 4], [12, 4], [48, 48]])
    target = torch.tensor([[[0.0, 0, 16, 16, 1], [0, 0, 0, 0, -1]]])
    row, reached = training.assign(boxes, logits, points, target, count=1)
    assert row[0, 0] == 0
    torch.testing.assert_close(reached, torch.tensor([[1.0, 0.0, 0.0]]))
    _, reached = training.assign(boxes, logits, points, target, count=2)
    torch.testing.assert_close(reached, torch.tensor([[1.0, 0.5**6, 0.0]]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"widths": (8, 8, 8)}, "one for each stride needs 5"),
        ({"widths": (8, 8, 8, 8, 64)}, "the last of 128"),
        ({"num_classes": 0}, "not all positive"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DetectorConfig(**options)
