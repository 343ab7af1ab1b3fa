"""A site's inputs, and a builder for the nodes that replace it."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.attention.builder import Builder
from attn_export.attention.metadata import SITE, origin_of
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.site import Site

MASK, LENGTHS = 3, 6
"""Inputs of standard Attention (ONNX operator specification)."""


def builder(site: Site) -> Builder:
    """For new nodes that carry the site's name and origin."""
    return Builder(site.name, {SITE: site.name, **origin_of(site.node)})


def operand_of(site: Site, index: int) -> ir.Value:
    """Query, key or value of a site, by its input of standard Attention."""
    value = site.node.inputs[index]
    if value is None:
        raise NotLowerable(Reason.UNKNOWN_SHAPE, "it lacks an input")
    return value


def mask_of(site: Site) -> ir.Value | None:
    return site.node.inputs[MASK] if len(site.node.inputs) > MASK else None
