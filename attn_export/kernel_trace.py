"""Which execution provider and which kernel computed each attention site, as the runtime says.

`python -m attn_export.kernel_trace BUNDLE RUNTIME COMPONENT FOLDER` runs the first stored case in a
process of its own: kernels print to its stdout and stderr, below Python's. Three sources:

- where ONNX Runtime recorded that it placed each node;
- its profile, which has a line for each node that ran, with the provider and the op's kernel;
- what its CUDA kernels say of themselves: com.microsoft ops print `Operator=... FLASH_ATTENTION=1`
  under ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1, the standard Attention op logs
  `ONNX Attention: using ...`. The CPU's say nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attn_export import bundle as bundles
from attn_export import errors
from attn_export.errors import AttnExportError, RuntimeUnavailable, UsageError
from attn_export.runtimes.base import LoadOptions, Placed
from attn_export.runtimes.placement import is_attention
from attn_export.sessions import load

DEBUG = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}
SAID = re.compile(r"ONNX Attention: using ([^\n\r]+)")
PRINTED = re.compile(r"Operator=(?P<op>\w+)(?P<rest>[^\n]*)")
FLAG = re.compile(r"(?P<kernel>[A-Z_]+)=1\b")
NODE = re.compile(r"\bNode=(?P<node>\S+)")


@dataclass(frozen=True)
class Seen:
    """One attention node of a site.

    Attributes:
        ran: whether the profile has it, so that a kernel of `provider` computed it.
        kernel: what the kernel said of itself; empty where it says nothing.
    """

    node: str
    op: str
    provider: str
    ran: bool
    kernel: str


def trace(bundle: bundles.Bundle, runtime: str, component: str) -> tuple[list[Seen], str]:
    """Every attention node in the graph's order, and a note where the runtime tells nothing.

    Raises:
        AttnExportError: what loading or running raised.
        RuntimeUnavailable: the process crashed.
    """
    command = [sys.executable, "-m", "attn_export.kernel_trace", str(bundle.path), runtime]
    with tempfile.TemporaryDirectory(prefix="attn-export-") as folder:
        done = subprocess.run(
            [*command, component, folder],
            capture_output=True, text=True, errors="replace", env={**os.environ, **DEBUG},
        )  # fmt: skip
        result = Path(folder, "result.json")
        if not result.is_file():
            words = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
            raise RuntimeUnavailable(
                f"the {runtime} process ended before it ran the model ({words})",
                "try `attn-export doctor`",
            )
        found = json.loads(result.read_text())
        if "error" in found:
            name, observed, way_out = found["error"]
            kind: type[AttnExportError] = getattr(errors, name)
            raise kind(observed, way_out)
        nodes = [Placed(**node) for node in found["nodes"]]
        return account(nodes, _profiled(Path(folder)), done.stdout + done.stderr), (
            "" if nodes else f"{runtime} does not say where it runs each node"
        )


def account(nodes: Sequence[Placed], profile: Mapping[str, str], log: str) -> list[Seen]:
    """Attention nodes with what was recorded of each.

    Args:
        nodes: as placed.
        profile: node -> the provider that ran it.
        log: what the process printed.
    """
    printed = kernels(log)
    said = iter(SAID.findall(log))
    seen = []
    for node in filter(is_attention, nodes):
        kernel = printed.get(node.name, "")
        if not kernel and node.domain in ("", "ai.onnx") and node.op == "Attention":
            kernel = next(said, "")  # those lines name no node, and come in the order of running
        provider = profile.get(node.name, node.provider)
        seen.append(Seen(node.name, node.op, provider, node.name in profile, kernel.strip()))
    return seen


def kernels(log: str) -> dict[str, str]:
    """Node -> the kernels that the line about it says were used."""
    found = {}
    for line in PRINTED.finditer(log):
        node = NODE.search(line["rest"])
        flags = [flag["kernel"] for flag in FLAG.finditer(line["rest"])]
        if node and flags:
            found[node["node"]] = ", ".join(flags)
    return found


def _profiled(folder: Path) -> dict[str, str]:
    """Node -> provider, of each kernel in the profile."""
    found = {}
    for path in folder.glob("profile*.json"):
        for event in json.loads(path.read_text()):
            name = str(event.get("name", ""))
            if name.endswith("_kernel_time"):
                found[name.removesuffix("_kernel_time")] = str(event["args"].get("provider", ""))
    return found


def by_site(sites: Sequence[Mapping[str, Any]], seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """For each site what computed it, as `inspect --runtime --json` has it.

    Nodes of a lowering are named SITE/OP. Where the runtime has no node of a site, it took the op
    apart (as for an opset that it has no kernel of), which no other message says.
    """
    rows = []
    for site in sites:
        name = str(site["name"])
        node = next((n for n in seen if n.node.startswith(f"{name}/") or n.node == name), None)
        found = asdict(node) if node else {"node": None, "op": None, "provider": None,
                                           "ran": False, "kernel": ""}  # fmt: skip
        rows.append({"name": name, **found})
    return rows


def _main(folder: Path, runtime: str, component: str, result: Path) -> None:
    answer: dict[str, Any]
    try:
        answer = {"nodes": _run(folder, runtime, component, result)}
    except AttnExportError as error:
        answer = {"error": [type(error).__name__, error.observed, error.way_out]}
    (result / "result.json").write_text(json.dumps(answer))


def _run(folder: Path, runtime: str, component: str, trace: Path) -> list[dict[str, str]]:
    bundle = bundles.read(folder)
    cases = [case for case in bundle.cases() if case.component == component]
    if not cases:
        raise UsageError(f"the bundle has no case for '{component}'", "name another component")
    options = LoadOptions(allow_fallback=True, trace=trace)  # what went elsewhere is to be shown
    with load(bundle, runtime, component, options=options) as session:
        session.run(cases[0].inputs)
        return [asdict(node) for node in session.nodes()]


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
