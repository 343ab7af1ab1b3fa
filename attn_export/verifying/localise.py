"""Where a bundle's graph first drifts on a runtime whose answers are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from attn_export import bundle as bundles
from attn_export.parity.bisect import bisect
from attn_export.parity.compare import Comparison
from attn_export.parity.drift import Drift
from attn_export.parity.exposing import Exposable, in_single, is_half
from attn_export.parity.tolerance import Array
from attn_export.parity.trace import FILE, read_trace
from attn_export.parity.yardstick import Progress
from attn_export.reference import Case
from attn_export.runtimes import ort_cpu, table
from attn_export.runtimes.base import GraphBytes, Session

Judge = Callable[[Case, dict[str, Array]], Sequence[Comparison]]
Start = Callable[[str, bytes], Session]


def localise(
    bundle: bundles.Bundle,
    runtime: str,
    comparisons: Sequence[tuple[str, Comparison]],
    parts: Mapping[str, Case],
    judge: Judge,
    start: Start,
    progress: Progress = lambda _: None,
    *,
    traced: bool = True,
) -> Drift | None:
    """The first value that is wrong, on the first case that failed; one with a trace if there is.

    Args:
        runtime: whose target's graph it is.
        comparisons: label of a case and what was compared.
        parts: the case by its label.
        judge: compares a case with outputs, as `comparisons` were made.
        traced: whether the parts are of the bundle's own cases, whose values inside it stores.
        start: (component, graph) -> a session on the runtime, with the bundle's weights.

    Returns None where no number is wrong: an output is missing, or the runtime raised.

    Raises:
        AttnExportError: the runtime does not run the graph with more outputs.
        FileError: the trace is not readable.
    """
    failing = [
        label for label, found in comparisons if not found.passed and found.mismatched
        and label in parts
    ]  # fmt: skip
    if not failing:
        return None
    stored = traced and FILE in bundle.manifest.get("files", ())
    trace = read_trace(bundle.path / FILE) if stored else {}
    label = next((label for label in failing if label in trace), failing[0])
    part = parts[label]
    target = bundle.target_for(table.find(runtime).GRAPHS, part.component)
    model = onnx.load(bundle.model_path(target), load_external_data=False)

    def wrong(outputs: Mapping[str, Array]) -> list[str]:
        found = judge(part, dict(outputs))
        return list(dict.fromkeys(c.output for c in found if not c.passed))

    return bisect(
        Exposable(model, lambda data: start(part.component, data)),
        part.inputs,
        wrong,
        trace.get(label),
        plain_twin(bundle, model),
        progress,
        label,
    )


def plain_twin(bundle: bundles.Bundle, model: onnx.ModelProto) -> Exposable:
    """The graph in float32 on ONNX Runtime's CPU provider, with optimisations off."""

    def start(data: bytes) -> Session:
        return ort_cpu.load(GraphBytes(data, bundle.path), optimize=False)

    return Exposable(in_single(model) if is_half(model) else model, start)
