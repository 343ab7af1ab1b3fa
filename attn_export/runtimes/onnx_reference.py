"""onnx-reference: ONNX's own evaluator in numpy. Slow, and independent of every other runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from attn_export.errors import FileError, one_line
from attn_export.runtimes import graphs
from attn_export.runtimes.base import (
    DEFAULTS,
    Arrays,
    Availability,
    Graph,
    LoadOptions,
    Placed,
    Session,
)

NAME = "onnx-reference"
GRAPHS = ("ort-tensorrt", "openvino", "ort-web", "ort-cuda", "ort-cpu")
"""Any graph of standard ops will do; that for TensorRT is always one."""
DEVICE = "numpy"


def availability() -> Availability:
    """It is part of the onnx package, which attn-export requires."""
    return Availability(NAME, True, versions={"onnx": onnx.__version__}, device="CPU")


class ReferenceSession(Session):
    """A graph of standard ops, node after node in numpy."""

    def __init__(self, model: onnx.ModelProto) -> None:
        try:
            self._evaluator: ReferenceEvaluator | None = ReferenceEvaluator(model)
        except Exception as error:  # the evaluator's exceptions share no base class
            raise FileError(
                f"ONNX's evaluator refuses the model ({one_line(error)})", "leave this runtime out"
            ) from error
        self._nodes = [Placed(DEVICE, n.domain, n.op_type, n.name) for n in model.graph.node]
        super().__init__(NAME, graphs.inputs(model))

    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        assert self._evaluator is not None
        try:
            with np.errstate(all="ignore"):  # blocked rows give NaN on the way
                values = self._evaluator.run(None, dict(inputs))
        except Exception as error:  # the evaluator's exceptions share no base class
            raise FileError(
                f"ONNX's evaluator failed on the model ({one_line(error)})",
                "leave this runtime out",
            ) from error
        names = self._evaluator.output_names
        return {name: np.asarray(v) for name, v in zip(names, values, strict=True)}

    def placement(self) -> dict[str, int]:
        return {DEVICE: len(self._nodes)}

    def nodes(self) -> list[Placed]:
        return list(self._nodes)

    def _close(self) -> None:
        self._evaluator = None


def load(
    model: Graph, threads: int | None = None, options: LoadOptions = DEFAULTS
) -> ReferenceSession:
    """As `Runtime.load`; numpy uses the threads that it likes.

    Raises:
        UsageError: the graph has ops that are not ONNX's own.
    """
    graphs.refuse_foreign(graphs.read(model), NAME)
    return ReferenceSession(graphs.whole(model))
