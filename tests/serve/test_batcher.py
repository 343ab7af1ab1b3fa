"""The queue of one model, around a function that says what it was given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from attn_export.errors import InputError
from attn_export.serve.batching import Batcher, most
from attn_export.serve.refusals import Full, NotReady
from tests.serve.conftest import Array

Runs = list[list[float]]


def batcher(
    runs: Runs, *, rows: int = 8, delay: float = 0.0, limit: int = 64, **more: Any
) -> Batcher:
    """Doubles x (rows, any); `runs` gets the first column of each run."""

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        x: Any = inputs["x"]
        runs.append(x[:, 0].tolist())
        if (x < 0).any():
            raise InputError("a number is negative", "send another")
        more.get("wait", lambda: None)()
        return {"y": more.get("compute", lambda x: 2 * x)(x)}

    return Batcher("m", run, rows=rows, delay=delay, limit=limit)


def x(*numbers: float, width: int = 1) -> dict[str, Array]:
    return {"x": np.repeat(np.array(numbers, np.float32)[:, None], width, 1)}


def within(made: Batcher, body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        made.start()
        await body()
        await made.close()

    asyncio.run(asyncio.wait_for(main(), 20))


async def values(made: Batcher, *numbers: float, width: int = 1) -> list[float]:
    answer = await made.submit(x(*numbers, width=width))
    return list(answer.outputs["y"][:, 0].tolist())


def test_what_comes_at_once_shares_runs_that_are_full() -> None:
    runs: Runs = []
    made = batcher(runs, rows=4)

    async def body() -> None:
        found = await asyncio.gather(*(values(made, n) for n in range(10)))
        assert found == [[2.0 * n] for n in range(10)]

    within(made, body)
    assert runs == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_requests_of_several_rows_stay_whole_and_in_order() -> None:
    runs: Runs = []
    made = batcher(runs, rows=4)

    async def body() -> None:
        found = await asyncio.gather(
            values(made, 1, 2), values(made, 3, 4, 5), values(made, 6), values(made, *range(10, 17))
        )
        assert found == [[2, 4], [6, 8, 10], [12], [2 * n for n in range(10, 17)]]

    within(made, body)
    assert runs == [[1, 2, 6], [3, 4, 5], list(range(10, 17))]  # one above the limit runs alone


def test_other_sizes_do_not_share_and_wait_their_turn() -> None:
    runs: Runs = []
    made = batcher(runs)

    async def body() -> None:
        await asyncio.gather(values(made, 1), values(made, 2, width=3), values(made, 3),
                             values(made, 4, width=3))  # fmt: skip

    within(made, body)
    assert runs == [[1, 3], [2, 4]]


@pytest.mark.parametrize("rows", [0, 1])
def test_none_is_shared_where_rows_mix(rows: int) -> None:
    runs: Runs = []
    made = batcher(runs, rows=rows)

    async def body() -> None:
        await asyncio.gather(*(values(made, n) for n in range(3)))

    within(made, body)
    assert runs == [[0], [1], [2]]


def test_company_is_waited_for_and_a_lone_request_is_not() -> None:
    runs: Runs = []
    made = batcher(runs, delay=0.3)

    async def later(seconds: float, number: float) -> None:
        await asyncio.sleep(seconds)
        await values(made, number)

    async def body() -> None:
        begun = asyncio.get_running_loop().time()
        await values(made, 0)
        assert asyncio.get_running_loop().time() - begun < 0.2
        await asyncio.gather(later(0, 1), later(0, 2), later(0.05, 3))
        assert asyncio.get_running_loop().time() - begun >= 0.3

    within(made, body)
    assert runs == [[0], [1, 2, 3]]


def test_the_one_at_fault_fails_alone() -> None:
    runs: Runs = []
    made = batcher(runs)

    async def body() -> None:
        tasks = [values(made, n) for n in (1.0, -2.0, 3.0)]
        one, two, three = await asyncio.gather(*tasks, return_exceptions=True)
        assert (one, three) == ([2.0], [6.0])
        assert isinstance(two, InputError)

    within(made, body)
    assert runs == [[1, -2, 3], [1], [-2], [3]]


def test_outputs_that_are_not_row_by_row_are_computed_alone() -> None:
    """A model that was taken for one of independent rows."""
    runs: Runs = []
    made = batcher(runs, compute=lambda x: x.sum(0, keepdims=True))

    async def body() -> None:
        assert await asyncio.gather(values(made, 1), values(made, 2)) == [[1], [2]]

    within(made, body)
    assert runs == [[1, 2], [1], [2]]


def test_one_that_was_given_up_is_not_run_and_makes_room() -> None:
    runs: Runs = []
    gate = threading.Event()
    made = batcher(runs, rows=1, limit=2, wait=lambda: gate.wait(10))

    async def body() -> None:
        first = asyncio.create_task(values(made, 1))
        await asyncio.sleep(0.05)  # it runs
        second, third = (asyncio.create_task(values(made, n)) for n in (2, 3))
        await asyncio.sleep(0.05)
        with pytest.raises(Full, match="2 requests wait for 'm', which is all that may"):
            await values(made, 4)
        second.cancel()
        await asyncio.sleep(0.05)
        fifth = asyncio.create_task(values(made, 5))
        await asyncio.sleep(0.05)
        gate.set()
        assert await asyncio.gather(first, third, fifth) == [[2], [6], [10]]

    within(made, body)
    assert runs == [[1], [3], [5]]


def test_closing_answers_what_waits_and_takes_no_more() -> None:
    runs: Runs = []
    gate = threading.Event()
    made = batcher(runs, rows=1, wait=lambda: gate.wait(10))

    async def body() -> None:
        tasks = [asyncio.create_task(values(made, n)) for n in (1, 2, 3)]
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(made.close())
        await asyncio.sleep(0.05)
        with pytest.raises(NotReady):
            await values(made, 4)
        gate.set()
        await closing
        assert [task.result() for task in tasks] == [[2], [4], [6]]

    within(made, body)


@pytest.mark.parametrize(
    ("milliseconds", "rows"),
    [
        ({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}, 8),  # 1, 0.6, 0.4, 0.3 a row
        ({1: 100.0, 2: 200.0, 4: 396.0, 8: 810.0}, 1),  # 99 at best
        ({1: 1.0, 2: 1.2, 4: 2.4, 8: 5.6}, 4),  # 0.6, 0.6, 0.7
        ({6: 3.0}, 6),
    ],
)
def test_runs_are_as_large_as_they_gain(milliseconds: dict[int, float], rows: int) -> None:
    assert most(milliseconds) == rows


def test_an_answer_tells_what_it_shared() -> None:
    made = batcher([])

    async def body() -> None:
        answers = await asyncio.gather(*(made.submit(x(n, n)) for n in (1, 2)))
        assert [(a.rows, a.requests) for a in answers] == [(4, 2), (4, 2)]
        assert all(a.waited >= 0 and a.ran >= 0 for a in answers)

    within(made, body)
