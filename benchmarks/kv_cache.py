"""A decoder's step behind 2,048 tokens: caches that grow by a copy, against caches in place.

    python benchmarks/kv_cache.py [--past 2048] [--threads 1] [--rounds 15] [--json FILE]

A decoder like Llama's (8 layers, 8 heads of 64) is exported twice, without and with
`--cache-capacity`, and both are verified first. Both sessions live in one process and take turns, a
step each, so that others on the machine disturb them alike. Times are of the process's own CPU,
which others disturb least, and by the clock; the ratio is the median of the first over rounds.
Then a step of each is profiled: what the kernels take that touch the cache, and how fast the
attention of caches in place reads them, beside this machine's rate of reading memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from rich.console import Console

from attn_export import bundle as bundles
from attn_export import export, load
from attn_export.bench.machine import machine
from attn_export.cli.plain_table import plain_table
from attn_export.models.decoder_lm import DecoderLMConfig, one_graph
from attn_export.models.spec import ExportSpec
from attn_export.production.decoding import Decoding
from attn_export.production.session import BundleSession
from attn_export.runtimes.base import Arrays

LAYERS, HEADS, HEAD_SIZE = 8, 8, 64
CAPACITY = 4096


def config(kv_heads: int) -> DecoderLMConfig:
    dim = HEADS * HEAD_SIZE
    return DecoderLMConfig(8192, dim, LAYERS, HEADS, kv_heads, hidden=1376)


def few() -> ExportSpec:
    """2 key heads for 8 query heads."""
    return _spec(2)


def all_heads() -> ExportSpec:
    """A key head for each query head."""
    return _spec(HEADS)


def _spec(kv_heads: int) -> ExportSpec:
    spec = one_graph(config(kv_heads), CAPACITY)
    spec.cache_capacity = None  # what is asked for on the export decides
    return spec


@dataclass
class Side:
    """One of the two: a step at a fixed length, and its bundle."""

    session: BundleSession
    step: Callable[[], Arrays]


def grows(session: BundleSession, inputs: Arrays, caches: Arrays) -> Side:
    """Caches go in and come out of each call, as long as they are."""
    feeds = {**inputs, **caches}
    return Side(session, lambda: session.run(feeds))


def stays(session: BundleSession, inputs: Arrays, caches: Arrays) -> Side:
    """Caches lie in buffers; the length is set back, so that each step is the same one."""
    first = next(iter(caches.values()))
    decoding: Decoding = session.start(first.shape[0], capacity=CAPACITY)
    presents = {name.replace("past_key_values", "present"): a for name, a in caches.items()}
    decoding.fill(presents)

    def step() -> Arrays:
        decoding.rewind(first.shape[2])
        return decoding.step(inputs)

    return Side(session, step)


def inputs_of(kv_heads: int, batch: int, past: int) -> tuple[Arrays, Arrays]:
    """A step's inputs, and its caches by the names of the graph's inputs."""
    rng = np.random.default_rng(0)
    shape = (batch, kv_heads, past, HEAD_SIZE)
    caches: Arrays = {
        f"past_key_values.{layer}.{part}": rng.standard_normal(shape, dtype=np.float32)
        for layer in range(LAYERS)
        for part in ("key", "value")
    }
    given: Arrays = {
        "input_ids": np.full((batch, 1), 5),
        "attention_mask": np.ones((batch, 1), np.int64),
        "past_mask": np.ones((batch, past), np.int64),
    }
    return given, caches


def timed(sides: dict[str, Side], rounds: int) -> dict[str, np.ndarray]:
    """(rounds, 2) milliseconds of one step each, of CPU and by the clock, in turns; the first round
    is a warm-up."""
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            clocks = (time.process_time, time.perf_counter)
            start = [clock() for clock in clocks]
            side.step()
            spent = [(clock() - begun) * 1e3 for clock, begun in zip(clocks, start, strict=True)]
            times[name].append(spent)
    return {name: np.array(rows[1:]) for name, rows in times.items()}


def read_rate() -> float:
    """GB/s of one thread that adds up 256 MB."""
    array = np.ones(64 << 20, np.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        array.sum()
        best = max(best, array.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def profile(graph: Path, threads: int, feeds: Arrays, shared: dict[str, str]) -> Counter[str]:
    """Operator -> milliseconds of one step, the median of some."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.enable_profiling = True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder, "profile"))
        session = onnxruntime.InferenceSession(
            str(graph), options, providers=["CPUExecutionProvider"]
        )
        binding = session.io_binding()
        values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        runs = 9
        for _ in range(runs):
            for output in session.get_outputs():
                if output.name in shared:
                    binding.bind_ortvalue_output(output.name, values[shared[output.name]])
                else:
                    binding.bind_output(output.name)
            session.run_with_iobinding(binding)
        events = json.loads(Path(session.end_profiling()).read_text())
    nodes: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            nodes.setdefault(event["name"], []).append(event["dur"] / 1e3)
            kinds[event["name"]] = event["args"]["op_name"]
    found: Counter[str] = Counter()
    for name, durations in nodes.items():
        found[kinds[name]] += median(durations[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--past", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    here, rate, rows = machine(args.threads), read_rate(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for factory, kv_heads in (("few", 2), ("all_heads", HEADS)):
            made = {
                name: export(
                    f"{__file__}:{factory}", Path(folder, f"{factory}-{name}"),
                    cache_capacity=capacity, dynamic=(),
                )
                for name, capacity in (("grows", None), ("stays", CAPACITY))
            }  # fmt: skip
            for batch in args.batch or [1, 4]:
                rows.append(compare(made, kv_heads, batch, args))
    show(rows, here, rate, args)
    if args.json:
        args.json.write_text(json.dumps({"machine": here, "read_gb_s": rate, "rows": rows}))


def compare(
    made: dict[str, bundles.Bundle], kv_heads: int, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Both sides at one batch size."""
    given, caches = inputs_of(kv_heads, batch, args.past)
    with (
        load(made["grows"], threads=args.threads, verify=True) as one,
        load(made["stays"], threads=args.threads, verify=True) as two,
    ):
        sides = {"grows": grows(one, given, caches), "stays": stays(two, given, caches)}
        logits = [side.step()["logits"] for side in sides.values()]
        if not np.allclose(*logits, atol=1e-3):
            raise SystemExit("the two answers differ")
        times = timed(sides, args.rounds)
    held = sum(array.nbytes for array in caches.values())
    behind = ((0, 0), (0, 0), (0, CAPACITY - args.past), (0, 0))
    room = {name: np.pad(array, behind) for name, array in caches.items()}
    shared = {name.replace("past_key_values", "present"): name for name in caches}
    length = {"past_length": np.array([args.past])}
    files = {name: bundle.path / "model.cpu.onnx" for name, bundle in made.items()}
    feeds = {"grows": {**given, **caches}, "stays": {**given, **room, **length}}
    kernels = {
        name: profile(files[name], args.threads, feeds[name], shared if name == "stays" else {})
        for name in files
    }
    ratios = (times["stays"] / times["grows"])[:, 0].tolist()
    medians = {name: np.median(rows, axis=0).tolist() for name, rows in times.items()}
    return {
        "kv_heads": kv_heads, "batch": batch, "cache_mb": held / 1e6,
        "cpu_ms": {name: found[0] for name, found in medians.items()},
        "clock_ms": {name: found[1] for name, found in medians.items()},
        "ratio": median(ratios), "low": min(ratios), "high": max(ratios),
        "kernels": {name: dict(found.most_common()) for name, found in kernels.items()},
        "attention_gb_s": held / 1e6 / kernels["stays"]["GroupQueryAttention"],
    }  # fmt: skip


def show(
    rows: list[dict[str, Any]], here: dict[str, Any], rate: float, args: argparse.Namespace
) -> None:
    numbers = ("batch", "cache MB", "CPU ms: grows", "in place", "ratio", "range", "clock: grows",
               "in place", "read at GB/s")  # fmt: skip
    title = (
        f"a step behind {args.past} tokens, {here['processor']}, {args.threads} threads, load"
        f" {here['load_average']}; memory is read at {rate:.1f} GB/s"
    )
    table = plain_table(title, "key heads", *numbers, right=numbers)
    for row in rows:
        table.add_row(
            str(row["kv_heads"]), str(row["batch"]), f"{row['cache_mb']:.0f}",
            f"{row['cpu_ms']['grows']:.2f}", f"{row['cpu_ms']['stays']:.2f}", f"{row['ratio']:.3f}",
            f"{row['low']:.2f}..{row['high']:.2f}", f"{row['clock_ms']['grows']:.2f}",
            f"{row['clock_ms']['stays']:.2f}", f"{row['attention_gb_s']:.1f}",
        )  # fmt: skip
    console = Console(width=132)
    console.print(table)
    for row in rows:
        for name, found in row["kernels"].items():
            told = ", ".join(f"{op} {ms:.2f}" for op, ms in list(found.items())[:6])
            where = f"{row['kv_heads']} key heads, batch {row['batch']}, {name}"
            console.print(f"{where}: {told}; {sum(found.values()):.2f} ms in kernels")


if __name__ == "__main__":
    main()
