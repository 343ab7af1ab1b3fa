"""`attn_export.load`: a bundle on the best runtime that works here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attn_export import bundle as bundles
from attn_export.errors import (
    AttnExportError,
    CheckFailed,
    FileError,
    RuntimeUnavailable,
    UsageError,
)
from attn_export.precision.views import target_of, view
from attn_export.production.choice import Choice, behind, order, reason
from attn_export.production.inputs import Signature
from attn_export.production.session import BundleSession
from attn_export.runtimes.base import LoadOptions, Session
from attn_export.sessions import load as load_component
from attn_export.tuned import settings_of

AUTO = "auto"
log = logging.getLogger("attn_export")


@dataclass(frozen=True)
class Options:
    """What `load` was asked for, apart from the runtime."""

    component: str | None
    threads: int | None
    allow_fallback: bool
    warmup: bool
    cache: Path | None
    spinning: bool | None

    def of(self, bundle: bundles.Bundle, runtime: str, component: str) -> LoadOptions:
        ranges = Signature.of(bundle.manifest, component).ranges
        spinning = self.spinning
        if spinning is None:
            one, name = view(bundle, runtime)
            spinning = bool(settings_of(target_of(one, name, component)).spinning)
        return LoadOptions(
            ranges, self.cache, allow_fallback=self.allow_fallback, spinning=spinning
        )


def load(
    bundle: Path | str | bundles.Bundle,
    runtime: str = AUTO,
    *,
    component: str | None = None,
    threads: int | None = None,
    allow_fallback: bool = False,
    verify: bool = False,
    warmup: bool = False,
    cache: Path | str | None = None,
    spinning: bool | None = None,
) -> BundleSession:
    """Open a bundle for production; no PyTorch is needed.

    With "auto" the runtime is the first that works here, in the order that was measured when the
    bundle was made (`targets[].measured`), else TensorRT, CUDA, ONNX Runtime's CPU provider,
    OpenVINO. The session's `choice` and the log `attn_export` tell which one it is and why not the
    others: a warning where a better one does not work.

    Args:
        runtime: "auto" or a name, which is then the only one that is tried.
        component: open this one alone; all of them where it is left out.
        threads: of each operator on the CPU; by default what `tune` found fastest, else as many
            cores as the container grants.
        allow_fallback: let another execution provider have attention nodes.
        verify: compare with the PyTorch outputs in the bundle before the session is returned.
        warmup: run the sizes of the stored cases once.
        cache: folder for engines that TensorRT builds, the user's cache where it is left out.
        spinning: let ONNX Runtime's idle threads look for work for a while before they sleep, for
            cores that nobody else needs; by default only where `tune` found that faster.
            docs/production.md has figures.

    Raises:
        FileError: the bundle is bad, or the runtime that was asked for refuses its graph.
        UsageError: there is no such runtime or component, or no graph for it, or threads below 1.
        RuntimeUnavailable: no runtime of the bundle works here, or not the one asked for.
        CheckFailed: `verify` found a difference.
    """
    found = bundle if isinstance(bundle, bundles.Bundle) else bundles.read(Path(bundle))
    components = found.components if component is None else [component]
    if not set(components) <= set(found.components):
        raise UsageError(
            f"the bundle has no component '{component}'",
            f"its components are {', '.join(found.components)}",
        )
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads}", "give 1 or more, or leave it out")
    folder = Path(cache) if cache else None
    options = Options(component, threads, allow_fallback, warmup, folder, spinning)
    if runtime == AUTO:
        choice, sessions = _best(found, components, options)
    else:
        choice, sessions = Choice(runtime, "asked for"), _open(found, runtime, components, options)
    path = found.path.absolute()
    again = partial(_reopen, path, found.digest(), choice.runtime, options)
    session = BundleSession(found, choice, sessions, again)
    log.info("%s runs on %s", found.name, choice)
    for name, clause in session.fallback.items():
        log.warning("'%s' of %s passed attention on: %s", name, found.name, clause)
    try:
        if verify:
            _require_parity(session)
        if warmup:
            session.warmup()
    except BaseException:
        session.close()
        raise
    return session


def _best(
    bundle: bundles.Bundle, components: Sequence[str], options: Options
) -> tuple[Choice, dict[str, Session]]:
    names, failed = order(bundle, components), dict[str, AttnExportError]()
    for index, name in enumerate(names):
        try:
            sessions = _open(bundle, name, components, options)
        except AttnExportError as error:  # of this runtime alone: the request itself is sound
            failed[name] = last = error
            continue
        passed = {other: str(seen).rstrip(".") for other, seen in failed.items()}
        for other, why in passed.items():
            log.warning("%s runs on %s, not on %s: %s", bundle.name, name, other, why)
        passed |= {other: behind(bundle, components, other, name) for other in names[index + 1 :]}
        return Choice(name, reason(bundle, components, name), passed), sessions
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if not failed:
        have = ", ".join(sorted({target["runtime"] for target in bundle.targets()}))
        raise UsageError(
            f"no runtime that 'auto' knows has a graph of {' and '.join(components)}",
            f"name one of {have}",
        )
    seen = ", ".join(f"{name} ({error.observed})" for name, error in failed.items())
    raise RuntimeUnavailable(f"no runtime of the bundle works here: {seen}", last.way_out)


def _open(
    bundle: bundles.Bundle, runtime: str, components: Sequence[str], options: Options
) -> dict[str, Session]:
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(
                load_component(
                    bundle,
                    runtime,
                    name,
                    options.threads,
                    options=options.of(bundle, runtime, name),
                    raw=True,
                )
            )
            for name in components
        }
        stack.pop_all()
    return sessions


def _require_parity(session: BundleSession) -> None:
    result = session.verify()
    if not result.passed:
        raise CheckFailed(
            f"{session.runtime} differs from PyTorch here, {result.failures[0]}",
            "load the bundle on another runtime, and run `attn-export verify`",
        )


def _reopen(path: Path, digest: str, runtime: str, options: Options) -> BundleSession:
    found = bundles.read(path)
    if found.digest() != digest:
        raise FileError(
            f"{path} has changed since the session was opened", "load the new bundle instead"
        )
    return load(found, runtime, **vars(options))
