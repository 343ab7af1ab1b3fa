"""Measured lowerings of this machine, for the exports that come after.

A file an entry: what each op took for one kind of site, keyed by machine, versions, threads and
what the site computes. `ATTN_EXPORT_CACHE` names the folder, else it is the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attn_export.attention.lowering import Order
from attn_export.attention.site import Site
from attn_export.bench.machine import SAME, machine
from attn_export.capability import Form, Preference, preference
from attn_export.capability.measured import Measured
from attn_export.runtimes.packages import runtime_version, versions
from attn_export.runtimes.threads import cores
from attn_export.storage import write_errors, write_file

FORMAT = 1
NOISE = 1.03  # a time of this very machine
log = logging.getLogger("attn_export")


def folder() -> Path:
    """Where entries lie."""
    if chosen := os.environ.get("ATTN_EXPORT_CACHE"):
        return Path(chosen, "tune")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "attn-export", "tune")


def key_of(runtime: str, site: Site, form: Form, tokens: tuple[int, int]) -> dict[str, Any]:
    """What a time depends on. Symbolic sizes count by which of them are equal, not by name."""
    names: dict[str, str] = {}

    def plain(value: object, name: str) -> object:
        symbolic = isinstance(value, str) and name in ("query_tokens", "key_tokens")
        return names.setdefault(str(value), f"size {len(names)}") if symbolic else value

    asked = {name: plain(value, name) for name, value in asdict(form).items() if name != "batch"}
    return {
        "format": FORMAT,
        "machine": _here(),
        "runtime": runtime,
        "version": runtime_version(runtime)[0],
        "attn-export": versions().get("attn-export", ""),
        "kind": site.kind,
        "scale": round(site.scale, 6),
        "form": asked,
        "tokens": list(tokens),
    }


@functools.cache
def _here() -> dict[str, Any]:
    found = machine(cores())
    return {name: found[name] for name in SAME}


def path_of(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:32]}.json"


def write(key: Mapping[str, Any], ms: Mapping[str, float], as_fast: Sequence[str] = ()) -> Path:
    """Keep what was measured, over what was kept before.

    Args:
        as_fast: the ops that the fastest one was not faster than beyond noise.

    Raises:
        FileError: the folder cannot be written to.
    """
    path = path_of(key)
    written = datetime.now(UTC).isoformat(timespec="seconds")
    noise = max((ms[op] for op in as_fast), default=0.0) / min(ms.values())
    clear = max(NOISE, noise * (1 + 1e-9))
    entry = {"key": key, "ms": dict(ms), "clear": clear, "written": written}
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(entry, indent=1) + "\n")
    return path


def read(key: Mapping[str, Any]) -> Measured | None:
    """What was measured; None where nothing was. A file that is no entry is said and left out."""
    path = path_of(key)
    if not path.is_file():
        return None
    try:
        entry = json.loads(path.read_text())
        ms = {str(op): float(number) for op, number in entry["ms"].items()}
        clear = float(entry["clear"])
        if not ms or entry["key"] != key or min(ms.values()) <= 0 or clear < 1:
            raise ValueError("it is of something else")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        log.warning("%s is left out, it is not what tune writes (%s)", path, error)
        return None
    S, T = key["tokens"]
    return Measured(ms, f"{S} x {T} tokens", f"measured here, {entry.get('written')}", clear)


def order(runtime: str) -> Order:
    """The order in which ops are tried on this machine, for what was measured on it."""

    def asked(site: Site, form: Form, tokens: tuple[int, int] | None) -> Preference | None:
        if tokens is None:
            return None
        found = read(key_of(runtime, site, form, tokens))
        if found is None:
            return None
        rule = preference(runtime, form, tokens)
        return Preference(runtime, (), found.order(rule.ops), found.why, found.source)

    return asked
