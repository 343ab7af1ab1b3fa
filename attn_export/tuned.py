"""What `tune` chose, as the manifest of a bundle has it, and what runtimes get of it.

`tuned` of a target is false, or an object whose `settings` may hold:

    {"level": "all" | "extended" | "basic" | "off", "without": [OPTIMISER, ...],
     "threads": N, "spinning": true | false, "provider": {OPTION: VALUE}}

What is not there is left as the runtime has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attn_export.errors import FileError
from attn_export.runtimes.base import LEVELS, LoadOptions
from attn_export.runtimes.threads import cores

OPTIONS = {"prefer_nhwc"}
"""Options of execution providers that a manifest may set."""


@dataclass(frozen=True)
class Settings:
    """How a runtime runs the graph of a target; empty is its own way.

    Attributes:
        level, without: as `LoadOptions` has them.
        threads: of each operator, on a machine that grants as many cores as that of `tune` did.
    """

    level: str = ""
    without: tuple[str, ...] = ()
    threads: int | None = None
    spinning: bool | None = None
    provider: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What differs from the runtime's own way."""
        found = {**vars(self), "without": list(self.without), "provider": dict(self.provider)}
        return {key: value for key, value in found.items() if value not in ("", [], {}, None)}

    def __str__(self) -> str:
        said = [f"optimisation level {self.level}"] if self.level else []
        said += [f"without {name}" for name in self.without]
        said += [f"{self.threads} thread{'s' * (self.threads != 1)}"] if self.threads else []
        if self.spinning is not None:
            said.append("spinning threads" if self.spinning else "sleeping threads")
        said += [f"{name}={value}" for name, value in self.provider.items()]
        return ", ".join(said)


def settings_of(target: Mapping[str, Any]) -> Settings:
    """The settings of a target; empty ones where it is not tuned.

    Raises:
        FileError: they are not what `tune` writes.
    """
    tuned = target.get("tuned")
    if not isinstance(tuned, dict):
        return Settings()
    given = tuned.get("settings", {})
    if not isinstance(given, dict) or not _is_sound(given):
        raise FileError(
            f"target '{target.get('name')}' has bad tuned settings, {given}", "tune it again"
        )
    without = tuple(given.get("without", ()))
    return Settings(**{**given, "without": without})


def _is_sound(given: Mapping[str, Any]) -> bool:
    threads, provider = given.get("threads"), given.get("provider", {})
    without = given.get("without", [])
    return (
        given.keys() <= Settings.__dataclass_fields__.keys()
        and given.get("level", "") in ("", *LEVELS)
        and isinstance(without, list)
        and all(isinstance(name, str) and name.isidentifier() for name in without)
        and (threads is None or (type(threads) is int and threads >= 1))
        and given.get("spinning") in (None, True, False)
        and isinstance(provider, dict)
        and provider.keys() <= OPTIONS
        and all(isinstance(value, str) for value in provider.values())
    )


def threads_of(target: Mapping[str, Any]) -> int | None:
    """The threads that were fastest, where this machine grants as many cores as that one did."""
    found = settings_of(target).threads
    if found is None:
        return None
    return found if target["tuned"].get("machine", {}).get("threads") == cores() else None


def applied(options: LoadOptions, target: Mapping[str, Any]) -> LoadOptions:
    """The options with what was tuned, where the caller left it open."""
    found = settings_of(target)
    return replace(
        options,
        level=options.level or found.level,
        without=options.without or found.without,
        spinning=found.spinning if options.spinning is None else options.spinning,
        provider={**found.provider, **options.provider},
    )
