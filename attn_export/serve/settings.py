"""What a server was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attn_export.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """How bundles are served.

    Attributes:
        runtime: "auto" or a name, as `attn_export.load` takes it.
        threads: of each operator on the CPU; as many as the container grants where it is None.
        max_batch_size: the most rows in one run of rows from several requests; 1 shares none.
        max_delay_ms: how long a request may wait for others to share a run with.
        queue: requests of one model that may wait; those above are refused.
        max_request_mb: the largest request.
        timeout: seconds a request may take, from its first byte to its answer.
        drain_delay: seconds that a server which is told to stop says "not ready" and still takes
            requests, so that balancers see it.
        finite: refuse NaN and infinities in every input of floats.
        allow_fallback, cache: as `attn_export.load` takes them.

    Raises:
        UsageError: a number that cannot be.
    """

    runtime: str = "auto"
    threads: int | None = None
    max_batch_size: int = 8
    max_delay_ms: float = 1.0
    queue: int = 64
    max_request_mb: float = 32.0
    timeout: float = 30.0
    drain_delay: float = 0.0
    finite: bool = False
    allow_fallback: bool = False
    cache: Path | None = None

    def __post_init__(self) -> None:
        for option, value, sound in (
            ("--max-batch-size", self.max_batch_size, self.max_batch_size >= 1),
            ("--max-delay", self.max_delay_ms, 0 <= self.max_delay_ms <= 60_000),
            ("--queue", self.queue, self.queue >= 1),
            ("--max-request-mb", self.max_request_mb, 0 < self.max_request_mb <= 2047),
            ("--timeout", self.timeout, 0 < self.timeout <= 86_400),
            ("--drain-delay", self.drain_delay, 0 <= self.drain_delay <= 3600),
        ):
            if not sound:
                raise UsageError(f"{option} is {value}", "see `attn-export serve --help`")

    @property
    def max_request_bytes(self) -> int:
        return int(self.max_request_mb * 1_000_000)
