"""A job on this machine: in this process, or in several with a session each; order is kept."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace

from attn_export.errors import AttnExportError
from attn_export.predict.answers import Answer
from attn_export.predict.job import Job, Range, Worker
from attn_export.runtimes.threads import cores

AHEAD = 3  # ranges that wait for each worker, so that none is idle and few answers are held
Part = tuple[str, list[Answer]]


def run(job: Job, workers: int = 1) -> Iterator[Part]:
    """The runtime and the answers of range after range.

    Raises:
        AttnExportError: as `attn_export.load`, or a worker process ended.
    """
    ranges = job.ranges(job.batch_size)
    if workers == 1:
        yield from _here(job, ranges)
        return
    share = job.threads or max(1, cores() // workers)
    yield from _elsewhere(replace(job, threads=share), ranges, min(workers, len(ranges)))


def _here(job: Job, ranges: list[Range]) -> Iterator[Part]:
    with closing(Worker(job)) as worker:
        for start, stop in ranges:
            yield worker.runtime, worker.work(start, stop)


def _elsewhere(job: Job, ranges: list[Range], workers: int) -> Iterator[Part]:
    """Processes are spawned: sessions do not survive a fork."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start, initargs=(job,)
    )
    waiting: deque[Future[Part]] = deque()
    todo = iter(ranges)
    try:
        for _ in range(workers * AHEAD):
            _submit(pool, todo, waiting)
        while waiting:
            part = waiting.popleft().result()
            _submit(pool, todo, waiting)
            yield part
    except BrokenProcessPool as error:
        raise AttnExportError(
            "a worker process ended before its work was done",
            "it may have been out of memory: lower --workers or --batch-size",
        ) from error
    finally:
        if waiting:  # Ctrl-C, or an error: what they work on is not wanted any more
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, todo: Iterator[Range], waiting: deque[Future[Part]]) -> None:
    for start, stop in todo:
        waiting.append(pool.submit(_work, start, stop))
        return


_JOB: Job | None = None
_WORKER: Worker | None = None


def _start(job: Job) -> None:
    """The session opens with the first range, so that its error reaches the parent."""
    global _JOB
    _JOB = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer


def _work(start: int, stop: int) -> Part:
    global _WORKER
    assert _JOB is not None
    if _WORKER is None:
        _WORKER = Worker(_JOB)
    return _WORKER.runtime, _WORKER.work(start, stop)
