// Loads a bundle of attn-export in a browser: every file is checked against manifest.json first.

const DTYPES = {
  F16: ["float16", Uint16Array],
  F32: ["float32", Float32Array],
  F64: ["float64", Float64Array],
  BOOL: ["bool", Uint8Array],
  I8: ["int8", Int8Array],
  I16: ["int16", Int16Array],
  I32: ["int32", Int32Array],
  I64: ["int64", BigInt64Array],
  U8: ["uint8", Uint8Array],
  U16: ["uint16", Uint16Array],
  U32: ["uint32", Uint32Array],
  U64: ["uint64", BigUint64Array],
};

export class Bundle {
  constructor(url, manifest) {
    this.url = url;
    this.manifest = manifest;
  }

  static async open(url) {
    const answer = await fetch(new URL("manifest.json", url));
    if (!answer.ok) throw new Error(`there is no bundle at ${url}`);
    const manifest = await answer.json();
    if (manifest.format !== "attn-export-bundle/1") {
      throw new Error(`${url} has format '${manifest.format}', which this page does not read`);
    }
    return new Bundle(url, manifest);
  }

  /** The bytes of a file, once its size and hash are found to be those of the manifest. */
  async file(name) {
    const entry = this.manifest.files[name];
    if (!entry) throw new Error(`the bundle lists no ${name}`);
    const answer = await fetch(new URL(name, this.url));
    if (!answer.ok) throw new Error(`${name} is missing`);
    const bytes = new Uint8Array(await answer.arrayBuffer());
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
    const hash = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
    if (bytes.length !== entry.size || hash !== entry.sha256) {
      throw new Error(`${name} is not the file that was exported`);
    }
    return bytes;
  }

  /** An onnxruntime-web session of one component, on WebAssembly. */
  async session(ort, component = "model") {
    const target = this.manifest.targets.find(
      (found) => found.runtime === "ort-web" && found.component === component,
    );
    if (!target) throw new Error("the bundle has no graph for a browser; export it with --target web");
    const weights = "weights.data" in this.manifest.files ? ["weights.data"] : [];
    const data = weights.map(async (path) => ({ path, data: await this.file(path) }));
    return ort.InferenceSession.create(await this.file(target.file), {
      executionProviders: ["wasm"],
      externalData: await Promise.all(data),
    });
  }

  /** The stored runs: [{name, component, inputs, outputs, truth, allowed}], tensors by name. */
  async cases() {
    const { metadata, tensors } = readSafetensors(await this.file("reference.safetensors"));
    const cases = JSON.parse(metadata.cases).map((entry) => ({
      ...entry, inputs: {}, outputs: {}, truth: {}, allowed: {},
    }));
    for (const [key, tensor] of Object.entries(tensors)) {
      const found = cases.find(({ name }) => key.startsWith(`${name}/`));
      const [part, ...name] = key.slice(found.name.length + 1).split("/");
      found[part][name.join("/")] = tensor;
    }
    return cases;
  }

  /** Held-out samples and what is right for each, or null. */
  async samples() {
    if (!("metric.safetensors" in this.manifest.files)) return null;
    return readSafetensors(await this.file("metric.safetensors")).tensors;
  }
}

/** https://huggingface.co/docs/safetensors: a length, a JSON head, raw little-endian elements. */
export function readSafetensors(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset);
  const start = 8 + Number(view.getBigUint64(0, true));
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
  const metadata = head.__metadata__ ?? {};
  delete head.__metadata__;
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(head)) {
    const [type, kind] = DTYPES[dtype];
    // slice copies, so that the elements are aligned.
    tensors[name] = { type, dims: shape, data: new kind(bytes.slice(start + from, start + to).buffer) };
  }
  return { metadata, tensors };
}

/** Run a session on tensors as readSafetensors gives them. */
export function run(ort, session, inputs) {
  const feeds = {};
  for (const [name, { type, dims, data }] of Object.entries(inputs)) {
    feeds[name] = new ort.Tensor(type, data, dims);
  }
  return session.run(feeds);
}

/**
 * Compare a session with the outputs that PyTorch gave: [{case, output, error, allowed, passed}].
 * Outputs with groups of their own scales are left to `attn-export verify`.
 */
export async function check(ort, bundle, session, component = "model") {
  const groups = new Map(bundle.manifest.outputs.map((output) => [output.name, output.groups]));
  const rows = [];
  for (const stored of await bundle.cases()) {
    if (stored.component !== component) continue;
    const outputs = await run(ort, session, stored.inputs);
    for (const [name, { dims, data }] of Object.entries(stored.outputs)) {
      if (groups.get(name)) continue;
      const result = outputs[name];
      const sameShape = String(result.dims) === String(dims);
      const error = sameShape ? largestDifference(result.data, data) : Infinity;
      const allowed = stored.allowed[name].data[0];
      rows.push({ case: stored.name, output: name, error, allowed, passed: error <= allowed });
    }
  }
  return rows;
}

function largestDifference(found, expected) {
  let largest = 0;
  for (let index = 0; index < expected.length; index++) {
    const [x, y] = [Number(found[index]), Number(expected[index])];
    if (Object.is(x, y) || x === y) continue;
    const difference = Math.abs(x - y);
    if (Number.isNaN(difference)) return Infinity; // a NaN on one side
    largest = Math.max(largest, difference);
  }
  return largest;
}
