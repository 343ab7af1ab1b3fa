"""One component of a bundle as a model of KServe."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse, Model

from attn_export.bench.batches import with_batch
from attn_export.bundle import Bundle
from attn_export.errors import InputError
from attn_export.production.inputs import Signature
from attn_export.production.rows import BATCH, max_rows, model_name, values
from attn_export.production.session import BundleSession
from attn_export.reference import Case
from attn_export.runtimes.base import Arrays
from attn_export.serve import metrics
from attn_export.serve.batching import Batcher, most
from attn_export.serve.call import CALL
from attn_export.serve.settings import Settings
from attn_export.serve.tensors import datatype

VERSION = "1"
TRIES = 3
log = logging.getLogger("attn_export")


class BundleModel(Model):
    """What `kserve.ModelServer` serves; `ready` from `open` on.

    Attributes:
        rows: the most that requests share a run for; below 2 they share none. What the bundle and
            the settings allow, and from `open` on no more than were a gain here.
    """

    def __init__(self, bundle: Bundle, component: str, settings: Settings, name: str = "") -> None:
        """
        Args:
            name: what clients call it; the bundle's where it is left out.

        Raises:
            UsageError: a tensor of a dtype that the protocol has no word for.
        """
        super().__init__(name or model_name(bundle, component))
        self.bundle, self.component, self.settings = bundle, component, settings
        self.rows = max_rows(bundle, component, settings.max_batch_size)
        self.inputs = [_described(entry) for entry in values(bundle, "inputs", component)]
        self.outputs = [_described(entry) for entry in values(bundle, "outputs", component)]
        self._datatypes = {output["name"]: output["datatype"] for output in self.outputs}
        self._signature = Signature.of(bundle.manifest, component)
        self._finite = {
            entry["name"]
            for entry in values(bundle, "inputs", component)
            if settings.finite or entry.get("finite") is True
        }
        self._session: BundleSession | None = None
        self.batcher = Batcher(
            self.name, self._run, rows=self.rows, delay=settings.max_delay_ms / 1000,
            limit=settings.queue,
        )  # fmt: skip

    def start(self) -> None:
        """Begin to take requests; called inside of the event loop. Readiness is another matter."""
        metrics.QUEUE.labels(self.name).set_function(lambda: len(self.batcher))
        metrics.READY.labels(self.name).set_function(lambda: int(self.ready))
        self.batcher.start()

    def open(self, session: BundleSession) -> None:
        """Find how many rows are worth a shared run, warm those runs up, and be ready.

        Args:
            session: verified, and warm for the stored sizes.
        """
        cases = [case for case in self.bundle.cases() if case.component == self.component]
        if self.rows > 1 and cases:
            timed = self._timed(session, cases[0])
            self.rows = self.batcher.rows = most(timed)
            told = ", ".join(f"{rows}: {s * 1e3 / rows:.3g}" for rows, s in timed.items())
            log.info("%s shares runs of %d rows; ms a row: %s", self.name, self.rows, told)
            for case in cases:
                session.run(with_batch(self.bundle, case, self.rows).inputs, self.component)
        self._session, self.ready = session, True

    def _timed(self, session: BundleSession, case: Case) -> dict[int, float]:
        """Rows -> the least seconds of a run."""
        rows, found = int(self._signature.ranges.get(BATCH, (1, 1))[0]), dict[int, float]()
        while self.rows not in found:
            rows = min(rows, self.rows)
            inputs = with_batch(self.bundle, case, rows).inputs
            session.run(inputs, self.component)
            found[rows] = min(_seconds(session, inputs, self.component) for _ in range(TRIES))
            rows *= 2
        return found

    def get_input_types(self) -> list[dict[str, Any]]:
        return self.inputs

    def get_output_types(self) -> list[dict[str, Any]]:
        return self.outputs

    async def predict(
        self,
        payload: InferRequest,
        headers: Mapping[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> InferResponse:
        """The answer, whose outputs' `data` are arrays.

        Raises:
            InputError: inputs that the model does not take, or outputs that it does not have.
            Full: too many requests wait.
        """
        wanted = self._wanted(payload)
        arrays = self._signature.arrays({each.name: _array(each) for each in payload.inputs})
        for name in self._finite & arrays.keys():
            if arrays[name].dtype.kind == "f" and not np.isfinite(arrays[name]).all():
                raise InputError(
                    f"input '{name}' is not finite", "send it without NaN and infinity"
                )
        answer = await self.batcher.submit(arrays)
        if call := CALL.get(None):
            call.answered(answer)
        outputs = [
            InferOutput(name, list(array.shape), self._datatypes[name], array)
            for name, array in answer.outputs.items()
            if name in wanted
        ]
        return InferResponse(payload.id or (call.id if call else "0"), self.name, outputs, VERSION)

    async def close(self) -> None:
        """Answer what waits, and take no more."""
        await self.batcher.close()

    def _wanted(self, payload: InferRequest) -> list[str]:
        have = [output["name"] for output in self.outputs]
        for output in payload.request_outputs or ():
            if output.name not in have:
                raise InputError(
                    f"the model has no output '{output.name}'", f"its outputs are {', '.join(have)}"
                )
            if "classification" in (output.parameters or {}):
                raise InputError(
                    f"labels of output '{output.name}' are asked for, which this server does not"
                    " give",
                    "ask for the output itself",
                )
        return [output.name for output in payload.request_outputs or ()] or have

    def _run(self, inputs: Mapping[str, Any]) -> Arrays:
        assert self._session is not None  # nothing is submitted before
        return self._session.run(inputs, self.component)


def models_of(bundle: Bundle, settings: Settings, name: str = "") -> list[BundleModel]:
    """One model a component.

    Args:
        name: in place of the bundle's.

    Raises:
        UsageError: as `BundleModel`.
    """
    several = len(bundle.components) > 1
    called = {c: f"{name}-{c}" if name and several else name for c in bundle.components}
    return [BundleModel(bundle, component, settings, called[component]) for component in called]


def open_models(models: list[BundleModel]) -> BundleSession:
    """Open the bundle of these models, verify and warm it up, and make them ready.

    Raises:
        CheckFailed, FileError, RuntimeUnavailable, UsageError: as `attn_export.load`.
    """
    from attn_export.production.loading import load

    first = models[0]
    settings = first.settings
    session = load(
        first.bundle, settings.runtime, threads=settings.threads,
        allow_fallback=settings.allow_fallback, verify=True, warmup=True, cache=settings.cache,
    )  # fmt: skip
    for model in models:
        model.open(session)
    return session


def _seconds(session: BundleSession, inputs: Arrays, component: str) -> float:
    begun = time.perf_counter()
    session.run(inputs, component)
    return time.perf_counter() - begun


def _described(entry: Mapping[str, Any]) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in entry["shape"]]
    kind = datatype(entry["name"], entry["dtype"])
    return {"name": entry["name"], "datatype": kind, "shape": shape}


def _array(tensor: Any) -> Any:
    """What our own decoders made; KServe's leave lists."""
    return tensor.data if isinstance(tensor.data, np.ndarray) else tensor.as_numpy()
