"""Where a model comes from.

A zoo name, `package.module:factory`, `path/file.py:factory`, or the name that a package gives it:
`timm:NAME`, `torchvision:NAME`, `ultralytics:NAME_OR_PATH`, `hf:PATH`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from attn_export.errors import AttnExportError, ExportError, UsageError, one_line
from attn_export.models.spec import ExportSpec
from attn_export.models.zoo import ZOO
from attn_export.right_padded import Promises, broken
from attn_export.signature import bind, describe, parse_input

UNUSED_INPUT = "--input was not used, since the model comes with example inputs"
PACKAGES = {
    "timm": "timm_models",
    "torchvision": "torchvision_models",
    "ultralytics": "ultralytics_models",
    "hf": "transformers_folder",
}


@dataclass
class Source:
    """A model to export: one ExportSpec for each component.

    Attributes:
        origin: what the user typed; a bench worker finds the same model by it.
        notes: what was done to the model that its owner should know.
    """

    name: str
    origin: str
    components: dict[str, ExportSpec]
    notes: list[str] = field(default_factory=list)


def resolve(origin: str, inputs: Sequence[str] = (), dynamic: Sequence[str] = ()) -> Source:
    """Build the model that `origin` names.

    Args:
        inputs: `NAME=DTYPE[SIZE,...]`, example inputs for a factory that returns none.
        dynamic: `INPUT=AXIS:MIN..MAX`, on top of what the factory declares.

    Raises:
        UsageError: no such model, module, file or factory, or a malformed option.
        ExportError: the factory raised, or returned something else than a model.
    """
    if origin in ZOO:
        built = ZOO[origin].build()
        components = built if isinstance(built, dict) else {"model": built}
        source = Source(origin, origin, components, [UNUSED_INPUT] if inputs else [])
    elif origin.partition(":")[0] in PACKAGES and ":" in origin:
        source = _from_package(origin, inputs)
    elif ":" in origin:
        source = _from_factory(origin, inputs)
    else:
        raise UsageError(f"there is no model '{origin}'", _suggest(origin))
    for option in dynamic:
        _declare(source, option)
    return source


def _suggest(origin: str) -> str:
    close = difflib.get_close_matches(origin, ZOO, n=3, cutoff=0.4)
    others = "give package.module:factory or path/file.py:factory"
    if close:
        return f"did you mean {' or '.join(close)}? Otherwise {others}"
    return f"`attn-export models` lists the names, or {others}"


def _from_factory(origin: str, inputs: Sequence[str]) -> Source:
    place, _, attribute = origin.rpartition(":")
    with _importable(str(Path(place).parent) if place.endswith(".py") else ""), _seeded():
        made = _make(origin, place, attribute)
    components = made if isinstance(made, Mapping) else {"model": made}
    specs = {key: describe(origin, value, inputs) for key, value in components.items()}
    bare = any(isinstance(value, nn.Module) for value in components.values())
    return Source(_slug(attribute), origin, specs, [UNUSED_INPUT] if inputs and not bare else [])


def _from_package(origin: str, inputs: Sequence[str]) -> Source:
    package, _, name = origin.partition(":")
    if not name:
        raise UsageError(f"{origin} names no model", f"put its name behind {package}:")
    module = importlib.import_module(f"attn_export.packages.{PACKAGES[package]}")
    with _seeded():
        spec, notes = module.build(name)
    if inputs:
        named = {spec.parameter(key): value for key, value in map(parse_input, inputs)}
        given = bind(origin, spec.module, named)
        dynamic = {key: axes for key, axes in spec.dynamic.items() if key in given}
        spec = replace(spec, inputs=given, dynamic=dynamic)
    return Source(_slug(Path(name).name), origin, {"model": spec}, list(notes))


def promise(source: Source, promises: Promises, removed: Promises | None = None) -> None:
    """Note which masks are right padded, by the names of the graph's inputs.

    Args:
        removed: those whose padding is not to be computed; that promises it as well.

    Raises:
        UsageError: no component has such an input, or the model's own example breaks the promise.
    """
    known = [s.names.get(name, name) for s in source.components.values() for name in s.inputs]
    for name, keeps in {**promises, **(removed or {})}.items():
        if name not in known:
            raise UsageError(
                f"{source.origin} has no input '{name}' to be right padded",
                f"its inputs are {', '.join(dict.fromkeys(known))}",
            )
        for component, spec in source.components.items():
            parameter = spec.parameter(name)
            if parameter in spec.inputs:
                _require_right_padded(name, keeps, spec, parameter)
                told = {**spec.right_padded, parameter: keeps}
                gone = (parameter,) if name in (removed or {}) else ()
                both = tuple(dict.fromkeys((*spec.remove_padding, *gone)))
                made = replace(spec, right_padded=told, remove_padding=both)
                source.components[component] = made


def _require_right_padded(name: str, keeps: int, spec: ExportSpec, parameter: str) -> None:
    rows = [spec.inputs[parameter]]
    if spec.metric is not None and parameter in spec.metric.inputs:
        rows.append(spec.metric.inputs[parameter])
    for mask in rows:
        problem = broken(mask.numpy(), keeps)
        if problem:
            raise UsageError(
                f"--right-padded {name}: the model's own example {problem}",
                f"leave it out, or write {name}={1 - keeps} if {1 - keeps} keeps a key",
            )


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "model"


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """A file may import its neighbours, when it is loaded and when its factory runs."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _seeded() -> Iterator[None]:
    """Weights that are drawn come out the same in every process: a benchmark builds them again."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _make(origin: str, place: str, attribute: str) -> Any:
    module = _import(place)
    try:
        factory: Any = getattr(module, attribute)
    except AttributeError as error:
        names = [name for name, value in vars(module).items() if callable(value)]
        close = difflib.get_close_matches(attribute, names, n=1)
        hint = f"did you mean '{close[0]}'" if close else "name a function defined there"
        raise UsageError(f"{place} has no '{attribute}'", hint) from error
    if not callable(factory):
        raise UsageError(f"{origin} is not callable", "name a function that returns the model")
    return factory if isinstance(factory, nn.Module) else _call(origin, factory)


def _call(origin: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except AttnExportError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ExportError(
            f"{origin} raised {type(error).__name__}: {one_line(error)}"
            f" ({Path(frame.filename).name} line {frame.lineno})",
            "a factory takes no arguments and returns the model; mend it and try again",
        ) from error


def _import(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _import_file(Path(place))
        return importlib.import_module(place)
    except AttnExportError:
        raise
    except ModuleNotFoundError as error:
        missing = f"there is no module '{error.name}'"
        if error.name and place.startswith(error.name):
            raise UsageError(missing, "give a module that this Python can import") from error
        raise ExportError(f"importing {place} failed: {missing}", "install it") from error
    except (Exception, SystemExit) as error:
        raise ExportError(
            f"importing {place} raised {type(error).__name__}: {one_line(error)}", "mend that file"
        ) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}", "check the path before the colon")
    name = f"_attn_export_source_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", "give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _declare(source: Source, option: str) -> None:
    from attn_export.signature import parse_dynamic

    name, axis, declared = parse_dynamic(option)
    owners = [spec for spec in source.components.values() if name in spec.inputs]
    if not owners:
        names = sorted({n for spec in source.components.values() for n in spec.inputs})
        raise UsageError(
            f"--dynamic {option}: the model has no input '{name}'",
            f"its inputs are {', '.join(names)}",
        )
    for spec in owners:
        if axis >= spec.inputs[name].dim():
            raise UsageError(
                f"--dynamic {option}: '{name}' has {spec.inputs[name].dim()} axes",
                "count axes from 0",
            )
        size = max(spec.inputs[name].shape[axis], 2)  # the exporter repeats an example of size 1
        if not declared.min <= size <= declared.max:
            raise UsageError(
                f"--dynamic {option}: the example input has {spec.inputs[name].shape[axis]} there",
                "give a range with it inside",
            )
        spec.dynamic.setdefault(name, {})[axis] = declared


def declare_rules(source: Source, compare: Mapping[str, str], masked: Mapping[str, str]) -> None:
    """Say how outputs are compared, on top of what the source declares.

    Outputs of a source that does not name them are checked once they are known.

    Raises:
        UsageError: no component has such an output.
    """
    for name in {**compare, **masked}:
        owners = [s for s in source.components.values() if not s.outputs or name in s.outputs]
        if not owners:
            names = sorted({n for spec in source.components.values() for n in spec.outputs})
            raise UsageError(f"there is no output '{name}'", f"the outputs are {', '.join(names)}")
        for spec in owners:
            spec.compare |= {name: compare[name]} if name in compare else {}
            spec.masked |= {name: masked[name]} if name in masked else {}


def eval_mode(module: nn.Module) -> dict[nn.Module, bool]:
    """Put a module into eval mode; returns each submodule's flag, for `restore_mode`."""
    flags = {child: child.training for child in module.modules()}
    module.eval()
    return flags


def restore_mode(flags: Mapping[nn.Module, bool]) -> None:
    """Give each submodule back the flag that it had."""
    for child, training in flags.items():
        child.training = training
