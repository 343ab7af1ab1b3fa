"""Added memory from 2,048 to 8,192 tokens, measured by the benchmark in processes of their own."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_export.models.attention.catalogue import CATALOGUE

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "attention_memory.py"
LINEAR = ("sliding_window", "sliding_window_symmetric", "block_sparse", "block_sparse_causal")
LINEAR += ("linear", "linear_causal", "gated_delta")


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = out if isinstance(out, tuple | list) else (out,)
        sizes = [x.numel() for x in tensors if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def largest(name: str, tokens: int) -> int:
    spec = CATALOGUE[name]()
    sizes = {"batch": 1, "tokens": tokens}
    inputs = spec.draw(torch.Generator().manual_seed(0), sizes, True)
    with LargestTensor() as record, torch.no_grad():
        spec.module(**inputs)
    return record.elements


@pytest.mark.parametrize("name", LINEAR)
def test_largest_tensor_grows_with_the_length_and_not_with_its_square(name):
    assert largest(name, 4 * 512) <= 5 * largest(name, 512)


def test_largest_tensor_of_top_k_is_its_scores():
    assert largest("top_k", 512) == 4 * 512 * 512  # heads * S * T


# Elsewhere there is no way to set a process's peak back; on Linux nothing is passed over.
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is set back by Linux's clear_refs")
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", "ort-cpu"])
@pytest.mark.parametrize("name", LINEAR)
def test_added_memory_grows_at_most_five_fold(name, runtime):
    assert benchmark().measure(name, runtime)["ratio"] <= 5
