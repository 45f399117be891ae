// host.call: checked against the op table, forwarded in order, refused in words, never throwing.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Host } from "./host.js";
import { type Limits, LIMITS } from "./limits.js";
import { OPS } from "./ops.js";
import { MessageError } from "./text_errors.js";
import type { TextService } from "./text.js";

const TEXT: TextService = {
  encode: (text) => [...text].map((letter) => letter.codePointAt(0) ?? 0),
  decode: (ids) => String.fromCodePoint(...ids),
  tokenBytes: (id) => Uint8Array.of(id, 15),
  render: (messages, cue, tools) => [(messages as unknown[]).length, Number(cue), tools === null ? 0 : tools.length],
  renderText: () => "text",
  role: () => {
    throw new MessageError("messages[0].role is wrong");
  },
  cue: () => [7],
  seal: () => {
    throw new Error("a fault of this side");
  },
};

function host(limits: Partial<Limits> = {}): { host: Host; posted: string[]; call: (op: string, fields?: unknown) => unknown } {
  const posted: string[] = [];
  const made = new Host(TEXT, (message) => posted.push(message), { ...LIMITS, ...limits });
  const call = (op: string, fields: unknown = {}): unknown => {
    const answer = made.call(op, typeof fields === "string" ? fields : JSON.stringify(fields));
    return answer === "" ? "" : JSON.parse(answer);
  };
  return { host: made, posted, call };
}

/** A host whose inferlet has made pipeline 1 and working set 2. */
function started(limits: Partial<Limits> = {}): ReturnType<typeof host> {
  const made = host(limits);
  assert.deepEqual([made.call("pipe.new", { pipe: 1 }), made.call("ws.new", { ws: 2 })], ["", ""]);
  made.posted.length = 0;
  return made;
}

const submit = (...outs: number[]): object => ({ pipe: 1, tokens: [1], ws: [2], geo: { mode: "folding" }, outs });
const refused = (type: string, message: RegExp) => (answer: unknown) => {
  const { error } = answer as { error: { type: string; message: string } };
  assert.equal(error.type, type);
  assert.match(error.message, message);
};

test("synchronous ops are answered here and not forwarded", () => {
  const { call, posted } = host();
  assert.deepEqual(call("encode", { text: "ab" }), [97, 98]);
  assert.equal(call("decode", { ids: [97, 98] }), "ab");
  assert.deepEqual(call("bytes", { ids: [1, 255] }), ["010f", "ff0f"]);
  assert.deepEqual(call("chat.render", { messages: [{}] }), [1, 1, 0]);
  assert.deepEqual(call("chat.render", { messages: [], cue: false, tools: [1, 2] }), [0, 0, 2]);
  assert.equal(call("chat.text", { messages: [] }), "text");
  assert.deepEqual(call("chat.cue", ""), [7]);
  assert.equal((call("random", { n: 9 }) as string).length, 18);
  const { wall, mono } = call("time") as { wall: number; mono: number };
  assert(Math.abs(wall - Date.now() / 1000) < 5 && mono > 0);
  assert.deepEqual(posted, []);
});

test("commits take a number, a path, a channel or an output, and saved sets a name", () => {
  const { call, posted } = host();
  assert.equal(call("ch.new", { ch: 4, dtype: "i32", host: "reader" }), "");
  assert.equal(call("ws.open", { ws: 1, name: "kept", f: 6 }), "", "a set of which this side knows nothing");
  posted.length = 0;
  for (const n of [3, [], { ch: 4 }, { out: 9 }]) assert.equal(call("ws.commit", { ws: 1, n }), "");
  for (const n of [-1, null, [1.5], ["a"], { ch: 0 }, { out: 1, ch: 1 }, { ws: 1 }, "all"]) {
    refused("UsageError", /^ws.commit: n = .* must be a whole number, a list of at most 65536 indices, /)(call("ws.commit", { ws: 1, n }));
  }
  for (const n of [0, null]) assert.equal(call("ws.discard", { ws: 1, n }), "");
  assert.equal(call("ws.save", { ws: 1, name: "u".repeat(100), f: 5 }), "");
  refused("UsageError", /^ws.open: name = .* must be text of at most 100 characters$/)(call("ws.open", { ws: 2, name: "x".repeat(101), f: 7 }));
  refused("InvalidState", /^a saved set cannot be named '\.x': use 1 to 100 letters/)(call("ws.save", { ws: 1, name: ".x", f: 7 }));
  assert.equal(posted.length, 7);
});

