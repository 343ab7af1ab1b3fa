"""Whether an .onnx file is sound enough to be read: its weights, its names, its order, its opset.

Only ONNX's own rules are checked, on the protobuf alone; what a runtime has kernels for is the
runtime's to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from attn_export.errors import FileError, one_line
from attn_export.protos import graph_tensors

OLDEST, NEWEST = 11, 26
STANDARD = ("", "ai.onnx")
PROTOBUF_LIMIT = 2**31


def load(path: Path) -> onnx.ModelProto:
    """The protobuf of a file, without the weights that lie beside it.

    Raises:
        FileError: it is not there, not ONNX, not sound, or its weights are missing or out of place.
    """
    if path.is_dir():
        raise FileError(
            f"{path} is a folder without a manifest.json", "give a bundle or an .onnx file"
        )
    if not path.is_file():
        raise FileError(f"there is no file {path}", "check the path")
    size = path.stat().st_size
    if size == 0:
        raise FileError(f"{path} is empty", "write it again")
    if size >= PROTOBUF_LIMIT:
        raise FileError(
            f"{path} holds {size:,} bytes, more than protobuf's 2 GB",
            "save it with its weights in a file beside it (onnx.save_model, save_as_external_data)",
        )
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError is not part of its public interface
        raise FileError(
            f"{path} is not an ONNX model ({one_line(error)})", "give a file that onnx can load"
        ) from error
    if not model.graph.node and not model.graph.output:
        raise FileError(f"{path} holds no graph", "give a file that onnx can load")
    _check_opset(path, model)
    _check_weights(path, model)
    for problem in _unsound(model.graph, frozenset()):
        raise FileError(f"{path} is not a sound graph: {problem}", "mend or export it again")
    return model


def opset(model: onnx.ModelProto) -> int | None:
    """The version of ONNX's own operators; None where the file uses none of them."""
    found = [entry.version for entry in model.opset_import if entry.domain in STANDARD]
    return max(found) if found else None


def _check_opset(path: Path, model: onnx.ModelProto) -> None:
    version = opset(model)
    if version is None and any(node.domain in STANDARD for node in model.graph.node):
        raise FileError(f"{path} names no opset", "export it again")
    if version is not None and not OLDEST <= version <= NEWEST:
        raise FileError(
            f"{path} has opset {version}, this version reads {OLDEST} to {NEWEST}",
            f"export it again with an opset from {OLDEST} to 23",
        )


def _check_weights(path: Path, model: onnx.ModelProto) -> None:
    """External data must be whole, and lie at or below the model's own folder."""
    home = path.parent.resolve()
    for tensor in graph_tensors(model):
        if not uses_external_data(tensor):
            continue
        info = ExternalDataInfo(tensor)
        pure = PurePosixPath(info.location)
        outside = pure.is_absolute() or ".." in pure.parts or "\\" in info.location
        place = path.parent / info.location
        if outside:
            raise FileError(
                f"{path} keeps its weights in '{info.location}', outside of its folder",
                "do not use this file",
            )
        if not place.resolve().is_relative_to(home):
            raise FileError(
                f"{path} keeps its weights in '{info.location}', a link out of its folder",
                "if you trust it, copy both files to one folder with `cp -L`",
            )
        if not place.is_file():
            raise FileError(
                f"{path} keeps its weights in {place}, which is not there",
                "put that file beside it",
            )
        end = (info.offset or 0) + (info.length or 0)
        if place.stat().st_size < end:
            raise FileError(
                f"{place} ends after {place.stat().st_size:,} bytes, '{tensor.name}' needs {end:,}",
                "copy that file again",
            )


def _unsound(graph: onnx.GraphProto, outer: frozenset[str]) -> Iterator[str]:
    """What is wrong with names and order, in words; nodes may come in any order."""
    given = [value.name for value in graph.input]
    made = [name for node in graph.node for name in node.output if name]
    yield from (f"two values are called '{name}'" for name in _repeated([*given, *made]))
    weights = {t.name for t in graph.initializer}
    weights |= {t.values.name for t in graph.sparse_initializer}
    known = outer | {*given, *made, *weights}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                yield f"{node.op_type} '{node.name}' reads '{name}', which nothing computes"
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _unsound(inner, known)
    yield from (
        f"its output '{v.name}' is not computed" for v in graph.output if v.name not in known
    )
    if _is_cyclic(graph):
        yield "its nodes run in a circle"


def _repeated(names: list[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


def _is_cyclic(graph: onnx.GraphProto) -> bool:
    """Whether some node needs its own result; what subgraphs read counts as read by their node."""
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    needs = [{makers[name] for name in _read(node) if name in makers} for node in graph.node]
    users: list[list[int]] = [[] for _ in needs]
    for index, row in enumerate(needs):
        for maker in row:
            users[maker].append(index)
    waiting = [len(row) for row in needs]
    ready = [index for index, count in enumerate(waiting) if count == 0]
    done = 0
    while ready:
        done += 1
        for user in users[ready.pop()]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    return done < len(needs)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            local = {v.name for v in graph.input} | {n for x in graph.node for n in x.output}
            for inner in graph.node:
                yield from (name for name in _read(inner) if name not in local)
            yield from (value.name for value in graph.output if value.name not in local)
