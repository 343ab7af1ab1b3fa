"""Requests that wait for one model, and the runs that they share.

One run at a time, in a thread of its own. A run takes the oldest request, and with it those of
equal sizes whose rows still fit. While it goes on others gather, so that a busy server shares runs
without any delay; `delay` is what a run that was shared, or has company already, waits for more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from attn_export.runtimes.base import Arrays
from attn_export.serve import metrics
from attn_export.serve.refusals import Full, NotReady
from attn_export.serve.tensors import Array

log = logging.getLogger("attn_export")


@dataclass(frozen=True)
class Answer:
    """Outputs by name.

    Attributes:
        waited: seconds before the run began.
        ran: seconds that the run took.
        rows: of all requests that shared it.
        requests: how many shared it.
    """

    outputs: Arrays
    waited: float
    ran: float
    rows: int
    requests: int


@dataclass(eq=False)
class _Waiting:
    inputs: Arrays
    rows: int
    key: Hashable
    arrived: float
    answer: asyncio.Future[Answer]


WORTH = 1.05  # what is nearer than this to the best is as good


def most(seconds: Mapping[int, float]) -> int:
    """The rows of a run that are a gain, where one of n rows takes so many seconds.

    As many as are as good as the best, since each run costs the server something too; the fewest
    where those are as good, since requests then wait for nothing.
    """
    of_a_row = {rows: taken / rows for rows, taken in sorted(seconds.items())}
    good = [rows for rows, each in of_a_row.items() if each <= min(of_a_row.values()) * WORTH]
    return good[0] if good[0] == min(of_a_row) else good[-1]


class Batcher:
    """The requests of one model.

    Attributes:
        rows: the most in a run that is shared; below 2 none is.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Mapping[str, Array]], Arrays],
        *,
        rows: int,
        delay: float,
        limit: int,
    ) -> None:
        """
        Args:
            name: the model's, for the thread and the log.
            run: inputs to outputs; called in another thread.
            rows: the most in a run that is shared; below 2 none is.
            delay: seconds that the oldest request waits for others, at most.
            limit: requests that may wait.
        """
        self._name, self._run = name, run
        self.rows, self._delay, self._limit = rows, delay, limit
        self._waiting: deque[_Waiting] = deque()
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, f"run-{name}")
        self._task: asyncio.Task[None] | None = None
        self._closing = self._shared_before = False

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        """Begin to answer; called inside of the event loop."""
        self._task = asyncio.create_task(self._work(), name=f"batches of {self._name}")

    def require_room(self) -> None:
        """Raise Full where no other request may wait."""
        if len(self._waiting) >= self._limit:
            raise Full(
                f"{self._limit} requests wait for '{self._name}', which is all that may",
                "send it again a little later",
            )

    async def submit(self, inputs: Arrays) -> Answer:
        """Outputs of these inputs, which the model is known to take.

        Cancelling the call takes it out of the queue.

        Raises:
            Full: too many wait.
            NotReady: the server stops.
        """
        self.require_room()
        if self._closing:
            raise NotReady(f"'{self._name}' stops", "send it to another server")
        rows, key = self._row_key(inputs)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(inputs, rows, key, time.monotonic(), answer)
        self._waiting.append(waiting)
        self._arrival.set()
        try:
            return await answer
        except asyncio.CancelledError:
            with suppress(ValueError):  # it may run already
                self._waiting.remove(waiting)
            raise

    async def close(self) -> None:
        """Answer what waits, then end the thread."""
        self._closing = True
        self._arrival.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    def _row_key(self, inputs: Arrays) -> tuple[int, Hashable]:
        """Rows, and what is equal for requests that may share a run."""
        if self.rows < 2:
            return 1, object()
        sizes = tuple((name, inputs[name].shape[1:]) for name in sorted(inputs))
        return next(iter(inputs.values())).shape[0], sizes

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while await self._any():
            await self._company()
            group = self._take()
            if not group:
                continue
            self._shared_before = len(group) > 1
            begun = time.monotonic()
            results = await loop.run_in_executor(self._thread, self._results, group)
            ran, rows = time.monotonic() - begun, sum(each.rows for each in group)
            metrics.of(metrics.RUN_SECONDS, self._name).observe(ran)
            metrics.of(metrics.RUN_ROWS, self._name).observe(rows)
            metrics.of(metrics.RUN_REQUESTS, self._name).observe(len(group))
            for each, result in zip(group, results, strict=True):
                if each.answer.done():  # given up meanwhile
                    continue
                if isinstance(result, Exception):
                    each.answer.set_exception(result)
                else:
                    answer = Answer(result, begun - each.arrived, ran, rows, len(group))
                    each.answer.set_result(answer)

    async def _any(self) -> bool:
        """Wait for a request; False once the queue is closed and empty."""
        while True:
            while self._waiting and self._waiting[0].answer.done():
                self._waiting.popleft()
            if self._waiting or self._closing:
                return bool(self._waiting)
            self._arrival.clear()
            await self._arrival.wait()

    async def _company(self) -> None:
        """Wait until a run is full, or its oldest request has waited as long as it may.

        A lone client does not wait: nothing says that others would come.
        """
        first = self._waiting[0]
        until = first.arrived + self._delay
        if self.rows < 2 or not (self._shared_before or len(self._waiting) > 1):
            return
        while not self._closing and (left := until - time.monotonic()) > 0:
            gathered = sum(each.rows for each in self._waiting if each.key == first.key)
            if gathered >= self.rows:
                return
            self._arrival.clear()
            try:
                async with asyncio.timeout(left):
                    await self._arrival.wait()
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """The oldest request and what may share its run, out of the queue; the rest in order."""
        taken, left, rows = list[_Waiting](), deque[_Waiting](), 0
        for each in self._waiting:
            if each.answer.done():
                continue
            if not taken or (each.key == taken[0].key and rows + each.rows <= self.rows):
                taken.append(each)
                rows += each.rows
            else:
                left.append(each)
        self._waiting = left
        return taken

    def _results(self, group: Sequence[_Waiting]) -> list[Arrays | Exception]:
        """In the thread: outputs of each, or its own error."""
        if len(group) > 1:
            try:
                return [*self._together(group)]
            except Exception as error:  # one of them may be at fault, so that each runs alone
                log.warning("a shared run of '%s' failed, each runs alone: %s", self._name, error)
        return [self._alone(each) for each in group]

    def _alone(self, each: _Waiting) -> Arrays | Exception:
        try:
            return self._run(each.inputs)
        except Exception as error:
            return error

    def _together(self, group: Sequence[_Waiting]) -> list[Arrays]:
        names, rows = group[0].inputs, sum(each.rows for each in group)
        joined = {name: np.concatenate([each.inputs[name] for each in group]) for name in names}
        outputs = self._run(joined)
        for name, array in outputs.items():
            if array.shape[:1] != (rows,):
                raise ValueError(f"output '{name}' has shape {array.shape} for {rows} rows")
        results, begin = [], 0
        for each in group:
            end = begin + each.rows
            results.append({name: array[begin:end] for name, array in outputs.items()})
            begin = end
        return results
