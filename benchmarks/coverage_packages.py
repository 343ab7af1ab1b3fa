"""What becomes of the models of timm, torchvision and ultralytics: sites, lowering, parity, time.

    python benchmarks/coverage_packages.py [NAME...] --json FILE [--markdown FILE]

It needs the environment of `make test-zoo`. NAME is a factory of tests/zoo_packages/catalogue.py,
or its beginning with a * behind it; all by default. Rows that the JSON file holds already are kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attn_export.errors import AttnExportError
from attn_export.pipeline import Options, export_and_verify
from tests.zoo_packages.catalogue import FACTORIES

PLACE = "tests.zoo_packages.catalogue"
PACKAGES = ("torch", "torchvision", "timm", "ultralytics", "transformers", "onnxruntime-gpu")
HEADER = "| model | sites | recognised | lowered to | refused | others | parity | seconds |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["*"])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    rows = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in [n for n in FACTORIES if any(fnmatch(n, wanted) for wanted in args.names)]:
        rows[name] = measure(name)
        args.json.write_text(json.dumps(rows, indent=1))
        print(line(name, rows[name]), flush=True)
    if args.markdown:
        args.markdown.write_text(markdown(rows))


def measure(name: str) -> dict[str, Any]:
    """Export one model for cpu and verify it there."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outcome = export_and_verify(
                f"{PLACE}:{name}", Path(folder, "bundle"), Options(), lambda _: None
            )
        except AttnExportError as error:
            return {"problem": error.observed, "seconds": time.perf_counter() - start}
    (target,) = outcome.bundle.targets()
    sites = target["sites"]
    refused = {site["reason"] for site in sites if site["status"] == "refused"}
    (result,) = outcome.verification.runtimes.values()
    return {
        "total": target["total"],
        "recognised": target["recognised"],
        "lowered": Counter(s["lowering"] for s in sites if s["status"] == "lowered"),
        "refused": target["refused"],
        "reasons": sorted(refused),
        "other": Counter(text.split(":")[0] for text in target["other"]),
        "parity": result.failures[0] if result.failures else "passed",
        "notes": outcome.bundle.manifest["notes"],
        "seconds": time.perf_counter() - start,
    }


def line(name: str, row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"| {name} | | | | {row['problem']} | | failed | {row['seconds']:.0f} |"
    cells = [
        name,
        row["total"],
        row["recognised"],
        counted(row["lowered"]),
        f"{row['refused']}: {'; '.join(row['reasons'])}" if row["refused"] else "",
        counted(row["other"]),
        row["parity"],
        f"{row['seconds']:.0f}",
    ]
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    sums = {key: sum(row.get(key, 0) for row in rows.values()) for key in ("total", "recognised")}
    lowered = sum(sum(row.get("lowered", {}).values()) for row in rows.values())
    passed = sum(row.get("parity") == "passed" for row in rows.values())
    return "\n".join(
        [
            "# Coverage of timm, torchvision and ultralytics",
            "",
            f"Random weights, target cpu; {versions}. Written by"
            " `benchmarks/coverage_packages.py`; seconds are of the whole export and check.",
            "",
            f"{len(rows)} models, {passed} with PyTorch's answers; {sums['total']} sites counted,"
            f" {sums['recognised']} recognised, {lowered} lowered to a fused op.",
            "",
            HEADER,
            "|" + " --- |" * (HEADER.count("|") - 1),
            *table(rows),
            "",
        ]
    )


def table(rows: dict[str, dict[str, Any]]) -> Iterable[str]:
    return (line(name, row) for name, row in rows.items())


if __name__ == "__main__":
    main()
