"""One self-attention on an NVIDIA GPU: each form on CUDA and TensorRT, against PyTorch's own.

    python benchmarks/gpu.py [--tokens 197,1024,4096] [--batch 1] [--heads 12] [--seconds 1]
    python benchmarks/gpu.py --device cpu      # a stand-in, which tells nothing about a GPU

float16 on the GPU, tensors on the device on both sides, synchronised, runtimes taken in turns.
Nothing is timed whose answers are not within the allowance of the float64 truth. The ratio is the
median over that of PyTorch's scaled_dot_product_attention: below 1 is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from attn_export.bench.stats import Latency, summarize
from attn_export.errors import AttnExportError
from attn_export.kernel_trace import account
from attn_export.parity.tolerance import allowed_error
from attn_export.runtimes import nvidia, ort_cpu, ort_cuda, ort_tensorrt, torch_compile
from attn_export.runtimes.base import LoadOptions
from attn_export.runtimes.device import DeviceRun
from attn_export.runtimes.ort import OrtSession

HEAD_SIZE = 64
WARM_UP, ROUNDS = 5, 10
BASELINE = "torch SDPA"
FORMS = {"ort-cpu": ("standard", "MultiHeadAttention", "decomposed"),
         "ort-cuda": ("standard", "MultiHeadAttention", "decomposed"),
         "ort-tensorrt": ("standard", "decomposed")}  # fmt: skip
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """B samples of S tokens, N heads of size HEAD_SIZE; everything is (B, S, N*H)."""

    batch: int
    tokens: int
    heads: int

    @property
    def width(self) -> int:
        return self.heads * HEAD_SIZE


@dataclass(frozen=True)
class Row:
    """What was seen of one runtime and form; `failure` stands for a time that was not taken."""

    name: str
    error: float = float("nan")
    allowed: float = float("nan")
    placement: str = ""
    kernel: str = ""
    latency: Latency | None = None
    failure: str = ""


def build(form: str, sizes: Sizes, dtype: np.dtype[Any]) -> onnx.ModelProto:
    """q, k, v -> y, all (B, S, N*H), as one fused node or written out."""
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    shape = [sizes.batch, sizes.tokens, sizes.width]
    values = [helper.make_tensor_value_info(name, kind, shape) for name in ("q", "k", "v", "y")]
    heads, constants = sizes.heads, []
    if form == "standard":
        counts = {"q_num_heads": heads, "kv_num_heads": heads}
        nodes = [helper.make_node("Attention", ["q", "k", "v"], ["y"], "site/Attention", **counts)]
    elif form == "MultiHeadAttention":
        nodes = [helper.make_node(form, ["q", "k", "v"], ["y"], f"site/{form}",
                                  domain="com.microsoft", num_heads=heads)]  # fmt: skip
    else:
        nodes, constants = _written_out(heads, dtype)
    graph = helper.make_graph(nodes, "attention", values[:3], values[3:], constants)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    used = opsets if form == "MultiHeadAttention" else opsets[:1]
    return helper.make_model(graph, opset_imports=used, ir_version=10)


def _written_out(
    heads: int, dtype: np.dtype[Any]
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Products and a softmax, the scale on the query, as TensorRT fuses them."""
    constants = [
        helper.make_tensor("split", TensorProto.INT64, [4], [0, 0, heads, HEAD_SIZE]),
        helper.make_tensor("merge", TensorProto.INT64, [3], [0, 0, heads * HEAD_SIZE]),
        onnx.numpy_helper.from_array(np.array(HEAD_SIZE**-0.5, dtype), "scale"),
    ]
    nodes = []
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes.append(helper.make_node("Reshape", [name, "split"], [f"{name}_split"]))
        nodes.append(
            helper.make_node("Transpose", [f"{name}_split"], [f"{name}_heads"], perm=order)
        )
    nodes += [
        helper.make_node("Mul", ["q_heads", "scale"], ["q_scaled"]),
        helper.make_node("MatMul", ["q_scaled", "k_heads"], ["scores"], "site/MatMul"),
        helper.make_node("Softmax", ["scores"], ["weights"], "site/Softmax", axis=-1),
        helper.make_node("MatMul", ["weights", "v_heads"], ["mixed"], "site/MatMul_1"),
        helper.make_node("Transpose", ["mixed"], ["joined"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["joined", "merge"], ["y"]),
    ]
    return nodes, constants


def inputs(sizes: Sizes, dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
    """Seeded numbers of unit scale."""
    random = np.random.default_rng(0)
    shape = (sizes.batch, sizes.tokens, sizes.width)
    return {name: random.standard_normal(shape).astype(dtype) for name in ("q", "k", "v")}


def attend(heads: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention of (B, S, N*H)."""
    split = [x.unflatten(2, (heads, HEAD_SIZE)).transpose(1, 2) for x in (q, k, v)]
    return scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


def truth(sizes: Sizes, given: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """The same in float64, on the CPU."""
    doubles = [torch.tensor(array, dtype=torch.float64) for array in given.values()]
    return np.asarray(attend(sizes.heads, *doubles).numpy())


def measure(device: str, sizes: Sizes, seconds: float, *, compiled: bool = True) -> list[Row]:
    """Every runtime and form: parity first, then the time of those that pass."""
    dtype = np.dtype(np.float16 if device == "cuda" else np.float32)
    given = inputs(sizes, dtype)
    right = truth(sizes, given)
    tensors = {name: torch.tensor(array, device=device) for name, array in given.items()}
    reference = attend(sizes.heads, *tensors.values())
    allowed = allowed_error(reference.cpu().numpy(), right)
    rows: list[Row] = []
    calls: dict[str, Call] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attn-export-")))
        for name, make in _candidates(device, sizes, dtype, tensors, folder, stack, compiled):
            row, call = _tried(name, make, right, allowed)
            rows.append(row)
            if call is not None:
                calls[name] = call
        times = _timed(calls, device, seconds)
    return [replace(row, latency=times.get(row.name)) for row in rows]


Made = tuple[Call, Callable[[str], tuple[str, str]]]


def _candidates(
    device: str, sizes: Sizes, dtype: np.dtype[Any], tensors: Mapping[str, torch.Tensor],
    folder: Path, stack: ExitStack, compiled: bool,
) -> Iterator[tuple[str, Callable[[], Made]]]:  # fmt: skip
    """Name -> what makes it ready: its call, and its placement and kernel from what was printed."""

    def torch_call(function: Callable[..., torch.Tensor]) -> Made:
        return lambda: function(sizes.heads, *tensors.values()), lambda _: (device, "")

    yield BASELINE, lambda: torch_call(attend)
    if compiled and torch_compile.availability().ok:
        yield "torch.compile", lambda: torch_call(torch.compile(attend))
    runtimes = (ort_cuda, ort_tensorrt) if device == "cuda" else (ort_cpu,)
    for runtime in runtimes:
        for form in FORMS[runtime.NAME]:

            def ort_call(runtime: Any = runtime, form: str = form) -> Made:
                model = build(form, sizes, dtype).SerializeToString()
                with runtime.load(model, options=LoadOptions(cache=folder, trace=folder)) as traced:
                    DeviceRun(traced, device).run(tensors)  # says which kernels it takes
                loaded: OrtSession = runtime.load(model, options=LoadOptions(cache=folder))
                session = stack.enter_context(loaded)
                run = DeviceRun(session, device)

                def told(log: str) -> tuple[str, str]:
                    places = [f"{n} {p}" for p, n in session.placement().items()]
                    kernels = [seen.kernel for seen in account(session.nodes(), {}, log)]
                    return ", ".join(places), ", ".join(filter(None, kernels))

                return lambda: torch.from_dlpack(run.run(tensors)["y"]), told

            yield f"{runtime.NAME} {form}", ort_call


def _tried(
    name: str, make: Callable[[], Made], right: NDArray[np.float64], allowed: float
) -> tuple[Row, Call | None]:
    """The row without its time, and the call where its answers are right."""
    try:
        with printed() as log:
            call, told = make()
            answer = call().double().cpu().numpy()
        placement, kernel = told("".join(log))
    except AttnExportError as error:
        return Row(name, failure=error.observed), None
    error = float(np.max(np.abs(answer - right)))
    row = Row(name, error, allowed, placement, kernel)
    if not error <= allowed:  # NaN is no pass
        return replace(row, failure="not timed: its answers are wrong"), None
    return row, call


def _timed(calls: Mapping[str, Call], device: str, seconds: float) -> dict[str, Latency]:
    """Milliseconds of a call that is waited for, the calls in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            until = time.perf_counter() + seconds / ROUNDS
            while not times[name] or time.perf_counter() < until:
                _wait(device)
                begun = time.perf_counter()
                call()
                _wait(device)
                times[name].append((time.perf_counter() - begun) * 1e3)
    return {name: summarize(row) for name, row in times.items()}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def printed() -> Iterator[list[str]]:
    """What the process prints below Python meanwhile, where kernels say which they are."""
    lines: list[str] = []
    sys.stdout.flush()
    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    with tempfile.TemporaryFile() as file:
        try:
            for fd, _ in kept:
                os.dup2(file.fileno(), fd)
            yield lines
        finally:
            for fd, before in kept:
                os.dup2(before, fd)
                os.close(before)
            file.seek(0)
            lines.append(file.read().decode(errors="replace"))


def table(title: str, rows: Sequence[Row]) -> Table:
    """One row a runtime and form."""
    made = Table(title=title, title_justify="left")
    for column in ("runtime", "max error", "of allowed", "median ms", "ratio", "nodes", "kernel"):
        made.add_column(column)
    base = next((row.latency for row in rows if row.name == BASELINE), None)
    for row in rows:
        share = f"{row.error / row.allowed:.0%}" if row.error == row.error else ""
        took = f"{row.latency.median:.3f}" if row.latency else row.failure
        ratio = f"{row.latency.median / base.median:.2f}" if row.latency and base else ""
        made.add_row(
            row.name, f"{row.error:.1e}", share, took, ratio, row.placement,
            row.kernel or "not told",
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", default="197,1024,4096", help="lengths, separated by commas")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.0, help="timed seconds a runtime")
    args = parser.parse_args()
    console, seen = Console(width=150), ort_cuda.availability()
    if args.device == "cuda":
        missing = "" if seen.ok else seen.observed
        if not missing and not torch.cuda.is_available():
            missing = f"PyTorch {torch.__version__} sees no CUDA device"
        if missing:
            console.print(f"Skipped: {missing}.", markup=False)
            return
    os.environ["ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"] = "1"
    device, _ = nvidia.device()
    where = str(device) if args.device == "cuda" else "the CPU, which tells nothing of a GPU"
    heads = f"{args.heads} heads of {HEAD_SIZE}"
    for tokens in map(int, args.tokens.split(",")):
        sizes = Sizes(args.batch, tokens, args.heads)
        title = f"{tokens} tokens, batch {args.batch}, {heads}, on {where}"
        console.print(table(title, measure(args.device, sizes, args.seconds)))


if __name__ == "__main__":
    main()
