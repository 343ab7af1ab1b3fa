"""Export PyTorch models with attention to ONNX with fused ops, and prove the answers are PyTorch's.

The public API is imported at its first use, so that `import attn_export` loads neither torch nor
onnxruntime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_export.bench.benchmark import benchmark
    from attn_export.build import export
    from attn_export.errors import AttnExportError
    from attn_export.fusing import fuse
    from attn_export.production.loading import load
    from attn_export.tuning.tuner import tune
    from attn_export.verifying.verification import assert_parity, verify

__version__ = "0.1.0"

_WHERE = {
    "AttnExportError": "attn_export.errors",
    "assert_parity": "attn_export.verifying.verification",
    "benchmark": "attn_export.bench.benchmark",
    "export": "attn_export.build",
    "fuse": "attn_export.fusing",
    "load": "attn_export.production.loading",
    "tune": "attn_export.tuning.tuner",
    "verify": "attn_export.verifying.verification",
}
_EXTRAS = {"export": "export", "fuse": "graph", "tune": "graph"}

__all__ = [
    "AttnExportError", "assert_parity", "benchmark", "export", "fuse", "load", "tune", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'attn_export' has no attribute '{name}'")
    if name in _EXTRAS:
        from attn_export.extras import require

        require(_EXTRAS[name])
    found = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = found
    return found
