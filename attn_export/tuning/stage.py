"""Variants of a graph as bundles of their own for as long as they are measured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export import bundle as bundles
from attn_export.bench.benchmark import PACE, Pace, measure
from attn_export.bench.process import WorkerProcess
from attn_export.errors import AttnExportError
from attn_export.runtimes.threads import cores
from attn_export.tuned import Settings
from attn_export.weights import write_graphs

Progress = Callable[[str], None]
ALWAYS = (bundles.REFERENCE, bundles.METRIC)


@dataclass(frozen=True, eq=False)
class Variant:
    """A graph with the settings that it is run with.

    Attributes:
        how: what it is, in words.
        account: its sites, as the manifest's target has them.
    """

    name: str
    runtime: str
    model: ir.Model
    account: Mapping[str, Any]
    settings: Settings = field(default_factory=Settings)
    how: str = ""

    def with_settings(self, name: str, settings: Settings) -> Variant:
        """The same graph under other settings."""
        return replace(self, name=name, settings=settings, how=str(settings))


@dataclass
class Timed:
    """What was seen of some variants in one interleaved measurement.

    Attributes:
        rounds: variant -> milliseconds of each call in each round, of those that were right.
        wrong: variant -> why it has no time: wrong answers, or a runtime that refused it.
    """

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


@dataclass
class Stage:
    """Where the variants of one component's target lie.

    Attributes:
        target: the manifest's, for precision and tolerance.
        case: the name of the stored case that is timed.
    """

    folder: Path
    bundle: bundles.Bundle
    target: Mapping[str, Any]
    case: str
    written: dict[int, Path] = field(default_factory=dict)
    held: list[ir.Model] = field(default_factory=list)
    count: int = 0

    @property
    def component(self) -> str:
        return str(self.target["component"])

    def time(
        self, variants: Sequence[Variant], seconds: float, progress: Progress, pace: Pace = PACE
    ) -> Timed:
        """Check the answers of each in a process of its own, then let those that are right take
        turns."""
        self._write(variant.model for variant in variants)
        refused: dict[str, AttnExportError] = {}
        with ExitStack() as stack:
            workers = {}
            for variant in variants:
                folder = self._bundle(variant)
                arguments = [str(folder), variant.runtime, self.component, "0", self.case]
                worker = WorkerProcess(variant.runtime, arguments)
                workers[variant.name] = stack.enter_context(worker)
            rows = measure(
                workers, [None], seconds, progress, describe=False, pace=pace, refused=refused
            )[None]
        found = Timed(wrong={name: error.observed for name, error in refused.items()})
        for name, row in rows.items():
            if row.sound:
                found.rounds[name] = row.rounds
            else:
                found.wrong[name] = next(iter(row.check["failures"]), "nothing was compared")
        return found

    def _write(self, models: Iterable[ir.Model]) -> None:
        """Each graph once, those that come together with one file of weights."""
        new = [m for m in {id(m): m for m in models}.values() if id(m) not in self.written]
        if not new:
            return
        self.count += 1
        folder = self.folder / f"graphs-{self.count}"
        folder.mkdir()
        write_graphs(folder, {f"{i}.onnx": model for i, model in enumerate(new)}, bundles.WEIGHTS)
        self.held += new  # so that no other model gets the id of one of these
        self.written |= {id(model): folder / f"{i}.onnx" for i, model in enumerate(new)}

    def _bundle(self, variant: Variant) -> Path:
        self.count += 1
        folder = self.folder / f"variant-{self.count}"
        folder.mkdir()
        graph = self.written[id(variant.model)]
        file = f"{self.component}.{variant.runtime}.onnx"
        link(graph, folder / file)
        if (graph.parent / bundles.WEIGHTS).exists():
            link(graph.parent / bundles.WEIGHTS, folder / bundles.WEIGHTS)
        manifest = self.bundle.manifest
        for name in ALWAYS:
            if name in manifest["files"]:
                link(self.bundle.path / name, folder / name)
        tuned = {"settings": variant.settings.to_json(), "machine": {"threads": cores()}}
        own = {"runtime": variant.runtime, "file": file, "tuned": tuned}
        # Judged by its cases alone: the whole bundle is verified before it is kept.
        sealed = {**manifest, "targets": [{**self.target, **own}]}
        bundles.seal(folder, sealed)
        return folder


def link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the disk has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
