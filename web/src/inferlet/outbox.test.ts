// Which messages share a post, by how long the guest's steps take.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Outbox } from "./outbox.js";

test("ops of short steps leave with the step's end, in order; those of long steps at once", () => {
  const sent: (string | string[])[] = [];
  const taken = (): (string | string[])[] => sent.splice(0);
  const box = new Outbox((messages) => sent.push(messages), () => time);
  let time = 1000;
  box.say("a");
  assert.deepEqual(taken(), ["a"], "nothing is known of this guest yet");
  box.end("answer 1");
  assert.deepEqual(taken(), ["answer 1"]);
  box.say("b");
  box.say("c");
  assert.deepEqual(taken(), []);
  box.end("answer 2");
  assert.deepEqual(taken(), [["b", "c", "answer 2"]]);
  box.say("d");
  time += 3;
  assert.deepEqual(taken(), []);
  box.say("e");
  assert.deepEqual(taken(), [["d", "e"]], "the step turns out to be a long one");
  box.end("answer 3");
  box.say("f");
  assert.deepEqual(taken(), ["answer 3", "f"]);
  box.end("answer 4");
  box.end("answer 5");
  box.say("g");
  box.end("answer 6");
  assert.deepEqual(taken(), ["answer 4", "answer 5", ["g", "answer 6"]]);
});
