"""CPU seconds an input of `predict`, for the cost model of docs/scale-out.md.

CPU time rather than latency: it is what cores are bought for, and it hardly changes where other
work shares the machine.

    python benchmarks/scale_out.py BUNDLE INPUT... [--seconds 10]
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

from attn_export.predict.job import Worker, prepare
from attn_export.predict.reading import Sample


def used() -> float:
    """CPU seconds of this process and its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    job = prepare(given.bundle, given.inputs, threads=1)
    begun, wall = used(), time.perf_counter()
    worker = Worker(job)
    opening = used() - begun
    print(f"open: {opening:.2f} CPU s, {time.perf_counter() - wall:.2f} s")
    ranges = job.ranges(job.batch_size)
    reading = running = 0.0
    count = 0
    until = time.perf_counter() + given.seconds
    while time.perf_counter() < until:
        for start, stop in ranges:
            begun = used()
            samples: list[Sample] = [
                worker.predictor.reader.read(*pair) for pair in job.samples.between(start, stop)
            ]
            read = used()
            worker.predictor.session.run(worker.predictor.inputs(samples))
            reading, running = reading + read - begun, running + used() - read
            count += stop - start
    worker.close()
    print(f"{count} inputs, batches of up to {job.batch_size}, {os.cpu_count()} cores")
    print(f"read and prepare: {1000 * reading / count:.3f} CPU ms an input")
    print(f"model: {1000 * running / count:.3f} CPU ms an input")
    print(f"inputs a second and core: {count / (reading + running):.0f}")


if __name__ == "__main__":
    main()
