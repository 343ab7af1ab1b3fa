"""How models declare what `predict` does around them, and what is refused at export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_export.build import export
from attn_export.declarations import sections
from attn_export.errors import ExportError
from attn_export.models.zoo import ZOO
from attn_export.packages.transformers_files import image_steps
from attn_export.predict.declared import read
from attn_export.predict.declared_values import build
from attn_export.predict.steps import ImageSteps
from attn_export.signature import describe


class Mean(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.mean(dim=(2, 3))


X = torch.zeros(2, 3, 4, 4)
FACTS = {
    "preprocess": {"image": {"resize": {"size": 4}, "scale": 1 / 255}},
    "postprocess": {"kind": "classify", "activation": "none"},
    "labels": ["red", "green", "blue"],
}


def test_a_factory_s_fourth_value_reaches_the_manifest(tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        "import torch\nfrom tests.predict.test_declared import FACTS, Mean, X\n"
        "def build():\n    return Mean(), X, None, FACTS\n"
    )
    manifest = export(f"{source}:build", tmp_path / "bundle").manifest
    assert manifest["preprocess"] == FACTS["preprocess"]
    assert manifest["labels"] == FACTS["labels"]
    assert manifest["postprocess"] == {
        "output": manifest["outputs"][0]["name"], "kind": "classify", "activation": "none"
    }  # fmt: skip
    assert read(manifest).images["image"].scale == 1 / 255


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (3, "it declares 3; give a dict with preprocess, tokenizer, postprocess, labels"),
        ({"pre": {}}, "it declares 'pre'; give any of preprocess"),
    ],
)
def test_a_fourth_value_of_another_kind_is_refused(facts: Any, sentence: str) -> None:
    with pytest.raises(ExportError, match=sentence):
        describe("it", (Mean(), X, {}, facts))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"preprocess": {"picture": {}}}, "'picture' is no input, the inputs are image"),
        ({"postprocess": {"kind": "embed", "output": "vector"}}, "'vector' is no output"),
        ({"preprocess": {"image": {"size": 8}}}, "preprocess.image has 'size', which is not known"),
        ({"tokenizer": {"file": "no.json", "inputs": {"image": "ids"}, "max_length": 4}},
         "there is no tokenizer no.json"),
    ],
)  # fmt: skip
def test_a_declaration_that_does_not_hold_leaves_no_bundle(
    tmp_path: Path, facts: dict[str, Any], sentence: str
) -> None:
    from attn_export.source import Source

    spec = describe("it", (Mean(), X, {}, facts))
    with pytest.raises(ExportError, match=sentence):
        export(Source("own", "own", {"model": spec}), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


DECLARED = ["detector-digits", "detr", "senet", "swin", "text-encoder", "translator", "vit-digits"]


@pytest.mark.parametrize("name", DECLARED)
def test_what_the_zoo_declares_holds(name: str) -> None:
    built = ZOO[name].build()
    specs = list(built.values()) if isinstance(built, dict) else [built]
    manifest: dict[str, Any] = {
        "inputs": [{"name": n} for spec in specs for n in spec.inputs],
        "outputs": [{"name": n} for spec in specs for n in spec.outputs],
        "generate": {},
        "labels": [label for spec in specs for label in spec.labels],
        **{key: value for key, value in sections(specs).items() if value},
    }
    declared = read(manifest)
    assert declared.post is not None
    assert declared.images or declared.text
    for spec in specs:
        if spec.tokenizer:
            assert Path(spec.tokenizer["file"]).is_file()


@pytest.mark.parametrize(
    ("stored", "steps"),
    [
        ({"size": {"height": 32, "width": 24}, "resample": 3, "image_mean": [0.5],
          "image_std": [1]},
         {"resize": {"size": [32, 24], "interpolation": "bicubic"}, "scale": 1 / 255,
          "mean": [0.5], "std": [1]}),
        ({"size": {"shortest_edge": 30}, "resample": 2, "do_center_crop": True, "crop_size": 28,
          "do_normalize": False, "rescale_factor": 0.5},
         {"resize": {"size": 30, "fit": "shortest", "interpolation": "bilinear"},
          "crop": {"size": 28}, "scale": 0.5}),
        ({"do_resize": False, "do_rescale": False, "do_normalize": False}, {}),
    ],
)  # fmt: skip
def test_image_processors_of_transformers_become_steps(
    stored: dict[str, Any], steps: dict[str, Any]
) -> None:
    found, unknown = image_steps(stored)
    assert (found, unknown) == (steps, "")
    build(ImageSteps, found, "steps")


@pytest.mark.parametrize(
    ("stored", "unknown"),
    [
        ({"do_pad": True}, "do_pad"),
        ({"size": {"longest_edge": 9}}, "size {'longest_edge': 9} and resample 2"),
        ({"do_center_crop": True, "crop_size": {"shortest_edge": 4}},
         "crop_size {'shortest_edge': 4}"),
    ],
)  # fmt: skip
def test_steps_that_are_not_known_are_named(stored: dict[str, Any], unknown: str) -> None:
    assert image_steps(stored) == ({}, unknown)
