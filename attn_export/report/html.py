"""Render the report. The file stands alone: no script, no font, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from attn_export.bench.result import Benchmark
from attn_export.parity.result import Verification
from attn_export.precision.speed import judged_lines, precision_lines


def render(
    manifest: Mapping[str, Any], verification: Verification, benchmark: Benchmark | None
) -> str:
    """HTML from the manifest and the same objects that `--json` prints."""
    environment = Environment(
        loader=PackageLoader("attn_export", "report"), autoescape=True, undefined=StrictUndefined
    )
    bench = benchmark.to_json() if benchmark else None
    medians = [
        row["median_ms"]
        for row in (bench["runtimes"].values() if bench else ())
        if row["median_ms"]
    ]
    return environment.get_template("report.html").render(
        manifest=manifest,
        verify=verification.to_json(),
        bench=bench,
        slowest=max(medians, default=None),
        judged=judged_lines(manifest["targets"]),
        precisions=precision_lines(benchmark) if benchmark else [],
    )
