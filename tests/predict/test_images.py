"""Pixels: what other libraries make of a file, bit for bit, and places worked out by hand."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import PILImageResampling
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from attn_export.errors import FileError
from attn_export.predict.images import Placement, decode, from_pixels, prepare, shown_mask
from attn_export.predict.linear import linear
from attn_export.predict.steps import ImageSteps


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("size", [(61, 47), (20, 33), (32, 32), (7, 90)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "nearest"])
def test_stretched_images_are_those_of_transformers_bit_for_bit(
    size: tuple[int, int], interpolation: str
) -> None:
    image = noise(*size)
    theirs = ViTImageProcessorPil(
        size={"height": 32, "width": 24},
        resample=PILImageResampling[interpolation.upper()],
        image_mean=MEAN,
        image_std=STD,
    )(image, return_tensors="np")["pixel_values"][0]
    steps = ImageSteps(
        resize={"size": [32, 24], "interpolation": interpolation},
        scale=1 / 255,
        mean=MEAN,
        std=STD,
    )
    ours, placement = prepare(image, steps)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == np.float32
    assert placement.shown == (32, 24)


def test_all_256_values_are_scaled_as_pytorch_scales_them() -> None:
    """torchvision's to_tensor and normalize: a float32 division, minus, over."""
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(np.stack([values] * 3, axis=2))
    theirs = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()).div(255)
    scaled, _ = prepare(image, ImageSteps(scale=1 / 255))
    np.testing.assert_array_equal(scaled, theirs.numpy())
    mean, std = (torch.tensor(row).view(3, 1, 1) for row in (MEAN, STD))
    normalised, _ = prepare(image, ImageSteps(scale=1 / 255, mean=MEAN, std=STD))
    np.testing.assert_array_equal(normalised, theirs.sub(mean).div(std).numpy())


def test_the_shorter_side_and_the_crop_round_as_torchvision_and_as_transformers() -> None:
    """41x30 at shorter side 20: int(20 * 41 / 30) = 27 high; 27 - 16 = 11 rows are left over."""
    image = noise(41, 30)
    pixels = np.asarray(image.resize((20, 27), Image.Resampling.BILINEAR))
    for rounding, top in (("even", 6), ("down", 5)):  # round(5.5) is 6
        steps = ImageSteps(
            resize={"size": 20, "fit": "shortest"},
            crop={"size": 16, "rounding": rounding},
        )
        ours, placement = prepare(image, steps)
        np.testing.assert_array_equal(ours, pixels[top : top + 16, 2:18].transpose(2, 0, 1))
        assert (placement.top, placement.left, placement.shown) == (-top, -2, (16, 16))


def test_a_letterbox_lies_in_the_middle_and_boxes_come_back() -> None:
    """4 wide and 2 high, enlarged twice into 8x8: two rows of padding above, two below."""
    image = Image.fromarray(np.full((2, 4, 3), 9, np.uint8))
    steps = ImageSteps(
        resize={"size": 8, "fit": "letterbox", "interpolation": "nearest", "pad": [1, 2, 3]},
    )
    ours, placement = prepare(image, steps)
    assert ours.dtype == np.uint8
    assert ours[:, 0, 0].tolist() == ours[:, 7, 7].tolist() == [1, 2, 3]
    assert (ours[:, 2:6] == 9).all()
    assert (ours[:, :2] != 9).all()
    assert placement == Placement(4, 2, (8, 8), 2.0, 2.0, 0, 2)
    boxes = np.array([[2.0, 2.0, 6.0, 4.0], [-1.0, 0.0, 9.0, 8.0]])
    assert placement.back(boxes).tolist() == [[1, 0, 3, 1], [0, 0, 4, 2]]
    assert shown_mask(placement).sum(axis=1).tolist() == [0, 0, 8, 8, 8, 8, 0, 0]
    high, turned = prepare(image.rotate(90, expand=True), steps)
    assert (turned.left, turned.top) == (2, 0)
    np.testing.assert_array_equal(high, ours.transpose(0, 2, 1))


def test_a_letterbox_in_the_corner_pads_right_and_below() -> None:
    image = Image.fromarray(np.full((3, 6), 200, np.uint8))
    steps = ImageSteps(
        channels="gray",
        resize={"size": [4, 3], "fit": "letterbox", "align": "corner", "pad": 7},
    )
    ours, placement = prepare(image, steps)  # half the size: 2 rows by 3 columns (1.5 to even)
    assert ours.tolist() == [[[200] * 3, [200] * 3, [7] * 3, [7] * 3]]
    assert (placement.left, placement.top) == (0, 0)
    assert shown_mask(placement).tolist() == [[True] * 3] * 2 + [[False] * 3] * 2


