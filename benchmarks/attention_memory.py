"""Peak memory that each attention module adds at 2,048 and at 8,192 tokens.

    python benchmarks/attention_memory.py [--runtime torch|ort-cpu] [--json] [NAME]...

Each figure comes from a process of its own, which warms up on few tokens, resets the kernel's
high-water mark of its resident memory (Linux only) and runs once. Four times the tokens may cost
about four times the memory where the cost is linear, and 16 times where it is quadratic.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINEAR = ("sliding_window", "block_sparse", "linear", "linear_causal", "gated_delta")
QUADRATIC = ("top_k", "multi_head_weights")
TOKENS = (2048, 8192)
RUNTIMES = ("torch", "ort-cpu")


def measure(name: str, runtime: str) -> dict[str, float]:
    """MiB added at each number of tokens, and the ratio of the last to the first."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model.onnx")
        if runtime == "ort-cpu":
            _child("export", name, model)
        added = [float(_child(runtime, name, model, str(tokens))) for tokens in TOKENS]
    figures = {f"mib_{tokens}": mib for tokens, mib in zip(TOKENS, added, strict=True)}
    return {**figures, "ratio": added[-1] / added[0]}


def _child(*arguments: str) -> str:
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def _resident(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}: this measurement needs Linux")
    return int(match[1]) / 1024


def _run_child(action: str, name: str, model: str, tokens: str = "") -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    from attn_export.models.attention.catalogue import CATALOGUE

    torch.set_num_threads(1)
    spec = CATALOGUE[name]()
    if action == "export":
        dims = {
            axis.name: torch.export.Dim(axis.name, min=axis.min, max=2 * axis.max)
            for axes in spec.dynamic.values()
            for axis in axes.values()
        }
        program = torch.export.export(
            spec.module,
            (),
            kwargs=spec.inputs,
            dynamic_shapes={
                name: {i: dims[axis.name] for i, axis in axes.items()}
                for name, axes in spec.dynamic.items()
            },
        )
        exported = torch.onnx.export(program, dynamo=True, opset_version=23, verbose=False)
        if exported is not None:
            exported.save(model)
        return

    def inputs(count: int) -> dict[str, torch.Tensor]:
        if spec.draw is None:
            raise RuntimeError(f"{name} draws no inputs")
        sizes = {"batch": 1, "tokens": count, "keys": count}
        return spec.draw(torch.Generator().manual_seed(0), sizes, True)

    if action == "torch":

        def run(count: int) -> object:
            with torch.no_grad():
                return spec.module(**inputs(count))
    else:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False  # an arena rounds up to powers of two
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

        def run(count: int) -> object:
            return session.run(None, {key: x.numpy() for key, x in inputs(count).items()})

    run(64)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    run(int(tokens))
    print(_resident("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*LINEAR, *QUADRATIC])
    parser.add_argument("--runtime", choices=["torch", "ort-cpu"], action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = {
        name: {runtime: measure(name, runtime) for runtime in arguments.runtime or RUNTIMES}
        for name in arguments.names
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"{'module':<20} {'runtime':<8} {'MiB at 2048':>12} {'MiB at 8192':>12} {'ratio':>6}")
    for name, by_runtime in figures.items():
        for runtime, row in by_runtime.items():
            first, last, ratio = row.values()
            print(f"{name:<20} {runtime:<8} {first:>12.1f} {last:>12.1f} {ratio:>6.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _run_child(*sys.argv[2:])
    else:
        main()
