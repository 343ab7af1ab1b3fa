"""Sessions on WebAssembly, where Node.js and onnxruntime-web are here."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data

from attn_export.errors import FileError, RuntimeUnavailable, UsageError
from attn_export.runtimes import node_process, ort_web
from attn_export.runtimes.base import TensorSpec
from tests.needed import needs

pytestmark = needs("ort-web")


def graph(op: str, dtypes: dict[str, Any], shape: list[Any], **attributes: Any) -> bytes:
    """One node of inputs of the same shape."""
    kinds = {n: helper.np_dtype_to_tensor_dtype(np.dtype(t)) for n, t in dtypes.items()}
    inputs = [helper.make_tensor_value_info(n, kind, shape) for n, kind in kinds.items()]
    result = helper.make_tensor_value_info("y", next(iter(kinds.values())), shape)
    node = helper.make_node(op, list(dtypes), ["y"], **attributes)
    made = helper.make_graph([node], "g", inputs, [result])
    opset = [helper.make_opsetid("", 23)]
    return helper.make_model(made, opset_imports=opset, ir_version=10).SerializeToString()


def attention() -> bytes:
    """Causal attention of q, k and v, one head of size 1, tokens dynamic."""
    shape = ["batch", 1, "tokens", 1]
    return graph("Attention", dict.fromkeys("qkv", np.float32), shape, is_causal=1)


def tokens(number: int, batch: int = 1) -> dict[str, NDArray[np.float32]]:
    """Zero scores, so that a query gets the mean of the values 0, 1, 2 ... that it may see."""
    zero = np.zeros((batch, 1, number, 1), np.float32)
    return {"q": zero, "k": zero, "v": zero + np.arange(number, dtype=np.float32).reshape(-1, 1)}


@pytest.fixture(scope="module")
def session() -> Iterator[ort_web.WebSession]:
    with ort_web.load(attention(), threads=1) as loaded:
        yield loaded


def test_causal_attention_of_zero_scores_gives_running_means(session: ort_web.WebSession) -> None:
    assert session.inputs[0] == TensorSpec("q", "float32", ("batch", 1, "tokens", 1))
    for number in (4, 2, 1):
        for batch in (1, 3):
            result = session.run(tokens(number, batch))["y"]
            assert result.shape == (batch, 1, number, 1)
            assert result.ravel().tolist() == pytest.approx([0, 0.5, 1, 1.5][:number] * batch)


def test_placement_is_what_onnx_runtime_logs(session: ort_web.WebSession) -> None:
    assert session.placement() == {"CPUExecutionProvider": 1}
    assert session.run(tokens(2))["y"].ravel().tolist() == [0, 0.5]


def test_several_threads_may_run_one_session(session: ort_web.WebSession) -> None:
    results: dict[int, list[list[float]]] = {}

    def work(number: int) -> None:
        results[number] = [session.run(tokens(number))["y"].ravel().tolist() for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(1, 9):
        assert results[number] == [[index / 2 for index in range(number)]] * 20


def test_inputs_are_checked_before_they_are_sent(session: ort_web.WebSession) -> None:
    with pytest.raises(UsageError, match="'q' is float64, the model takes float32"):
        session.run({**tokens(2), "q": np.zeros((1, 1, 2, 1))})
    with pytest.raises(UsageError, match="'tokens' is 3"):
        session.run({**tokens(2), "q": np.zeros((1, 1, 3, 1), np.float32)})


def test_two_wasm_threads_give_the_same() -> None:
    with ort_web.load(attention(), threads=2) as session:
        assert session.run(tokens(4))["y"].ravel().tolist() == pytest.approx([0, 0.5, 1, 1.5])


EXACT = {
    "float16": [0.5, -65504.0, np.inf, np.nan], "float32": [1e-45, -3.4e38, np.inf, np.nan],
    "float64": [5e-324, -1.7e308, np.inf, np.nan], "bool": [True, False],
    "int8": [-128, 127], "int16": [-(2**15), 2**15 - 1], "int32": [-(2**31), 2**31 - 1],
    "int64": [-(2**63), 2**53 + 1, 2**63 - 1], "uint8": [0, 255], "uint16": [0, 2**16 - 1],
    "uint32": [0, 2**32 - 1], "uint64": [0, 2**64 - 1],
}  # fmt: skip


def test_every_dtype_comes_back_bit_for_bit_whatever_its_shape_and_strides() -> None:
    inputs: dict[str, NDArray[Any]] = {d: np.array(v, d) for d, v in EXACT.items()}
    inputs |= {"scalar": np.array(7.5, np.float32), "empty": np.zeros((2, 0, 3), np.int64)}
    inputs["turned"] = np.arange(6, dtype=np.int32).reshape(2, 3).T
    inputs["backwards"] = np.arange(6, dtype=np.int64)[::-1]
    kinds = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in inputs.items()}
    values = [
        [helper.make_tensor_value_info(p + n, kinds[n], a.shape) for n, a in inputs.items()]
        for p in ("", "out_")
    ]
    nodes = [helper.make_node("Identity", [n], [f"out_{n}"]) for n in inputs]
    made = helper.make_graph(nodes, "g", *values)
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(made, opset_imports=opset, ir_version=10)
    with ort_web.load(model.SerializeToString(), threads=1) as session:
        assert {spec.name: spec.dtype for spec in session.inputs}["float16"] == "float16"
        outputs = session.run(inputs)
    assert list(outputs) == [f"out_{name}" for name in inputs]
    for name, array in inputs.items():
        result = outputs[f"out_{name}"]
        assert (result.dtype, result.shape) == (array.dtype, array.shape)
        assert result.tobytes() == np.ascontiguousarray(array).tobytes()


def with_weights(folder: Path) -> Path:
    """y = x + w, where w = 0, 1, ... 2047 lies in a file beside the model."""
    weights = numpy_helper.from_array(np.arange(2048, dtype=np.float32), "w")
    model = onnx.ModelProto.FromString(graph("Add", {"x": np.float32, "w": np.float32}, [2048]))
    del model.graph.input[1]
    model.graph.initializer.append(weights)
    convert_model_to_external_data(model, location="w.data", size_threshold=0)
    folder.mkdir()
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def test_weights_beside_the_model_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_weights(tmp_path / "a")
    for folder, name in ((Path("/"), path), (tmp_path, Path("a/m.onnx")), (path.parent, "m.onnx")):
        monkeypatch.chdir(folder)
        with ort_web.load(Path(name), threads=1) as session:
            result = session.run({"x": np.ones(2048, np.float32)})["y"]
            assert result.tolist() == [index + 1 for index in range(2048)]


def test_weights_that_are_missing_are_a_file_error(tmp_path: Path) -> None:
    path = with_weights(tmp_path / "a")
    (path.parent / "w.data").unlink()
    with pytest.raises(FileError, match=r"onnxruntime-web .* refuses m\.onnx \(ENOENT.*w\.data"):
        ort_web.load(path)
    with pytest.raises(FileError, match="does not parse"):
        ort_web.load(path.parent / "nothing.onnx")


def test_a_file_that_is_no_model_is_a_file_error() -> None:
    for content in (b"no model", onnx.ModelProto().SerializeToString()):
        with pytest.raises(FileError, match="the model does not parse"):
            ort_web.load(content)
    with pytest.raises(FileError, match=r"onnxruntime-web .* refuses the model"):
        ort_web.load(onnx.ModelProto(ir_version=10).SerializeToString())
    nowhere = graph("NoSuchOp", {"x": np.float32}, [1])
    with pytest.raises(FileError, match="NoSuchOp"):
        ort_web.load(nowhere)


def test_what_fails_when_run_is_one_sentence_and_the_session_lives_on() -> None:
    shape = ["n"]
    model = onnx.ModelProto.FromString(graph("Add", {"a": np.float32, "b": np.float32}, shape))
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "m"
    with ort_web.load(model.SerializeToString(), threads=1) as session:
        with pytest.raises(FileError, match="onnxruntime-web failed on the model") as told:
            session.run({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)})
        assert "\n" not in str(told.value)
        both = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
        assert session.run(both)["y"].tolist() == [2, 2]


def test_an_input_that_numpy_does_not_have_is_a_file_error() -> None:
    text = helper.make_tensor_value_info("x", TensorProto.STRING, [1])
    out = helper.make_tensor_value_info("y", TensorProto.STRING, [1])
    made = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [text], [out])
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(made, opset_imports=opset, ir_version=10)
    with pytest.raises(FileError, match="input 'x' is a string, which numpy does not have"):
        ort_web.load(model.SerializeToString())


def ended(process: int) -> bool:
    """Gone for good: not even a zombie is left."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_process_that_dies_is_told_and_leaves_no_zombie() -> None:
    session = ort_web.load(attention(), threads=1)
    (process,) = session.processes
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RuntimeUnavailable) as told:
        session.run(tokens(4))
    assert str(told.value) == (
        "the Node process ended during 'run' (killed by signal 9); load the model again."
    )
    assert ended(process)
    with pytest.raises(RuntimeUnavailable, match="the Node process has ended; load"):
        session.run(tokens(4))
    session.close()


