"""Other processes: a forked child refuses and ends well, a spawned one opens the bundle again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.boundary import ROOT, Ended

OPEN = """
import gc, multiprocessing, os, sys, time
import numpy as np
import attn_export

def inputs(seed):
    generator = np.random.default_rng(seed)
    return {"tokens": generator.standard_normal((2, 9, 16)).astype(np.float32)}

def answer(session, seed=0):
    (made,) = session.run(inputs(seed)).values()
    return made

def ended(child):
    "The exit status of a child, or 'hangs' after ten seconds."
    until = time.monotonic() + 10
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"
"""


def script(tmp_path: Path, body: str, bundle: Path) -> Ended:
    """Run in a process of its own, which has not imported torch and has one thread."""
    path = tmp_path / "script.py"
    path.write_text(OPEN + body)
    done = subprocess.run(
        [sys.executable, path, bundle],
        capture_output=True,
        text=True,
        timeout=100,
        # numpy's own pool of threads would be counted among those of the session.
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    )
    return Ended(done.returncode, done.stdout, done.stderr)


FORK = """
session = attn_export.load(sys.argv[1], "ort-cpu", threads={threads})
expected = answer(session)
child = os.fork()
if child == 0:
    for call in (lambda: answer(session), session.warmup, session.placement):
        try:
            call()
        except attn_export.AttnExportError as error:
            print(type(error).__name__, error, flush=True)
    session.close()
    again = session.reopen()
    assert np.array_equal(answer(again), expected)
    del session, call
    gc.collect()  # would wait for threads that this process does not have
    {end}
print(ended(child), child)
assert np.array_equal(answer(session), expected)
session.close()
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("end", ["sys.exit(7)", "os._exit(7)"])
def test_a_forked_child_refuses_reopens_and_ends(
    tmp_path: Path, lengths_bundle: Path, threads: int, end: str
) -> None:
    done = script(tmp_path, FORK.format(threads=threads, end=end), lengths_bundle)
    assert (done.code, done.stderr) == (0, "")
    *refusals, last = done.stdout.splitlines()
    code, child = last.split()
    assert code == "7"
    assert len(refusals) == 3
    for line in refusals:
        assert line.startswith("UsageError this session was opened in process ")
        assert line.endswith(
            f" and is used in {child}, which was forked from it; open one there with"
            " session.reopen(), for instance in gunicorn's post_fork."
        )


FORK_WHILE_BUSY = """
import threading
session = attn_export.load(sys.argv[1], "ort-cpu", threads=2)
expected, stop = answer(session), threading.Event()

def busy():
    while not stop.is_set():
        assert np.array_equal(answer(session), expected)

threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
codes = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        try:
            answer(session)
        except attn_export.AttnExportError:
            os._exit(5)
        os._exit(6)
    codes.append(ended(child))
stop.set()
for thread in threads:
    thread.join()
print(codes)
"""


def test_a_child_forked_while_threads_run_refuses_at_once(
    tmp_path: Path, lengths_bundle: Path
) -> None:
    done = script(tmp_path, FORK_WHILE_BUSY, lengths_bundle)
    assert (done.code, done.stdout, done.stderr) == (0, f"{[5] * 10}\n", "")


PRELOAD = """
session = attn_export.load(sys.argv[1], "ort-cpu", threads=2)  # as an application that is preloaded
expected = [answer(session, seed).tobytes() for seed in range(4)]
children = []
for worker in range(2):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        session = session.reopen()  # as post_fork does
        for seed in range(4):
            os.write(write, b"1" if answer(session, seed).tobytes() == expected[seed] else b"0")
        sys.exit(0)
    os.close(write)
    children.append((child, read))
print([(ended(child), os.read(read, 4).decode()) for child, read in children])
"""


def test_workers_of_a_preloaded_application_open_their_own(
    tmp_path: Path, lengths_bundle: Path
) -> None:
    done = script(tmp_path, PRELOAD, lengths_bundle)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == "[(0, '1111'), (0, '1111')]\n"


SPAWN = """
if __name__ == "__main__":
    session = attn_export.load(sys.argv[1], "ort-cpu", threads=1)
    expected = [answer(session, seed) for seed in range(6)]
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        made = pool.starmap(answer, [(session, seed) for seed in range(6)])
    print([bool(np.array_equal(*pair)) for pair in zip(made, expected, strict=True)])
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_pickled_session_opens_again_where_it_arrives(
    tmp_path: Path, lengths_bundle: Path, method: str
) -> None:
    done = script(tmp_path, SPAWN.format(method=method), lengths_bundle)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == f"{[True] * 6}\n"


TASKS = """
session = attn_export.load(sys.argv[1], "ort-cpu", threads={threads})
session.run(inputs(0))
print(os.environ.get("ORT_DISABLE_TELEMETRY"), len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_a_session_has_its_threads_and_none_that_reports_it(
    tmp_path: Path, lengths_bundle: Path, threads: int
) -> None:
    """The first thread is this process's own; onnxruntime's reporting would be one more."""
    done = script(tmp_path, TASKS.format(threads=threads), lengths_bundle)
    assert done.stdout == f"1 {threads}\n"
