"""Logs as JSON, one object a line, on stderr."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

NAMES = ("attn_export", "kserve", "uvicorn", "py.warnings")


class JsonFormatter(logging.Formatter):
    """`fields` of a record are merged in."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: int) -> None:
    """Send what this package, KServe and uvicorn log to stderr, in place of their own handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "attn_export" else max(level, logging.WARNING))
    logging.captureWarnings(True)
