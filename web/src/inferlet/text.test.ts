// Tokenizer and chat against Python's answers (written by tests/web/text_fixtures.py), and hostile templates.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Chat } from "./chat.js";
import { ChatTemplate, MAX_SOURCE } from "./template.js";
import { textService, textTables } from "./text.js";
import { TemplateError, TextError } from "./text_errors.js";
import { MAX_CHARS, TokenizerOf, type TokenizerSpec, tokenizerTables } from "./tokenizer.js";

interface Outcome {
  value?: unknown;
  error?: string;
  message?: string;
}
interface Fixtures {
  text: { spec: TokenizerSpec; template: string; tokens: Record<string, string> };
  golden_cases: { text: string; ids: number[] }[];
  golden_chats: { question: string; text: string; ids: number[] }[];
  texts: { text: string; ids: number[]; back: string }[];
  decoded: { ids: number[]; text: string }[];
  bytes: string[];
  chats: {
    template: string;
    bos: number | null;
    cases: { messages: unknown; cue: boolean; tools: unknown[] | null; ids: Outcome; text: Outcome }[];
    turns: { role: string; content: string; ids: Outcome }[];
    cue: Outcome;
    seal: Outcome;
  }[];
  bombs: string[];
}

const file = process.env["PIE_TEXT_FIXTURES"];
const needs = { skip: file === undefined && "PIE_TEXT_FIXTURES is not set: pytest tests/web/test_node.py sets it" };
const fixtures = file === undefined ? null : (JSON.parse(readFileSync(file, "utf8")) as Fixtures);
const tokenizer = fixtures === null ? null : new TokenizerOf(structuredClone(tokenizerTables(fixtures.text.spec)));

function given(): { fixtures: Fixtures; tokenizer: TokenizerOf } {
  assert(fixtures !== null && tokenizer !== null);
  return { fixtures, tokenizer };
}

function outcome(call: () => unknown): Outcome {
  try {
    return { value: call() };
  } catch (error) {
    assert(error instanceof TextError, String(error));
    return { error: error.name, message: error.message };
  }
}

/** Errors that the two template libraries word differently are compared by type. */
function assertSame(mine: Outcome, theirs: Outcome, where: string): void {
  if (theirs.error === "TemplateError" && /failed on these messages/.test(theirs.message ?? "")) {
    assert.equal(mine.error, theirs.error, where);
  } else assert.deepEqual(mine, theirs, where);
}

test("golden ids, and specials in text stay text", needs, () => {
  const { fixtures, tokenizer } = given();
  const cases = fixtures.golden_cases.filter(({ text }) => !text.includes("<|"));
  assert.equal(cases.length, 15);
  for (const { text, ids } of cases) assert.deepEqual(tokenizer.encode(text), ids, text);
  // The sixteenth was recorded with specials parsed, as a template may write them.
  const chat = new Chat(tokenizer, () => new ChatTemplate("<|im_start|>user"), fixtures.text.spec.specials, null);
  const recorded = fixtures.golden_cases.filter(({ text }) => text.includes("<|")).map(({ ids }) => ids);
  assert.deepEqual(recorded, [chat.encode([{ role: "user", content: "x" }], true, null)]);
});

test("random Unicode: the same ids and texts as Python's", needs, () => {
  const { fixtures, tokenizer } = given();
  for (const { text, ids, back } of fixtures.texts) {
    assert.deepEqual(tokenizer.encode(text), ids, JSON.stringify(text));
    assert.equal(tokenizer.decode(ids), back);
  }
  for (const { ids, text } of fixtures.decoded) assert.equal(tokenizer.decode(ids), text);
});

test("the bytes of every id", needs, () => {
  const { fixtures, tokenizer } = given();
  assert.equal(tokenizer.vocabSize, fixtures.bytes.length);
  fixtures.bytes.forEach((hex, id) => assert.equal(Buffer.from(tokenizer.tokenBytes(id)).toString("hex"), hex, String(id)));
});

