// Conversations to token ids, as pie_core.text.chat: special tokens come from the template alone, never from what a user wrote.

import { checkMessages } from "./chat_messages.js";
import type { ChatTemplate } from "./template.js";
import { MessageError, TemplateError } from "./text_errors.js";
import { alternatives, type TokenizerOf } from "./tokenizer.js";

// Private-use characters; one that occurs in neither messages nor template keeps user text from forming special tokens.
const FIRST = 0xf0000;
const LAST = 0xffffd;
const PRIVATE = /[\u{F0000}-\u{FFFFD}]/gu;

interface Rendered {
  readonly text: string;
  readonly marker: string;
}

const ASK = { role: "user", content: "a" };
const ANSWER = { role: "assistant", content: "b" };

/** `specials`: the text of each special token -> its id. `bos`: the id that every sequence starts with. `template`: null for a base model. */
export class Chat {
  readonly #tokenizer: Pick<TokenizerOf, "encode">;
  readonly #load: (() => ChatTemplate) | null;
  readonly #specials: ReadonlyMap<string, number>;
  readonly #bos: number | null;
  readonly #pattern: RegExp | null;
  readonly #starts = new Set<string>();
  readonly #ends = new Set<string>();
  readonly #lengths: readonly number[]; // of starts and ends, in UTF-16 units
  #template: ChatTemplate | null = null;
  #seal: readonly number[] | null = null;
  #cue: readonly number[] | null = null;

  constructor(
    tokenizer: Pick<TokenizerOf, "encode">,
    template: (() => ChatTemplate) | null,
    specials: Readonly<Record<string, number>>,
    bos: number | null,
  ) {
    this.#tokenizer = tokenizer;
    this.#load = template;
    this.#specials = new Map(Object.entries(specials));
    this.#bos = bos;
    const names = [...this.#specials.keys()];
    this.#pattern = alternatives(names);
    for (const name of names) {
      for (let at = 1; at < name.length; at++) {
        this.#starts.add(name.slice(0, at));
        this.#ends.add(name.slice(at));
      }
    }
    this.#lengths = [...new Set([...this.#starts].map((part) => part.length))].sort((a, b) => a - b);
  }

  /** Ids that every sequence starts with. */
  prefix(): number[] {
    return this.#bos === null ? [] : [this.#bos];
  }

  /** Ids of a whole conversation, `prefix` included once, with the opening of the assistant's turn when `cue`. */
  encode(messages: unknown, cue: boolean, tools: readonly unknown[] | null): number[] {
    const ids = this.#ids(this.#render(messages, cue, tools));
    return this.#bos === null || ids[0] === this.#bos ? ids : [this.#bos, ...ids];
  }

  /** The prompt as text, as the template writes it. */
  text(messages: unknown, cue: boolean, tools: readonly unknown[] | null): string {
    const { text, marker } = this.#render(messages, cue, tools);
    return text.replaceAll(marker, "");
  }

  /** Ids of one turn, without `prefix`, by the difference of two renders. */
  role(role: string, content: string): number[] {
    const turn = { role, content };
    const [checked] = checkMessages([turn]);
    const ids = this.#ids(checked?.role === "system" ? this.#systemTurn(turn) : this.#turn(turn));
    return this.#bos !== null && ids[0] === this.#bos ? ids.slice(1) : ids;
  }

  #systemTurn(turn: object): Rendered {
    const { text, marker } = this.#render([turn, ASK], false);
    const after = this.#render([turn, ASK, ANSWER, ASK], false).text;
    const longer = this.#render([turn, ASK, ANSWER], false).text;
    const rest = this.#difference(after, longer, "system");
    if (!text.endsWith(rest)) throw indivisible("system");
    return { text: text.slice(0, text.length - rest.length), marker };
  }

  #turn(turn: { role: string }): Rendered {
    const base = turn.role === "assistant" ? [ASK] : [ASK, ANSWER];
    const before = this.#render(base, false).text;
    const { text, marker } = this.#render([...base, turn], false);
    return { text: this.#difference(text, before, turn.role), marker };
  }

