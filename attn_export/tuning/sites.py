"""Each legal lowering of one site as a model of its own, timed at several lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from attn_export import bundle as bundles
from attn_export.attention.site import Site
from attn_export.bench.benchmark import Pace, measure
from attn_export.bench.process import WorkerProcess
from attn_export.bench.stats import Latency, summarize_rounds
from attn_export.capability import Form
from attn_export.errors import AttnExportError
from attn_export.parity.tolerance import FACTOR, FLOOR, Array, allowed_error, max_abs, rounded
from attn_export.reference import Case, write_cases
from attn_export.runtimes import ort_cpu
from attn_export.runtimes.base import Graph, GraphBytes
from attn_export.runtimes.packages import versions
from attn_export.tuning.choose import as_fast
from attn_export.tuning.cuts import Cuts, values_of

Progress = Callable[[str], None]
COMPONENT = "site"
PACE = Pace(round=0.05, warm_up=0.1)
WOBBLES = 2


@dataclass(frozen=True)
class Kind:
    """Sites that compute the same function, by their forms.

    Attributes:
        form: of the first of them, and its S and T at the example's sizes.
    """

    site: Site
    form: Form
    tokens: tuple[int, int] | None
    names: tuple[str, ...]


@dataclass(frozen=True)
class SiteTimes:
    """What the ops took for a kind of sites at one length.

    Attributes:
        ms: op -> what was measured, the preferred op first.
        as_fast: the ops that the fastest one is not faster than beyond noise.
        wrong: op -> why it was not timed.
    """

    kind: Kind
    sizes: Mapping[str, int]
    tokens: tuple[int, int]
    ms: Mapping[str, Latency]
    as_fast: tuple[str, ...]
    wrong: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The preferred one of those that are as fast as the fastest."""
        return self.as_fast[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "tokens": list(self.tokens),
            "ops": {
                op: {"median_ms": row.median, "low_ms": row.low, "high_ms": row.high}
                for op, row in self.ms.items()
            },
            "best": self.best,
            "as_fast": list(self.as_fast),
            "wrong": dict(self.wrong),
        }


def times(
    cuts: Cuts,
    case: Case,
    runtime: str,
    folder: Path,
    progress: Progress,
    pace: Pace = PACE,
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """op -> rounds of milliseconds, and op -> why it has none.

    Each op's answers are compared with the case in the process that times it.
    """
    refused: dict[str, AttnExportError] = {}
    with ExitStack() as stack:
        workers = {}
        for index, (op, part) in enumerate(cuts.parts.items()):
            place = folder / str(index)
            place.mkdir(parents=True)
            write(place, part, case, runtime)
            arguments = [str(place), runtime, COMPONENT, "0", case.name]
            workers[op] = stack.enter_context(WorkerProcess(runtime, arguments))
        rows = measure(
            workers, [None], 6 * pace.round, progress, describe=False, pace=pace, refused=refused
        )[None]
    wrong = {op: error.observed for op, error in refused.items()}
    wrong |= {
        op: next(iter(row.check["failures"]), "nothing was compared")
        for op, row in rows.items()
        if not row.sound
    }
    return {op: row.rounds for op, row in rows.items() if row.sound}, wrong


def timed(
    kind: Kind,
    sizes: Mapping[str, int],
    tokens: tuple[int, int],
    rounds: Mapping[str, list[list[float]]],
    wrong: Mapping[str, str],
) -> SiteTimes:
    """Raises ValueError where no op gave the right answers."""
    if not rounds:
        raise ValueError("; ".join(f"{op}: {why}" for op, why in wrong.items()))
    summed = {op: summarize_rounds(row) for op, row in rounds.items()}
    return SiteTimes(kind, sizes, tokens, summed, tuple(as_fast(rounds)), wrong)


def case_of(
    model: ir.Model, cuts: Cuts, inputs: Mapping[str, Array], folder: Path, name: str
) -> Case:
    """What goes into the site and comes out of it when the whole graph runs on these inputs.

    What may differ is what the answers move by when their inputs are rounded, times FACTOR.

    Args:
        model: one that the parts were cut out of.
        folder: where its weights lie, as far as they lie in files.

    Raises:
        AttnExportError: it does not run.
        ValueError: it is too large for a protobuf.
    """
    entered = _run_whole(model, cuts.begins, inputs, folder)
    given = {f"input_{i}": entered[name] for i, name in enumerate(cuts.begins)}
    part = next(iter(cuts.parts.values())).SerializeToString()
    with ort_cpu.load(part, optimize=False) as session:
        outputs = session.run(given)
        moved = [session.run(_wobbled(given, seed)) for seed in range(WOBBLES)]
    allowed = {}
    for output, array in outputs.items():
        exact = np.asarray(array, np.float64)
        spread = max(max_abs(np.asarray(m[output], np.float64), exact) for m in moved)
        allowed[output] = {"all": max(allowed_error(array, None), FACTOR * spread)}
    return Case(name, COMPONENT, given, dict(outputs), {}, allowed)


def _wobbled(inputs: Mapping[str, Array], seed: int) -> dict[str, Array]:
    with np.errstate(over="ignore"):  # the lowest number of a mask becomes -inf
        return {name: rounded(a, a.dtype, seed).astype(a.dtype) for name, a in inputs.items()}


def _run_whole(
    model: ir.Model, names: Sequence[str], inputs: Mapping[str, Array], folder: Path
) -> dict[str, Array]:
    asked = model.clone()
    values = values_of(asked)
    outputs = set(map(id, asked.graph.outputs))
    own = {name: inputs[name] for name in names if name in inputs}
    wanted = [name for name in names if name not in own]
    asked.graph.outputs.extend(values[n] for n in wanted if id(values[n]) not in outputs)
    graph: Graph = GraphBytes(ir.to_proto(asked).SerializeToString(), folder)
    with ort_cpu.load(graph, optimize=False) as session:
        found = session.run(dict(inputs))
    return {**own, **{name: found[name] for name in wanted}}


def write(folder: Path, part: onnx.ModelProto, case: Case, runtime: str) -> None:
    """A bundle of one site."""
    file = f"{COMPONENT}.{runtime}.onnx"
    (folder / file).write_bytes(part.SerializeToString())
    write_cases(folder / bundles.REFERENCE, [case], {COMPONENT: {}})
    account = {"sites": [], "total": 1, "recognised": 1, "lowered": 1, "refused": 0}
    target = {
        "name": runtime, "runtime": runtime, "component": COMPONENT, "precision": "fp32",
        "file": file, **account, "tolerance": {"factor": FACTOR, "floor": FLOOR},
    }  # fmt: skip
    bundles.seal(
        folder,
        {
            "name": COMPONENT,
            "source": COMPONENT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "components": [COMPONENT],
            "inputs": [_tensor(*pair) for pair in case.inputs.items()],
            "outputs": [_tensor(*pair) for pair in case.outputs.items()],
            "targets": [target],
        },
    )


def _tensor(name: str, array: Array) -> dict[str, Any]:
    """Without a batch: what lies inside of a model need not have independent rows."""
    return {
        "name": name, "component": COMPONENT, "dtype": array.dtype.name, "shape": list(array.shape)
    }  # fmt: skip
