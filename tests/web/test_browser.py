"""The example page in a real browser: a bundle's answers there are PyTorch's."""

from __future__ import annotations

import base64
import importlib.util
import json
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attn_export import bundle as bundles
from attn_export.runtimes.base import Arrays, Session, TensorSpec
from attn_export.verifying.checking import check_session
from tests.boundary import ROOT
from tests.needed import needs
from tests.web.chromium import Chromium

pytestmark = [needs("ort-web"), needs("chromium"), pytest.mark.xdist_group("web")]

RUN = """(async () => {
  const { run } = await import("/bundle.mjs");
  const ort = await import("/ort/ort.wasm.min.mjs");
  const inputs = {};
  for (const [name, { type, dims, raw }] of Object.entries(%s)) {
    const bytes = Uint8Array.from(atob(raw), letter => letter.charCodeAt(0));
    inputs[name] = { type, dims, data: new Float32Array(bytes.buffer) };
  }
  const outputs = await run(ort, page.session, inputs);
  return Object.entries(outputs).map(([name, { type, dims, data }]) => {
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    return { name, type, dims, raw: btoa(Array.from(bytes, b => String.fromCharCode(b)).join("")) };
  });
})()"""


class PageSession(Session):
    """The session of the page that a browser shows; numbers travel as their bytes."""

    def __init__(self, browser: Chromium, bundle: bundles.Bundle) -> None:
        self.browser = browser
        super().__init__("browser", [
            TensorSpec(entry["name"], entry["dtype"], tuple(entry["shape"]))
            for entry in bundle.manifest["inputs"]
        ])  # fmt: skip

    def _run(self, inputs: Mapping[str, NDArray[np.generic]]) -> Arrays:
        given = {
            name: {"type": array.dtype.name, "dims": array.shape,
                   "raw": base64.b64encode(array.tobytes()).decode()}
            for name, array in inputs.items()
        }  # fmt: skip
        return {
            entry["name"]: np.frombuffer(base64.b64decode(entry["raw"]), entry["type"])
            .reshape(entry["dims"])
            .copy()
            for entry in self.browser.evaluate(RUN % json.dumps(given))
        }

    def placement(self) -> dict[str, int]:
        return {}

    def _close(self) -> None:
        pass


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve", ROOT / "examples/web/serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(
    serve: ModuleType, web_bundle: bundles.Bundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chromium]:
    """A browser that shows the example with `vit-digits`."""
    server = serve.server(web_bundle.path)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with Chromium(tmp_path_factory.mktemp("profile")) as found:
            found.open(f"http://127.0.0.1:{server.server_port}/")
            found.evaluate("import('/digits.mjs').then(async ({ ready }) => {"
                           " globalThis.page = await ready; })")  # fmt: skip
            yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def text(browser: Chromium, name: str) -> Any:
    return browser.evaluate(f"document.getElementById('{name}').textContent")


def test_the_page_is_isolated_and_says_what_it_runs(browser: Chromium) -> None:
    assert browser.evaluate("crossOriginIsolated") is True
    assert text(browser, "status").startswith("vit-digits on WebAssembly, ")


def test_every_stored_case_is_pytorchs_in_the_browser(
    browser: Chromium, web_bundle: bundles.Bundle
) -> None:
    """The project's own check, on the numbers that the page computed, each row alone as well."""
    found = list(check_session(web_bundle, PageSession(browser, web_bundle), web_bundle.cases()))
    assert {case for case, _ in found} >= {"batch=1", "batch=3", "batch=3, row 2 alone"}
    assert all(result.passed and 0 < result.max_abs < 1e-4 for _, result in found)


def test_the_page_compares_its_own_answers_with_pytorchs(
    browser: Chromium, web_bundle: bundles.Bundle
) -> None:
    rows = browser.evaluate(
        "Promise.all([import('/bundle.mjs'), import('/ort/ort.wasm.min.mjs')])"
        ".then(([{ check }, ort]) => check(ort, page.bundle, page.session))"
    )
    cases = web_bundle.cases()
    assert [row["case"] for row in rows] == [case.name for case in cases]
    assert all(row["passed"] and 0 < row["error"] <= row["allowed"] for row in rows)
    assert [row["allowed"] for row in rows] == [c.allowed["logits"]["all"] for c in cases]


