"""The InferenceService is what KServe's own client models take, field by field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_export.bundle import Bundle
from attn_export.deploy.kserve import Scaling, inference_service, service_name
from attn_export.errors import UsageError
from tests.boundary import Cli

# In a process of its own: the protocol files of kserve and tritonclient do not load side by side.
CHECK = """
import json, re, sys
import kserve.models, kubernetes.client

def check(kind, value, where):
    inner = re.fullmatch(r"(?:[Ll]ist\\[|[Dd]ict[\\[(]str, )(.*)[\\])]", kind)
    if inner:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check(inner[1], item, f"{where}.{key}")
    elif model := getattr(kserve.models, kind, getattr(kubernetes.client, kind, None)):
        types = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
        for key, item in value.items():
            assert key in types, f"{where} has no {key}"
            check(types[key], item, f"{where}.{key}")
    elif kind != "object":  # a number or a name, as a port
        assert type(value).__name__ == kind, f"{where} is {value}, a {kind} is wanted"

check("V1beta1InferenceService", json.load(sys.stdin), "service")
"""


def refused(service: dict[str, Any]) -> str:
    """What the client's models say against it; empty where every field is one that they have."""
    command = [sys.executable, "-c", CHECK]
    ended = subprocess.run(command, input=json.dumps(service), capture_output=True, text=True)
    return "" if ended.returncode == 0 else ended.stderr


@pytest.mark.parametrize("served", [{"image": "registry/vit:1"}, {"storage_uri": "s3://models/r"}])
def test_no_field_is_unknown_to_kserve(digits: Bundle, served: dict[str, str]) -> None:
    service = inference_service(digits, "cpu", Scaling(), namespace="vision", **served)
    assert refused(service) == ""


def test_the_check_sees_an_unknown_field_and_a_wrong_type(digits: Bundle) -> None:
    service = inference_service(digits, "cpu", Scaling(), image="i")
    predictor = service["spec"]["predictor"]
    assert "has no maxReplica" in refused({**service, "spec": {"predictor": {"maxReplica": 1}}})
    assert "is wanted" in refused(
        {**service, "spec": {"predictor": {**predictor, "scaleTarget": "8"}}}
    )


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
