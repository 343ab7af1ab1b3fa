"""A plain kserve model without batching, which `serving.py` compares with.

    python benchmarks/serving_plain.py BUNDLE --http_port 8080 --grpc_port 8081

What KServe's documentation shows: `predict` reads arrays, runs the model and returns arrays. The
session is the same as that of `attn-export serve`.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

import attn_export

DATATYPES = {"float32": "FP32", "int64": "INT64", "bool": "BOOL"}


class Plain(Model):
    def __init__(self, path: str) -> None:
        self.session = attn_export.load(path, "ort-cpu", warmup=True)
        super().__init__(self.session.name)
        self.ready = True

    async def predict(self, payload: InferRequest, *_: Any, **__: Any) -> InferResponse:
        found = self.session.run({each.name: each.as_numpy() for each in payload.inputs})
        outputs = []
        for name, array in found.items():
            output = InferOutput(name, list(array.shape), DATATYPES[array.dtype.name])
            output.set_data_from_numpy(array)
            outputs.append(output)
        return InferResponse(
            payload.id or uuid.uuid4().hex, self.name, outputs,
            use_binary_outputs=payload.use_binary_outputs,
        )  # fmt: skip


if __name__ == "__main__":
    ModelServer(enable_latency_logging=False).start([Plain(sys.argv[1])])
