"""What a bundle's manifest says, gathered from an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export.attention import fixed_cache
from attn_export.attention.site import Account
from attn_export.capability import RUNTIMES, TARGETS, Target
from attn_export.declarations import sections
from attn_export.exporting.exporter import Graph
from attn_export.fixed_caches import CAPACITY, LENGTH
from attn_export.parity.cases import rules_of
from attn_export.parity.tolerance import FACTOR, FLOOR
from attn_export.runtimes import ort_web
from attn_export.runtimes.packages import runtime_version, versions
from attn_export.runtimes.table import availability
from attn_export.sessions import STAND_IN


def describe_values(
    component: str, graph: Graph
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The manifest's `inputs` and `outputs` of one component."""
    spec = graph.spec
    rules = rules_of(spec)
    inputs = []
    for value in graph.model.graph.inputs:
        axes = spec.axes().get(str(value.name), {})
        ranges = {axis.name: [axis.min, axis.max] for axis in axes.values()}
        keeps = spec.promises().get(str(value.name))
        promise = {} if keeps is None else {"right_padded": True, "keeps": keeps}
        inputs.append({**_tensor(component, value), "ranges": ranges, **promise})
    caches = fixed_state(graph)
    if caches:
        inputs.append({"name": LENGTH, "component": component, "dtype": "int64", "shape": [1],
                       "ranges": {}})  # fmt: skip
    outputs = []
    for value in graph.model.graph.outputs:
        name = str(value.name)
        outputs.append({**_tensor(component, value), **rules[name].to_manifest()})
    for row in caches:
        for key, entries in (("input", inputs), ("output", outputs)):
            entry = next(entry for entry in entries if entry["name"] == row[key])
            entry["shape"][row["axis"]] = CAPACITY
            if key == "input":
                entry["ranges"].pop(row["size"], None)
                entry["ranges"][CAPACITY] = [1, row[CAPACITY]]
    return inputs, outputs


def fixed_state(graph: Graph) -> list[dict[str, Any]]:
    """`state` of the caches that have a fixed capacity, as attn_export.fixed_caches reads it."""
    capacity = graph.spec.cache_capacity
    caches = fixed_cache.growing(graph.model, graph.spec.state) if capacity else ()
    if not caches:
        return []
    size, tokens = fixed_cache.new_tokens(graph.model, caches)
    new = tokens if isinstance(tokens, int) else str(tokens)
    return [
        {"output": output, "input": given, "axis": axis, CAPACITY: capacity, "length": LENGTH,
         "size": size, "tokens": new}
        for output, given, axis in caches
    ]  # fmt: skip


def _tensor(component: str, value: ir.Value) -> dict[str, Any]:
    shape = value.shape if value.shape is not None else ()
    dtype = value.dtype.numpy().name if value.dtype is not None else "unknown"
    sizes = [size if isinstance(size, int) else str(size.value) for size in shape]
    return {"name": value.name, "component": component, "dtype": dtype, "shape": sizes}


def describe_target(target: Target, component: str, file: str, account: Account) -> dict[str, Any]:
    """One entry of the manifest's `targets`.

    `runtime_version` is what the ops were chosen for; `checked` is "stand-in" where the runtime
    itself did not run the graph when it was exported.
    """
    number, assumed = runtime_version(target.runtime)
    return {
        "name": target.name,
        "runtime": target.runtime,
        "runtime_version": number,
        "assumed_version": assumed,
        "checked": "run" if availability(target.runtime).ok else "stand-in",
        "component": component,
        "precision": "fp32",
        "file": file,
        **account.to_json(),
        "tolerance": {"factor": FACTOR, "floor": FLOOR},
        "tuned": False,
    }


def target_notes(target: Target) -> list[str]:
    """What the owner of a graph should know that was not made where it will run."""
    notes = []
    number, assumed = runtime_version(target.runtime)
    if assumed:
        notes.append(
            f"the version of {RUNTIMES[target.runtime]} for target {target.name} is assumed to be"
            f" {number}, since it is not installed here"
        )
    seen = availability(target.runtime)
    if not seen.ok:
        notes.append(
            f"the graph of target {target.name} was checked on {STAND_IN} as a stand-in, not on"
            f" {target.runtime}, because {seen.observed}"
        )
    return notes


def weights_notes(targets: Sequence[str], weights: Path) -> list[str]:
    """What a browser cannot load."""
    size = weights.stat().st_size if weights.is_file() else 0
    if size <= ort_web.LARGEST_FILE or not any(TARGETS[t].runtime == ort_web.NAME for t in targets):
        return []
    largest = ort_web.LARGEST_FILE / 1e9
    return [
        f"{weights.name} has {size / 1e9:.2f} GB and a browser takes {largest:.2f} GB at once,"
        " so the graph of target web runs under Node.js and not in a page"
    ]


def assemble(
    name: str,
    source: str,
    graphs: Mapping[str, Graph],
    targets: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The manifest, without its `files`."""
    described = [describe_values(component, graph) for component, graph in graphs.items()]
    specs = [graph.spec for graph in graphs.values()]
    manifest: dict[str, Any] = {
        "name": name,
        "source": source,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "components": list(graphs),
        "inputs": [entry for inputs, _ in described for entry in inputs],
        "outputs": [entry for _, outputs in described for entry in outputs],
        "targets": [dict(target) for target in targets],
        "notes": list(notes),
    }
    fixed = {row["input"]: row for graph in graphs.values() for row in fixed_state(graph)}
    state = [
        fixed.get(given, {"output": output, "input": given, "axis": axis})
        for spec in specs
        for output, given, axis in spec.state
    ]
    generate = {key: value for spec in specs for key, value in spec.generate.items()}
    labels = next((list(spec.labels) for spec in specs if spec.labels), [])
    optional = {"state": state, "generate": generate, "labels": labels, **sections(specs)}
    return manifest | {key: value for key, value in optional.items() if value}
