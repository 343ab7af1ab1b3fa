"""`cross-unet`: one text-conditioned U-Net stage of a latent diffusion model.

"High-Resolution Image Synthesis with Latent Diffusion Models" (Rombach et al., 2021): a residual
block that knows the time step, then a transformer whose pixels attend to one another and to the
prompt's tokens, then half the resolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.attention.rotary import rotary_angles
from attn_export.models.spec import Axis, ExportSpec


@dataclass(frozen=True)
class CrossUNetConfig:
    in_channels: int = 32
    channels: int = 64
    prompt_dim: int = 48
    heads: int = 4
    layers: int = 2
    groups: int = 8

    def __post_init__(self) -> None:
        if self.channels % self.heads:
            raise ValueError(f"channels {self.channels} is not a multiple of heads {self.heads}")
        if self.channels % self.groups or self.in_channels % self.groups:
            raise ValueError(
                f"channels {self.in_channels} and {self.channels} must be multiples of "
                f"groups {self.groups}"
            )
        if self.channels % 2:
            raise ValueError(f"the time embedding needs even channels, not {self.channels}")


class ResBlock(nn.Module):
    """Two convolutions with the time embedding (B, time_dim) added between them."""

    def __init__(self, inputs: int, outputs: int, time_dim: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_dim, outputs)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))  # (B, C, height, width)
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        out: Tensor = y + self.skip(x)
        return out


class Attention(nn.Module):
    """Pixels (B, S, C) attend to a context (B, T, Dc): themselves or the prompt."""

    def __init__(self, channels: int, context_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(channels, channels, bias=False)
        self.key = nn.Linear(context_dim, channels, bias=False)
        self.value = nn.Linear(context_dim, channels, bias=False)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        sizes = (self.heads, -1)
        q = self.query(x).unflatten(-1, sizes).transpose(1, 2)  # (B, N, S, H)
        k = self.key(context).unflatten(-1, sizes).transpose(1, 2)  # (B, N, T, H)
        v = self.value(context).unflatten(-1, sizes).transpose(1, 2)  # (B, N, T, H)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, N, S, H)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))  # (B, S, C)
        return out


class GEGLU(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.Linear(channels, 8 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.up(x).chunk(2, dim=-1)  # each (B, S, 4C)
        out: Tensor = self.down(y * F.gelu(gate))
        return out


class SpatialTransformer(nn.Module):
    def __init__(self, config: CrossUNetConfig) -> None:
        super().__init__()
        C = config.channels
        self.norm = nn.GroupNorm(config.groups, C, eps=1e-6)
        self.proj_in = nn.Conv2d(C, C, 1)
        self.norm1, self.self_attention = nn.LayerNorm(C), Attention(C, C, config.heads)
        self.norm2 = nn.LayerNorm(C)
        self.cross_attention = Attention(C, config.prompt_dim, config.heads)
        self.norm3, self.mlp = nn.LayerNorm(C), GEGLU(C)
        self.proj_out = nn.Conv2d(C, C, 1)

    def forward(self, image: Tensor, prompt: Tensor, mask: Tensor) -> Tensor:
        """Image (B, C, height, width), prompt (B, T, Dc), bool mask (B, 1, 1, T)."""
        x = self.proj_in(self.norm(image))  # (B, C, height, width)
        x = x.flatten(2).transpose(1, 2)  # (B, S, C), S = height * width
        pixels = self.norm1(x)
        x = x + self.self_attention(pixels, pixels)
        x = x + self.cross_attention(self.norm2(x), prompt, mask)
        x = x + self.mlp(self.norm3(x))
        x = x.transpose(1, 2).unflatten(2, image.shape[2:])  # (B, C, height, width)
        out: Tensor = image + self.proj_out(x)
        return out


class CrossUNetStage(nn.Module):
    def __init__(self, config: CrossUNetConfig) -> None:
        super().__init__()
        C, time_dim = config.channels, 4 * config.channels
        self.config = config
        self.time = nn.Sequential(nn.Linear(C, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        inputs = [config.in_channels] + [C] * (config.layers - 1)
        self.residuals = nn.ModuleList(ResBlock(n, C, time_dim, config.groups) for n in inputs)
        self.transformers = nn.ModuleList(SpatialTransformer(config) for _ in inputs)
        self.down = nn.Conv2d(C, C, 3, stride=2, padding=1)

    def forward(
        self, latent: Tensor, timestep: Tensor, prompt: Tensor, prompt_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One stage on the way down.

        Args:
            latent: (B, in_channels, height, width).
            timestep: int64 (B,).
            prompt: token embeddings (B, T, prompt_dim).
            prompt_mask: int64 (B, T), 0 for padding. A prompt that is all padding adds nothing
                but the projection's bias.

        Returns the skip connection (B, C, height, width) and the next stage's input, at half
        the height and width (rounded up).
        """
        mask = prompt_mask.bool()[:, None, None, :]  # (B, 1, 1, T)
        cos, sin = rotary_angles(timestep, self.config.channels, 10000.0, latent.dtype)
        time = self.time(torch.cat([cos, sin], dim=-1))  # (B, 4C), sinusoids of the time step
        x = latent
        for residual, transformer in zip(self.residuals, self.transformers, strict=True):
            x = residual(x, time)  # (B, C, height, width)
            x = transformer(x, prompt, mask)
        return x, self.down(x)


BATCH, WORDS = Axis("batch", 1, 16), Axis("words", 1, 77)
HEIGHT, WIDTH = Axis("height", 4, 64), Axis("width", 4, 64)


def cross_unet() -> ExportSpec:
    """A stage with seeded random weights: `skip` and `down` from a latent and a prompt."""
    config = CrossUNetConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CrossUNetStage(config).eval()

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> dict[str, Tensor]:
        B, T = sizes["batch"], sizes["words"]
        image = (B, config.in_channels, sizes["height"], sizes["width"])
        mask = torch.rand(B, T, generator=g) > (0.3 if masked else -1.0)
        mask[:, 0] = True  # a prompt has at least its start token
        return {
            "latent": torch.randn(image, generator=g),
            "timestep": torch.randint(1000, (B,), generator=g),
            "prompt": torch.randn(B, T, config.prompt_dim, generator=g),
            "prompt_mask": mask.long(),
        }

    example = {"batch": 2, "words": 7, "height": 8, "width": 12}
    return ExportSpec(
        module=model,
        inputs=draw(torch.Generator().manual_seed(0), example, False),
        dynamic={
            "latent": {0: BATCH, 2: HEIGHT, 3: WIDTH},
            "timestep": {0: BATCH},
            "prompt": {0: BATCH, 1: WORDS},
            "prompt_mask": {0: BATCH, 1: WORDS},
        },
        outputs=("skip", "down"),
        draw=draw,
    )
