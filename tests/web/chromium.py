"""Headless Chromium, driven over a pipe with the DevTools protocol."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--no-first-run", "--disable-background-networking", "--remote-debugging-pipe",
         "--window-size=800,900")  # fmt: skip


class Chromium:
    """One browser with one page. Messages are JSON that ends with a zero byte."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        asked, self._ask = os.pipe()
        self._answers, answering = os.pipe()
        command = shlex.join([PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"])
        self._process = subprocess.Popen(
            # It reads descriptor 3 and writes descriptor 4.
            ["bash", "-c", f"exec {command} 3<&{asked} 4>&{answering}"],
            pass_fds=[asked, answering],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(asked)
        os.close(answering)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in pages if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        raw = json.dumps(message).encode() + b"\0"
        while raw:
            raw = raw[os.write(self._ask, raw) :]
        while (answer := self._read()).get("id") != self._number:
            pass  # an event
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._answers, 1 << 20)
            if not more:
                raise EOFError("Chromium ended")
            self._buffer += more
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.evaluate("new Promise(done => document.readyState === 'complete' ? done()"
                      " : addEventListener('load', done))")  # fmt: skip

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, awaited; what it throws is raised here."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {})
            raise RuntimeError(thrown.get("description", thrown.get("value", "it threw")))
        return answer["result"].get("value")

    def draw(self, points: list[tuple[float, float]]) -> None:
        """Press the left button at the first point, drag it along the others, and let go."""
        for index, (x, y) in enumerate(points):
            kind = "mouseMoved" if index else "mousePressed"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1,
                      clickCount=1)  # fmt: skip
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=points[-1][0],
                  y=points[-1][1], button="left", clickCount=1)  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with its renderers
        self._process.wait()
        os.close(self._ask)
        os.close(self._answers)