test("posted and future ops are forwarded as they came, the log among them", () => {
  const { call, posted } = host();
  const big = '{"value":{"n":12345678901234567890123}}';
  for (const [op, fields] of [["ws.new", { ws: 2 }], ["log", { level: "info", text: "é" }], ["send", big], ["sleep", { ms: 5, f: 9 }]] as const) {
    assert.equal(call(op, fields), "");
  }
  assert.deepEqual(posted, ['["op","ws.new",{"ws":2}]', '["op","log",{"level":"info","text":"é"}]', `["op","send",${big}]`, '["op","sleep",{"ms":5,"f":9}]']);
});

for (const [op, fields, message] of [
  ["nope", {}, /^unknown op 'nope'; known: encode, decode, /],
  ["ws.new", "{", /^ws.new: the payload is not JSON/],
  ["ws.new", "[1]", /^ws.new: the payload must be an object/],
  ["ws.new", {}, /^ws.new: field 'ws' is missing/],
  ["ws.new", { ws: 0 }, /^ws.new: ws = 0 must be a whole number 1 \.\. 9007199254740991/],
  ["ws.new", { ws: 1.5 }, /ws = 1.5 must be/],
  ["ws.new", { ws: true }, /ws = true must be/],
  ["ws.new", { ws: 1, more: 2 }, /^ws.new: unknown field 'more'; known: ws, reuse/],
  ["ws.new", { ws: 1, reuse: null }, /^ws.new: reuse = null must be true or false/],
  ["ws.new", '{"ws":1,"__proto__":2}', /unknown field '__proto__'/],
  ["log", { level: "loud", text: "" }, /level = "loud" must be one of debug, info, warning, error/],
  ["chat.role", { role: "x".repeat(65), content: "" }, /text of at most 64 characters/],
  ["log", { level: "info", text: "x".repeat((1 << 20) + 1) }, /^log: text = "x{55}…" must be text of at most 1048576 characters$/],
  ["ch.new", { ch: 1, dtype: "f64" }, /one of f32, i32, u32, bool/],
  ["ch.new", { ch: 1, dtype: "f32", shape: [1, 2, 3, 4, 5] }, /a list of at most 4 whole numbers/],
  ["ch.put", { ch: 1, words: [-1] }, /whole numbers 0 \.\. 4294967295/],
  ["ws.fork", { ws: 1, of: 2, pipe: 0 }, /, or null/],
  ["submit", { ...submit(), tokens: { ch: 1, x: 2 } }, /a list of ids, a list of lists, or/],
  ["submit", { ...submit(), geo: [] }, /geo = \[\] must be an object/],
] as const) {
  test(`refused: ${op} ${JSON.stringify(fields).slice(0, 60)}`, () => {
    const { call, posted } = host();
    refused("UsageError", message)(call(op, fields));
    assert.deepEqual(posted, []);
  });
}

test("texts are counted in characters, as Python counts them", () => {
  assert.deepEqual(host().call("chat.role", { role: "😀".repeat(64), content: "" }), {
    error: { type: "MessageError", message: "messages[0].role is wrong" },
  });
});

test("errors of texts keep their type, other faults become HostError", () => {
  const { call } = host();
  refused("MessageError", /role is wrong/)(call("chat.role", { role: "user", content: "" }));
  refused("HostError", /^chat.seal: the host failed/)(call("chat.seal"));
});

test("64 passes may be in flight; settled ones make room", () => {
  const { host: made, call, posted } = started();
  for (let n = 1; n <= 64; n++) assert.equal(call("submit", submit(10 * n)), "");
  refused("BudgetExceeded", /^passes outstanding: 64 in use, the cap is 64; await some first$/)(call("submit", submit(1000)));
  assert.equal(posted.length, 64);
  made.beginStep('[[10,true,1],[20,false,{"type":"X","message":"m"}],[30,false,{"type":"Deadlock","message":"m"}],[99999,true,null]]');
  assert.deepEqual([call("submit", submit(1001)), call("submit", submit(1002))], ["", ""]);
  refused("BudgetExceeded", /passes outstanding/)(call("submit", submit(1003)));
  made.beginStep("[[30,true,1]]"); // whose wait was ended, not the pass
  assert.equal(call("submit", submit(1003)), "");
});

test("passes without outputs count within their step", () => {
  const { host: made, call } = started();
  for (let n = 0; n < 64; n++) assert.equal(call("submit", submit()), "");
  refused("BudgetExceeded", /passes outstanding/)(call("submit", submit()));
  made.beginStep("[]");
  assert.equal(call("submit", submit()), "");
});

