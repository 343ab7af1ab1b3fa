"""`attn-export deploy triton|kserve|docker`"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from attn_export.cli.options import Command, Output, output_options

bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what exists.")
target_option = click.option("--target", help="Whose graph; the bundle's first if left out.")


def output_option(text: str) -> Callable[[Command], Command]:
    path = click.Path(path_type=Path)
    return click.option("-o", "--output", "place", type=path, required=True, help=text)


@click.group("deploy")
def command() -> None:
    """Write what Triton, KServe or a container engine serves BUNDLE from."""


@command.command("triton")
@bundle_argument
@output_option("The model repository's folder.")
@target_option
@click.option("--max-batch-size", default=8, show_default=True, help="Most rows in one run.")
@click.option("--max-delay", default=1.0, show_default=True, metavar="MS",
              help="How long a request waits for others.")  # fmt: skip
@click.option("--instances", default=1, show_default=True, help="Copies of each model.")
@click.option("--threads", default=0, help="Of one CPU instance; the runtime's choice at 0.")
@overwrite_option
@output_options
def triton(
    bundle: Path,
    place: Path,
    target: str | None,
    max_batch_size: int,
    max_delay: float,
    instances: int,
    threads: int,
    overwrite: bool,
    output: Output,
) -> None:
    """Write a Triton model repository, one model for each component of BUNDLE."""
    from attn_export import bundle as bundles
    from attn_export.deploy.triton import ENGINES, Serving, write_repository

    found = bundles.read(bundle)
    name = target or found.targets()[0]["name"]
    serving = Serving(max_batch_size, max_delay, instances, threads)
    models = write_repository(found, name, place, serving, overwrite=overwrite)
    output.console.print(f"Triton repository: {place} ({', '.join(models)})")
    if name == "tensorrt":
        output.console.print(f"Mount a folder at {ENGINES}: engines are built once and kept there.")
    output.result({"repository": str(place), "models": models, "target": name})


@command.command("kserve")
@bundle_argument
@output_option("The YAML file.")
@target_option
@click.option("--image", help="Container image that `deploy docker` made.")
@click.option("--storage-uri", help="Where the repository of `deploy triton` lies: s3://, pvc://.")
@click.option("--namespace", help="Kubernetes namespace.")
@click.option("--min-replicas", default=1, show_default=True)
@click.option("--max-replicas", default=4, show_default=True)
@click.option("--scale-metric", default="concurrency", show_default=True,
              type=click.Choice(["concurrency", "rps", "cpu", "memory"]),
              help="What a new replica is started for.")  # fmt: skip
@click.option("--scale-target", default=8, show_default=True, help="Of it, for each replica.")
@click.option("--cpu", default="2", show_default=True, help="Of each replica.")
@click.option("--memory", default="2Gi", show_default=True, help="Of each replica.")
@click.option("--gpus", default=0, show_default=True, help="Of each replica.")
@overwrite_option
@output_options
def kserve(
    bundle: Path,
    place: Path,
    target: str | None,
    image: str | None,
    storage_uri: str | None,
    namespace: str | None,
    min_replicas: int,
    max_replicas: int,
    scale_metric: str,
    scale_target: int,
    cpu: str,
    memory: str,
    gpus: int,
    overwrite: bool,
    output: Output,
) -> None:
    """Write an InferenceService that Kubernetes scales, for an image or a Triton repository."""
    from attn_export import bundle as bundles
    from attn_export.deploy.kserve import Scaling, inference_service
    from attn_export.errors import UsageError
    from attn_export.extras import require
    from attn_export.storage import write_file

    require("serve", "yaml")
    import yaml

    found = bundles.read(bundle)
    name = target or found.targets()[0]["name"]
    scaling = Scaling(
        min_replicas, max_replicas, scale_metric, scale_target, cpu, memory, gpus
    )  # fmt: skip
    service = inference_service(
        found, name, scaling, image=image, storage_uri=storage_uri, namespace=namespace
    )
    if place.exists() and not overwrite:
        raise UsageError(f"{place} exists", "choose another -o, or add --overwrite")
    write_file(place, yaml.safe_dump(service, sort_keys=False))
    output.console.print(f"InferenceService: {place}; deploy it with `kubectl apply -f {place}`")
    output.result({"file": str(place), "service": service})


@command.command("docker")
@bundle_argument
@output_option("The folder that `docker build` is given.")
@target_option
@click.option("--base-image", default="python:3.11-slim", show_default=True)
@click.option("--wheel", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="This package's wheel, where no index has it.")  # fmt: skip
@overwrite_option
@output_options
def docker(
    bundle: Path,
    place: Path,
    target: str | None,
    base_image: str,
    wheel: Path | None,
    overwrite: bool,
    output: Output,
) -> None:
    """Write a folder that `docker build` makes an image of that serves BUNDLE, without PyTorch."""
    from attn_export import bundle as bundles
    from attn_export.deploy.docker import write_context

    found = bundles.read(bundle)
    name = target or found.targets()[0]["name"]
    loose = write_context(found, name, place, image=base_image, wheel=wheel, overwrite=overwrite)
    output.console.print(f"Image: docker build -t {found.name} {place}")
    if loose:
        output.console.print(f"Not pinned, since not installed here: {', '.join(loose)}")
    output.result({"folder": str(place), "target": name, "not_pinned": loose})
