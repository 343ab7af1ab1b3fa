"""The main job: export, verify, benchmark, report; the bundle appears when all is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.bench.benchmark import benchmark
from attn_export.bench.result import Benchmark
from attn_export.build import check_request, export_into
from attn_export.parity.result import Verification
from attn_export.precision.bounds import parse as parse_bound
from attn_export.precision.judging import Request
from attn_export.production.measured import record
from attn_export.report.html import render
from attn_export.right_padded import REMOVE_PADDING, parse
from attn_export.source import declare_rules, promise, resolve
from attn_export.verifying.verification import verify

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What `export` and `run` take on the command line."""

    targets: tuple[str, ...] = ("cpu",)
    precision: str = "fp32"
    overwrite: bool = False
    inputs: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()
    lowering: str = "auto"
    less_work: bool = True
    allow_fallback: bool = False
    right_padded: tuple[str, ...] = ()
    remove_padding: tuple[str, ...] = ()
    cache_capacity: int | None = None
    compare: Mapping[str, str] = field(default_factory=dict)
    masked: Mapping[str, str] = field(default_factory=dict)
    metric_bounds: tuple[str, ...] = ()
    io_dtype: str = "fp32"


@dataclass(frozen=True)
class Outcome:
    """A bundle with what was seen of it."""

    bundle: bundles.Bundle
    verification: Verification
    benchmark: Benchmark | None

    def to_json(self) -> dict[str, Any]:
        """The `run --json` object."""
        return {
            "bundle": str(self.bundle.path),
            "targets": self.bundle.targets(),
            "notes": self.bundle.manifest["notes"],
            "verify": self.verification.to_json(),
            "bench": self.benchmark.to_json() if self.benchmark else None,
        }

    def require(self) -> None:
        """Raise CheckFailed unless every runtime's answers are PyTorch's."""
        self.verification.require()


def fresh_folder(source: str) -> Path:
    """A folder name after the source that does not exist yet."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", source.rpartition(":")[2]).strip("-") or "model"
    names = (f"{stem}-bundle" if n == 1 else f"{stem}-bundle-{n}" for n in count(1))
    return next(path for path in map(Path, names) if not path.exists())


def export_and_verify(source: str, folder: Path, options: Options, progress: Progress) -> Outcome:
    """Export and check; the errors of `attn_export.export`."""
    return _make(source, folder, options, None, progress)


def run(source: str, folder: Path, options: Options, seconds: float, progress: Progress) -> Outcome:
    """Export, check, time and report; the errors of `attn_export.export`."""
    return _make(source, folder, options, seconds, progress)


def _make(
    source: str, folder: Path, options: Options, seconds: float | None, progress: Progress
) -> Outcome:
    check_request(options.targets, options.precision, options.lowering, options.cache_capacity)
    bounds = [parse_bound(text) for text in options.metric_bounds]
    request = Request(
        options.lowering, bounds, options.io_dtype == "fp16", options.less_work,
        options.cache_capacity,
    )  # fmt: skip
    with bundles.write(folder, overwrite=options.overwrite) as stage:
        progress(f"loading {source}")
        model = resolve(source, options.inputs, options.dynamic)
        promise(model, parse(options.right_padded), parse(options.remove_padding, REMOVE_PADDING))
        declare_rules(model, options.compare, options.masked)
        made = export_into(stage, model, options.targets, options.precision, request, progress)
        progress("verifying")
        verification = verify(made, stand_ins=True, allow_fallback=options.allow_fallback)
        timings = None
        works_here = any(found.stands_in_for is None for found in verification.runtimes.values())
        if seconds is not None and verification.passed and works_here:
            timings = benchmark(
                made, seconds=seconds, allow_fallback=options.allow_fallback, progress=progress
            )
            made = record(made, timings)
        html = render(made.manifest, verification, timings)
        made = bundles.add_file(made, bundles.REPORT, html)
    return Outcome(replace(made, path=folder), verification, timings)
