"""Weights of timm's and torchvision's Vision Transformers for `attn_export.models.vit`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_export.models.vit import ViT, ViTConfig

Names = dict[str, str]
"""Their module or parameter name -> ours."""


def timm_names(depth: int) -> Names:
    names = {
        "patch_embed.proj": "patches",
        "cls_token": "cls_token",
        "pos_embed": "positions",
        "norm": "norm",
        "head": "head",
    }
    for i in range(depth):
        for theirs, ours in {
            "norm1": "norm1",
            "attn.qkv": "attn.qkv",
            "attn.proj": "attn.proj",
            "norm2": "norm2",
            "mlp.fc1": "mlp.0",
            "mlp.fc2": "mlp.2",
        }.items():
            names[f"blocks.{i}.{theirs}"] = f"blocks.{i}.{ours}"
    return names


def torchvision_names(depth: int) -> Names:
    names = {
        "conv_proj": "patches",
        "class_token": "cls_token",
        "encoder.pos_embedding": "positions",
        "encoder.ln": "norm",
        "heads.head": "head",
    }
    for i in range(depth):
        for theirs, ours in {
            "ln_1": "norm1",
            "self_attention.in_proj": "attn.qkv",
            "self_attention.out_proj": "attn.proj",
            "ln_2": "norm2",
            "mlp.0": "mlp.0",
            "mlp.3": "mlp.2",
        }.items():
            names[f"encoder.layers.encoder_layer_{i}.{theirs}"] = f"blocks.{i}.{ours}"
    return names


def _keys(names: Names) -> Names:
    """Module names to the keys of a state dict; torchvision writes `in_proj_weight`."""
    keys = {}
    for theirs, ours in names.items():
        if ours in ("cls_token", "positions"):
            keys[theirs] = ours
        else:
            joint = "_" if theirs.endswith("in_proj") else "."
            keys |= {f"{theirs}{joint}{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}
    return keys


def _depth(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({key[len(prefix) :].split(".")[0] for key in state if key.startswith(prefix)})


def to_vit(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A timm or torchvision state dict under this package's names.

    Raises ValueError, naming the keys, where something is missing or left over (another model:
    distillation or register tokens, layer scale, normalised queries).
    """
    if "conv_proj.weight" in state:
        keys = _keys(torchvision_names(_depth(state, "encoder.layers.encoder_layer_")))
    elif "patch_embed.proj.weight" in state:
        keys = _keys(timm_names(_depth(state, "blocks.")))
    else:
        raise ValueError(
            "neither timm's patch_embed.proj.weight nor torchvision's conv_proj.weight"
        )
    if missing := sorted(keys.keys() - state.keys()):
        raise ValueError(f"the state dict lacks {', '.join(missing)}")
    if unknown := sorted(state.keys() - keys.keys()):
        raise ValueError(f"a plain ViT has no {', '.join(unknown)}")
    return {ours: state[theirs] for theirs, ours in keys.items()}


def to_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This package's state dict under timm's names."""
    return {
        theirs: state[ours] for theirs, ours in _keys(timm_names(_depth(state, "blocks."))).items()
    }


def to_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This package's state dict under torchvision's names."""
    names = torchvision_names(_depth(state, "blocks."))
    return {theirs: state[ours] for theirs, ours in _keys(names).items()}


def load_vit(weights: Mapping[str, Tensor] | str | Path, heads: int | None = None) -> ViT:
    """A ViT with timm's or torchvision's weights, in eval mode.

    Args:
        weights: a state dict, or the path of one as safetensors.
        heads: attention heads, which the weights don't tell; left out, D / 64 as in ViT-Ti to
            ViT-L (D is 192 to 1,024).

    Images are square, as in the published models. Raises ValueError for keys or shapes of another
    model.
    """
    state = to_vit(load_file(weights) if isinstance(weights, str | Path) else weights)
    dim, channels, patch_size, _ = state["patches.weight"].shape
    side = math.isqrt(state["positions"].shape[1] - 1)
    if side * side != state["positions"].shape[1] - 1:
        raise ValueError(f"{state['positions'].shape[1]} positions are not a square and a token")
    if heads is None and dim % 64:
        raise ValueError(f"D is {dim}, not a multiple of 64; say how many heads there are")
    config = ViTConfig(
        image_size=side * patch_size,
        patch_size=patch_size,
        channels=channels,
        num_classes=state["head.weight"].shape[0],
        dim=dim,
        depth=_depth(state, "blocks."),
        heads=dim // 64 if heads is None else heads,
        mlp_ratio=state["blocks.0.mlp.0.weight"].shape[0] // dim,
    )
    with torch.random.fork_rng(devices=[]):
        model = ViT(config)
    model.load_state_dict(state)
    return model.eval()
