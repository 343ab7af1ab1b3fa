"""Every model of the packages' catalogues, with a factory for each.

`attn-export inspect tests/zoo_packages/catalogue.py:timm_vit` works on any of them: the package,
then the entry's name with underscores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.zoo_packages.made import Made
from tests.zoo_packages.timm_models import TIMM
from tests.zoo_packages.torchvision_models import TORCHVISION
from tests.zoo_packages.ultralytics_models import ULTRALYTICS


class Architecture(Protocol):
    @property
    def sites(self) -> int: ...

    def build(self) -> Made: ...


CATALOGUE: dict[str, Architecture] = {
    **{f"timm-{name}": entry for name, entry in TIMM.items()},
    **{f"torchvision-{name}": entry for name, entry in TORCHVISION.items()},
    **{f"ultralytics-{name}": entry for name, entry in ULTRALYTICS.items()},
}
# Sites that no fused op takes, at most: docs/coverage-zoo.md has the reasons.
REFUSED = {
    "timm-cait": 2,
    "timm-coat-lite": 8,
    "timm-convit": 2,
    "timm-efficientformer-v2": 4,
    "timm-lambda-resnet": 3,
    "timm-mobilevit-v2": 9,
    "timm-volo": 4,
    "torchvision-mvit-video": 2,
    "torchvision-swin": 2,
    "torchvision-swin-v2": 2,
    "torchvision-swin-video": 1,
}
# Its top queries have scores that are equal, and ONNX Runtime lists them in another order.
ROWS_SWAP = {"ultralytics-rt-detr"}
NOT_EXPORTED = {"ultralytics-yolo-world": "adaptive_max_pool2d"}
FACTORIES: dict[str, Callable[[], Made]] = {
    name.replace("-", "_"): entry.build for name, entry in CATALOGUE.items()
}


def __getattr__(name: str) -> Callable[[], Made]:
    try:
        return FACTORIES[name]
    except KeyError:
        raise AttributeError(name) from None
