"""A small real-time detector in the style of YOLO26: convolutions, attention on the coarsest map.

Self-attention is quadratic in the number of positions, so it runs on the stride-32 map only: 400
positions of a 640x640 image, 160,000 pairs, where the stride-8 map would make 40,960,000. The head
is trained one-to-one ("YOLOv10", Wang et al., 2024), so that its best boxes need no suppression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.models.detector_blocks import C2PSA, SPPF, C3k2, attention_bottleneck, conv
from attn_export.models.digit_scenes import texture
from attn_export.models.preparing import letterbox
from attn_export.models.spec import Axis, Draw, ExportSpec, Group

STRIDES = (8, 16, 32)
BOX_START = 2.0  # a cell starts with about two strides to each side of its box
SCORE_START = -4.6  # and with a score of 0.01, since nearly all cells hold nothing
DETECTION_GROUPS = (Group("box", 2, 0, 4), Group("score", 2, 4, 5), Group("class", 2, 5, 6))


@dataclass(frozen=True)
class DetectorConfig:
    """widths: channels at strides 2, 4, 8, 16 and 32."""

    num_classes: int = 80
    channels: int = 3
    widths: tuple[int, int, int, int, int] = (16, 32, 64, 128, 256)
    depth: int = 1
    head_dim: int = 64
    max_detections: int = 300

    def __post_init__(self) -> None:
        if len(self.widths) != 5:
            raise ValueError(f"widths has {len(self.widths)} entries, one for each stride needs 5")
        if any(width % 4 for width in self.widths) or self.widths[-1] % 128:
            raise ValueError(
                f"widths {self.widths} are not multiples of 4, the last of 128: half of its "
                "channels pass through attention, a head for each 64"
            )
        if min(self.num_classes, self.depth, self.head_dim, self.max_detections) < 1:
            raise ValueError("num_classes, depth, head_dim and max_detections are not all positive")


class Backbone(nn.Module):
    """Images (B, C, H, W) to maps at strides 8, 16 and 32."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        w2, w4, w8, w16, w32 = config.widths
        self.stem = nn.Sequential(
            conv(config.channels, w2, kernel=3, stride=2),
            conv(w2, w4, kernel=3, stride=2),
            C3k2(w4, w4, config.depth),
        )
        self.stage8 = self.stage(w4, w8, config.depth)
        self.stage16 = self.stage(w8, w16, config.depth)
        self.stage32 = nn.Sequential(
            *self.stage(w16, w32, config.depth), SPPF(w32), C2PSA(w32, config.depth)
        )

    @staticmethod
    def stage(in_dim: int, out_dim: int, depth: int) -> nn.Sequential:
        return nn.Sequential(
            conv(in_dim, out_dim, kernel=3, stride=2), C3k2(out_dim, out_dim, depth)
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p8 = self.stage8(self.stem(image))
        p16 = self.stage16(p8)
        p32 = self.stage32(p16)
        return p8, p16, p32


def upsample_to(x: Tensor, like: Tensor) -> Tensor:
    """Nearest neighbours to the other map's size, so that sides need not be multiples of 32."""
    return F.interpolate(x, size=like.shape[-2:], mode="nearest")


class Neck(nn.Module):
    """Coarse to fine, then fine to coarse ("Path Aggregation Network", Liu et al., 2018)."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        w8, w16, w32 = config.widths[2:]
        self.up16 = C3k2(w32 + w16, w16, config.depth)
        self.up8 = C3k2(w16 + w8, w8, config.depth)
        self.shrink16 = conv(w8, w8, kernel=3, stride=2)
        self.down16 = C3k2(w8 + w16, w16, config.depth)
        self.shrink32 = conv(w16, w16, kernel=3, stride=2)
        self.down32 = C3k2(w16 + w32, w32, config.depth, block=attention_bottleneck)

    def forward(self, maps: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        p8, p16, p32 = maps
        p16 = self.up16(torch.cat([upsample_to(p32, p16), p16], dim=1))
        p8 = self.up8(torch.cat([upsample_to(p16, p8), p8], dim=1))
        p16 = self.down16(torch.cat([self.shrink16(p8), p16], dim=1))
        p32 = self.down32(torch.cat([self.shrink32(p16), p32], dim=1))
        return p8, p16, p32


def anchor_points(maps: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Centres (A, 2) as x, y in pixels and strides (A, 1) of the cells of all maps."""
    points, strides = [], []
    for stride, fmap in zip(STRIDES, maps, strict=True):
        height, width = fmap.shape[-2:]
        y = torch.arange(height, device=fmap.device, dtype=fmap.dtype) + 0.5
        x = torch.arange(width, device=fmap.device, dtype=fmap.dtype) + 0.5
        yy, xx = torch.meshgrid(y, x, indexing="ij")
        points.append(torch.stack([xx, yy], dim=-1).flatten(0, 1) * stride)
        strides.append(torch.full_like(points[-1][:, :1], stride))
    return torch.cat(points), torch.cat(strides)


def last_layer(in_dim: int, out_dim: int, bias: float) -> nn.Conv2d:
    layer = nn.Conv2d(in_dim, out_dim, 1)
    layer.bias = nn.Parameter(torch.full((out_dim,), bias))
    return layer


class Head(nn.Module):
    """At each cell a box, as distances to its four sides in strides, and a logit for each class.

    Returns boxes (B, A, 4) as x1, y1, x2, y2 in pixels and logits (B, A, num_classes).
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        dim = config.head_dim
        self.box = nn.ModuleList(
            nn.Sequential(
                conv(width, dim, kernel=3), conv(dim, dim, kernel=3), last_layer(dim, 4, BOX_START)
            )
            for width in config.widths[2:]
        )
        self.score = nn.ModuleList(
            nn.Sequential(
                conv(width, width, kernel=3, groups=width),
                conv(width, dim),
                conv(dim, dim, kernel=3, groups=dim),
                conv(dim, dim),
                last_layer(dim, config.num_classes, SCORE_START),
            )
            for width in config.widths[2:]
        )

    def forward(self, maps: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        distances = torch.cat(
            [box(x).flatten(2) for box, x in zip(self.box, maps, strict=True)], dim=2
        )  # (B, 4, A)
        logits = torch.cat(
            [score(x).flatten(2) for score, x in zip(self.score, maps, strict=True)], dim=2
        )  # (B, num_classes, A)
        points, strides = anchor_points(maps)  # (A, 2), (A, 1)
        left_top, right_bottom = (F.softplus(distances).mT * strides).chunk(2, dim=-1)
        boxes = torch.cat([points - left_top, points + right_bottom], dim=-1)  # (B, A, 4)
        return boxes, logits.mT


def top_detections(boxes: Tensor, logits: Tensor, count: int) -> Tensor:
    """The `count` best pairs of a cell and a class: (B, count, 6), best first.

    They are ranked by logits, which still differ where scores have all rounded to 1.
    """
    num_classes = logits.shape[-1]
    best, index = logits.flatten(1).topk(count)  # (B, count)
    cell = index // num_classes
    label = (index - cell * num_classes).to(boxes.dtype)
    boxes = boxes.gather(1, cell.unsqueeze(-1).expand(-1, -1, 4))  # (B, count, 4)
    return torch.cat([boxes, best.sigmoid().unsqueeze(-1), label.unsqueeze(-1)], dim=-1)


class Detector(nn.Module):
    """Images (B, C, H, W), values 0..1, to detections (B, max_detections, 6).

    A detection is x1, y1, x2, y2 in pixels, score and class, best score first; there are always
    max_detections of them, so callers keep those above a score. Sides may be of any size for which
    there are max_detections pairs of a cell and a class; multiples of 32 waste no border.
    Dtype float32; float64 and half precision follow the module.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.neck = Neck(config)
        self.head = Head(config)

    def features(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps at strides 8, 16 and 32 that a head reads; an auxiliary head may be trained too."""
        maps: tuple[Tensor, Tensor, Tensor] = self.neck(self.backbone(image))
        return maps

    def forward(self, image: Tensor) -> Tensor:
        boxes, logits = self.head(self.features(image))
        return top_detections(boxes, logits, self.config.max_detections)


def textures(
    generator: torch.Generator, sizes: Mapping[str, int], masked: bool
) -> dict[str, Tensor]:
    images = [texture(sizes["height"], sizes["width"], generator) for _ in range(sizes["batch"])]
    return {"image": torch.stack(images)}


def detector_spec(module: Detector, draw: Draw, height: int, width: int) -> ExportSpec:
    """The facts that every detector shares; images are dynamic in batch, height and width."""
    sizes = {"batch": 2, "height": height, "width": width}
    axes = {0: Axis("batch", 1, 64), 2: Axis("height", 128, 1280), 3: Axis("width", 128, 1280)}
    return ExportSpec(
        module=module.eval(),
        inputs=draw(torch.Generator().manual_seed(0), sizes, False),
        dynamic={"image": axes},
        outputs=("detections",),
        draw=draw,
        compare={"detections": "detections"},
        groups={"detections": DETECTION_GROUPS},
        preprocess={"image": letterbox(height, width)},
        postprocess={"kind": "detect"},
    )


def detector() -> ExportSpec:
    """The detector of 80 classes with random weights, on 640x640 images.

    An untrained head scores all cells nearly alike. Its last layers are scaled up, so that the
    order of the detections does not hang on rounding.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Detector(DetectorConfig())
    with torch.no_grad():
        for layer in module.head.score.modules():
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                layer.weight.mul_(100)
    return detector_spec(module, textures, height=640, width=640)
