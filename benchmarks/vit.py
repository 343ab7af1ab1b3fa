"""ViT-tiny at 224 pixels, batch 1: each lowering on ONNX Runtime's CPU against PyTorch eager.

    python benchmarks/vit.py [--seconds 10] [--json FILE]

Each runtime runs in its own process, and is timed only if its answers are PyTorch's. Ratios are
medians over PyTorch's of the same run: below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from attn_export import benchmark, export
from attn_export.cli.bench_tables import bench_table
from attn_export.models.vit import ViT, ViTConfig

LOWERINGS = ("auto", "standard", "decomposed")


def vit_tiny() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Seeded random weights: speed does not depend on them."""
    torch.manual_seed(0)
    return ViT(ViTConfig()).eval(), {"image": torch.randn(2, 3, 224, 224)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="timed seconds a runtime")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    console, found = Console(width=132), {}
    with tempfile.TemporaryDirectory() as folder:
        for lowering in LOWERINGS:
            bundle = Path(folder, lowering)
            export(f"{__file__}:vit_tiny", bundle, lowering=lowering)
            result = benchmark(bundle, seconds=args.seconds)
            found[lowering] = result.to_json()
            console.rule(f"--lowering {lowering}")
            console.print(bench_table(result))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
