"""Where a node came from, kept as node metadata through every pass and into the bundle."""

MODULE = "attn_export.module"
"""Path of the PyTorch submodule: "blocks.0.attn"."""

ORIGIN = "attn_export.origin"
"""File name and line of the call: "vit.py:52"."""

SITE = "attn_export.site"
"""Name of the attention site that a node implements."""
