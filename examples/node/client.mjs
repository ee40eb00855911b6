// A client of an Intarsia server, whole: streams, cancels, returns after a cut. The protocol is docs/wire-protocol.md.
import { parseArgs } from "node:util";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const WINDOW = 64; // deltas that may be on the way; more are granted once half of them are read

// --- messages --------------------------------------------------------------------------------------------------------

const write = (kind, id = "", body = {}) =>
  encode({ v: 1, kind, ...(id && { id }), ...(Object.keys(body).length && { body }) });

function read([head, ...blobs]) {
  const message = decode(head);
  const all = message.kind === "batch" ? message.body.messages : [message];
  return all.map(({ kind, id = "", seq = 0, body = {} }) => ({ kind, id, seq, body: resolve(body, blobs) }));
}

// Large arrays travel as raw frames: { blob: index, dtype, n } stands for one.
function resolve(body, blobs) {
  for (const key of ["prompt", "token_ids", "top_ids", "logprobs", "top_logprobs"]) {
    const { blob, dtype, n } = body[key] ?? {};
    if (blob === undefined || n === undefined) continue;
    const bytes = Uint8Array.from(blobs[blob]).buffer; // a copy begins where numbers may
    body[key] = [...(dtype === "<i4" ? new Int32Array(bytes) : new Float32Array(bytes))];
  }
  for (const key of ["logprobs", "prompt_logprobs", "choices"])
    for (const held of [body[key]].flat()) if (held?.constructor === Object) resolve(held, blobs);
  return body;
}

// --- the client ------------------------------------------------------------------------------------------------------

class Client {
  #requests = new Map(); // id -> what is known of it
  #names = 0;
  #closed = false;
  #open = false; // whether the server has welcomed this connection

  constructor(address, options = {}) {
    this.address = address;
    this.options = options;
    this.running = this.#run();
  }

  // One socket after the other: each greets with the token of the session, and what is missing comes again.
  async #run() {
    while (!this.#closed) {
      const socket = (this.socket = new Dealer({ linger: 500, sendTimeout: 5000, ...this.options }));
      this.sent = Promise.resolve();
      socket.events.on("disconnect", () => socket.close());
      socket.connect(this.address);
      const late = setTimeout(() => this.#open || console.error(`no answer from ${this.address} yet; waiting for it`), 3000);
      const received = Object.fromEntries([...this.#requests].filter(([, r]) => r.seq).map(([id, r]) => [id, r.seq]));
      this.#say("hello", "", { versions: [1], client: { name: "node" }, ...(this.token && { token: this.token, received }) });
      for await (const frames of socket) {
        this.heard = Date.now();
        for (const message of read(frames)) this.#hear(message);
      }
      this.#open = false;
      clearTimeout(late);
      clearInterval(this.pulse);
      if (!this.#closed) await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }

  #say(kind, id, body) {
    const socket = this.socket;
    this.sent = this.sent.then(() => socket.send(write(kind, id, body))).catch(() => socket.close()); // it is said again
  }

  #hear({ kind, id, seq, body }) {
    if (kind === "welcome") return this.#welcome(body);
    const request = this.#requests.get(id);
    if (!request) return kind === "error" && !id && console.error(`the server: ${body.code}: ${body.message}`);
    if (kind === "error" && body.code === "no_session") return this.socket.close();
    if (seq && seq !== request.seq + 1) return seq > request.seq && this.socket.close(); // a gap: have it sent again
    request.seq = seq || request.seq;
    request.push({ kind, ...body });
    if (kind === "delta") return;
    if (seq) this.#say("credit", id, { received: seq });
    this.#requests.delete(id);
  }

  #welcome({ token, resumed, requests, heartbeat_s }) {
    this.token = token;
    this.#open = true;
    this.pulse = setInterval(() => {
      if (Date.now() - this.heard > 3000 * heartbeat_s) this.socket.close(); // silent: it is gone
      else this.#say("ping");
    }, heartbeat_s * 1000);
    for (const [id, request] of this.#requests) {
      if (resumed && requests.includes(id)) this.#grant(id, request);
      else if (request.cancelled) this.#requests.delete(id);
      else if (!request.seq) this.#say("generate", id, request.body); // it never came
      else {
        this.#requests.delete(id);
        request.push({ kind: "error", code: "connection_lost", message: "the server has forgotten the request" });
      }
    }
  }

  #grant(id, request) {
    request.upto = (request.cancelled ? request.seq : request.read) + WINDOW; // what nobody reads holds up no end
    if (this.#open) this.#say("credit", id, { received: request.seq, upto: request.upto });
    if (this.#open && request.cancelled) this.#say("cancel", id);
  }

  // Yields deltas, then `done`. Leaving the loop, or aborting the signal, cancels the request.
  async *stream(prompt, sampling = {}, signal) {
    const id = `node-${++this.#names}`;
    const queue = [];
    let wake = () => {};
    const push = (event) => (queue.push(event), wake());
    const request = { body: { prompt, sampling, credit: WINDOW }, seq: 0, read: 0, upto: WINDOW, cancelled: false, push };
    this.#requests.set(id, request);
    if (this.#open) this.#say("generate", id, request.body);
    const cancel = () => ((request.cancelled = true), this.#grant(id, request));
    signal?.addEventListener("abort", cancel, { once: true });
    try {
      for (;;) {
        while (!queue.length) await new Promise((resolve) => (wake = resolve));
        const event = queue.shift();
        if (event.kind === "error") throw Object.assign(new Error(`${event.code}: ${event.message}`), { code: event.code, field: event.field });
        yield event;
        if (event.kind === "done") return;
        if (request.upto - ++request.read <= WINDOW / 2) this.#grant(id, request);
      }
    } finally {
      signal?.removeEventListener("abort", cancel);
      if (this.#requests.has(id)) cancel();
    }
  }

  async close() {
    this.#closed = true;
    this.#say("bye");
    await this.sent;
    this.socket.close();
    await this.running;
  }
}

// --- the command -----------------------------------------------------------------------------------------------------

const { values: flags, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    address: { type: "string", default: "tcp://127.0.0.1:5555" },
    "max-tokens": { type: "string", default: "64" },
    vectors: { type: "string" },
  },
});
if (flags.vectors) process.exit((await import("./vectors.mjs")).check(flags.vectors, read, write) ? 0 : 1);
const client = new Client(flags.address);
const interrupt = new AbortController();
process.once("SIGINT", () => interrupt.abort());
try {
  const sampling = { max_tokens: Number(flags["max-tokens"]) };
  for await (const event of client.stream(positionals.join(" "), sampling, interrupt.signal)) {
    if (event.kind === "delta") process.stdout.write(event.text ?? "");
    else console.error(`\n${event.choices[0].finish_reason}, ${event.usage.completion_tokens} tokens`);
  }
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  await client.close();
}
