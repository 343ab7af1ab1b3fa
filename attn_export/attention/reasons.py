"""Why a site is not lowered: a closed list, so that users can excuse a kind of reason."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The code that stands in front of each reason's own words."""

    WEIGHTS_USED = "weights-used"
    """The attention weights are returned or read by something else, so they must survive."""

    NOT_EXPRESSIBLE = "not-expressible"
    """No attention op computes this: talking heads, sinks, top-k, scores from no product."""

    MASK = "mask"
    """The mask cannot be given to the op in a form that it takes."""

    BLOCKED_ROWS = "blocked-rows"
    """A query that may see no key would get another answer than PyTorch's."""

    LAYOUT = "layout"
    """Heads, tokens or batch lie in an order that the op does not take."""

    PROJECTION = "projection"
    """Query, key and value are not the linear projections that the op merges."""

    HEADS = "heads"
    """The op has no grouped heads, or no heads of this size."""

    CACHE = "cache"
    """The op cannot return or extend this cache."""

    SOFTCAP = "softcap"
    """The op has no softcap."""

    WINDOW = "window"
    """The op has no window."""

    CAUSAL = "causal"
    """The op's causal mask is aligned in another way, or missing."""

    NO_KERNEL = "no-kernel"
    """The runtime, or this version of it, has no right kernel for the op and dtype."""

    QUANTISED = "quantised"
    """Its products are quantised."""

    UNKNOWN_SHAPE = "unknown-shape"
    """A rank, size or dtype that the op needs is not known."""

    DISAGREES = "disagrees"
    """The op was run and gave another answer; it is not applied."""

    UNPROVABLE = "unprovable"
    """The site could not be run on its own, so nothing was proved and nothing is changed."""

    SLOWER = "slower"
    """It was measured, and the plain form is faster."""

    NOT_RECOGNISED = "not-recognised"
    """The counter saw attention here that the finder did not take."""


class NotLowerable(Exception):
    """This op cannot take this site, for a reason that is listed.

    Args:
        reason: its code.
        detail: what was seen, as a clause about the site ("its mask is scaled").
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