  /** Ids that open the assistant's turn. */
  cue(): number[] {
    if (this.#cue === null) {
      const before = this.#render([ASK], false).text;
      const { text, marker } = this.#render([ASK], true);
      this.#cue = this.#ids({ text: this.#difference(text, before, "assistant"), marker });
    }
    return [...this.#cue];
  }

  /** Ids that close the assistant's turn, the end-of-turn token first. */
  seal(): number[] {
    if (this.#seal === null) {
      const { source } = this.#source();
      let number = 0;
      while (source.includes(`zq${number}j`)) number++;
      const probe = `zq${number}j`;
      const { text, marker } = this.#render([ASK, { role: "assistant", content: probe }], false);
      const at = text.lastIndexOf(probe);
      if (at < 0) throw indivisible("assistant");
      this.#seal = this.#ids({ text: text.slice(at + probe.length), marker });
    }
    return [...this.#seal];
  }

  #source(): ChatTemplate {
    if (this.#load === null) throw new TemplateError("this model has no chat template; encode plain text instead");
    this.#template ??= this.#load();
    return this.#template;
  }

  /** What the longer render adds to the shorter one. */
  #difference(longer: string, shorter: string, role: string): string {
    if (!longer.startsWith(shorter) || longer.length === shorter.length) throw indivisible(role);
    return longer.slice(shorter.length);
  }

  /** The rendered text, in which a marker breaks up every special token that a message or tool contains, and the marker. */
  #render(messages: unknown, cue: boolean, tools: readonly unknown[] | null = null): Rendered {
    const template = this.#source();
    const checked = checkMessages(messages);
    const marker = unusedMarker([template.source, ...stringsIn([checked, tools])]);
    const escaped = checked.map((message) => ({
      ...(this.#escape(message, marker) as object),
      role: message.role,
      content: this.#escapeText(message.content, marker, true),
    }));
    return { text: template.render(escaped, this.#escape(tools, marker) as unknown[] | null, cue), marker };
  }

  #escape(value: unknown, marker: string): unknown {
    if (typeof value === "string") return this.#escapeText(value, marker);
    if (Array.isArray(value)) return value.map((item) => this.#escape(item, marker));
    if (typeof value !== "object" || value === null) return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [this.#break(key, marker), this.#escape(item, marker)]));
  }

  /** Put `marker` inside every special token of `text`. */
  #break(text: string, marker: string): string {
    if (this.#pattern === null) return text;
    return text.replace(this.#pattern, (found) => {
      const [first = ""] = found;
      return first + marker + found.slice(first.length);
    });
  }

  /**
   * `#break`, and a marker beside what could become a special token together with the template's own text: an end that begins one, a
   * beginning that ends one, and, for contents (`whole`), a text that lies within one. Other values, such as names and types, are left
   * as they are then, for templates compare them.
   */
  #escapeText(text: string, marker: string, whole = false): string {
    if (this.#pattern === null || text === "") return text;
    let broken = this.#break(text, marker);
    if (this.#lengths.some((length) => this.#starts.has(text.slice(-length)))) broken += marker;
    const within = (): boolean => whole && [...this.#specials.keys()].some((name) => name.includes(text));
    if (this.#lengths.some((length) => this.#ends.has(text.slice(0, length))) || within()) broken = marker + broken;
    return broken;
  }

  /** Ids of rendered text: specials as themselves, everything between them as plain text. */
  #ids({ text, marker }: Rendered): number[] {
    const ids: number[] = [];
    for (const piece of this.#pattern === null ? [text] : text.split(this.#pattern)) {
      const special = this.#specials.get(piece);
      if (special !== undefined) {
        ids.push(special);
        continue;
      }
      const plain = piece.replaceAll(marker, "");
      if (plain !== "") for (const id of this.#tokenizer.encode(plain)) ids.push(id);
    }
    return ids;
  }
}

function indivisible(role: string): TemplateError {
  return new TemplateError(`this model's chat template does not write a ${role} turn on its own; render whole conversations instead`);
}

function unusedMarker(texts: Iterable<string>): string {
  const used = new Set<string>();
  for (const text of texts) for (const [found] of text.matchAll(PRIVATE)) used.add(found);
  for (let code = FIRST; code <= LAST; code++) {
    const marker = String.fromCodePoint(code);
    if (!used.has(marker)) return marker;
  }
  throw new MessageError("the messages use every private-use character, so special tokens in them cannot be kept apart");
}

/** Every string in a JSON value, keys included. */
function* stringsIn(value: unknown): Iterable<string> {
  if (typeof value === "string") yield value;
  else if (Array.isArray(value)) for (const item of value) yield* stringsIn(item);
  else if (typeof value === "object" && value !== null) {
    for (const [key, item] of Object.entries(value)) {
      yield key;
      yield* stringsIn(item);
    }
  }
}
