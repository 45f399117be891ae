// What an inferlet's text ops are answered with: the checkpoint's tokenizer and chat template, from the JSON that the engine made.

import type { TextSpec } from "../messages.js";
import { Chat } from "./chat.js";
import { ChatTemplate } from "./template.js";
import { TokenizerOf, type TokenizerSpec, tokenizerTables, type TokenizerTables } from "./tokenizer.js";

export { TextError } from "./text_errors.js";

/** What `Host` needs; ids of a conversation come with the prefix once. */
export interface TextService {
  encode(text: string): number[];
  decode(ids: readonly number[]): string;
  tokenBytes(id: number): Uint8Array;
  render(messages: unknown, cue: boolean, tools: readonly unknown[] | null): number[];
  renderText(messages: unknown, cue: boolean, tools: readonly unknown[] | null): string;
  role(role: string, content: string): number[];
  cue(): number[];
  seal(): number[];
}

/** A TextSpec (messages.ts) worked out, as one worker hands it to the others. */
export interface TextTables {
  readonly tokenizer: TokenizerTables;
  readonly specials: Readonly<Record<string, number>>;
  /** The id that every sequence starts with. */
  readonly bos: number | null;
  readonly template: string | null;
  /** What the template may name, such as {"bos_token": "<s>"}. */
  readonly tokens: Readonly<Record<string, string>>;
}

/** Throws TokenizerError for a tokenizer that cannot be used. */
export function textTables(json: TextSpec): TextTables {
  const { spec, template, tokens } = JSON.parse(json) as Pick<TextTables, "template" | "tokens"> & { spec: TokenizerSpec };
  const bos = spec.add_bos ? spec.bos : null;
  return { tokenizer: tokenizerTables(spec), specials: spec.specials, bos, template, tokens };
}

/** The service of a checkpoint. A template that cannot be used fails its own ops only. */
export function textService({ tokenizer: tables, specials, bos, template, tokens }: TextTables): TextService {
  const tokenizer = new TokenizerOf(tables);
  const chat = new Chat(tokenizer, template === null ? null : () => new ChatTemplate(template, tokens), specials, bos);
  return {
    encode: (text) => tokenizer.encode(text),
    decode: (ids) => tokenizer.decode(ids),
    tokenBytes: (id) => tokenizer.tokenBytes(id),
    render: (messages, cue, tools) => chat.encode(messages, cue, tools),
    renderText: (messages, cue, tools) => chat.text(messages, cue, tools),
    role: (role, content) => chat.role(role, content),
    cue: () => chat.cue(),
    seal: () => chat.seal(),
  };
}
