"""How much arithmetic the matrix products of an eager PyTorch run are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def count(run: Callable[[], object]) -> int:
    """Floating-point operations as PyTorch's own counter has them, and those of its fused
    attention on the CPU, which that leaves out."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from torch.utils.module_tracker import ModuleTracker

    class Untracked(ModuleTracker):
        """No count by module: its hooks fail where a module is given a view of a parameter."""

        def __enter__(self) -> ModuleTracker:
            return self

        def __exit__(self, *_: object) -> None:
            return

    fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={fused: _attention})
    counter.mod_tracker = Untracked()
    with counter:
        run()
    return int(counter.get_total_flops())


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of shapes (B, N, S, H), (B, K, T, H) and (B, K, T, Hv): Q K^T, and the weights with V."""
    batch, heads, tokens, size = query
    return int(2 * batch * heads * tokens * key[2] * (size + value[3]))