def test_colours_and_axes_are_in_the_declared_order() -> None:
    image = Image.fromarray(np.array([[[10, 20, 30]]], np.uint8))
    assert prepare(image, ImageSteps())[0].ravel().tolist() == [10, 20, 30]
    assert prepare(image, ImageSteps(channels="bgr"))[0].ravel().tolist() == [30, 20, 10]
    assert prepare(image, ImageSteps(layout="hwc"))[0].shape == (1, 1, 3)
    grey = prepare(image, ImageSteps(channels="gray"))[0]
    assert (grey.shape, grey.item()) == ((1, 1, 1), (10 * 299 + 20 * 587 + 30 * 114 + 500) // 1000)


def test_linear_interpolation_by_hand() -> None:
    """Centres of 4 pixels over 2: -0.25, 0.25, 0.75, 1.25 of the way from the first to the second;
    of 2 over 4, without a wider filter: the middle of the first two, and of the last two."""
    row = np.array([[0, 100]], np.uint8)
    assert linear(row, (1, 4)).tolist() == [[0, 25, 75, 100]]
    assert linear(np.array([[0, 10, 50, 70]], np.uint8), (1, 2)).tolist() == [[5, 60]]
    assert linear(row.T, (4, 1)).ravel().tolist() == [0, 25, 75, 100]


@pytest.mark.parametrize("size", [(9, 31), (50, 12)])
def test_linear_interpolation_is_pytorchs_without_antialias(size: tuple[int, int]) -> None:
    pixels = np.asarray(noise(23, 17))
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].double()
    theirs = torch.nn.functional.interpolate(tensor, size, mode="bilinear", antialias=False)
    difference = np.abs(linear(pixels, size).transpose(2, 0, 1) - theirs[0].numpy())
    assert difference.max() <= 0.5 + 255 * 2 / 2048


def test_a_photo_that_was_taken_sideways_is_turned_upright(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8))  # red, blue
    exif = Image.Exif()
    exif[0x0112] = 6  # the top row is the right side: turn it clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    upright = decode(tmp_path / "turned.png", "turned.png")
    assert upright.size == (1, 2)
    assert np.asarray(upright)[:, 0].tolist() == [[255, 0, 0], [0, 0, 255]]


def test_sixteen_bits_keep_their_shades(tmp_path: Path) -> None:
    deep = np.array([[0, 256, 40_000, 65_535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    image = decode(tmp_path / "deep.png", "deep.png")
    ours, _ = prepare(image, ImageSteps(channels="gray"))
    assert ours.ravel().tolist() == [0, 1, 156, 255]


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_every_mode_becomes_what_the_model_takes(tmp_path: Path, mode: str) -> None:
    name = "a.jpg" if mode == "CMYK" else "a.png"
    noise(5, 4).convert(mode).save(tmp_path / name)
    image = decode(tmp_path / name, name)
    for channels, count in (("rgb", 3), ("gray", 1)):
        assert prepare(image, ImageSteps(channels=channels))[0].shape == (count, 5, 4)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def test_what_is_no_whole_image_is_one_sentence(tmp_path: Path) -> None:
    whole = encoded(noise(40, 40))
    with pytest.raises(FileError, match=r"^x.png is not an image that Pillow reads; "):
        decode(b"nothing of that kind", "x.png")
    with pytest.raises(FileError, match=r"^x.png does not decode \(.*truncated.*\); "):
        decode(whole[: len(whole) // 2], "x.png")
    with pytest.raises(FileError, match=r"^there is no file x.png; "):
        decode(tmp_path / "x.png", "x.png")
    frames = BytesIO()
    noise(4, 4).save(frames, "PNG", save_all=True, append_images=[noise(4, 4, 1)])
    with pytest.raises(FileError, match=r"^x.png holds 2 frames; "):
        decode(frames.getvalue(), "x.png")


def test_an_image_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for side in (12, 30):  # Pillow warns of the first one, and refuses the second one
        with pytest.raises(FileError, match=r"^x.png is too large an image"):
            decode(encoded(noise(side, side)), "x.png")


def test_an_image_smaller_than_the_crop_is_refused() -> None:
    steps = ImageSteps(crop={"size": [8, 8]})
    with pytest.raises(FileError, match="has 9x7 pixels, the crop takes 8x8"):
        prepare(noise(7, 9), steps)


def test_arrays_of_pixels_are_images_too() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_array_equal(np.asarray(from_pixels(pixels, "a")), pixels)
    assert from_pixels(pixels[:, :, :1], "a").mode == "L"
    with pytest.raises(FileError, match="a holds float32"):
        from_pixels(pixels.astype(np.float32), "a")
