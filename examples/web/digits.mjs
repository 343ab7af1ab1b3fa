// The page: a canvas of 8 x 8 pixels, whose grey values 0..1 are the model's input.

import * as ort from "./ort/ort.wasm.min.mjs";
import { Bundle, check, run } from "./bundle.mjs";

const at = (id) => document.getElementById(id);
const SIZE = 8;
const BRUSH = 0.9; // pixels; digits of the training set have strokes of about two
const url = new URL(new URLSearchParams(location.search).get("bundle") ?? "bundle/", location.href);

let pixels = new Float32Array(SIZE * SIZE);
let sample = -1;

async function open() {
  const bundle = await Bundle.open(url);
  const session = await bundle.session(ort);
  return { bundle, session, samples: await bundle.samples() };
}

function show() {
  const context = at("digit").getContext("2d");
  const image = context.createImageData(SIZE, SIZE);
  pixels.forEach((grey, index) => {
    image.data.set([255 * (1 - grey), 255 * (1 - grey), 255 * (1 - grey), 255], 4 * index);
  });
  context.putImageData(image, 0, 0);
}

async function predict({ bundle, session }) {
  const [input] = session.inputNames;
  const [output] = session.outputNames;
  const image = { type: "float32", dims: [1, 1, SIZE, SIZE], data: pixels.slice() };
  const logits = (await run(ort, session, { [input]: image }))[output].data;
  const best = logits.indexOf(Math.max(...logits));
  at("prediction").textContent = bundle.manifest.labels[best];
}

function stroke(event) {
  const box = at("digit").getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * SIZE - 0.5;
  const y = ((event.clientY - box.top) / box.height) * SIZE - 0.5;
  pixels.forEach((grey, index) => {
    const distance = Math.hypot((index % SIZE) - x, Math.floor(index / SIZE) - y);
    pixels[index] = Math.max(grey, Math.min(1, Math.max(0, 1.5 - distance / BRUSH)));
  });
}

async function update(page, label = "") {
  show();
  await predict(page);
  at("label").textContent = label;
}

async function takeSample(page) {
  const images = Object.entries(page.samples).find(([name]) => name.startsWith("inputs/"))[1];
  const { target } = page.samples;
  sample = (sample + 1) % target.dims[0];
  pixels = images.data.slice(sample * pixels.length, (sample + 1) * pixels.length);
  await update(page, `(sample ${sample}, which is a ${target.data[sample]})`);
}

async function clear(page) {
  pixels = new Float32Array(SIZE * SIZE);
  await update(page);
}

async function showParity({ bundle, session }) {
  const rows = await check(ort, bundle, session);
  at("parity").hidden = false;
  at("parity").tBodies[0].replaceChildren(
    ...rows.map(({ passed, error, allowed, ...row }) => {
      const line = document.createElement("tr");
      const cells = [row.case, row.output, error.toExponential(2), allowed.toExponential(2)];
      for (const text of [...cells, passed ? "passed" : "FAILED"]) {
        line.insertCell().textContent = text;
      }
      return line;
    }),
  );
  return rows;
}

function listen(page) {
  const canvas = at("digit");
  canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
  for (const kind of ["pointerdown", "pointermove"]) {
    canvas.addEventListener(kind, (event) => {
      if (event.buttons !== 1) return;
      stroke(event);
      update(page).catch(fail);
    });
  }
  const actions = { sample: takeSample, clear, check: showParity };
  for (const [id, action] of Object.entries(actions)) {
    at(id).addEventListener("click", () => action(page).catch(fail));
  }
  at("sample").disabled = page.samples === null;
}

function fail(error) {
  at("status").textContent = error.message;
}

/** Settles once the page can be used; for whoever drives it. */
export const ready = open().then((page) => {
  listen(page);
  show();
  const threads = ort.env.wasm.numThreads;
  at("status").textContent = `${page.bundle.manifest.name} on WebAssembly, ${threads} thread(s).`;
  return page;
});
ready.catch(fail);
