"""Small models whose graphs are broken on purpose; each factory is a source."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.decoder_lm import DecoderLMConfig, components
from attn_export.models.spec import Axis, ExportSpec, Group

BATCH, LENGTH = Axis("batch", 1, 8), Axis("length", 1, 64)


class Block(nn.Module):
    """Pre-norm attention and MLP; queries are grouped where `kv_heads` is smaller."""

    def __init__(
        self, dim: int = 16, heads: int = 4, kv_heads: int = 4, causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        size = dim // heads
        self.query, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key, self.value = nn.Linear(dim, kv_heads * size), nn.Linear(dim, kv_heads * size)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        y = self.norm1(x)
        z = y if memory is None else memory
        q, k, v = (
            layer(t).unflatten(2, (heads, -1)).transpose(1, 2)
            for layer, t, heads in (
                (self.query, y, self.heads),
                (self.key, z, self.kv_heads),
                (self.value, z, self.kv_heads),
            )
        )
        grouped = self.kv_heads != self.heads
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=grouped)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def seeded(module: nn.Module) -> nn.Module:
    """Weights, biases and norms that matter, none of them 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + scale * noise)
    return module.eval()


class TextEncoder(nn.Module):
    """Token ids (B, S) and a mask (B, S) to states (B, S, D); padding is only masked as keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask.bool()[:, None, None, :].expand(-1, 1, x.shape[1], -1))
        out: Tensor = self.norm(x)
        return out


def text_encoder() -> ExportSpec:
    inputs = {
        "input_ids": torch.arange(10).view(2, 5),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]]),
    }
    dynamic = {name: {0: BATCH, 1: LENGTH} for name in inputs}
    return ExportSpec(seeded(TextEncoder()), inputs, dynamic, ("states",))


def _tokens(module: nn.Module, **masks: Tensor) -> ExportSpec:
    inputs = {"x": torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1)), **masks}
    dynamic = {name: {0: BATCH, 1: LENGTH} for name in inputs}
    return ExportSpec(seeded(module), inputs, dynamic, ("y",))


def causal() -> ExportSpec:
    return _tokens(Block(causal=True))


def grouped() -> ExportSpec:
    return _tokens(Block(kv_heads=2))


class Cross(nn.Module):
    """Queries (B, S, D) over a memory (B, T, D), causal from the upper left where S != T."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.block = Block(causal=causal)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.block(x, None, memory)
        return out


def _cross(causal: bool) -> ExportSpec:
    generator = torch.Generator().manual_seed(2)
    sizes = {"x": 4, "memory": 7}
    inputs = {name: torch.randn(2, size, 16, generator=generator) for name, size in sizes.items()}
    dynamic = {name: {0: BATCH, 1: Axis(f"{name}_length", 1, 64)} for name in inputs}
    return ExportSpec(seeded(Cross(causal)), inputs, dynamic, ("y",))


def cross() -> ExportSpec:
    return _cross(False)


def cross_causal() -> ExportSpec:
    return _cross(True)


class ByHand(nn.Module):
    """softcap(q k^T / sqrt(H)) with a causal window of 3 tokens, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, 4, 4).permute(2, 0, 3, 1, 4)
        scores = 1.5 * torch.tanh(q @ k.transpose(2, 3) * 0.7 / 1.5)
        back = torch.arange(S)[:, None] - torch.arange(S)[None, :]
        scores = scores.masked_fill((back < 0) | (back > 2), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, 16)


def by_hand() -> ExportSpec:
    return _tokens(ByHand())


class Windows(nn.Module):
    """Windows of 2x2 of a map (B, 16, C), shifted by one, with a bias for each offset and head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.zeros(9, 4))
        y, x = torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")
        place = torch.stack([y.flatten(), x.flatten()])
        offset = place[:, :, None] - place[:, None, :] + 1
        self.register_buffer("index", offset[0] * 3 + offset[1])
        region = torch.tensor([0, 0, 0, 1])
        image = (region[:, None] * 2 + region[None, :]).roll((-1, -1), (0, 1))
        windows = image.view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)
        self.register_buffer("apart", windows[:, :, None] != windows[:, None, :])

    def forward(self, x: Tensor) -> Tensor:
        B = x.shape[0]
        x = x.view(B, 4, 4, 16).roll((-1, -1), (1, 2))
        x = x.view(B, 2, 2, 2, 2, 16).permute(0, 1, 3, 2, 4, 5).reshape(B * 4, 4, 16)
        q, k, v = self.qkv(x).view(-1, 4, 3, 4, 4).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.index].permute(2, 0, 1)
        mask = torch.where(self.apart, -100.0, 0.0)[None, :, None] + bias
        y = F.scaled_dot_product_attention(q, k, v, mask.expand(B, -1, -1, -1, -1).flatten(0, 1))
        y = y.transpose(1, 2).reshape(B, 2, 2, 2, 2, 16).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(B, 4, 4, 16).roll((1, 1), (1, 2)).reshape(B, 16, 16)


