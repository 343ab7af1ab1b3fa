"""Two runtimes that turn out to be one: a comparison of them would show nothing."""

from __future__ import annotations

from collections.abc import Mapping

from attn_export.errors import RuntimeUnavailable
from attn_export.parity.result import RuntimeResult


def refuse_twins(results: Mapping[str, RuntimeResult]) -> None:
    """Raise RuntimeUnavailable where two runtimes had all nodes on the very same provider.

    ONNX Runtime replaces a provider that does not load by its CPU provider, and goes on.
    """
    seen: dict[tuple[str, ...], str] = {}
    for name, result in results.items():
        providers = tuple(sorted(result.placement))
        if result.stands_in_for is not None or not providers:
            continue
        if _of_onnxruntime(providers) and (other := seen.setdefault(providers, name)) != name:
            if results[other].runtime == result.runtime:
                continue  # two precisions on one runtime
            raise RuntimeUnavailable(
                f"{other} and {name} turned out to be the same, both ran everything on"
                f" {' and '.join(providers)}",
                f"ask for one of them, or run `attn-export doctor` to see why {name} is not used",
            )


def _of_onnxruntime(providers: tuple[str, ...]) -> bool:
    """Its providers are called so; PyTorch's and OpenVINO's devices are not those of another."""
    return all(name.endswith("ExecutionProvider") for name in providers)
