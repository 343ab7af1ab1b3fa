"""Train `vit-digits` on the UCI handwritten digits (8x8 pixels) that scikit-learn ships.

Writes the weights and the held-out digits that the package carries. About five minutes on two
cores: `python examples/train_vit_digits.py`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from attn_export.models.vit import ViT
from attn_export.models.vit_digits import CONFIG, WEIGHTS

BATCH, PEAK_RATE, WEIGHT_DECAY = 128, 2e-3, 0.05


def augment(images: Tensor) -> Tensor:
    """Rotate, scale and shift each image (B, 1, 8, 8) a little, so that 1,437 digits suffice."""
    B = images.shape[0]
    angle = (torch.rand(B) * 2 - 1) * math.radians(15)
    scale = 1 + (torch.rand(B) * 2 - 1) * 0.12
    shift = (torch.rand(B, 2) * 2 - 1) * 0.25  # in units of half the image: one pixel
    theta = torch.zeros(B, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = angle.cos() * scale
    theta[:, 0, 1], theta[:, 1, 0] = -angle.sin() * scale, angle.sin() * scale
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return (moved + torch.randn_like(moved) * 0.03).clamp(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.tensor(part) for part in split)
    train_x = train_x.float().view(-1, 1, 8, 8) / 16
    test_raw = test_x.to(torch.uint8).view(-1, 8, 8)
    test_x = test_raw.float().unsqueeze(1) / 16

    model = ViT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=WEIGHT_DECAY)
    steps = args.epochs * math.ceil(len(train_x) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    for _ in track(range(args.epochs), "training"):
        model.train()
        for index in torch.randperm(len(train_x)).split(BATCH):
            logits = model(augment(train_x[index]))
            loss = F.cross_entropy(logits, train_y[index], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    model.eval()
    with torch.inference_mode():
        accuracy = (model(test_x).argmax(-1) == test_y).float().mean().item()
    print(f"held-out accuracy {accuracy:.4f} on {len(test_y)} digits")
    WEIGHTS.mkdir(exist_ok=True)
    save_file(model.state_dict(), Path(WEIGHTS, "vit_digits.safetensors"))
    heldout = {"images": test_raw.contiguous(), "labels": test_y.to(torch.int64)}
    save_file(heldout, Path(WEIGHTS, "vit_digits_heldout.safetensors"))


if __name__ == "__main__":
    main()
