"""timm's and torchvision's ViT state dicts, against models built here with their key names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from attn_export.models.vit_weights import load_vit, to_timm, to_torchvision, to_vit


class TorchvisionLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 3 * dim),
            nn.GELU(),
            nn.Dropout(0),
            nn.Linear(3 * dim, dim),
            nn.Dropout(0),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TorchvisionViT(nn.Module):
    """The module tree that torchvision's key names spell out, with PyTorch's own attention."""

    def __init__(self, dim: int, depth: int, heads: int, patch: int, side: int) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim))
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(torch.randn(1, side * side + 1, dim))
        layers = {f"encoder_layer_{i}": TorchvisionLayer(dim, heads) for i in range(depth)}
        self.encoder.layers = nn.ModuleDict(layers)
        self.encoder.ln = nn.LayerNorm(dim, eps=1e-6)
        self.heads = nn.ModuleDict({"head": nn.Linear(dim, 7)})

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv_proj(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.encoder.pos_embedding
        for layer in self.encoder.layers.values():
            x = layer(x)
        return self.heads["head"](self.encoder.ln(x)[:, 0])


def torchvision_vit(dim: int = 24, heads: int = 3) -> TorchvisionViT:
    torch.manual_seed(0)
    model = TorchvisionViT(dim, depth=2, heads=heads, patch=4, side=3).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


TIMM_KEYS = {
    "patch_embed.proj.weight": (24, 3, 4, 4),
    "patch_embed.proj.bias": (24,),
    "cls_token": (1, 1, 24),
    "pos_embed": (1, 10, 24),
    **{
        f"blocks.{i}.{name}": shape
        for i in range(2)
        for name, shape in {
            "norm1.weight": (24,),
            "norm1.bias": (24,),
            "attn.qkv.weight": (72, 24),
            "attn.qkv.bias": (72,),
            "attn.proj.weight": (24, 24),
            "attn.proj.bias": (24,),
            "norm2.weight": (24,),
            "norm2.bias": (24,),
            "mlp.fc1.weight": (72, 24),
            "mlp.fc1.bias": (72,),
            "mlp.fc2.weight": (24, 72),
            "mlp.fc2.bias": (24,),
        }.items()
    },
    "norm.weight": (24,),
    "norm.bias": (24,),
    "head.weight": (7, 24),
    "head.bias": (7,),
}


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_torchvisions_weights_give_the_logits_of_pytorchs_own_attention(batch: int) -> None:
    theirs = torchvision_vit()
    ours = load_vit(theirs.state_dict(), heads=3)
    image = torch.randn(batch, 3, 12, 12)
    with torch.no_grad():
        right = theirs(image)
        torch.testing.assert_close(ours(image), right, rtol=1e-4, atol=1e-4)
    assert right.std() > 0.1


def test_timms_weights_give_the_same_logits_as_torchvisions() -> None:
    theirs = torchvision_vit()
    timm = to_timm(to_vit(theirs.state_dict()))
    assert {name: tuple(tensor.shape) for name, tensor in timm.items()} == TIMM_KEYS
    image = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        right = theirs(image)
        torch.testing.assert_close(load_vit(timm, heads=3)(image), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("there", [to_timm, to_torchvision])
def test_names_map_both_ways(there: object) -> None:
    ours = to_vit(torchvision_vit().state_dict())
    back = to_vit(there(ours))
    assert list(back) == list(ours)
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_torchvisions_names_are_all_restored() -> None:
    state = torchvision_vit().state_dict()
    restored = to_torchvision(to_vit(state))
    assert restored.keys() == state.keys()
    assert "encoder.layers.encoder_layer_1.self_attention.in_proj_weight" in restored


def test_sizes_are_read_off_the_weights(tmp_path: Path) -> None:
    save_file(torchvision_vit(128, 2).state_dict(), tmp_path / "vit.safetensors")
    config = load_vit(tmp_path / "vit.safetensors").config
    assert (config.image_size, config.patch_size, config.dim) == (12, 4, 128)
    assert (config.depth, config.heads, config.num_classes, config.mlp_ratio) == (2, 2, 7, 3)


def test_heads_must_be_told_where_64_does_not_divide() -> None:
    with pytest.raises(ValueError, match="D is 24, not a multiple of 64"):
        load_vit(torchvision_vit().state_dict())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("blocks.0.ls1.gamma", r"a plain ViT has no blocks\.0\.ls1\.gamma"),
        ("reg_token", "a plain ViT has no reg_token"),
    ],
)
def test_weights_of_another_model_are_named(key: str, message: str) -> None:
    state = {name: torch.zeros(shape) for name, shape in TIMM_KEYS.items()}
    with pytest.raises(ValueError, match=message):
        load_vit(state | {key: torch.zeros(1)}, heads=3)


def test_a_missing_weight_is_named() -> None:
    state = {name: torch.zeros(shape) for name, shape in TIMM_KEYS.items()}
    del state["blocks.1.attn.qkv.bias"]
    with pytest.raises(ValueError, match=r"lacks blocks\.1\.attn\.qkv\.bias"):
        load_vit(state, heads=3)


def test_a_state_dict_of_neither_library_is_refused() -> None:
    with pytest.raises(ValueError, match="neither timm's"):
        load_vit({"conv1.weight": torch.zeros(1)})


def test_positions_that_are_no_square_are_refused() -> None:
    state = {name: torch.zeros(shape) for name, shape in TIMM_KEYS.items()}
    state["pos_embed"] = torch.zeros(1, 12, 24)
    with pytest.raises(ValueError, match="12 positions are not a square and a token"):
        load_vit(state, heads=3)
