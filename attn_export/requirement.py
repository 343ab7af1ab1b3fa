"""`--require` and `--excuse`: what a site may be refused for before a check says no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_export.errors import CheckFailed, UsageError


@dataclass(frozen=True)
class Requirement:
    """How many sites must become fused ops, and which need not.

    Attributes:
        wanted: "all" (no refused site that is not excused), a number of lowered sites, or None.
        excused: names of sites, or codes of `attn_export.attention.reasons.Reason`.
        blocked_rows: whether a query that may see no key may get another answer than before.
    """

    wanted: int | str | None = None
    excused: tuple[str, ...] = ()
    blocked_rows: bool = False

    def failure(self, accounts: Sequence[Mapping[str, Any]]) -> CheckFailed | None:
        """What these `inspect --json` objects lack, or None."""
        sites = [site for account in accounts for site in account["sites"]]
        changed = [s for s in sites if s.get("blocked_rows", "same") != "same"]
        if changed and not self.blocked_rows:
            return CheckFailed(
                f"{changed[0]['name']} gives blocked rows '{changed[0]['blocked_rows']}'",
                "add --allow-blocked-rows, or another --lowering",
            )
        lowered = sum(account["lowered"] for account in accounts)
        if isinstance(self.wanted, int) and lowered < self.wanted:
            return CheckFailed(
                f"{lowered} sites were lowered and {self.wanted} are required",
                "see the reasons of the refused ones, or require fewer",
            )
        missed = [site for site in sites if site["status"] == "refused" and not self.excuses(site)]
        if self.wanted == "all" and missed:
            more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
            code = missed[0].get("code") or "not-recognised"
            return CheckFailed(
                f"{missed[0]['name']}{more} was refused ({missed[0]['reason']})",
                f"mend it, or excuse it with --excuse {missed[0]['name']} or --excuse {code}",
            )
        return None

    def excuses(self, site: Mapping[str, Any]) -> bool:
        """Whether a refused site is one that the user let go."""
        return site["name"] in self.excused or site.get("code") in self.excused

    def unused(self, accounts: Sequence[Mapping[str, Any]]) -> list[str]:
        """A note for each excuse that no refused site needed."""
        refused = [s for a in accounts for s in a["sites"] if s["status"] == "refused"]
        needed = {key for site in refused for key in (site["name"], site.get("code"))}
        return [f"--excuse {text} excused nothing" for text in self.excused if text not in needed]


def parse(
    wanted: str | int | None, excused: Sequence[str] = (), blocked_rows: bool = False
) -> Requirement:
    """Read the options.

    Raises:
        UsageError: neither "all" nor a number from 0 on.
    """
    if isinstance(wanted, str) and wanted != "all":
        if not wanted.isdecimal():
            raise UsageError(f"--require {wanted} does not parse", "use all, or a number of sites")
        wanted = int(wanted)
    return Requirement(wanted, tuple(excused), blocked_rows)
