"""What tests of the web target share."""

from __future__ import annotations

import pytest

from attn_export import bundle as bundles
from attn_export.build import export


@pytest.fixture(scope="session")
def web_bundle(tmp_path_factory: pytest.TempPathFactory) -> bundles.Bundle:
    """`vit-digits` for a browser alone. Who takes it is of the xdist group "web"."""
    return export("vit-digits", tmp_path_factory.mktemp("web") / "bundle", targets=("web",))
