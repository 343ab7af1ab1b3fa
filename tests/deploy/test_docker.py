"""The folder is one that docker builds from: pinned, without PyTorch, not as root."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from attn_export import bundle as bundles
from attn_export.bundle import Bundle
from attn_export.cli.serve import command as serve
from attn_export.deploy.docker import requirements, write_context
from attn_export.deploy.kserve import GRPC_PORT, HTTP_PORT
from attn_export.errors import UsageError
from attn_export.verifying.verification import verify
from tests.needed import passed_over


@pytest.fixture(scope="module")
def context(digits: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docker") / "context"
    write_context(digits, "cpu", folder)
    return folder


def instructions(context: Path) -> list[tuple[str, str]]:
    text = (context / "Dockerfile").read_text().replace("\\\n", "")
    lines = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(name, rest) for name, rest in lines]


def test_the_image_runs_as_another_user_than_root_and_checks_its_health(context: Path) -> None:
    steps = instructions(context)
    names = [name for name, _ in steps]
    assert names[0] == "FROM"
    user = names.index("USER")
    assert int(steps[user][1]) > 0
    assert "RUN" not in names[user:]
    assert "/v2/health/ready" in dict(steps)["HEALTHCHECK"]
    assert json.loads(dict(steps)["ENTRYPOINT"])[:3] == ["attn-export", "serve", "/srv/bundle"]


def test_the_server_takes_the_arguments_of_the_entry_point(context: Path) -> None:
    _, _, *arguments = json.loads(dict(instructions(context))["ENTRYPOINT"])
    given = serve.make_context("serve", arguments).params
    assert given["bundles"] == ("/srv/bundle",)
    assert (given["runtime"], given["host"]) == ("ort-cpu", "0.0.0.0")
    assert (given["port"], given["grpc_port"]) == (HTTP_PORT, GRPC_PORT)


def test_the_health_check_is_python_that_compiles(context: Path) -> None:
    command = json.loads(dict(instructions(context))["HEALTHCHECK"].partition("CMD ")[2])
    compile(command[2], "probe", "exec")


def test_the_bundle_inside_is_whole(context: Path) -> None:
    assert verify(bundles.read(context / "bundle"), ["ort-cpu"]).passed


def test_what_is_installed_here_is_pinned_and_torch_is_not_among_it(context: Path) -> None:
    lines = (context / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {"numpy", "onnx", "safetensors", "click", "rich", "onnxruntime"} <= set(pins)
    assert "torch" not in pins
    assert "onnxruntime-gpu" not in pins


def test_the_runtime_has_the_version_that_the_graph_was_made_for() -> None:
    pinned, _ = requirements("cpu", "1.30.0")
    assert "onnxruntime==1.30.0" in pinned
    pinned, _ = requirements("cuda", "1.31.1")
    assert "onnxruntime-gpu[cuda,cudnn]==1.31.1" in pinned


def test_a_wheel_comes_along(digits: Bundle, tmp_path: Path) -> None:
    wheel = tmp_path / "attn_export-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    write_context(digits, "cpu", tmp_path / "c", wheel=wheel)
    assert ("COPY", f"{wheel.name} ./") in instructions(tmp_path / "c")
    with pytest.raises(UsageError, match="no wheel of attn-export"):
        write_context(digits, "cpu", tmp_path / "d", wheel=tmp_path / "other.whl")


def test_another_folder_is_not_overwritten(digits: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UsageError, match="no Dockerfile"):
        write_context(digits, "cpu", tmp_path / "mine", overwrite=True)


@pytest.mark.slow
def test_docker_builds_it(context: Path) -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"]).returncode:
        # What goes into the image is tested above; that it builds is seen only where one can.
        passed_over(
            "docker", "it takes docker to build an image, and `docker info` does not answer"
        )
    subprocess.run(["docker", "build", "-q", context], check=True)
