"""Rotary position embedding as people write it becomes one node with the same answers."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from attn_export.attention.apply import apply
from attn_export.attention.lower.rotary_embedding import CONTRIB, STANDARD, build
from attn_export.attention.lowering import lower
from attn_export.attention.reasons import NotLowerable, Reason
from attn_export.attention.rotary import rotations
from attn_export.exporting.exporter import Graph, to_onnx
from attn_export.models.spec import ExportSpec
from attn_export.runtimes import ort_cpu
from tests.attention.graphs import BATCH, SIZES, TOKENS, op_types, run

N, H = 2, 8
FREQUENCIES = 1 / 100 ** (torch.arange(0, H, 2) / H)  # (H/2,)


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def heads_first(x: Tensor) -> Tensor:
    return x.unflatten(2, (N, H)).transpose(1, 2)


class Llama(nn.Module):
    """Positions of each row, angles computed in the graph and doubled."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, :, None].float() * FREQUENCIES
        angles = torch.cat([angles, angles], -1)[:, None]
        q = heads_first(x)
        return q * angles.cos() + halves(q) * angles.sin()


class NeoX(nn.Module):
    """Only the first half of a head is turned; tables are cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(64.0)[:, None] * FREQUENCIES[:2]
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        q = heads_first(x)
        turned, rest = q[..., :4], q[..., 4:]
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        return torch.cat([turned * cos + halves(turned) * sin, rest], -1)


class GptJ(nn.Module):
    """Interleaved pairs, tokens before heads, tables picked by position."""

    def __init__(self) -> None:
        super().__init__()
        angles = (torch.arange(64.0)[:, None] * FREQUENCIES).repeat_interleave(2, -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q = x.unflatten(2, (N, H))
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        return (q * cos + neighbours(q) * sin).transpose(1, 2)


class Complex(nn.Module):
    """Complex numbers as pairs of reals."""

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * FREQUENCIES
        turn = torch.stack([angles.cos(), angles.sin()], -1)[:, None]  # (S, 1, H/2, 2)
        z = x.unflatten(2, (N, -1, 2))
        real = z[..., 0] * turn[..., 0] - z[..., 1] * turn[..., 1]
        imaginary = z[..., 0] * turn[..., 1] + z[..., 1] * turn[..., 0]
        return torch.stack([real, imaginary], -1).flatten(3).transpose(1, 2)


class Split(nn.Module):
    """Two halves turned apart, tables that were never doubled."""

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * FREQUENCIES
        a, b = heads_first(x).chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


FORMS = [
    (Llama, H, False),
    (NeoX, 4, False),
    (GptJ, H, True),
    (Complex, H, True),
    (Split, H, False),
]


def exported(module: nn.Module) -> Graph:
    inputs, dynamic = {"x": torch.randn(2, 5, N * H)}, {"x": {0: BATCH, 1: TOKENS}}
    if "positions" in module.forward.__code__.co_varnames:
        inputs["positions"] = torch.arange(5).repeat(2, 1)
        dynamic["positions"] = {0: BATCH, 1: TOKENS}
    return to_onnx(ExportSpec(module.eval(), inputs, dynamic, ("y",)))


def given(module: nn.Module, batch: int, tokens: int) -> dict[str, Tensor]:
    inputs = {"x": torch.randn(batch, tokens, N * H)}
    if "positions" in module.forward.__code__.co_varnames:
        inputs["positions"] = torch.randint(0, 60, (batch, tokens))  # no two rows the same
    return inputs


@pytest.mark.parametrize("op", [CONTRIB, STANDARD])
@pytest.mark.parametrize(("module", "size", "interleaved"), FORMS)
def test_each_form_is_one_node_at_every_size(
    module: type[nn.Module], size: int, interleaved: bool, op: str
) -> None:
    torch.manual_seed(0)
    built = module()
    graph = exported(built)
    (rotation,) = rotations(graph.model)
    assert (rotation.size, rotation.interleaved) == (size, interleaved)
    apply(graph.model, build(rotation, op), SIZES)
    assert op_types(graph.model).count(op) == 1
    for batch, tokens in ((1, 1), (2, 5), (3, 12)):
        inputs = given(built, batch, tokens)
        np.testing.assert_allclose(run(graph.model, **inputs), built(**inputs), atol=2e-5)


def test_a_quarter_turn_is_what_the_angles_say() -> None:
    """Both pairs of the second token are turned by 90 degrees: (1, 2, 3, 4) is (-3, -4, 1, 2)."""

    class Quarter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(x.shape[1])[:, None] * torch.full((2,), math.pi / 2)
            angles = torch.cat([angles, angles], -1)
            q = x.unflatten(2, (1, 4)).transpose(1, 2)
            return q * angles.cos() + halves(q) * angles.sin()

    spec = ExportSpec(Quarter(), {"x": torch.randn(2, 3, 4)}, {"x": {0: BATCH, 1: TOKENS}}, ("y",))
    model = to_onnx(spec).model
    (found,) = lower(model, "ort-cpu", SIZES).rotary
    assert found.lowering == CONTRIB
    y = run(model, x=torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 2, 4))
    np.testing.assert_allclose(y[0, 0], [[1, 2, 3, 4], [-3, -4, 1, 2]], atol=1e-6)


def test_the_account_counts_them_and_a_table_for_each_row_takes_the_standard_op() -> None:
    for module, op in ((Llama, STANDARD), (NeoX, CONTRIB)):
        account = lower(exported(module()).model, "ort-cpu", SIZES).to_json()
        assert [found["lowering"] for found in account["rotary"]] == [op]
        assert account["total"] == 0


def test_nodes_that_are_there_already_are_counted_and_kept() -> None:
    graph = exported(Split())
    first = lower(graph.model, "ort-cpu", SIZES).rotary
    again = lower(graph.model, "ort-cpu", SIZES).rotary
    assert [found.lowering for found in (*first, *again)] == [CONTRIB, CONTRIB]
    assert op_types(graph.model).count(CONTRIB) == 1


@pytest.mark.parametrize(("choice", "op"), [("contrib", CONTRIB), ("standard", STANDARD)])
def test_a_forced_op_is_taken(choice: str, op: str) -> None:
    graph = exported(Llama())
    (found,) = lower(graph.model, "ort-cpu", SIZES, choice).rotary
    assert found.lowering == op


def test_other_sums_of_products_are_no_rotation() -> None:
    class Backwards(nn.Module):
        """The angle has the other sign in one half alone: it scales and mirrors."""

        def forward(self, x: Tensor) -> Tensor:
            a, b = heads_first(x).chunk(2, -1)
            angles = torch.arange(x.shape[1])[:, None] * FREQUENCIES
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([a * cos + b * sin, b * cos + a * sin], -1)

    class TwoTables(nn.Module):
        """The halves are turned by different angles."""

        def forward(self, x: Tensor) -> Tensor:
            q = heads_first(x)
            angles = torch.arange(x.shape[1])[:, None] * torch.arange(float(H))
            return q * angles.cos() + halves(q) * angles.sin()

    for module in (Backwards(), TwoTables()):
        assert rotations(exported(module).model) == []


def test_the_proof_refuses_a_wrong_node() -> None:
    for name, value in (("interleaved", 1), ("rotary_embedding_dim", 4)):
        graph = exported(Split())
        (rotation,) = rotations(graph.model)
        rewrite = build(rotation, CONTRIB)
        node = next(node for node in rewrite.nodes if node.op_type == "RotaryEmbedding")
        node.attributes.pop(name, None)
        node.attributes.add(ir.AttrInt64(name, value))
        with pytest.raises(NotLowerable) as refusal:
            apply(graph.model, rewrite, SIZES)
        assert refusal.value.reason in (Reason.DISAGREES, Reason.UNPROVABLE)
        assert CONTRIB not in op_types(graph.model)


def test_the_kernel_broadcasts_no_table_over_the_batch() -> None:
    """What STANDARD expands for: a table of one row is refused for two rows of x."""
    shapes = {"x": (2, N, 3, H), "cos": (1, 3, H // 2), "sin": (1, 3, H // 2)}
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, shapes["x"])
    node = helper.make_node("RotaryEmbedding", list(shapes), ["y"])
    graph = helper.make_graph([node], "rotary", infos, [out])
    opsets = [helper.make_opsetid("", 23)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    feeds = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    with ort_cpu.load(model) as session, pytest.raises(Exception, match="cos_cache"):
        session.run(feeds)
