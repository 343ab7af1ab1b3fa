"""Throughput and latency of `attn-export serve`, against in-process runs and a plain kserve model.

    python benchmarks/serving.py [--seconds 2] [--rounds 5] [--clients 16] [--json FILE]

Latency: one client of Triton, one request after the other, 1x3x224x224 float32 in binary, a model
of about a millisecond; "added" is the median over that of the same runs in process. Throughput:
as many clients at once on `vit-digits` and on ViT-small at 224 pixels, each with its own image.
Every response is compared with the in-process answer. Servers stay up and are asked in turn, round
after round, so that what else the machine does meets all of them; the spread of the rounds is told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
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
def server(kind: str, bundle: Bundle) -> Iterator[tuple[int, int]]:
    """Its ports for REST and gRPC."""
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
        yield http, grpc
    finally:
        process.terminate()
        process.wait(60)


def rounds(
    ways: dict[str, Callable[[], list[float]]], count: int, clients: int
) -> dict[str, dict[str, Any]]:
    """Each way in turn, `count` times over; figures over all, and the spread of the rounds."""
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(count + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            found = way()
            if number:  # the first round warms up
                times[name].append(found)
                rates[name].append(len(found) / (time.perf_counter() - begun))
    figures = {}
    for name, found in times.items():
        joined = np.concatenate(found)
        figures[name] = {
            "p50_ms": float(np.percentile(joined, 50)),
            "p99_ms": float(np.percentile(joined, 99)),
            "per_second": float(np.median(rates[name])),
            "per_second_rounds": [min(rates[name]), max(rates[name])],
            "p50_ms_rounds": [float(f([np.median(each) for each in found])) for f in (min, max)],
            "requests": len(joined),
            "clients": clients,
        }
    return figures


def in_process(bundle: Bundle, session: Any) -> Callable[[int], Any]:
    return lambda index: session.run({bundle.input: bundle.images[index][None]})[bundle.output]


def measure(
    bundle: Bundle, clients: int, seconds: float, count: int, kinds: list[str]
) -> dict[str, dict[str, Any]]:
    """Every server over both protocols, next to runs in this process; a lone client is Triton's."""
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(attn_export.load(bundle.path, "ort-cpu", warmup=True))
        ask = in_process(bundle, session)
        ways = {"in process, one after the other": lambda: latencies(bundle, seconds, ask)}
        for kind in kinds:
            ports = stack.enter_context(server(kind, bundle))
            for name, module, way, port in (
                ("http", tritonclient.http, by_http, ports[0]),
                ("grpc", tritonclient.grpc, by_grpc, ports[1]),
            ):
                if clients > 1:
                    ways[f"{kind}, {name}"] = lambda way=way, port=port: asyncio.run(
                        at_once(way, bundle, port, clients, seconds)
                    )
                    continue
                client = stack.enter_context(module.InferenceServerClient(f"127.0.0.1:{port}"))
                ways[f"{kind}, {name}"] = lambda client=client, module=module: latencies(
                    bundle,
                    seconds,
                    lambda index: client.infer(bundle.name, bundle.tensors(module, index)).as_numpy(
                        bundle.output
                    ),
                )
        return rounds(ways, count, clients)


def table(title: str, figures: dict[str, dict[str, Any]]) -> Table:
    made = Table(title=title)
    for column in ("", "requests/s", "of its rounds", "p50 ms", "of its rounds", "p99 ms", "added"):
        made.add_column(column, justify="right" if column else "left")
    (base, *_) = figures.values()
    for name, row in figures.items():
        low, high = row["per_second_rounds"]
        least, most = row["p50_ms_rounds"]
        added = row["p50_ms"] - base["p50_ms"]
        made.add_row(
            name, f"{row['per_second']:.1f}", f"{low:.1f} to {high:.1f}", f"{row['p50_ms']:.2f}",
            f"{least:.2f} to {most:.2f}", f"{row['p99_ms']:.2f}",
            f"{added:+.2f}" if row is not base else "",
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
