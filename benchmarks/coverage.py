"""How much of a model's attention each tool fuses, and whether its fused model is still right.

    python benchmarks/coverage.py [--models NAME...] [--models-from FILE.py] [--json FILE]

Tools, on the same traced program: this one (`auto`, each target); PyTorch's exporter at opset 23;
onnxscript.rewriter.ort_fusions at opset 18; onnxruntime.transformers at opset 18 and, from
TorchScript, at 17, the better of the two. A fused model is run on ONNX Runtime's CPU on the cases
that a bundle stores (batch 1 and 3, other lengths, masks with holes), and is wrong where it
differs from PyTorch by 100 times what a bundle allows, which rounding never does.

FILE.py has FACTORIES, a mapping of names to factories that are also its attributes, and may have
MODEL_TYPES, the families that onnxruntime.transformers knows. By default the models of
tests/zoo/catalogue.py, which are those of the transformers package with random weights.
Each model has its own process; a tool that ends it is reported as crashed, and the others follow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("attn-export", "exporter", "onnxscript", "onnxruntime")
PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime")
LIMIT = 900.0  # seconds that one model may take


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", help="some of them; all by default")
    parser.add_argument("--models-from", type=Path, default=ROOT / "tests/zoo/catalogue.py")
    parser.add_argument("--targets", default="cpu", help="comma-separated; cpu by default")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    args = parser.parse_args()
    console, rows = Console(stderr=True), {}
    file = str(args.models_from.resolve())
    for name in args.models or names(file):
        rows[name] = measure(file, name, args.targets)
        console.print(f"{name}: {', '.join(cell(rows[name].get(t)) for t in TOOLS)}")
        if args.json:  # a long run that is broken off has shown something
            args.json.write_text(json.dumps({"versions": versions(), "models": rows}, indent=1))
    Console(width=160).print(table(rows))
    if args.markdown:
        args.markdown.write_text(markdown(rows))


def names(file: str) -> list[str]:
    """The factories of a file, asked for in a process of its own."""
    code = "import runpy, sys; print(*runpy.run_path(sys.argv[1])['FACTORIES'])"
    command = [sys.executable, "-c", code, file]
    ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return ended.stdout.split()


def measure(file: str, name: str, targets: str) -> dict[str, Any]:
    """Run the worker until it has an answer of every tool."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        found: dict[str, Any] = {}
        for _ in TOOLS:
            worker = [sys.executable, "-m", "benchmarks.coverage_worker"]
            command = [*worker, file, name, targets, folder]
            try:
                ended = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
                )
                problem = f"crashed: exit {ended.returncode} {last_line(ended.stderr)}"
            except subprocess.TimeoutExpired:
                problem = f"stopped after {LIMIT:.0f} s"
            found = json.loads(result.read_text()) if result.exists() else {}
            running = found.pop("running", None)
            if running is None:
                break
            found[running] = {"problem": problem}
            result.write_text(json.dumps(found))
        return found or {tool: {"problem": problem} for tool in TOOLS}


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def cell(found: dict[str, Any] | None) -> str:
    """`3 of 4`, with what is wrong behind it."""
    if found is None:
        return "-"
    if "problem" in found:
        return "crashed" if found["problem"].startswith("crashed") else "failed"
    text = f"{found['fused']} of {found['total']}"
    return text if not found["wrong"] else f"{text}, {found['wrong'].split(':')[0]}"


def lowered_to(found: dict[str, Any] | None) -> str:
    """`ai.onnx.Attention 2`, for each target where there are several."""
    if found is None or "targets" not in found:
        return ""
    parts = []
    for target, row in found["targets"].items():
        ops = ", ".join(f"{op.split('.')[-1]} {n}" for op, n in row["ops"].items())
        parts.append(f"{target}: {ops}" if len(found["targets"]) > 1 else ops)
    return "; ".join(parts)


HEADER = ("model", "sites", "found", "lowered", "proved", "to", "explained", "parity", "seconds",
          *TOOLS[1:])  # fmt: skip


def line(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    ours = row.get(TOOLS[0])
    peers = tuple(cell(row.get(tool)) for tool in TOOLS[1:])
    if ours is None or "problem" in ours:
        return (name, "", "", "", "", "", cell(ours), "", "", *peers)
    return (
        name, str(ours["total"]), str(ours["found"]), str(ours["fused"]), str(ours["proved"]),
        lowered_to(ours), "; ".join(ours["reasons"]), ours["wrong"] or "yes",
        f"{ours['export_s']:.1f} + {ours['lower_s']:.1f}", *peers,
    )  # fmt: skip


def totals(rows: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    def add(tool: str, key: str) -> int:
        return sum(row.get(tool, {}).get(key, 0) for row in rows.values())

    wrong = {tool: sum(bool(r.get(tool, {}).get("wrong")) for r in rows.values()) for tool in TOOLS}
    ours = [str(add(TOOLS[0], key)) for key in ("total", "found", "fused", "proved")]
    peers = (f"{add(tool, 'fused')} fused, {wrong[tool]} wrong" for tool in TOOLS[1:])
    return ("all", *ours, "", "", f"{wrong[TOOLS[0]]} wrong", "", *peers)


def table(rows: dict[str, dict[str, Any]]) -> Table:
    made = Table(*HEADER, title=", ".join(f"{k} {v}" for k, v in versions().items()))
    for name, row in rows.items():
        made.add_row(*line(name, row))
    made.add_section()
    made.add_row(*totals(rows))
    return made


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *(line(n, row) for n, row in rows.items())]
    text = ["| " + " | ".join(part) + " |" for part in [*lines, totals(rows)]]
    return "\n".join(text) + "\n"


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except ImportError:  # PackageNotFoundError: not installed
            continue
    return found


if __name__ == "__main__":
    main()
