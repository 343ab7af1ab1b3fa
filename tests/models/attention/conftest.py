from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded_weights() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
