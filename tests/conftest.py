"""What tests of the boundary share: one real bundle, the real command line, real environments."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_export import bundle as bundles
from attn_export.build import export
from tests.boundary import ROOT, SCRIPT, Cli, Ended, Environment, build_environment, reseal, run


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all tests that need the environments, or that share a module's fixture."""
    shared = {p: 'scope="module"' in p.read_text() for p in {item.path for item in items}}
    for item in items:
        if "environments" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("environments"))
        elif shared[item.path]:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs the console script in `tmp_path`; `env` adds variables, other options go to Popen."""

    def call(*arguments: str | Path, env: dict[str, str] | None = None, **options: Any) -> Ended:
        given: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **(env or {})}, **options}
        return run([SCRIPT, *arguments], **given)

    return call


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees what was measured on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTN_EXPORT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def digits_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`vit-digits`, exported once. Tests that change a bundle take `bundle_copy`."""
    return export("vit-digits", tmp_path_factory.mktemp("digits") / "bundle").path


@pytest.fixture(scope="session")
def decoder_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`prefill` and `decode` with a cache."""
    return export("decoder-lm", tmp_path_factory.mktemp("decoder") / "bundle").path


@pytest.fixture
def bundle_copy(digits_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits_bundle, tmp_path / "copy"))


@pytest.fixture
def wrong_bundle(bundle_copy: Path) -> Path:
    """A well-formed bundle whose weights are not those that PyTorch's outputs came from."""
    path = bundle_copy / bundles.WEIGHTS
    raw = bytearray(path.read_bytes())
    raw[3::4] = bytes(byte ^ 0x80 for byte in raw[3::4])  # the sign of each float32
    path.write_bytes(raw)
    reseal(bundle_copy)
    return bundle_copy


USER_MODEL = '''
import torch
from torch import nn

class Pooled(nn.Module):
    """Attention over tokens (B, S, 16), pooled to one row a sample."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, tokens):
        B, S, D = tokens.shape
        q, k, v = self.qkv(tokens).view(B, S, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(B, S, D).mean(1)

def build():
    torch.manual_seed(7)
    return Pooled(), {"tokens": torch.randn(2, 5, 16)}
'''


@pytest.fixture
def user_model(tmp_path: Path) -> Path:
    """A model file outside of the package, with a factory `build`."""
    path = tmp_path / "user_model.py"
    path.write_text(USER_MODEL)
    return path


@pytest.fixture(scope="session")
def onnxruntime_twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH on which every known owner but one is found to be installed too."""
    folder = tmp_path_factory.mktemp("twins")
    for name in ("onnxruntime", "onnxruntime-gpu"):
        info = folder / f"{name.replace('-', '_')}-1.31.1.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n"
        )
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built from a copy of the sources alone."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "node_modules")
    shutil.copytree(ROOT / "attn_export", copy / "attn_export", ignore=ignored)
    dist = copy / "dist"
    same_bytes = {**os.environ, "SOURCE_DATE_EPOCH": "1000000000"}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", dist, copy]
    built = run(command, env=same_bytes)
    assert built.code == 0, built.stderr
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def environments() -> Iterator[None]:
    """One test run at a time may change what lies below .envs."""
    (ROOT / ".envs").mkdir(exist_ok=True)
    with (ROOT / ".envs" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def base_environment(environments: None, wheel: Path) -> Environment:
    """attn-export alone: no runtime, no torch."""
    return build_environment("", wheel)


@pytest.fixture(scope="session")
def cpu_environment(environments: None, wheel: Path) -> Environment:
    """attn-export[cpu]: ONNX Runtime, no torch."""
    return build_environment("cpu", wheel)