def click(browser: Chromium, name: str, until: str) -> None:
    """Click a button and wait until an expression holds."""
    browser.evaluate(f"document.getElementById('{name}').click()")
    wait(browser, until)


def wait(browser: Chromium, until: str) -> None:
    browser.evaluate(
        "new Promise((done, fail) => { const end = Date.now() + 20000; (function look() {"
        f" if ({until}) done(); else if (Date.now() > end) fail(new Error('not in time'));"
        " else setTimeout(look, 10); })(); })"
    )


def test_held_out_digits_are_recognised(browser: Chromium) -> None:
    held_out = "document.getElementById('label').textContent"
    for sample in range(3):
        click(browser, "sample", f"{held_out}.startsWith('(sample {sample},')")
        right = text(browser, "label").removesuffix(")").rpartition(" ")[2]
        assert text(browser, "prediction") == right


def test_a_one_drawn_with_the_mouse_is_recognised(browser: Chromium) -> None:
    click(browser, "clear", "document.getElementById('label').textContent === ''")
    box = browser.evaluate("document.getElementById('digit').getBoundingClientRect().toJSON()")
    pixel = box["width"] / 8
    middle = box["x"] + 4 * pixel
    browser.draw([(middle, box["y"] + (0.5 + step / 4) * pixel) for step in range(29)])
    wait(browser, "document.getElementById('prediction').textContent === '1'")


def test_the_button_shows_parity_as_a_table(browser: Chromium, web_bundle: bundles.Bundle) -> None:
    body = "document.getElementById('parity').tBodies[0]"
    click(browser, "check", f"{body}.rows.length === {len(web_bundle.cases())}")
    verdicts = browser.evaluate(f"Array.from({body}.rows, row => row.cells[4].textContent)")
    assert verdicts == ["passed"] * len(web_bundle.cases())


@pytest.mark.parametrize(("change", "told"), [
    ("bundle.manifest.files['weights.data'].sha256 = '00'",
     "weights.data is not the file that was exported"),
    ("bundle.manifest.files['weights.data'].size += 1",
     "weights.data is not the file that was exported"),
    ("delete bundle.manifest.files['model.web.onnx']", "the bundle lists no model.web.onnx"),
    ("bundle.manifest.targets = []", "the bundle has no graph for a browser"),
])  # fmt: skip
def test_a_bundle_that_is_not_what_its_manifest_says_is_refused(
    browser: Chromium, change: str, told: str
) -> None:
    with pytest.raises(RuntimeError, match=told):
        browser.evaluate(
            "Promise.all([import('/bundle.mjs'), import('/ort/ort.wasm.min.mjs')])"
            ".then(async ([{ Bundle }, ort]) => {"
            " const bundle = await Bundle.open(new URL('bundle/', location.href));"
            f" {change}; await bundle.session(ort); }})"
        )


@pytest.mark.parametrize(("found", "right"), [("1", True), ("1.5", False), ("NaN", False)])
def test_the_pages_own_check_can_fail(browser: Chromium, found: str, right: bool) -> None:
    """An answer of 1 where PyTorch gave 1 and 0.25 is allowed."""
    (row,) = browser.evaluate(
        "import('/bundle.mjs').then(({ check }) => { const one = x => ({"
        " type: 'float32', dims: [1], data: new Float32Array([x]) });"
        " const stored = { name: 'c', component: 'model', inputs: {}, outputs: { y: one(1) },"
        "  allowed: { y: one(0.25) } };"
        " const bundle = { manifest: { outputs: [{ name: 'y' }] }, cases: async () => [stored] };"
        f" return check({{}}, bundle, {{ run: async () => ({{ y: one({found}) }}) }}); }})"
    )
    assert row["passed"] is right
