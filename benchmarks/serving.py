"""Throughput and latency of `attn-export serve`, against in-process runs and a plain kserve model.

    python benchmarks/serving.py [--seconds 2] [--rounds 5] [--clients 16] [--json FILE]

Latency: one client of Triton, one request after the other, 1x3x224x224 float32 in binary, a model
of about a millisecond; "added" is the median over that of the same runs in process. Throughput:
as many clients at once on `vit-digits` and on ViT-small at 224 pixels, each with its own image.
Every response is compared with the in-process answer. Servers stay up and are asked in turn, round
after round, so that what else the machine does meets all of them; ratios are medians of the rounds'
own, and the spread of the rounds is told. "CPU ms" is what a request costs the server's
process, which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import tritonclient.grpc
import tritonclient.http
from rich.console import Console
from rich.table import Table
from serving_clients import Bundle, at_once, by_grpc, by_http, latencies
from torch import nn, randn

import attn_export
from attn_export.models.vit import ViT, ViTConfig

HERE = Path(__file__).parent
SERVERS = {
    "plain kserve": lambda bundle: [HERE / "serving_plain.py", bundle],
    "serve, batch 1": lambda bundle: ["-m", "attn_export", "serve", bundle, "--max-batch-size", 1],
    "serve": lambda bundle: ["-m", "attn_export", "serve", bundle],
}  # fmt: skip


def light() -> tuple[nn.Module, dict[str, Any]]:
    """1x3x224x224 in, and little to compute."""
    return ViT(ViTConfig(patch_size=56, dim=32, depth=1, heads=2)).eval(), {
        "image": randn(2, 3, 224, 224)
    }


def small() -> tuple[nn.Module, dict[str, Any]]:
    """ViT-small at 224 pixels."""
    return ViT(ViTConfig(dim=384, depth=12, heads=6)).eval(), {"image": randn(2, 3, 224, 224)}


@contextlib.contextmanager
def server(kind: str, bundle: Bundle) -> Iterator[tuple[int, int, int]]:
    """Its ports for REST and gRPC, and the id of its process."""
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        http, grpc = a.getsockname()[1], b.getsockname()[1]
    plain = kind.startswith("plain")
    words = ("--http_port", "--grpc_port") if plain else ("--port", "--grpc-port")
    command = [sys.executable, *SERVERS[kind](bundle.path), words[0], http, words[1], grpc]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{http}/v2/models/{bundle.name}/ready"
        while True:
            assert process.poll() is None, f"{kind} ended"
            with contextlib.suppress(OSError), urlopen(url):
                break
            time.sleep(0.05)
        yield http, grpc, process.pid
    finally:
        process.terminate()
        process.wait(60)


@dataclass
class Way:
    """One way to get answers, and what its rounds gave.

    Attributes:
        ask: milliseconds of each request of a round.
        process: whose time is counted.
    """

    ask: Callable[[], list[float]]
    process: int
    times: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    cpu: float = 0.0

    def round(self, *, keep: bool) -> None:
        begun, busy = time.perf_counter(), cpu_seconds(self.process)
        found = self.ask()
        if keep:
            self.times.append(found)
            self.rates.append(len(found) / (time.perf_counter() - begun))
            self.cpu += cpu_seconds(self.process) - busy

    def figures(self) -> dict[str, Any]:
        joined = np.concatenate(self.times)
        medians = [float(np.median(each)) for each in self.times]
        return {
            "requests": len(joined),
            "per_second": float(np.median(self.rates)),
            "per_second_rounds": self.rates,
            "p50_ms": float(np.percentile(joined, 50)),
            "p50_ms_rounds": medians,
            "p99_ms": float(np.percentile(joined, 99)),
            "cpu_ms": self.cpu * 1e3 / len(joined),
        }


def cpu_seconds(process: int) -> float:
    """User and system time of all threads (proc(5), stat)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    bundle: Bundle, clients: int, seconds: float, count: int, kinds: list[str]
) -> dict[str, dict[str, Any]]:
    """Every server over both protocols, next to runs in this process; a lone client is Triton's."""
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(attn_export.load(bundle.path, "ort-cpu", warmup=True))
        here = partial(latencies, bundle, seconds, partial(bundle.run, session))
        ways = {"in process": Way(here, os.getpid())}
        for kind in kinds:
            http, grpc, process = stack.enter_context(server(kind, bundle))
            for name, module, way, port in (
                ("http", tritonclient.http, by_http, http),
                ("grpc", tritonclient.grpc, by_grpc, grpc),
            ):
                if clients > 1:
                    ask = partial(at_once, way, bundle, port, clients, seconds)
                else:
                    client = module.InferenceServerClient(f"127.0.0.1:{port}")
                    stack.enter_context(client)
                    ask = partial(latencies, bundle, seconds, partial(bundle.infer, module, client))
                ways[f"{kind}, {name}"] = Way(ask, process)
        for number in range(count + 1):
            for way in ways.values():
                way.round(keep=number > 0)  # the first warms up
        return {name: way.figures() for name, way in ways.items()}


def ratio(figures: dict[str, dict[str, Any]], name: str, other: str) -> str:
    """Throughput over that of another way, as the median of the rounds' own ratios."""
    base = f"{other}, {name.rpartition(', ')[2]}"
    if base not in figures or name == base:
        return ""
    pairs = zip(figures[name]["per_second_rounds"], figures[base]["per_second_rounds"], strict=True)
    return f"{np.median([mine / its for mine, its in pairs]):.2f}"


def table(title: str, figures: dict[str, dict[str, Any]]) -> Table:
    made = Table(title=title)
    for column in ("", "requests/s", "(rounds)", "over plain", "over batch 1", "p50 ms", "(rounds)",
                   "added", "p99 ms", "CPU ms"):  # fmt: skip
        made.add_column(column, justify="right" if column else "left")
    (base, *_) = figures.values()
    for name, row in figures.items():
        rates, medians = row["per_second_rounds"], row["p50_ms_rounds"]
        added = "" if row is base else f"{row['p50_ms'] - base['p50_ms']:+.2f}"
        made.add_row(
            name, f"{row['per_second']:.1f}", f"{min(rates):.0f}-{max(rates):.0f}",
            ratio(figures, name, "plain kserve"), ratio(figures, name, "serve, batch 1"),
            f"{row['p50_ms']:.2f}", f"{min(medians):.2f}-{max(medians):.2f}", added,
            f"{row['p99_ms']:.1f}", f"{row['cpu_ms']:.2f}",
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--only", choices=["latency", "digits", "small"])
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    console, found = Console(width=132), {}
    jobs = {
        "latency": (f"{__file__}:light", 1, "One client, 1x3x224x224 float32"),
        "digits": ("vit-digits", args.clients, f"{args.clients} clients, vit-digits"),
        "small": (f"{__file__}:small", args.clients, f"{args.clients} clients, ViT-small"),
    }
    console.print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        for name, (source, clients, title) in jobs.items():
            if args.only in (None, name):
                attn_export.export(source, Path(folder, name))
                bundle = Bundle(Path(folder, name))
                longer = args.seconds * (4 if name == "small" else 1)
                kinds = ["plain kserve", "serve"] if clients == 1 else list(SERVERS)
                found[name] = measure(bundle, clients, longer, args.rounds, kinds)
                console.print(table(title, found[name]))
    console.print(f"load average after: {os.getloadavg()[0]:.1f}; every answer was right")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