test("budgets of futures, logs, sent values, ops of a step, and payloads", () => {
  const futures = host({ futures: 2 });
  for (const f of [1, 2]) assert.equal(futures.call("sleep", { ms: 1, f }), "");
  refused("BudgetExceeded", /futures in flight: 2/)(futures.call("receive", { f: 3 }));
  const logs = host({ logged: 5 });
  assert.equal(logs.call("log", { level: "info", text: "12345" }), "");
  refused("BudgetExceeded", /^characters printed and logged: 6 in use, the cap is 5; print\(\) and log\(\) less$/)(logs.call("log", { level: "info", text: "6" }));
  const sends = host({ stepSent: 20, sent: 30 });
  assert.equal(sends.call("send", { value: 1234 }), "");
  refused("BudgetExceeded", /sent in one step/)(sends.call("send", { value: 1234 }));
  sends.host.beginStep("");
  assert.equal(sends.call("send", { value: 1234 }), "");
  sends.host.beginStep("");
  refused("BudgetExceeded", /^characters sent: /)(sends.call("send", { value: 1234 }));
  const ops = host({ stepOps: 1 });
  assert.equal(ops.call("ws.new", { ws: 1 }), "");
  for (let n = 0; n < 5; n++) assert.equal(ops.call("send", { value: n }), "", "their characters count, not they");
  refused("BudgetExceeded", /^ops of one step: 1 in use, the cap is 1; await something between them$/)(ops.call("ws.new", { ws: 2 }));
  const chars = host({ stepChars: 10 });
  refused("BudgetExceeded", /characters of one step/)(chars.call("ws.new", { ws: 12345678 }));
  refused("OutputLimitExceeded", /ws.new: 8 characters in one call; the limit is 7/)(host({ text: 7 }).call("ws.new", { ws: 1 }));
});

test("handles, programs and channel cells are counted while they are alive", () => {
  const { call, posted } = host({ handles: 3, programs: 1, cellWords: 12 });
  const full = refused("BudgetExceeded", /^handles: 3 in use, the cap is 3; let go of working sets, pipelines and channels$/);
  const channel = (ch: number, capacity: number): unknown => call("ch.new", { ch, dtype: "f32", shape: [2, 3], capacity });
  assert.equal(call("ws.new", { ws: 1 }), "");
  assert.equal(call("pipe.new", { pipe: 2 }), "");
  refused("BudgetExceeded", /^words of channel cells: 18 in use, the cap is 12; cells have a word an element, rings capacity \+ 1: use smaller ones, or let go of channels$/)(channel(3, 2));
  assert.equal(channel(3, 1), "");
  full(call("ws.fork", { ws: 4, of: 1 }));
  full(call("ws.open", { ws: 4, name: "kept", f: 5 }));
  assert.equal(call("pipe.close", { pipe: 2 }), "");
  assert.equal(call("ws.open", { ws: 4, name: "kept", f: 5 }), "", "what was refused has not used its ids");
  full(call("pipe.new", { pipe: 6 }));
  assert.equal(call("ws.drop", { ws: 1 }), "");
  refused("BudgetExceeded", /^words of channel cells: 14 in use/)(call("ch.new", { ch: 6, dtype: "bool", shape: [], capacity: 1 }));
  assert.equal(call("program", { prog: 7, text: "{}" }), "");
  refused("BudgetExceeded", /^programs: 1 in use, the cap is 1; each new shape of an epilogue is one: /)(call("program", { prog: 8, text: "{}" }));
  assert.equal(posted.length, 7);
  refused("UsageError", /^program.drop: id 3 is a channel; a program is needed$/)(call("program.drop", { prog: 3 }));
  assert.equal(call("program.drop", { prog: 7 }), "");
  assert.equal(call("program", { prog: 8, text: "{}" }), "", "the one that was dropped counts no more");
  refused("UsageError", /^ch.drop: id 8 is a program; a channel is needed$/)(call("ch.drop", { ch: 8 }));
  assert.equal(call("ch.drop", { ch: 3 }), "");
  refused("UsageError", /^ch.take: id 3 is unknown, or was dropped; a channel is needed$/)(call("ch.take", { ch: 3, f: 20 }));
  assert.equal(channel(9, 1), "", "nor do its cells");
});

