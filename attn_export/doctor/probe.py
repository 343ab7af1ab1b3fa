"""Run a small attention model on one runtime: `python -m attn_export.doctor.probe RUNTIME`.

Prints one JSON object, the fields of `doctor.Finding`, as the last line on stdout.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from attn_export.errors import AttnExportError, one_line
from attn_export.runtimes import table
from attn_export.runtimes.base import LoadOptions, Session, TensorSpec

HEAD_SIZE = 8  # flash kernels want a multiple of 8
SHAPE = (1, 1, "tokens", HEAD_SIZE)
TOLERANCE = 2e-3  # of values up to 3; loose enough for tf32, far below a wrong key


def cases() -> list[tuple[dict[str, NDArray[np.float32]], NDArray[np.float32]]]:
    """Inputs of causal attention with scale 1, and the answers, worked out by hand.

    With zero scores every query gets the mean of the values up to its own: 0, 1/2, 1, 3/2. With
    scores 0 and ln 3 the second query weighs the values 0 and 4 by 1/4 and 3/4, which makes 3.
    """
    flat = _inputs(np.zeros(4), np.zeros(4), np.arange(4.0))
    sharp = _inputs(np.array([0.0, math.log(3)]), np.array([0.0, 1.0]), np.array([0.0, 4.0]))
    return [(flat, _spread([0.0, 0.5, 1.0, 1.5])), (sharp, _spread([0.0, 3.0]))]


def _inputs(query: Any, key: Any, value: Any) -> dict[str, NDArray[np.float32]]:
    """query and key in the first of the head's numbers, value in all of them."""
    first = np.eye(1, HEAD_SIZE, dtype=np.float32)
    return {
        "query": _spread(query) * first,
        "key": _spread(key) * first,
        "value": _spread(value),
    }


def _spread(numbers: Any) -> NDArray[np.float32]:
    """A number a token -> (1, 1, tokens, H)."""
    column = np.asarray(numbers, np.float32)[:, None]
    return np.repeat(column, HEAD_SIZE, axis=1)[None, None]


def graph() -> onnx.ModelProto:
    """One standard Attention node of opset 23, tokens dynamic."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE)
        for name in ("query", "key", "value", "output")
    ]
    node = helper.make_node(
        "Attention", ["query", "key", "value"], ["output"], name="attention", is_causal=1, scale=1.0
    )
    made = helper.make_graph([node], "doctor", values[:3], values[3:])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def session(runtime: str, folder: Path) -> Session:
    """The model on a runtime that is available."""
    if runtime in table.MODULE_RUNTIMES:
        return _torch_session(runtime)
    path = folder / "doctor.onnx"
    onnx.save(graph(), path)
    options = LoadOptions(ranges={"tokens": (1, 16)}, cache=folder)
    return table.find(runtime).load(path, options=options)


def _torch_session(runtime: str) -> Session:
    from torch import Tensor, nn

    from attn_export.runtimes.torch_compile import NAME, CompiledSession
    from attn_export.runtimes.torch_eager import TorchSession

    class Causal(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attend = nn.functional.scaled_dot_product_attention
            return attend(query, key, value, is_causal=True, scale=1.0)

    specs = [TensorSpec(name, "float32", SHAPE) for name in ("query", "key", "value")]
    kind = CompiledSession if runtime == NAME else TorchSession
    return kind(Causal(), specs, ["output"])


def examine(runtime: str) -> dict[str, Any]:
    """The fields of a Finding."""
    seen = table.availability(runtime)
    found = asdict(seen)
    del found["runtime"], found["ok"]
    if not seen.ok:
        return {**found, "status": "unavailable"}
    try:
        return {**found, **_run(runtime)}
    except AttnExportError as error:
        return {**found, "status": "fail", "observed": error.observed, "fix": error.way_out}
    except Exception as error:  # the exceptions of runtimes share no base class
        text = f"it raised {type(error).__name__}: {one_line(error)}"
        return {**found, "status": "fail", "observed": text, "fix": "reinstall its packages"}


def _run(runtime: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="attn-export-") as folder:
        begun = time.perf_counter()
        with session(runtime, Path(folder)) as loaded:
            answers = [loaded.run(inputs)["output"] for inputs, _ in cases()]
            took = (time.perf_counter() - begun) * 1e3
    for answer, (_, right) in zip(answers, cases(), strict=True):
        if not np.allclose(answer, right, rtol=0, atol=TOLERANCE):
            return {
                "status": "fail",
                "observed": f"it answered {answer[0, 0, :, 0].tolist()} where"
                f" {right[0, 0, :, 0].tolist()} is right",
                "fix": "do not use it",
                "ms": took,
            }
    return {"status": "pass", "observed": "", "fix": "", "ms": took}


if __name__ == "__main__":
    print("\n" + json.dumps(examine(sys.argv[1])))
