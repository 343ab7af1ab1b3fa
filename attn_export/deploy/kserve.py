"""A KServe InferenceService for a bundle, autoscaled on Kubernetes.

Source: serving.kserve.io/v1beta1, as KServe's documentation of its control plane gives it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_export.bundle import Bundle
from attn_export.errors import UsageError

HTTP_PORT, GRPC_PORT = 8080, 8081
TARGETS_ON_GPU = ("ort-cuda", "ort-tensorrt")
METRICS = ("concurrency", "rps", "cpu", "memory")
# From "not ready" to the end, which a server uses to answer what it has accepted.
GRACE_SECONDS = 60


@dataclass(frozen=True)
class Scaling:
    """How many replicas there are, what each may use, and what a new one is started for.

    Attributes:
        target: of `metric`, for each replica: requests at a time, requests a second, or percent.
        cpu, memory: Kubernetes quantities, as "2" and "2Gi".
        gpus: for each replica.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    metric: str = "concurrency"
    target: int = 8
    cpu: str = "2"
    memory: str = "2Gi"
    gpus: int = 0


def inference_service(
    bundle: Bundle,
    target: str,
    scaling: Scaling,
    *,
    image: str | None = None,
    storage_uri: str | None = None,
    namespace: str | None = None,
) -> dict[str, Any]:
    """The InferenceService, for a container image or for a Triton repository in storage.

    Args:
        image: what `deploy docker` built; it runs `attn-export serve`.
        storage_uri: where the repository of `deploy triton` was put; Triton serves it.

    Raises:
        UsageError: both or neither of the two, a target that the bundle has not, or numbers that
            do not go together.
    """
    runtime = _runtime(bundle, target)
    _check(scaling, runtime)
    if (image is None) == (storage_uri is None):
        raise UsageError(
            "an image and a storage URI are both given" if image else "nothing says what to serve",
            "give --image (from deploy docker) or --storage-uri (from deploy triton)",
        )
    served = _container(bundle, image, scaling) if image else _triton(storage_uri, scaling)
    metadata: dict[str, Any] = {"name": service_name(bundle.name)}
    if namespace:
        metadata["namespace"] = namespace
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {
            "predictor": {
                "minReplicas": scaling.min_replicas,
                "maxReplicas": scaling.max_replicas,
                "scaleMetric": scaling.metric,
                "scaleTarget": scaling.target,
                "terminationGracePeriodSeconds": GRACE_SECONDS,
                **served,
            }
        },
    }


def service_name(name: str) -> str:
    """The name as DNS takes it: lower case, digits and dashes, at most 63."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].rstrip("-") or "model"


def _runtime(bundle: Bundle, target: str) -> str:
    found = {entry["name"]: str(entry["runtime"]) for entry in bundle.targets()}
    if target not in found:
        raise UsageError(
            f"the bundle has no target '{target}'",
            f"name one of {', '.join(found)}, or export it with --target",
        )
    return found[target]


def _check(scaling: Scaling, runtime: str) -> None:
    if not 0 <= scaling.min_replicas <= scaling.max_replicas or scaling.max_replicas < 1:
        raise UsageError(
            f"{scaling.min_replicas} to {scaling.max_replicas} replicas is no range",
            "give a minimum from 0 on and a maximum above it",
        )
    if scaling.target < 1:
        raise UsageError(f"a scale target of {scaling.target} is none", "give 1 or more")
    if runtime in TARGETS_ON_GPU and scaling.gpus < 1:
        raise UsageError(f"{runtime} needs a GPU and --gpus is 0", "give --gpus 1")


def _resources(scaling: Scaling) -> dict[str, Any]:
    amounts: dict[str, str] = {"cpu": scaling.cpu, "memory": scaling.memory}
    if scaling.gpus:
        amounts["nvidia.com/gpu"] = str(scaling.gpus)
    return {"requests": amounts, "limits": dict(amounts)}


def _container(bundle: Bundle, image: str | None, scaling: Scaling) -> Mapping[str, Any]:
    ready = {"httpGet": {"path": "/v2/health/ready", "port": HTTP_PORT}, "periodSeconds": 5}
    live = {"httpGet": {"path": "/v2/health/live", "port": HTTP_PORT}, "periodSeconds": 10}
    return {
        "containers": [
            {
                "name": "kserve-container",
                "image": image,
                "ports": [{"name": "http1", "containerPort": HTTP_PORT, "protocol": "TCP"}],
                "readinessProbe": ready,
                "livenessProbe": {**live, "initialDelaySeconds": 30},
                "resources": _resources(scaling),
                "securityContext": {
                    "runAsNonRoot": True,
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ]
    }


def _triton(storage_uri: str | None, scaling: Scaling) -> Mapping[str, Any]:
    return {
        "model": {
            "modelFormat": {"name": "onnx"},
            "runtime": "kserve-tritonserver",
            "protocolVersion": "v2",
            "storageUri": storage_uri,
            "resources": _resources(scaling),
        }
    }