test("ids and texts that cannot be used are named", needs, () => {
  const { tokenizer } = given();
  const last = tokenizer.vocabSize - 1;
  for (const bad of [-1, last + 1, 2 ** 31]) {
    assert.throws(() => tokenizer.decode([5, bad]), { name: "TokenizerError", message: `token id ${bad} is outside the vocabulary; ids are 0 to ${last}` });
  }
  assert.throws(() => tokenizer.encode("a".repeat(MAX_CHARS + 1)), /is too long to encode; at most 1000000/);
  assert.throws(() => tokenizer.encode("😀a\ud800b"), /character 2 of the text is a lone surrogate/);
});

/** Of this process: a busy machine does not lengthen it. */
function cpuSeconds(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

test("long runs do not blow up", needs, () => {
  const { tokenizer } = given();
  for (const character of ["a", " ", "日", "1", "😀"]) {
    const run = character.repeat(MAX_CHARS / 4);
    const began = cpuSeconds();
    assert.equal(tokenizer.decode(tokenizer.encode(run)), run);
    assert(cpuSeconds() - began < 5, character);
  }
});

test("golden conversations", needs, () => {
  const { fixtures } = given();
  const service = textService(structuredClone(textTables(JSON.stringify(fixtures.text))));
  assert.equal(fixtures.golden_chats.length, 3);
  for (const { question, text, ids } of fixtures.golden_chats) {
    const messages = [{ role: "user", content: question }];
    assert.equal(service.renderText(messages, true, null), text);
    assert.deepEqual(service.render(messages, true, null), ids);
  }
  assert.deepEqual([service.cue(), service.seal()], [[1, 520, 9531, 198], [2, 198]]);
  service.cue().push(0);
  assert.deepEqual(service.cue(), [1, 520, 9531, 198]);
});

test("conversations, turns, cue and seal of many templates as Python has them", needs, () => {
  const { fixtures, tokenizer } = given();
  for (const { template, bos, cases, turns, cue, seal } of fixtures.chats) {
    const chat = new Chat(tokenizer, () => new ChatTemplate(template, fixtures.text.tokens), fixtures.text.spec.specials, bos);
    for (const row of cases) {
      const where = `${template} ${JSON.stringify(row.messages)}`;
      assertSame(outcome(() => chat.text(row.messages, row.cue, row.tools)), row.text, where);
      assertSame(outcome(() => chat.encode(row.messages, row.cue, row.tools)), row.ids, where);
    }
    for (const row of turns) assertSame(outcome(() => chat.role(row.role, row.content)), row.ids, `${template} ${row.role} ${row.content}`);
    assertSame(outcome(() => chat.cue()), cue, template);
    assertSame(outcome(() => chat.seal()), seal, template);
  }
});

test("a base model has no chat but a prefix", () => {
  const chat = new Chat({ encode: () => [] }, null, {}, 1);
  assert.deepEqual(chat.prefix(), [1]);
  for (const call of [() => chat.encode([{ role: "user", content: "x" }], true, null), () => chat.role("user", "x"), () => chat.cue(), () => chat.seal()]) {
    assert.throws(call, { name: "TemplateError", message: /no chat template/ });
  }
});

const USER = [{ role: "user", content: "hi" }];
const rendered = (source: string, messages: unknown = USER, tools: unknown[] | null = null): string =>
  new ChatTemplate(source, { bos_token: "<s>" }).render(messages, tools);

for (const [source, text] of [
  ["{{ messages[0].content }}|{{ messages[0]['role'] }}", "hi|user"],
  ["{{ bos_token }}{{ nothing }}{% if eos_token is defined %}x{% endif %}", "<s>"],
  ["{{ {'é': [1, none, true, '<']} | tojson }}", '{"é": [1, null, true, "<"]}'],
  ["{{ [1] | tojson(indent=2) }}", "[\n  1\n]"],
  ["{% for m in messages %}{{ loop.index0 }}{{ m.content | trim }}{% if loop.last %}!{% endif %}{% endfor %}", "0hi!"],
  ["{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"],
  ["{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') ~ f(1) }}", "<a><1>"],
  ["{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "013"],
  ["{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"],
  ["{{ 'a-b'.split('-')[1].upper().strip() }}{{ 'x' in ['x'] }}{{ 'a,b'.replace(',', ';') }}", "BTruea;b"],
  ["{{ ['a', 'b'] | join(', ') }}{{ ', '.join(['c', 'd']) }}{{ 'abc'[::-1] }}", "a, bc, dcba"],
  ["{% for k, v in {'x': 1}.items() %}{{ k }}={{ v }}{% endfor %}{{ {'y': 2}.get('y') }}", "x=12"],
  ["{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | map(attribute='role') | join }}", "1user"],
  ["{{ 2 ** 5 }}{{ 7 % 4 }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ ['a', {'b': none}] }}", "323abab[1, 2]['a', {'b': None}]"],
  ["{{ 'a\nb' | indent(2) }}{{ [1, 2] | sum }}{{ 'x' | replace('x', 'y') | upper }}", "a\n  b3Y"],
  ["{% for a, b in [(1, 2), (3, 4)] %}{{ a * b }},{% endfor %}{% set c, d = 5, 6 %}{{ c }}{{ d }}", "2,12,56"],
  ["{{ strftime_now('%Y') | length }}{{ messages is iterable }}{{ messages[0].nope is defined }}{{ none }}", "4TrueFalseNone"],
  ["{{ [] == [] }}{{ {'a': [1]} == {'a': [1.0]} }}{{ '1' == 1 }}{{ true == 1 }}{{ none == x }}{{ 0 == '' }}{{ 'a' != 'b' }}", "TrueTrueFalseTrueFalseFalseTrue"],
  ["{{ 'x</think>\n\ny\n'.split('</think>')[-1].lstrip('\n').rstrip('\n') }}{% for i in range(2, -1, -1) %}{{ i }}{% endfor %}", "y210"],
  ["{{ 3 * 4 }}{{ 1.5 * 2 }}{{ [0] * 2 }}{{ -1 * 2 }}", "123.0[0, 0]-2"],
  ["  {%- if true %}  x{% endif %}\n  {% if true %}\ny{% endif %}", "  xy"],
] as const) {
  test(`what real templates use: ${source}`, () => assert.equal(rendered(source), text));
}

test("tools reach a template that takes them, a refusal is told apart", () => {
  const source = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}";
  assert.equal(rendered(source, USER, [{ type: "function" }]), '[{"type": "function"}]hi');
  assert.throws(() => rendered("{{ messages[0].content }}", USER, [{}]), /no place for tools/);
  assert.throws(() => rendered("{{ raise_exception('a system message must come first') }}"), {
    name: "TemplateRefused",
    message: "the chat template refused the messages: a system message must come first",
  });
});

test("a template cannot run on, grow without bound, or reach its host", needs, () => {
  for (const bomb of given().fixtures.bombs) {
    const began = cpuSeconds();
    let text: string;
    try {
      text = new ChatTemplate(bomb, {}, 0.1).render(USER);
    } catch (error) {
      assert(error instanceof TemplateError, `${bomb.slice(0, 200)}: ${String(error)}`);
      continue;
    } finally {
      const seconds = cpuSeconds() - began;
      assert(seconds < 4, `${seconds} s: ${bomb.slice(0, 200)}`);
    }
    assert(text.length < 1000, `${bomb.slice(0, 200)}: ${text.length} characters`);
    assert(!/class|function|native code/.test(text), bomb);
  }
  assert.throws(() => new ChatTemplate("x".repeat(MAX_SOURCE + 1)), /65537 characters; at most 65536/);
});
