// Sha256 against Node's, over every length around the block's ends and in pieces of every kind.

import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { test } from "node:test";
import { Sha256 } from "./sha256.js";

const reference = (bytes: Uint8Array): string => createHash("sha256").update(bytes).digest("hex");

test("every length around the block boundaries", () => {
  for (let length = 0; length <= 260; length++) {
    const bytes = randomBytes(length);
    assert.equal(new Sha256().update(bytes).hex(), reference(bytes), `${length} bytes`);
  }
});

test("pieces give the digest of the whole", () => {
  const bytes = randomBytes(300_007);
  for (const step of [1, 7, 63, 64, 65, 4096, 100_000]) {
    const hash = new Sha256();
    for (let at = 0; at < bytes.length; at += step) hash.update(bytes.subarray(at, at + step));
    assert.equal(hash.hex(), reference(bytes), `pieces of ${step}`);
  }
});

test("two digests at once do not disturb each other", () => {
  const [one, two] = [randomBytes(1000), randomBytes(1000)] as const;
  const [a, b] = [new Sha256(), new Sha256()];
  for (let at = 0; at < 1000; at += 50) {
    a.update(one.subarray(at, at + 50));
    b.update(two.subarray(at, at + 50));
  }
  assert.deepEqual([a.hex(), b.hex()], [reference(one), reference(two)]);
});