def test_an_interrupt_between_question_and_answer_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer would be taken for that of the next question."""
    session = ort_web.load(attention(), threads=1)
    (process,) = session.processes
    read = node_process.NodeProcess._read

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(node_process.NodeProcess, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.run(tokens(4))
    monkeypatch.setattr(node_process.NodeProcess, "_read", read)
    assert ended(process)
    with pytest.raises(RuntimeUnavailable, match="the Node process has ended"):
        session.run(tokens(1))


def test_closing_ends_the_process_and_so_does_forgetting_the_session() -> None:
    session = ort_web.load(attention(), threads=1)
    (process,) = session.processes
    session.close()
    session.close()
    assert ended(process)
    with pytest.raises(UsageError, match="this ort-web session is closed"):
        session.run(tokens(1))
    forgotten = ort_web.load(attention(), threads=1)
    (process,) = forgotten.processes
    del forgotten
    gc.collect()
    assert ended(process)


def test_a_refused_model_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    ask = node_process.NodeProcess.ask

    def watched(self: Any, do: str, *arguments: Any, **request: Any) -> Any:
        started.append(self.pid)
        return ask(self, do, *arguments, **request)

    monkeypatch.setattr(node_process.NodeProcess, "ask", watched)
    with pytest.raises(FileError):
        ort_web.load(graph("NoSuchOp", {"x": np.float32}, [1]))
    assert started
    assert all(map(ended, started))


SCRIPT = """
import os, sys
from attn_export.runtimes import ort_web
session = ort_web.load(open(sys.argv[1], "rb").read(), threads=1)
print(session.processes[0], flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_the_process_ends_with_the_program_that_began_it(tmp_path: Path, how: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(attention())
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, path, how], capture_output=True, text=True
    )
    assert done.returncode == (0 if how == "exit" else -9), done.stderr
    until = time.monotonic() + 20
    while not ended(int(done.stdout)):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_forked_child_leaves_the_process_of_its_parent_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(attention())
    script = SCRIPT + (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n        session.placement()\n"
        "    except Exception as error:\n        print(error, flush=True)\n"
        "    session.close()\n    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(session.placement())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, path, "fork"], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[1:] == [
        "this model was loaded before this process was forked; load it after the fork.",
        "{'CPUExecutionProvider': 1}",
    ], done.stderr