test("an id is used once at a time", () => {
  const { call } = host();
  assert.equal(call("sleep", { ms: 1, f: 2 }), "");
  refused("UsageError", /^sleep: id 2 is taken by a future; ids are unique within the instance$/)(call("sleep", { ms: 1, f: 2 }));
  const other = started();
  refused("UsageError", /^submit: id 2 is taken by a working set/)(other.call("submit", submit(2)));
});

test("tokens of a pass are checked against the working sets and the vocabulary", () => {
  const { host: made, call, posted } = started();
  made.beginRun('{"model":{"vocab":10,"hidden":4}}');
  for (const [tokens, message] of [
    [[1, 10], /^tokens\[1\] = 10 is not a token id: whole numbers 0 \.\. 9 are$/],
    [["a"], /^tokens\[0\] = 'a' is not/],
    [[["a"]], /^tokens\[0\]\[0\] = 'a' is not/],
    [[], /^tokens is empty/],
    [[[1], [2]], /^tokens: 2 lists of ids for 1 working sets/],
  ] as const) {
    refused("InvalidPass", message)(call("submit", { ...submit(3), tokens }));
  }
  assert.deepEqual(posted, []);
  assert.equal(call("submit", { ...submit(3), tokens: [[9, 0]] }), "", "what was refused has not used its ids");
  refused("UsageError", /^submit: id 5 is unknown, or was dropped; a channel is needed$/)(call("submit", { ...submit(4), tokens: { ch: 5 } }));
});

test("a prewarm counts as a pass and as a future, and its ids are checked", () => {
  const { host: made, call, posted } = started({ outstanding: 2, futures: 3 });
  made.beginRun('{"model":{"vocab":10,"hidden":4}}');
  refused("InvalidPass", /^prewarm: ids\[1\] = 10 is not a token id: whole numbers 0 \.\. 9 are$/)(call("prewarm", { ids: [1, 10], f: 11 }));
  assert.deepEqual([call("prewarm", { ids: [1, 2], f: 11 }), call("submit", submit(12))], ["", ""]);
  refused("BudgetExceeded", /passes outstanding: 2/)(call("prewarm", { ids: [], f: 13 }));
  refused("UsageError", /^sleep: id 11 is taken by a future/)(call("sleep", { ms: 1, f: 11 }));
  made.beginStep("[[11,true,0]]");
  assert.equal(call("prewarm", { ids: [], f: 13 }), "");
  made.beginStep("[[12,true,0]]");
  for (const f of [4, 5]) assert.equal(call("sleep", { ms: 1, f }), "");
  refused("BudgetExceeded", /futures in flight: 3/)(call("prewarm", { ids: [], f: 6 }));
  assert.equal(posted.length, 5);
});

test("a refusal of the engine goes to an output or an answer, then to a value, and never to a message or an alarm", () => {
  const { host: made, call } = started();
  assert.equal(call("ch.new", { ch: 3, dtype: "i32", host: "reader" }), "");
  for (const [op, fields] of [
    ["sleep", { ms: 1, f: 10 }], ["receive", { f: 11 }], ["ch.take", { ch: 3, f: 12 }], ["submit", submit(13)], ["ws.length", { ws: 2, f: 14 }],
  ] as const) {
    assert.equal(call(op, fields), "");
  }
  const error = { type: "ChannelFull", message: "ch.put: no", capacity: 1 };
  const lost = { futures: [], error };
  const told = made.refuse([lost, { futures: [20], error }, lost, lost, lost], [10, 11, 12, 13, 14]);
  assert.deepEqual(told.map(([id]) => id), [13, 20, 14, 12]);
  assert.equal(made.untold?.message, "ch.put: no");
  assert.equal(call("log", { level: "info", text: "" }), "");
  assert.equal(call("ws.drop", { ws: 2 }), "");
  assert.deepEqual(call("ch.take", { ch: 3, f: 15 }), { error });
  assert.equal(call("ch.take", { ch: 3, f: 15 }), "", "each is told once");
  assert.equal(made.untold, null);
});

const file = process.env["PIE_TEXT_FIXTURES"];
test("the op table is Python's", { skip: file === undefined && "PIE_TEXT_FIXTURES is not set: pytest tests/web/test_node.py sets it" }, () => {
  const { ops } = JSON.parse(readFileSync(file ?? "", "utf8")) as { ops: object };
  assert.deepEqual(Object.fromEntries([...OPS].map(([name, op]) => [name, [op.kind, Object.keys(op.fields), op.defaults]])), ops);
});
