"""What find, lower and prove cost beyond PyTorch's own export: seconds and resident memory.

    python -m benchmarks.lowering_cost [--json FILE]

ViT-tiny has 12 blocks. The large model has 13 blocks of width 1,280, which is 976 MB of weights;
the packed op merges a quarter of them, which it must hold beside the model's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from attn_export.attention.lowering import lower
from attn_export.cli.plain_table import plain_table
from attn_export.exporting.exporter import to_onnx
from attn_export.models.spec import Axis, ExportSpec
from attn_export.models.vit import vit
from attn_export.parity.drawing import sizes_of

WIDTH, HEADS, BLOCKS = 1280, 16, 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, 2)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def large() -> ExportSpec:
    axes = {0: Axis("batch", 1, 8), 1: Axis("tokens", 2, 64)}
    module = nn.Sequential(*(Block() for _ in range(BLOCKS))).eval()
    return ExportSpec(module, {"input": torch.randn(2, 5, WIDTH)}, {"input": axes}, ("y",))


def resident_mb() -> float:
    """Resident memory of this process in MB (proc(5), statm)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def peak_mb() -> Iterator[list[float]]:
    """The largest resident memory within, read every 20 ms."""
    peak, done = [resident_mb()], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], resident_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def cost(build: Callable[[], ExportSpec]) -> dict[str, Any]:
    """One model, in this process."""
    spec = build()
    weights = sum(p.numel() * p.element_size() for p in spec.module.parameters()) / 2**20
    start = time.perf_counter()
    graph = to_onnx(spec)
    exported, before = time.perf_counter(), resident_mb()
    spent = time.process_time()
    with peak_mb() as peak:
        account = lower(graph.model, "ort-cpu", sizes_of(graph.spec))
    return {
        "weights_mb": weights,
        "export_s": exported - start,
        "lower_s": time.perf_counter() - exported,
        "lower_cpu_s": time.process_time() - spent,
        "before_mb": before,
        "peak_mb": peak[0],
        "after_mb": resident_mb(),
        "sites": account.total,
        "lowered": account.lowered,
    }


MODELS: dict[str, Callable[[], ExportSpec]] = {"ViT-tiny": vit, "976 MB": large}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", choices=MODELS, help="this model in this process, as JSON")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(cost(MODELS[args.one])))
        return
    rows = {}
    for name in MODELS:
        # A process each: what one model leaves behind is not the other's.
        command = [sys.executable, "-m", "benchmarks.lowering_cost", "--one", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows[name] = json.loads(done.stdout)
    numbers = tuple(next(iter(rows.values())))
    table = plain_table("find, lower and prove for ort-cpu", "model", *numbers, right=numbers)
    for name, row in rows.items():
        table.add_row(name, *(f"{value:,.1f}" for value in row.values()))
    Console(width=132).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
