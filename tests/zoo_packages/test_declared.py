"""Images as the packages' own transforms prepare them, pixel for pixel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attn_export.packages import timm_models, torchvision_models, ultralytics_models
from attn_export.predict.declared_values import build
from attn_export.predict.images import prepare
from attn_export.predict.steps import ImageSteps

pytestmark = pytest.mark.zoo
SIZES = [(301, 403), (250, 231), (90, 123)]


def photo(height: int, width: int) -> Image.Image:
    """Smooth shades and some noise, as photographs have both."""
    rows, columns = np.mgrid[:height, :width]
    shades = np.stack([rows * 255 / height, columns * 255 / width, rows * 0 + 99], axis=2)
    noise = np.random.default_rng(0).normal(0, 20, shades.shape)
    return Image.fromarray(np.clip(shades + noise, 0, 255).astype(np.uint8))


def steps_of(spec: object) -> ImageSteps:
    (given,) = spec.preprocess.values()
    return build(ImageSteps, given, "steps")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "mobilevit_xs"])
def test_timm(name: str, size: tuple[int, int]) -> None:
    import timm

    spec, _ = timm_models.build(name)
    config = timm.data.resolve_model_data_config(spec.module)
    theirs = timm.data.create_transform(**config, is_training=False)(photo(*size))
    ours, _ = prepare(photo(*size), steps_of(spec))
    np.testing.assert_array_equal(ours, theirs.numpy())
    assert len(spec.labels) == 1000


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["vit_b_32", "swin_t"])
def test_torchvision(name: str, size: tuple[int, int]) -> None:
    from torchvision import models

    spec, _ = torchvision_models.build(name)
    theirs = models.get_model_weights(name).DEFAULT.transforms()(photo(*size))
    ours, _ = prepare(photo(*size), steps_of(spec))
    np.testing.assert_array_equal(ours, theirs.numpy())
    assert spec.labels[0] == "tench"


@pytest.mark.parametrize("size", [*SIZES, (720, 1280), (640, 640)])
def test_ultralytics_within_one_level_of_opencv(size: tuple[int, int], tmp_path: Path) -> None:
    from ultralytics.data.augment import LetterBox

    spec, _ = ultralytics_models.build("yolo11n")
    image = photo(*size)
    theirs = LetterBox((640, 640), auto=False)(image=np.asarray(image)).astype(np.int64)
    ours, placement = prepare(image, steps_of(spec))
    levels = np.rint(ours * 255).astype(np.int64).transpose(1, 2, 0)
    assert np.abs(levels - theirs).max() <= 1
    assert placement.shown == (640, 640)
    assert len(spec.labels) == 80
    assert spec.postprocess["form"] == "anchors"
