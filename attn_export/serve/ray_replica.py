"""What Ray Serve runs in a process of its own: bundles behind the routes of `attn-export serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.errors import FileError
from attn_export.serve.settings import Settings


@dataclass(frozen=True)
class Place:
    """A bundle that is served.

    Attributes:
        name: in place of its own; empty keeps that.
        path: where every node of the cluster finds it.
        digest: of its manifest, so that a replica with other files refuses.
    """

    name: str
    path: Path
    digest: str


class Replica:
    """What Ray runs in a process of its own; it takes requests once the constructor has ended."""

    def __init__(self, places: Sequence[Place], settings: Settings) -> None:
        arguments, sys.argv = sys.argv, sys.argv[:1]  # KServe reads them when it is imported
        try:
            from kserve import ModelRepository
        finally:
            sys.argv = arguments
        from attn_export.serve.model import models_of, open_models
        from attn_export.serve.service import Service

        repository = ModelRepository()
        self._sessions = []
        for place in places:
            bundle = _read(place)
            models = models_of(bundle, settings, place.name)
            self._sessions.append(open_models(models))
            for model in models:
                repository.update(model)
        self._service = Service(repository, settings)
        self._started = False

    def __serve_build_asgi_app__(self) -> Any:
        from attn_export.serve.rest import application

        answer = application(self._service)

        async def started(scope: Any, receive: Any, send: Any) -> None:
            if not self._started:  # a batcher belongs to the event loop that answers
                self._started = True
                for model in self._service.models:
                    model.start()
            await answer(scope, receive, send)

        return started

    def check_health(self) -> None:
        """Ray starts another replica in place of one that raises here."""
        if not self._service.ready:
            raise RuntimeError("a model is not ready")

    async def __del__(self) -> None:
        for model in self._service.models if self._started else ():
            await model.close()
        for session in self._sessions:
            session.close()


def _read(place: Place) -> bundles.Bundle:
    found = bundles.read(place.path)
    if found.digest() != place.digest:
        raise FileError(
            f"{place.path} is another bundle on this node than where it was deployed",
            "copy it to every node",
        )
    return found
