"""`timm:NAME`, `torchvision:NAME` and `ultralytics:NAME` with the packages installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_export.errors import UsageError
from attn_export.source import resolve

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]
BIAS = {"timm:test_vit": "head.bias", "torchvision:mobilenet_v3_small": "classifier.3.bias"}


@pytest.mark.parametrize("origin", BIAS)
def test_random_weights_are_said_and_are_the_same_each_time(
    origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    first, second = resolve(origin), resolve(origin)
    (note,) = first.notes
    assert note.startswith("the weights are random: this disk has none for")
    states = [source.components["model"].module.state_dict() for source in (first, second)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_weights_of_torchvision_that_lie_on_the_disk_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models import MobileNet_V3_Small_Weights, mobilenet_v3_small

    state = mobilenet_v3_small().state_dict()
    state["classifier.3.bias"] = torch.full((1000,), 7.0)
    file = tmp_path / "checkpoints" / Path(MobileNet_V3_Small_Weights.DEFAULT.url).name
    file.parent.mkdir()
    torch.save(state, file)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    source = resolve("torchvision:mobilenet_v3_small")
    assert source.notes == []
    assert source.components["model"].module.classifier[3].bias.unique().tolist() == [7.0]


def test_weights_of_timm_that_lie_in_the_cache_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    import timm
    from safetensors.torch import save_file

    state = timm.create_model("test_vit").state_dict()
    state["head.bias"] = torch.full_like(state["head.bias"], 7.0)
    file = tmp_path / "model.safetensors"
    save_file(state, file)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(file))
    source = resolve("timm:test_vit")
    assert source.notes == []
    assert source.components["model"].module.head.bias.unique().tolist() == [7.0]


@pytest.mark.parametrize(
    ("origin", "close"),
    [
        ("timm:vit_tiny_patch16_242", "vit_tiny_patch16_224"),
        ("timm:vit_tiny_patch16_224.nothing", "vit_tiny_patch16_224"),
        ("torchvision:vit_b_17", "vit_b_16"),
        ("ultralytics:yolo12z", "yolo12"),
    ],
)
def test_a_name_that_the_package_does_not_have_is_refused(origin: str, close: str) -> None:
    with pytest.raises(UsageError, match=f"has no model .* did you mean .*{close}"):
        resolve(origin)


def test_the_size_of_the_example_can_be_given_by_the_graph_s_name() -> None:
    spec = resolve("ultralytics:yolo11n-cls", ["images=float32[2,3,32,32]"]).components["model"]
    assert {name: tuple(x.shape) for name, x in spec.inputs.items()} == {"x": (2, 3, 32, 32)}
    assert spec.names == {"x": "images"}


def test_videos_have_frames() -> None:
    (clip,) = resolve("torchvision:swin3d_t").components["model"].inputs.values()
    assert tuple(clip.shape) == (2, 3, 16, 224, 224)
