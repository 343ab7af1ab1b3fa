"""Which provider and kernel computed a site: seen on the CPU, and read from what CUDA prints."""

from __future__ import annotations

from pathlib import Path

from attn_export import bundle as bundles
from attn_export.kernel_trace import account, by_site, kernels, trace
from attn_export.runtimes.base import Placed
from tests.boundary import Cli

CUDA = "CUDAExecutionProvider"
SITES = [f"blocks.{i}.attn" for i in range(6)]


def test_every_site_of_a_bundle_ran_where_it_was_placed(digits_bundle: Path) -> None:
    seen, note = trace(bundles.read(digits_bundle), "ort-cpu", "model")
    assert note == ""
    assert [(n.node, n.provider, n.ran) for n in seen] == [
        (f"{site}/Attention", "CPUExecutionProvider", True) for site in SITES
    ]


def test_what_contrib_kernels_print_is_read_by_node() -> None:
    """The names as they stand in the binary of onnxruntime-gpu 1.31.1."""
    log = (
        "AttentionKernelOptions: FLASH_ATTENTION=1 EFFICIENT_ATTENTION=1 MATH=1\n"
        "Operator=MultiHeadAttention Node=a/MultiHeadAttention DataType=fp16 FLASH_ATTENTION=1"
        " EFFICIENT_ATTENTION=0\n"
        "Operator=Attention Node=b/Attention DataType=fp32 FLASH_ATTENTION=0 MATH=1\n"
    )
    assert kernels(log) == {"a/MultiHeadAttention": "FLASH_ATTENTION", "b/Attention": "MATH"}


def test_what_the_standard_op_logs_goes_to_its_nodes_in_order() -> None:
    nodes = [
        Placed(CUDA, "", "Attention", "a/Attention"),
        Placed(CUDA, "", "MatMul", "m"),
        Placed(CUDA, "com.microsoft", "MultiHeadAttention", "b/MultiHeadAttention"),
        Placed(CUDA, "", "Attention", "c/Attention"),
    ]
    log = (
        "[V:onnxruntime:, attention.cc:1] ONNX Attention: using Flash Attention\n"
        "[V:onnxruntime:, attention.cc:2] ONNX Attention: using unified unfused path\n"
    )
    seen = account(nodes, {"a/Attention": "CPUExecutionProvider"}, log)
    assert [(n.node, n.kernel) for n in seen] == [
        ("a/Attention", "Flash Attention"),
        ("b/MultiHeadAttention", ""),
        ("c/Attention", "unified unfused path"),
    ]
    assert [(n.provider, n.ran) for n in seen[:2]] == [
        ("CPUExecutionProvider", True),
        (CUDA, False),
    ]


def test_an_op_that_was_taken_apart_has_no_node() -> None:
    nodes = [Placed("CPUExecutionProvider", "", "Attention", "blocks.1.attn/Attention")]
    first, second = by_site(
        [{"name": "blocks.0.attn"}, {"name": "blocks.1.attn"}], account(nodes, {}, "")
    )
    assert (first["node"], first["ran"]) == (None, False)
    assert second["node"] == "blocks.1.attn/Attention"


def test_inspect_runs_a_bundle_on_a_runtime(cli: Cli, digits_bundle: Path) -> None:
    ended = cli("inspect", digits_bundle, "--runtime", "ort-cpu")
    assert ended.code == 0
    assert "On ort-cpu" in ended.stdout
    assert ended.stdout.count("the provider does not say") == 6


def test_inspect_needs_a_bundle_to_run_and_a_runtime_that_is_here(
    cli: Cli, digits_bundle: Path
) -> None:
    ended = cli("inspect", "vit-digits", "--runtime", "ort-cpu")
    assert (ended.code, "--runtime runs a bundle" in ended.sentence) == (2, True)
    assert cli("inspect", digits_bundle, "--runtime", "ort-cpu", "--target", "cpu").code == 2
    assert cli("inspect", digits_bundle, "--runtime", "ort-ep:nowhere").code == 3
