"""The optional parts of an installation, and what to say where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from attn_export.errors import RuntimeUnavailable

MODULES = {
    "export": ("torch", "onnx_ir", "onnxscript", "jinja2"),
    "graph": ("onnx_ir", "onnxscript"),
    "report": ("jinja2",),
}


def require(extra: str) -> None:
    """Raise RuntimeUnavailable unless the packages of an extra are installed."""
    missing = [module for module in MODULES[extra] if find_spec(module) is None]
    if missing:
        raise RuntimeUnavailable(
            f"this needs {' and '.join(missing)}, which is not installed",
            f"run `pip install 'attn-export[{extra}]'`",
        )
