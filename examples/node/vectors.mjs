// Checks that a client reads docs/wire-vectors.json as it is meant, and says what it writes with the very same bytes.
import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";

// As the file writes what JSON has no form for: bytes as base64, blobs as their numbers.
function plain(value) {
  if (value instanceof Uint8Array) return { base64: Buffer.from(value).toString("base64") };
  if (Array.isArray(value)) return value.map(plain);
  if (value?.constructor !== Object) return value;
  if (Array.isArray(value.values) && value.blob) return value.values;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, plain(each)]));
}

const bytes = (_, value) => (typeof value?.base64 === "string" ? Buffer.from(value.base64, "base64") : value);

export function check(file, read, write) {
  const { valid } = JSON.parse(readFileSync(file, "utf8"));
  const wrong = valid.filter(({ message, messages = [message], frames }) => {
    const found = read(frames.map((hex) => Buffer.from(hex, "hex"))).map(plain);
    return !isDeepStrictEqual(found, messages.map(plain));
  });
  for (const { name } of wrong) console.error(`read wrongly: ${name}`);
  // What clients say has no sequence number. JavaScript writes 5.0 as 5, which servers take as well.
  const said = valid.filter(({ message, frames }) => message && !message.seq && frames.length === 1);
  const alike = said.filter(({ message: { kind, id, body }, frames }) => {
    const written = write(kind, id, JSON.parse(JSON.stringify(body), bytes));
    return Buffer.from(written).toString("hex") === frames[0];
  });
  console.log(`read ${valid.length - wrong.length} of ${valid.length}`);
  console.log(`wrote alike: ${alike.map(({ name }) => name).join(", ")}`);
  return wrong.length === 0;
}
