"""The optional parts of an installation, and what to say where one is missing."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from attn_export.errors import RuntimeUnavailable, one_line

MODULES = {
    "export": ("torch", "onnx_ir", "onnxscript", "jinja2"),
    "graph": ("onnx_ir", "onnxscript"),
    "predict": ("PIL", "tokenizers"),
    "ray": ("ray", "pyarrow"),
    "report": ("jinja2",),
    "serve": ("kserve",),
}


def require(extra: str, *modules: str) -> None:
    """Raise RuntimeUnavailable unless the packages of an extra are installed and import.

    Args:
        modules: those of the extra that are needed; the ones that stand for all by default.
    """
    needed = modules or MODULES[extra]
    missing = [module for module in needed if find_spec(module) is None]
    if missing:
        raise RuntimeUnavailable(
            f"this needs {' and '.join(missing)}, which is not installed",
            f"run `pip install 'attn-export[{extra}]'`",
        )
    for module in needed:
        try:
            import_module(module)
        except Exception as error:  # a broken installation raises anything: OSError, NameError, ...
            raise RuntimeUnavailable(
                f"{module} is installed and does not import ({one_line(error)})",
                f"run `pip install --force-reinstall {module.replace('_', '-')}`",
            ) from error
