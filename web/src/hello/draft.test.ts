// Drafts over stores that work, are damaged, full or blocked.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Drafts, type Store } from "./draft.js";

const draft = { source: "async def main(input):\n    return 'ü'\n", input: '{"a": 1}' };

function memory(first?: string): Store & { items: Map<string, string> } {
  const items = new Map<string, string>(first === undefined ? [] : [["pie-hello-draft", first]]);
  return {
    items,
    getItem: (key) => items.get(key) ?? null,
    setItem: (key, value) => void items.set(key, value),
    removeItem: (key) => void items.delete(key),
  };
}

test("what was saved last is there at the next visit, until it is forgotten", () => {
  const store = memory();
  assert.equal(new Drafts(() => store).load(), null);
  new Drafts(() => store).save({ source: "first", input: "" });
  new Drafts(() => store).save(draft);
  assert.deepEqual(new Drafts(() => store).load(), draft);
  new Drafts(() => store).forget();
  assert.equal(new Drafts(() => store).load(), null);
  assert.equal(store.items.size, 0);
});

test("anything else in its place is no draft", () => {
  for (const text of ["", "{", "null", "5", "[]", "{}", '{"source": 5, "input": ""}', '{"source": "a"}', '"text"']) {
    assert.equal(new Drafts(() => memory(text)).load(), null, text);
  }
});

test("a store that is blocked or full stops nobody", () => {
  const blocked = new Drafts(() => {
    throw new DOMException("denied", "SecurityError");
  });
  const full = new Drafts(() => ({
    ...memory(JSON.stringify(draft)),
    setItem: () => {
      throw new DOMException("full", "QuotaExceededError");
    },
  }));
  for (const drafts of [blocked, full]) drafts.save({ source: "new", input: "" });
  blocked.forget();
  assert.equal(blocked.load(), null);
  assert.deepEqual(full.load(), draft);
});
