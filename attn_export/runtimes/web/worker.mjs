// One onnxruntime-web session in a Node process: `node worker.mjs PACKAGE_FOLDER ANSWER_FD`.
//
// A message is the length of its head (uint32, little-endian), the head as JSON, and the raw
// little-endian elements of each tensor that head.tensors lists as {name, dtype, shape}. Requests
// come on stdin, answers go to ANSWER_FD, since WebAssembly may print to stdout. The process ends
// with its stdin.
//
//     {do: "load", model, data, threads}  -> {inputs: [{name, dtype, shape}], outputs: [name]}
//                                            model is a file, or "" and the one tensor holds it
//     {do: "run", tensors}                -> {tensors}
//     {do: "describe"}                    -> {}: ONNX Runtime logs where each node is placed
//     any                                 -> {error} where it failed

import { closeSync, fstatSync, openSync, readSync, writeSync } from "node:fs";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const [, , folder, descriptor] = process.argv;
const answers = Number(descriptor);
const ort = await import(pathToFileURL(join(folder, "dist", "ort.node.min.mjs")));

const ARRAYS = {
  float16: Uint16Array, // the bits: Node 20 has no Float16Array
  float32: Float32Array,
  float64: Float64Array,
  bool: Uint8Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
};
const CHUNK = 1 << 30; // one call reads or writes less than 2 GiB

let session, model, options;

function readExactly(file, length) {
  const bytes = new Uint8Array(length);
  let done = 0;
  while (done < length) {
    const count = readSync(file, bytes, done, Math.min(CHUNK, length - done), null);
    if (count === 0) throw new Error(`it ended after ${done} of ${length} bytes`);
    done += count;
  }
  return bytes;
}

function readFile(path) {
  const file = openSync(path);
  try {
    return readExactly(file, fstatSync(file).size);
  } finally {
    closeSync(file);
  }
}

function writeAll(bytes) {
  let done = 0;
  while (done < bytes.length) {
    done += writeSync(answers, bytes, done, Math.min(CHUNK, bytes.length - done));
  }
}

function readMessage() {
  const length = new DataView(readExactly(0, 4).buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(readExactly(0, length)));
  head.tensors = (head.tensors ?? []).map(({ name, dtype, shape }) => {
    const kind = ARRAYS[dtype];
    const elements = shape.reduce((product, size) => product * size, 1);
    const bytes = readExactly(0, elements * kind.BYTES_PER_ELEMENT);
    return { name, dtype, shape, data: new kind(bytes.buffer) };
  });
  return head;
}

function writeMessage(head, tensors = []) {
  head.tensors = tensors.map(({ name, dtype, shape }) => ({ name, dtype, shape }));
  const text = new TextEncoder().encode(JSON.stringify(head));
  const length = new Uint8Array(4);
  new DataView(length.buffer).setUint32(0, text.length, true);
  writeAll(length);
  writeAll(text);
  for (const { data } of tensors) {
    writeAll(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  }
}

async function load({ model: path, data, threads, tensors }) {
  const former = session;
  session = undefined;
  await former?.release();
  ort.env.wasm.numThreads = threads; // the first session's count holds for the process
  model = path ? readFile(path) : tensors[0].data;
  options = {
    executionProviders: ["wasm"],
    externalData: data.map((name) => ({ path: name, data: readFile(join(dirname(path), name)) })),
    logSeverityLevel: 4, // errors are answered
  };
  session = await ort.InferenceSession.create(model, options);
  const inputs = session.inputMetadata.map(({ name, type, shape }) => ({
    name,
    dtype: type ?? "no tensor",
    shape: shape ?? [],
  }));
  writeMessage({ inputs, outputs: session.outputNames });
}

async function run({ tensors }) {
  const feeds = {};
  for (const { name, dtype, shape, data } of tensors) {
    feeds[name] = new ort.Tensor(dtype, data, shape);
  }
  const results = await session.run(feeds);
  const found = session.outputNames.map((name) => {
    const { type, dims, data } = results[name];
    if (!(type in ARRAYS)) throw new Error(`output '${name}' is a tensor of ${type}`);
    return { name, dtype: type, shape: dims, data };
  });
  writeMessage({}, found);
}

// Placement is told in the log alone, while a session is made.
async function describe() {
  const logged = await ort.InferenceSession.create(model, { ...options, logSeverityLevel: 0 });
  await logged.release();
  writeMessage({});
}

const actions = { load, run, describe };
while (true) {
  let message;
  try {
    message = readMessage();
  } catch {
    process.exit(0); // who asks has gone
  }
  try {
    await actions[message.do](message);
  } catch (error) {
    writeMessage({ error: String(error?.message ?? error) });
    if (error instanceof WebAssembly.RuntimeError) process.exit(1); // its memory may be spoilt
  }
}
