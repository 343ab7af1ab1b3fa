"""The InferenceService is what KServe's own client models take, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_export.bundle import Bundle
from attn_export.deploy.kserve import Scaling, inference_service, service_name
from attn_export.errors import UsageError
from tests.boundary import Cli

kubernetes_client = pytest.importorskip("kubernetes.client")
kserve_models = pytest.importorskip("kserve.models")


def round_trip(service: dict[str, Any]) -> Any:
    """Through the client's models, which keep only what they know."""
    for name in dir(kserve_models):  # the client looks up types by name in kubernetes' own module
        if name.startswith("V1"):
            setattr(kubernetes_client.models, name, getattr(kserve_models, name))
    client = kubernetes_client.ApiClient()
    response = SimpleNamespace(data=json.dumps(service))
    found = client.deserialize(response, kserve_models.V1beta1InferenceService)
    return client.sanitize_for_serialization(found)


@pytest.mark.parametrize("served", [{"image": "registry/vit:1"}, {"storage_uri": "s3://models/r"}])
def test_no_field_is_unknown_to_kserve(digits: Bundle, served: dict[str, str]) -> None:
    service = inference_service(digits, "cpu", Scaling(), namespace="vision", **served)
    assert round_trip(service) == service


def test_a_gpu_target_asks_for_a_gpu(gpu_bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="ort-cuda needs a GPU"):
        inference_service(gpu_bundle, "cuda", Scaling(), image="i")
    service = inference_service(gpu_bundle, "cuda", Scaling(gpus=1), image="i")
    (container,) = service["spec"]["predictor"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize(
    ("scaling", "served", "sentence"),
    [
        (Scaling(), {}, "nothing says what to serve"),
        (Scaling(), {"image": "a", "storage_uri": "b"}, "both given"),
        (Scaling(min_replicas=5), {"image": "a"}, "5 to 4 replicas is no range"),
        (Scaling(target=0), {"image": "a"}, "scale target of 0"),
    ],
)
def test_what_does_not_go_together_is_refused(
    digits: Bundle, scaling: Scaling, served: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        inference_service(digits, "cpu", scaling, **served)


def test_names_are_those_of_dns() -> None:
    assert service_name("My_Model v2") == "my-model-v2"
    assert len(service_name("x" * 80)) == 63


def test_the_command_writes_yaml_that_says_the_same(
    cli: Cli, digits: Bundle, tmp_path: Path
) -> None:
    import yaml

    ended = cli("deploy", "kserve", digits.path, "-o", "s.yaml", "--image", "i:1", "--json")
    assert ended.code == 0
    written = yaml.safe_load((tmp_path / "s.yaml").read_text())
    assert written == json.loads(ended.stdout)["service"]
    again = cli("deploy", "kserve", digits.path, "-o", "s.yaml", "--image", "i:2")
    assert again.code == 2
