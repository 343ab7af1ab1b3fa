"""One request from its first byte to its answer: its id, what is counted, and what is logged."""

from __future__ import annotations

import logging
import os
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from attn_export.serve import metrics
from attn_export.serve.batching import Answer
from attn_export.serve.refusals import Refused

log = logging.getLogger("attn_export.requests")
CALL: ContextVar[Call] = ContextVar("call")
NO_MODEL = ""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class Call:
    """A request.

    Attributes:
        protocol: http or grpc.
        model: its name, as the client wrote it.
        id: the client's X-Request-Id where it is printable, else a new one.
        known: whether there is such a model; others are not counted by name.
        status: of HTTP, also for gRPC.
        told: the sentence, where the request was refused.
    """

    protocol: str
    model: str
    id: str
    known: bool = False
    status: int = 200
    told: str = ""
    begun: float = field(default_factory=time.monotonic)
    answer: Answer | None = None

    @classmethod
    def begin(cls, protocol: str, model: str, given: str | None) -> Call:
        kept = given if given and _ID.fullmatch(given) else os.urandom(16).hex()
        call = cls(protocol, model, kept)
        CALL.set(call)
        return call

    def answered(self, answer: Answer) -> None:
        self.answer = answer

    def refused(self, error: Refused) -> None:
        self.status, self.told = error.status, str(error)

    def end(self) -> None:
        """Count it and log it."""
        seconds = time.monotonic() - self.begun
        name = self.model if self.known else NO_MODEL
        metrics.of(metrics.REQUESTS, name, self.protocol, str(self.status)).inc()
        fields: dict[str, object] = {
            "id": self.id,
            "protocol": self.protocol,
            "model": self.model[:128],
            "status": self.status,
            "ms": _ms(seconds),
        }
        if self.answer is not None:
            metrics.of(metrics.SECONDS, name).observe(seconds)
            metrics.of(metrics.WAITED, name).observe(self.answer.waited)
            fields |= {
                "queue_ms": _ms(self.answer.waited),
                "run_ms": _ms(self.answer.ran),
                "run_rows": self.answer.rows,
            }
        if self.told:
            fields["error"] = self.told
        log.info("request", extra={"fields": fields})


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
