"""What REST and gRPC share: which model, whether it may be asked, how long, and what went wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kserve import InferRequest, InferResponse, ModelRepository
from kserve.metrics import PREDICT_HIST_TIME

from attn_export import __version__
from attn_export.serve import metrics
from attn_export.serve.call import Call
from attn_export.serve.model import VERSION, BundleModel
from attn_export.serve.refusals import Failed, Gone, NotFound, NotReady, TooSlow, refusal
from attn_export.serve.settings import Settings

log = logging.getLogger("attn_export")
NAME = "attn-export"
EXTENSIONS = ["binary_tensor_data"]


class Service:
    """The models, and whether the server stops.

    Attributes:
        draining: set once it was told to stop; what comes is still answered, and it is not ready.
        closing: set once it listens no more; REST tells each client that its connection closes,
            gRPC takes no more calls.
    """

    def __init__(self, repository: ModelRepository, settings: Settings) -> None:
        self._repository, self.settings = repository, settings
        self.draining = self.closing = False

    @property
    def models(self) -> list[BundleModel]:
        return list(self._repository.get_models().values())

    @property
    def ready(self) -> bool:
        return not self.draining and all(model.ready for model in self.models)

    def metadata(self) -> dict[str, object]:
        return {"name": NAME, "version": __version__, "extensions": EXTENSIONS}

    def model(self, name: str, version: str = "") -> BundleModel:
        """Raise NotFound where there is no such model or version."""
        model = self._repository.get_model(name)
        if model is None:
            have = ", ".join(self._repository.get_models())
            raise NotFound(f"there is no model '{name[:60]}'", f"name one of {have}")
        if version not in ("", VERSION):
            raise NotFound(
                f"'{name}' has no version '{version[:60]}'", f"its only one is {VERSION}"
            )
        assert isinstance(model, BundleModel)
        return model

    def model_metadata(self, name: str, version: str = "") -> dict[str, object]:
        """Names, datatypes and shapes; -1 is a size that may vary."""
        model = self.model(name, version)
        return {
            "name": name,
            "versions": [VERSION],
            "platform": "onnx",
            "inputs": model.get_input_types(),
            "outputs": model.get_output_types(),
        }

    async def answer(
        self, call: Call, version: str, read: Callable[[], Awaitable[InferRequest]]
    ) -> tuple[InferRequest, InferResponse]:
        """The request that `read` reads, and its answer.

        Raises:
            Refused: there is none, and why.
        """
        try:
            async with asyncio.timeout(self.settings.timeout):
                model = self.model(call.model, version)
                call.known = True
                if not model.ready:
                    raise NotReady(f"'{call.model}' is not ready yet", "send it again later")
                model.batcher.require_room()  # before its body is held
                request = await read()
                # Calling the model costs more than this: KServe looks for steps that it lacks.
                with metrics.of(PREDICT_HIST_TIME, call.model).time():
                    return request, await model.predict(request)
        except asyncio.CancelledError:
            call.status = Gone.status
            raise
        except TimeoutError:
            seconds = self.settings.timeout
            late = TooSlow(f"there was no answer within {seconds:g} s", "send it again later")
            call.refused(late)
            raise late from None
        except Exception as error:
            told = refusal(error)
            call.refused(told)
            if told.status == Failed.status:
                log.exception("request %s failed", call.id)
            raise told from error
