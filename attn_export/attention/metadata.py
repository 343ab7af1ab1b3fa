"""What nodes are told by: names, and where they came from, kept through every pass."""

from __future__ import annotations

import onnx_ir as ir

MODULE = "attn_export.module"
"""Path of the PyTorch submodule: "blocks.0.attn"."""

ORIGIN = "attn_export.origin"
"""File name and line of the call: "vit.py:52"."""

SITE = "attn_export.site"
"""Name of the attention site that a node implements."""


def origin_of(node: ir.Node | None) -> dict[str, str]:
    """MODULE and ORIGIN of a node, as far as they are known, for the nodes that replace it."""
    known = {} if node is None else node.metadata_props
    return {key: known[key] for key in (MODULE, ORIGIN) if key in known}


def name_nodes(model: ir.Model) -> None:
    """Every node gets a name of its own, in subgraphs too: sites and reasons are told by it."""
    taken: set[str] = set()
    for index, node in enumerate(model.graph.all_nodes()):
        name = wanted = node.name or f"{node.op_type}_{index}"
        number = 0
        while name in taken:
            number += 1
            name = f"{wanted}.{number}"
        taken.add(name)
        node.name = name
