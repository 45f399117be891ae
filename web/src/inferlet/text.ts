// What an inferlet's text ops are answered with: the checkpoint's tokenizer and chat template, from the JSON that the engine made.

import { Chat } from "./chat.js";
import { ChatTemplate } from "./template.js";
import { TokenizerOf, type TokenizerSpec } from "./tokenizer.js";

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

interface Parts {
  readonly spec: TokenizerSpec;
  readonly template: string | null;
  readonly tokens: Readonly<Record<string, string>>;
}

/** The service of a checkpoint. `json` is a TextSpec (messages.ts). A template that cannot be used fails its own ops only. */
export function loadText(json: string): TextService {
  const { spec, template, tokens } = JSON.parse(json) as Parts;
  const tokenizer = new TokenizerOf(spec);
  const chat = new Chat(tokenizer, template === null ? null : () => new ChatTemplate(template, tokens), spec.specials, spec.add_bos ? spec.bos : null);
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
