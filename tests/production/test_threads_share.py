"""One session, many threads: each result is that of a run alone, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from attn_export import load
from tests.needed import needs

THREADS, RUNS = 8, 200
OPENVINO = pytest.param("openvino", 2, marks=needs("openvino"))


@pytest.mark.parametrize(("runtime", "cores"), [("ort-cpu", 1), ("ort-cpu", 2), OPENVINO])
def test_eight_threads_get_what_one_gets(lengths_bundle: Path, runtime: str, cores: int) -> None:
    generator = np.random.default_rng(0)
    inputs = [
        [
            generator.standard_normal((1, 3 + (7 * thread + run) % 62, 16)).astype(np.float32)
            for run in range(RUNS)
        ]
        for thread in range(THREADS)
    ]
    with load(lengths_bundle, runtime, threads=cores) as session:

        def answers(arrays: list[np.ndarray]) -> list[np.ndarray]:
            return [next(iter(session.run({"tokens": array}).values())) for array in arrays]

        alone = [answers(arrays) for arrays in inputs]
        with ThreadPoolExecutor(THREADS) as pool:
            together = list(pool.map(answers, inputs))
    assert {array.shape[1] for arrays in inputs for array in arrays} == set(range(3, 65))
    differing = [
        (thread, run)
        for thread in range(THREADS)
        for run in range(RUNS)
        if not np.array_equal(alone[thread][run], together[thread][run])
    ]
    assert differing == []
    assert not np.array_equal(alone[0][0], alone[1][0][:, :3])
