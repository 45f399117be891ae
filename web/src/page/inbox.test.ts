// What is sent to a run: in order, as many as may wait, and nothing once it is over.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Inbox, MOST_WAITING } from "./inbox.js";

test("what comes before the run is kept in order", () => {
  const [inbox, got] = [new Inbox(), [] as string[]];
  assert.equal(inbox.send("1"), true);
  inbox.open((value) => got.push(value));
  assert.equal(inbox.send("2"), true);
  assert.deepEqual(got, ["1", "2"]);
  inbox.close();
  assert.equal(inbox.send("3"), false);
  assert.deepEqual(got, ["1", "2"]);
});

test("the sender is refused while too many wait, and goes on once some were received", () => {
  const [inbox, got] = [new Inbox(), [] as string[]];
  for (let n = 0; n < MOST_WAITING; n++) assert(inbox.send("0"));
  assert.throws(() => inbox.send("1"), { name: "PieError", message: /^run\.send: 1,024 values wait to be received, which is the cap/ });
  inbox.open((value) => got.push(value));
  assert.throws(() => inbox.send("1"), { name: "PieError" });
  inbox.received();
  assert(inbox.send("2"));
  assert.throws(() => inbox.send("3"), { name: "PieError" });
  assert.equal(got.length, MOST_WAITING + 1);
});

test("a run to which nobody sends says so", () => {
  const inbox = new Inbox();
  inbox.refuse();
  assert.throws(() => inbox.send("1"), { name: "UsageError", message: /^run\.send: the run was started with receives: false/ });
});
