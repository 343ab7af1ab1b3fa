"""A folder that `docker build` makes an image of: the bundle, what serves it, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attn_export import __version__
from attn_export.bundle import Bundle
from attn_export.deploy.kserve import GRPC_PORT, HTTP_PORT
from attn_export.errors import UsageError
from attn_export.runtimes.packages import version
from attn_export.storage import staged

PACKAGE = "attn-export"
IMAGE = "python:3.11-slim"
EXTRAS = {
    "ort-cpu": "cpu", "ort-cuda": "cuda", "ort-tensorrt": "tensorrt", "openvino": "openvino",
}  # fmt: skip
USER = 10001
RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "openvino")
FORBIDDEN = ("torch",)  # production serves without it

TEMPLATE = """\
FROM {image}

ENV PYTHONUNBUFFERED=1
RUN useradd --uid {user} --create-home app
WORKDIR /srv

COPY requirements.txt ./
RUN pip install --no-cache-dir --requirement requirements.txt
{package}
COPY bundle/ /srv/bundle/

USER {user}
EXPOSE {http} {grpc}
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \\
  CMD ["python", "-c", "{probe}"]
ENTRYPOINT {entry}
"""


def write_context(
    bundle: Bundle,
    target: str,
    folder: Path,
    *,
    image: str = IMAGE,
    wheel: Path | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write Dockerfile, requirements.txt, .dockerignore and the bundle.

    Args:
        image: what the image is built from; it has Python 3.11 or newer.
        wheel: this package's own wheel, where the image cannot install it from an index.

    Returns:
        Packages without a pinned version, since they are not installed here.

    Raises:
        UsageError: a target that the bundle has not, a wheel of something else, or the folder
            exists.
        FileError: it could not be written.
    """
    entries = {entry["name"]: entry for entry in bundle.targets()}
    if target not in entries or entries[target]["runtime"] not in EXTRAS:
        usable = [name for name, entry in entries.items() if entry["runtime"] in EXTRAS]
        raise UsageError(f"no image serves target '{target}'", f"name one of {', '.join(usable)}")
    if wheel is not None and not wheel.name.startswith("attn_export-"):
        raise UsageError(f"{wheel} is no wheel of attn-export", "give the one that was built")
    foreign = folder.is_dir() and any(folder.iterdir()) and not (folder / "Dockerfile").is_file()
    if overwrite and foreign:
        raise UsageError(
            f"{folder} has no Dockerfile, so it is not overwritten", "choose another -o"
        )
    runtime = entries[target]["runtime"]
    pinned, loose = requirements(EXTRAS[runtime], str(entries[target]["runtime_version"]))
    command = ["attn-export", "serve", "/srv/bundle", "--runtime", runtime, "--host", "0.0.0.0",
               "--port", str(HTTP_PORT), "--grpc-port", str(GRPC_PORT)]  # fmt: skip
    with staged(folder, replace=overwrite) as stage:
        shutil.copytree(bundle.path, stage / "bundle")
        (stage / "requirements.txt").write_text("\n".join([*pinned, *loose]) + "\n")
        (stage / ".dockerignore").write_text("**/__pycache__\n**/*.partial\n")
        (stage / "Dockerfile").write_text(
            TEMPLATE.format(
                image=image, user=USER, http=HTTP_PORT, grpc=GRPC_PORT, probe=_probe(),
                package=_install(wheel), entry=json.dumps(command),
            )
        )  # fmt: skip
        if wheel is not None:
            shutil.copyfile(wheel, stage / wheel.name)
    return loose


def _probe() -> str:
    url = f"http://127.0.0.1:{HTTP_PORT}/v2/health/ready"
    return f"import urllib.request as r; r.urlopen('{url}', timeout=4)"


def _install(wheel: Path | None) -> str:
    what = f"{PACKAGE}=={__version__}" if wheel is None else f"./{wheel.name}"
    copied = "" if wheel is None else f"COPY {wheel.name} ./\n"
    return f"{copied}RUN pip install --no-cache-dir --no-deps {what}"


def requirements(extra: str, runtime_version: str) -> tuple[list[str], list[str]]:
    """What attn-export[EXTRA,serve] needs, all the way down: (pinned, not installed here).

    The runtime has the version that the graph was made for, whatever is installed here.

    Raises:
        UsageError: PyTorch would be among it.
    """
    pinned: dict[str, str] = {}
    loose: dict[str, str] = {}
    for wanted in _walk(extra):
        name = canonicalize_name(wanted.name)
        if name in RUNTIMES:
            features = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
            pinned[name] = f"{name}{features}=={runtime_version}"
        elif found := version(name):
            pinned[name] = f"{name}=={found}"
        else:
            loose[name] = str(wanted).partition(";")[0].strip()
    clash = [name for name in FORBIDDEN if name in pinned or name in loose]
    if clash:
        raise UsageError(f"{' and '.join(clash)} would be part of the image", "report this")
    return sorted(pinned.values()), sorted(loose.values())


def _walk(extra: str) -> Iterator[Requirement]:
    """Every requirement, this package's own first; those of what is not installed are unknown."""
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [Requirement(f"{PACKAGE}[{extra},serve]")]
    while queue:
        wanted = queue.pop(0)
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name != PACKAGE:
            yield wanted
        for line in _requires(name):
            needed = Requirement(line)
            given = [{"extra": feature} for feature in extras or {""}]
            if needed.marker is None or any(needed.marker.evaluate(each) for each in given):
                queue.append(needed)


def _requires(name: str) -> list[str]:
    """Requirements of an installed package; the builds of ONNX Runtime need the same."""
    same = RUNTIMES[:2] if name in RUNTIMES[:2] else (name,)
    installed = next((each for each in (name, *same) if version(each)), None)
    return metadata.requires(installed) or [] if installed else []
