"""The table that `--lowering auto` asks where this machine's cache knows nothing.

    python benchmarks/lowering_table.py [--runtime ort-cpu] [--seconds 0.6] [--busy] [-o TABLE.json]

What each legal op takes for one self-attention with its projections, at several sizes. Each op runs
in a process of its own, once its answers are those of the graph before lowering; the ops of a size
take turns in rounds. Kept is the fastest call of each: whatever else runs only ever adds time.
--busy is for a machine that others use meanwhile: the CPU time of one thread instead of the clock's
on all cores, in one process. Without -o the table is printed alone;
`-o attn_export/capability/lowering_table.json` makes it the shipped one, where rows of other
runtimes stay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from attn_export.bench.benchmark import Pace
from attn_export.bench.machine import machine
from attn_export.bench.stats import FEWEST_ROUNDS
from attn_export.capability import RUNTIMES
from attn_export.cli.plain_table import plain_table
from attn_export.parity.compare import compare_outputs
from attn_export.reference import Case
from attn_export.runtimes.packages import runtime_version
from attn_export.runtimes.table import find
from attn_export.runtimes.threads import cores
from attn_export.tuning import sites
from attn_export.tuning.bases import Base
from attn_export.tuning.cuts import Cuts, cut_site
from attn_export.tuning.lowerings import uniform

HEADS = ((3, 64), (8, 64), (12, 64), (8, 32))
TOKENS = (64, 197, 512, 1024)
LONG = (((8, 64), 2048), ((8, 64), 4096))
MASKS = ("none", "dense", "causal")
PROVED_AT = 16  # tokens; proofs in float64 take long at thousands


def graph(heads: int, head_size: int, mask: str) -> ir.Model:
    """x (1, S, D) -> three projections -> Attention -> y; a dense mask is (1, 1, S, S)."""
    width = heads * head_size
    rng = np.random.default_rng(0)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "tokens", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "tokens", width])
    inputs, nodes, weights = [x], [], []
    for role in "qkv":
        drawn = rng.standard_normal((width, width)) / np.sqrt(width)
        weights.append(numpy_helper.from_array(drawn.astype(np.float32), f"w{role}"))
        weights.append(numpy_helper.from_array(np.ones(width, np.float32), f"b{role}"))
        nodes.append(helper.make_node("MatMul", ["x", f"w{role}"], [f"{role}_0"]))
        nodes.append(helper.make_node("Add", [f"{role}_0", f"b{role}"], [role]))
    given = ["q", "k", "v"]
    if mask == "dense":
        shape = [1, 1, "tokens", "tokens"]
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, shape))
        given.append("mask")
    causal = {"is_causal": 1} if mask == "causal" else {}
    nodes.append(
        helper.make_node(
            "Attention", given, ["y"], name="site", q_num_heads=heads, kv_num_heads=heads, **causal
        )
    )
    made = helper.make_graph(nodes, "g", inputs, [y], weights)
    opset = [helper.make_opsetid("", 23)]
    return ir.from_proto(helper.make_model(made, opset_imports=opset, ir_version=10))


def measure(
    runtime: str,
    heads: int,
    head_size: int,
    tokens: int,
    mask: str,
    pace: Pace,
    folder: Path,
    *,
    busy: bool,
) -> dict[str, float]:
    """op -> the fastest call in milliseconds."""

    def fresh() -> tuple[ir.Model, Callable[[], None]]:
        model = graph(heads, head_size, mask)
        for node in model.graph:
            for value in node.outputs:
                value.dtype = ir.DataType.FLOAT
                value.shape = ir.Shape([1, "tokens", heads * head_size])
        return model, lambda: None

    made, _ = uniform(Base(fresh, folder, [{"tokens": PROVED_AT}]), runtime, lambda _: None)
    rng = np.random.default_rng(1)
    inputs: dict[str, Any] = {
        "x": rng.standard_normal((1, tokens, heads * head_size)).astype(np.float32)
    }
    if mask == "dense":
        hidden = rng.random((1, 1, tokens, tokens)) < 0.2
        inputs["mask"] = np.where(hidden, np.finfo(np.float32).min, 0).astype(np.float32)
    name = made[0].kinds[0].names[0]
    cuts = cut_site({one.op: one.model for one in made}, name, made[0].known)
    case = sites.case_of(made[-1].model, cuts, inputs, folder, "size")
    if busy:
        return cpu_times(cuts, case, runtime, pace)
    rounds, wrong = sites.times(cuts, case, runtime, folder / "parts", lambda _: None, pace)
    for op, why in wrong.items():
        Console(stderr=True).print(f"{op} was not timed: {why}")
    return {op: round(min(min(times) for times in row), 4) for op, row in rounds.items()}


def cpu_times(cuts: Cuts, case: Case, runtime: str, pace: Pace) -> dict[str, float]:
    """op -> the least CPU time of a call on one thread, in milliseconds; ops take turns."""
    least: dict[str, float] = {}
    with ExitStack() as stack:
        sessions = {
            op: stack.enter_context(find(runtime).load(part.SerializeToString(), 1))
            for op, part in cuts.parts.items()
        }
        for op, session in sessions.items():
            for found in compare_outputs(
                session.run(case.inputs), case.outputs, case.allowed, {}, {}
            ):
                if not found.passed:
                    raise SystemExit(f"{op}: {found.problem}")
        for _ in range(2 * FEWEST_ROUNDS):
            for op, session in sessions.items():
                until = time.process_time() + pace.round / 2
                while True:
                    begun = time.process_time()
                    session.run(case.inputs)
                    ended = time.process_time()
                    least[op] = min(least.get(op, np.inf), (ended - begun) * 1e3)
                    if ended > until:
                        break
    return {op: round(ms, 4) for op, ms in least.items()}


def source(runtime: str, *, busy: bool) -> str:
    """Where the times come from, in words."""
    here = machine(cores())
    version, _ = runtime_version(runtime)
    day = datetime.now(UTC).date().isoformat()
    how = "CPU time of one thread" if busy else f"{here['threads']} threads"
    return (
        f"fastest calls of benchmarks/lowering_table.py, {how}, {here['processor']},"
        f" {RUNTIMES[runtime]} {version}, {day}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", action="append", choices=["ort-cpu", "ort-cuda", "openvino"])
    parser.add_argument("--seconds", type=float, default=0.6, help="timed seconds an op and size")
    parser.add_argument("-o", "--output", type=Path, help="the table to write into")
    parser.add_argument("--busy", action="store_true", help="CPU time of one thread")
    parser.add_argument("--only-tokens", type=int, action="append")
    args = parser.parse_args()
    pace = Pace(round=args.seconds / FEWEST_ROUNDS, warm_up=0.2)
    configurations = [(h, s) for s in TOKENS for h in HEADS] + list(LONG)
    found: dict[str, Any] = {"sources": {}, "rows": []}
    if args.output and args.output.exists():
        found = json.loads(args.output.read_text())
    for runtime in args.runtime or ["ort-cpu"]:
        found["rows"] = [row for row in found["rows"] if row["runtime"] != runtime]
        found["sources"][runtime] = source(runtime, busy=args.busy)
        for (heads, size), tokens in configurations:
            if args.only_tokens and tokens not in args.only_tokens:
                continue
            for mask in MASKS:
                with tempfile.TemporaryDirectory() as folder:
                    ms = measure(
                        runtime, heads, size, tokens, mask, pace, Path(folder), busy=args.busy
                    )
                row = {
                    "runtime": runtime, "mask": mask, "heads": heads, "head_size": size,
                    "tokens": tokens, "ms": ms,
                }  # fmt: skip
                found["rows"].append(row)
                Console(stderr=True, width=200).print(row)
        if args.output:  # each runtime that is done
            rows = ",\n  ".join(json.dumps(row) for row in found["rows"])
            sources = json.dumps(found["sources"], indent=1, ensure_ascii=False)
            args.output.write_text(f'{{"sources": {sources},\n "rows": [\n  {rows}\n ]}}\n')
    print_table(found["rows"])


def print_table(rows: list[dict[str, Any]]) -> None:
    ops = list(dict.fromkeys(op for row in rows for op in row["ms"]))
    table = plain_table("One attention, milliseconds", "runtime", "mask", "heads", "tokens", *ops,
                        right=("tokens", *ops))  # fmt: skip
    for row in rows:
        times = [f"{row['ms'][op]:.3f}" if op in row["ms"] else "" for op in ops]
        heads = f"{row['heads']} x {row['head_size']}"
        table.add_row(row["runtime"], row["mask"], heads, str(row["tokens"]), *times)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
