"""Serve the page and a bundle: `python examples/web/serve.py BUNDLE [PORT]`.

The two headers make the page cross-origin isolated, without which WebAssembly has one thread.
"""

from __future__ import annotations

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export.errors import AttnExportError
from attn_export.runtimes import ort_web

FOLDER = Path(__file__).resolve().parent
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}


class Handler(SimpleHTTPRequestHandler):
    """Files of three folders: this one, onnxruntime-web's below ort/, the bundle below bundle/."""

    extensions_map = {  # noqa: RUF012 - as the base class has it
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, bundle: Path, ort: Path, *arguments: Any) -> None:
        self.folders = {"bundle": bundle, "ort": ort}
        super().__init__(*arguments, directory=str(FOLDER))

    def translate_path(self, path: str) -> str:
        here = Path(super().translate_path(path))
        first, *rest = here.relative_to(FOLDER).parts or ("",)
        return str(self.folders[first].joinpath(*rest)) if first in self.folders else str(here)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Errors are seen in the page."""


def server(bundle: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server on localhost that is not running yet; port 0 takes a free one.

    Raises:
        FileError: this is no bundle.
        RuntimeUnavailable: onnxruntime-web is not installed.
    """
    bundles.read(bundle)
    ort, _ = ort_web.package()
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, bundle, ort / "dist"))


if __name__ == "__main__":
    try:
        serving = server(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
    except AttnExportError as error:
        sys.exit(f"Error: {error}")
    print(f"http://127.0.0.1:{serving.server_port}/")
    serving.serve_forever()
