"""What Prometheus reads at /metrics, KServe's own `request_predict_seconds` with it.

Labels are names of models that are served, never what a client wrote.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

SECONDS_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30,
)  # fmt: skip
ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)

REQUESTS = Counter(
    "attn_export_requests", "Requests by status", ["model_name", "protocol", "status"]
)
SECONDS = Histogram(
    "attn_export_request_seconds", "From the first byte of a request to its answer",
    ["model_name"], buckets=SECONDS_BUCKETS,
)  # fmt: skip
WAITED = Histogram(
    "attn_export_queue_seconds", "Before the run of a request began",
    ["model_name"], buckets=SECONDS_BUCKETS,
)  # fmt: skip
RUN_SECONDS = Histogram(
    "attn_export_run_seconds", "One run of the model", ["model_name"], buckets=SECONDS_BUCKETS
)
RUN_ROWS = Histogram(
    "attn_export_run_rows", "Rows that shared one run", ["model_name"], buckets=ROWS_BUCKETS
)
RUN_REQUESTS = Histogram(
    "attn_export_run_requests", "Requests that shared one run", ["model_name"],
    buckets=ROWS_BUCKETS,
)  # fmt: skip
QUEUE = Gauge("attn_export_queue_length", "Requests that wait", ["model_name"])
READY = Gauge("attn_export_ready", "1 once a model is verified and warm", ["model_name"])


@cache
def of(metric: Any, *labels: str) -> Any:
    """The series of these labels, which are few; looking one up costs as much as counting."""
    return metric.labels(*labels)