def windows() -> ExportSpec:
    inputs = {"x": torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3))}
    return ExportSpec(seeded(Windows()), inputs, {"x": {0: BATCH}}, ("y",))


class Linear(nn.Module):
    """elu(x) + 1 as a feature map ("Transformers are RNNs", Katharopoulos et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        weights = q @ k.transpose(1, 2)
        return (weights @ v) / weights.sum(-1, keepdim=True)


def linear() -> ExportSpec:
    return _tokens(Linear())


class Detector(nn.Module):
    """Boxes in pixels beside scores in 0..1, for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.boxes, self.scores = nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return torch.cat([640 * self.boxes(x).sigmoid(), self.scores(x).sigmoid()], dim=-1)


def detector() -> ExportSpec:
    spec = _tokens(Detector())
    spec.groups["y"] = (Group("boxes", 2, 0, 4), Group("scores", 2, 4, 6))
    return spec


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.head(self.block(x).mean(1))
        return logits, logits.argmax(-1), logits.topk(3).indices


def classifier() -> ExportSpec:
    spec = _tokens(Classifier())
    spec.outputs = ("logits", "label", "best")
    spec.compare = {"label": "index:logits", "best": "index:logits"}
    return spec


class Sampled(nn.Module):
    """One query point a token, sampled from a map (B, C, H, W): half of deformable attention."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Linear(16, 8)
        self.weights = nn.Linear(16, 4)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        B, S, _ = x.shape
        grid = self.points(x).view(B, S, 4, 2)
        values = F.grid_sample(image, grid, align_corners=False)  # (B, C, S, 4)
        return (values * self.weights(x).softmax(-1)[:, None]).sum(-1).transpose(1, 2)


def sampled() -> ExportSpec:
    generator = torch.Generator().manual_seed(4)
    inputs = {
        "x": torch.randn(2, 9, 16, generator=generator),
        "image": torch.randn(2, 3, 6, 5, generator=generator),
    }
    dynamic = {"x": {0: BATCH, 1: LENGTH}, "image": {0: BATCH}}
    return ExportSpec(seeded(Sampled()), inputs, dynamic, ("y",))


def decode() -> ExportSpec:
    """One step of a decoder with grouped queries, rotary positions and a cache."""
    config = DecoderLMConfig(vocab=32, dim=16, layers=1, heads=4, kv_heads=2, hidden=16)
    return components(config)["decode"]


def prefill() -> ExportSpec:
    """All tokens at once, of a decoder with a window."""
    config = DecoderLMConfig(vocab=32, dim=16, layers=2, heads=2, kv_heads=1, hidden=16, window=3)
    return components(config)["prefill"]


class PrePost(nn.Module):
    """An encoder layer of PyTorch's own, post-norm, with a padding mask of True for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.layer(x, src_key_padding_mask=padding)
        return out


def pre_post() -> ExportSpec:
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    return _tokens(PrePost(), padding=padding)


FACTORIES: Mapping[str, object] = {
    made.__name__: made
    for made in (
        text_encoder, causal, grouped, cross, cross_causal, by_hand, windows, linear, detector,
        classifier, sampled, decode,
    )
}  # fmt: skip
