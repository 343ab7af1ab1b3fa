"""DETR: "End-to-End Object Detection with Transformers" (Carion et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_export.models.conv_backbone import ConvBackbone, halve_mask, sine_positions
from attn_export.models.preparing import unit
from attn_export.models.spec import Axis, ExportSpec


@dataclass(frozen=True)
class DetrConfig:
    """widths: the backbone's channels at strides 4, 8, 16 and 32."""

    num_classes: int = 80
    channels: int = 3
    widths: tuple[int, ...] = (16, 32, 64, 128)
    dim: int = 128
    heads: int = 4
    encoder_layers: int = 2
    decoder_layers: int = 2
    hidden_dim: int = 256
    queries: int = 25
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.dim % 4:
            raise ValueError(
                f"dim {self.dim} is not a multiple of 4, for sine and cosine of row and column"
            )
        if len(self.widths) < 2:
            raise ValueError("widths has fewer than two entries, so the backbone has no stage")


def attention(config: DetrConfig) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(config.dim, config.heads, dropout=config.dropout, batch_first=True)


def perceptron(config: DetrConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.dim, config.hidden_dim),
        nn.ReLU(),
        nn.Linear(config.hidden_dim, config.dim),
    )


class EncoderLayer(nn.Module):
    """Self-attention over positions; the codes go to queries and keys, not to values."""

    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        self.attn = attention(config)
        self.mlp = perceptron(config)
        self.norm1 = nn.LayerNorm(config.dim)
        self.norm2 = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        q = k = x + positions  # (B, T, D)
        y, _ = self.attn(q, k, x, key_padding_mask=padding, need_weights=False)
        x = self.norm1(x + y)
        return self.norm2(x + self.mlp(x))


class DecoderLayer(nn.Module):
    """Self-attention among the object queries, then cross-attention to the image."""

    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        self.self_attn = attention(config)
        self.cross_attn = attention(config)
        self.mlp = perceptron(config)
        self.norm1 = nn.LayerNorm(config.dim)
        self.norm2 = nn.LayerNorm(config.dim)
        self.norm3 = nn.LayerNorm(config.dim)

    def forward(
        self, x: Tensor, queries: Tensor, memory: Tensor, positions: Tensor, padding: Tensor
    ) -> Tensor:
        q = k = x + queries  # (B, S, D)
        y, _ = self.self_attn(q, k, x, need_weights=False)
        x = self.norm1(x + y)
        y, _ = self.cross_attn(
            x + queries, memory + positions, memory, key_padding_mask=padding, need_weights=False
        )
        x = self.norm2(x + y)
        return self.norm3(x + self.mlp(x))


class Detr(nn.Module):
    """A fixed number of object queries read the image and each answer with a class and a box.

    Args of `forward`:
        image: (B, C, H, W), any size.
        mask: (B, H, W) bool, True on the image and False on padding; None means no padding. At
            least one cell of the coarsest map must be left, or that image's answers are undefined.

    Returns:
        Logits (B, queries, num_classes + 1), the last class being "no object", and boxes
        (B, queries, 4) as centre x, centre y, width and height in 0..1 of the padded image.
    """

    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = ConvBackbone(config.channels, config.widths)
        self.reduce = nn.Conv2d(config.widths[-1], config.dim, 1)
        self.queries = nn.Parameter(torch.randn(config.queries, config.dim))
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.classes = nn.Linear(config.dim, config.num_classes + 1)
        self.boxes = nn.Sequential(
            nn.Linear(config.dim, config.dim), nn.ReLU(),
            nn.Linear(config.dim, config.dim), nn.ReLU(),
            nn.Linear(config.dim, 4), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, image: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.reduce(self.backbone(image)[-1])  # (B, D, height, width)
        mask = torch.ones_like(image[:, 0], dtype=torch.bool) if mask is None else mask
        mask = halve_mask(mask, times=len(self.config.widths) + 1)  # (B, height, width)
        positions = sine_positions(mask, self.config.dim, x.dtype).flatten(2).mT  # (B, T, D)
        padding = ~mask.flatten(1)  # (B, T)
        memory = x.flatten(2).mT  # (B, T, D)
        for layer in self.encoder:
            memory = layer(memory, positions, padding)
        queries = self.queries.expand(image.shape[0], -1, -1)  # (B, S, D)
        y = torch.zeros_like(queries)
        for layer in self.decoder:
            y = layer(y, queries, memory, positions, padding)
        y = self.norm(y)
        return self.classes(y), self.boxes(y)


def padded_images(
    generator: torch.Generator, sizes: Mapping[str, int], masked: bool
) -> dict[str, Tensor]:
    """Images with a mask. Masked, each image has its own size in the batch, and a hole."""
    B, height, width = sizes["batch"], sizes["height"], sizes["width"]
    image = torch.rand(B, 3, height, width, generator=generator)
    mask = torch.ones(B, height, width, dtype=torch.bool)
    if masked:
        kept = 0.6 + 0.4 * torch.rand(B, 2, generator=generator)
        for row, (down, across) in enumerate(kept.tolist()):
            mask[row, int(down * height) :] = False
            mask[row, :, int(across * width) :] = False
        mask[:, height // 4 : height // 2, width // 4 : width // 2] = False
        image = image * mask.unsqueeze(1)
    return {"image": image, "mask": mask}


def padded_image_axes(smallest: int) -> dict[str, dict[int, Axis]]:
    batch, height, width = (
        Axis("batch", 1, 64),
        Axis("height", smallest, 1024),
        Axis("width", smallest, 1024),
    )
    return {"image": {0: batch, 2: height, 3: width}, "mask": {0: batch, 1: height, 2: width}}


def detr() -> ExportSpec:
    """DETR with random weights, on 256x224 images of which one is padded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Detr(DetrConfig()).eval()
    sizes = {"batch": 2, "height": 256, "width": 224}
    return ExportSpec(
        module=module,
        inputs=padded_images(torch.Generator().manual_seed(0), sizes, True),
        dynamic=padded_image_axes(smallest=64),
        outputs=("logits", "boxes"),
        draw=padded_images,
        preprocess={"image": {**unit(256, 224, fit="letterbox", align="corner"), "mask": "mask"}},
        postprocess={
            "kind": "detect",
            "form": "queries",
            "boxes": "boxes",
            "box": "cxcywh",
            "units": "image",
            "activation": "softmax",
            "background": "last",
        },
    )
