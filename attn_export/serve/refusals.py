"""Why a request gets no answer, with the status that says so.

The sentence of each goes to the client; it never holds a path or a traceback.
"""

from __future__ import annotations

from attn_export.errors import AttnExportError, InputError


class Refused(AttnExportError):
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        retry_after: seconds after which it may work; None where it will not.
    """

    status = 400
    retry_after: int | None = None


class BadRequest(Refused):
    """What was sent cannot be read."""


class NotFound(Refused):
    status = 404


class TooLarge(Refused):
    status = 413


class Encoded(Refused):
    status = 415


class NotReady(Refused):
    status = 503
    retry_after = 2


class Full(Refused):
    status = 503
    retry_after = 1


class Gone(Refused):
    """The client went away; nobody reads this. The status is what proxies write for it."""

    status = 499


class TooSlow(Refused):
    status = 504


class Failed(Refused):
    """The server's own fault; its log tells more."""

    status = 500


def refusal(error: Exception) -> Refused:
    """What a client is told where this was raised; anything unforeseen is the server's fault."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return BadRequest(error.observed, error.way_out)
    return Failed(
        f"the server failed on its own account ({type(error).__name__})",
        "its log tells more, under the id of this request",
    )
