"""A bundle's declarations, the inputs of its samples, and the samples in what the user names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attn_export import bundle as bundles
from attn_export.errors import FileError, UsageError
from attn_export.predict.declared import Declared, read
from attn_export.predict.sources import Samples, find
from attn_export.predict.telling import Classify, Detect, Postprocess
from attn_export.production.inputs import Signature


def declared_by(
    bundle: bundles.Bundle, top: int | None = None, threshold: float | None = None
) -> Declared:
    """What the manifest declares, with the user's own `top_k` or `threshold`.

    Raises:
        FileError: a section is malformed, or names what the bundle does not have.
        UsageError: an option that the bundle's `postprocess` does not have.
    """
    try:
        declared = read(bundle.manifest)
    except ValueError as error:
        raise FileError(f"{bundle.path}: {error}", "export the bundle again") from error
    if declared.text and declared.text.file not in bundle.manifest["files"]:
        raise FileError(f"{bundle.path} lists no {declared.text.file}", "export the bundle again")
    return replace(declared, post=_adapted(declared.post, top, threshold))


def _adapted(
    post: Postprocess | None, top: int | None, threshold: float | None
) -> Postprocess | None:
    if top is not None:
        if not isinstance(post, Classify):
            raise UsageError("--top is for classifiers, and this bundle is none", "leave it out")
        post = replace(post, top_k=top)
    if threshold is not None:
        if not isinstance(post, Detect):
            raise UsageError(
                "--threshold is for detectors, and this bundle is none", "leave it out"
            )
        post = replace(post, threshold=threshold)
    return post


def taken(bundle: bundles.Bundle) -> Signature:
    """What one sample gives: the inputs of the only component, or of the one that starts the loop.

    Raises:
        UsageError: several components without a loop, or an axis 0 that is no batch of samples.
    """
    component = bundle.components[0]
    if len(bundle.components) > 1 and "generate" not in bundle.manifest:
        raise UsageError(
            f"{bundle.name} has {len(bundle.components)} graphs and no loop over them",
            "run them from Python with attn_export.load",
        )
    signature = Signature.of(bundle.manifest, component)
    first = {spec.shape[:1] for spec in signature.inputs}
    if first == {()} or len(first) != 1 or component in bundle.manifest.get("rows_mix", ()):
        raise UsageError(
            f"axis 0 of {bundle.name} is not a batch of independent samples",
            "run it from Python with attn_export.load",
        )
    return signature


def samples_of(
    declared: Declared, signature: Signature, inputs: Sequence[str | Path], texts: Sequence[str]
) -> Samples:
    """The samples in files, folders and patterns, and in texts; errors are those of `find`."""
    ranks = {spec.name: len(spec.shape) for spec in signature.inputs}
    return find([str(name) for name in inputs], texts, ranks, frozenset(declared.images))
