"""A session that gives and takes other arrays than the one that it runs on."""

from __future__ import annotations

from collections.abc import Sequence

from attn_export.runtimes.base import Placed, Session


class Around(Session):
    """What runs where is the inner session's to say; closing this one closes that."""

    session: Session

    def placement(self) -> dict[str, int]:
        return self.session.placement()

    def nodes(self) -> Sequence[Placed]:
        return self.session.nodes()

    @property
    def processes(self) -> tuple[int, ...]:
        return self.session.processes

    def _close(self) -> None:
        self.session.close()
