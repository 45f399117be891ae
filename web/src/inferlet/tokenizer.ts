// The checkpoint's tokenizer over `@huggingface/tokenizers`: the same ids and texts as the server's.

import { Tokenizer } from "@huggingface/tokenizers";
import { TokenizerError } from "./text_errors.js";
import { characters } from "./ops.js";

export const MAX_CHARS = 1_000_000; // characters of one encode call

/** As pie_core.text.tokenizer.TokenizerSpec. */
export interface TokenizerSpec {
  readonly tokenizer: TokenizerJson;
  readonly specials: Readonly<Record<string, number>>;
  readonly eos: readonly number[];
  readonly bos: number | null;
  readonly add_bos: boolean;
}

interface TokenizerJson {
  readonly added_tokens: readonly AddedToken[];
  readonly pre_tokenizer: PreTokenizer;
  readonly model: { readonly vocab: Readonly<Record<string, number>> };
}

interface AddedToken {
  readonly id: number;
  readonly content: string;
  readonly special: boolean;
}

interface PreTokenizer {
  readonly type: string;
  readonly pretokenizers?: readonly PreTokenizer[];
  readonly individual_digits?: boolean;
  readonly use_regex?: boolean;
}

export class TokenizerOf {
  readonly #engine: Tokenizer;
  readonly #bytes: readonly Uint8Array[];

  constructor(spec: TokenizerSpec) {
    // Without its special tokens the library cannot find them in user text; templates look them up in `specials`.
    const json = {
      ...spec.tokenizer,
      added_tokens: spec.tokenizer.added_tokens.filter((token) => !token.special),
      pre_tokenizer: exactClasses(spec.tokenizer.pre_tokenizer),
    };
    this.#engine = new Tokenizer(json as object, {});
    this.#bytes = tokenTable(spec);
  }

  get vocabSize(): number {
    return this.#bytes.length;
  }

  /** Ids of plain text: nothing is added, special tokens in it stay text. Throws TokenizerError over MAX_CHARS and for lone surrogates. */
  encode(text: string): number[] {
    if (text.length > MAX_CHARS) {
      const count = characters(text);
      if (count > MAX_CHARS) throw new TokenizerError(`text of ${count} characters is too long to encode; at most ${MAX_CHARS} are allowed`);
    }
    const lone = loneSurrogate(text);
    if (lone !== null) throw new TokenizerError(`character ${lone} of the text is a lone surrogate, which is no Unicode text`);
    return this.#engine.encode(text, { add_special_tokens: false }).ids;
  }

  /** Text of ids, special tokens included; bytes that are no UTF-8 become U+FFFD. Throws TokenizerError for an unknown id. */
  decode(ids: readonly number[]): string {
    const parts = ids.map((id) => this.tokenBytes(id));
    const bytes = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
    let at = 0;
    for (const part of parts) {
      bytes.set(part, at);
      at += part.length;
    }
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
  }

  /** The bytes that one id stands for. Throws TokenizerError for an unknown id. */
  tokenBytes(id: number): Uint8Array {
    const bytes = this.#bytes[id];
    if (bytes === undefined) throw new TokenizerError(`token id ${id} is outside the vocabulary; ids are 0 to ${this.vocabSize - 1}`);
    return bytes;
  }
}

/**
 * The library reads digits as ASCII and white space as JavaScript's \s, the reference as Unicode's classes. The same splits are
 * written out here with those classes.
 */
function exactClasses(part: PreTokenizer): PreTokenizer {
  if (part.type === "Sequence") return { ...part, pretokenizers: (part.pretokenizers ?? []).map(exactClasses) };
  if (part.type === "Digits") return isolate(part.individual_digits ? "\\p{N}" : "\\p{N}+");
  if (part.type === "ByteLevel" && part.use_regex !== false) {
    return { type: "Sequence", pretokenizers: [isolate(BYTE_LEVEL), { ...part, use_regex: false }] };
  }
  return part;
}

const BYTE_LEVEL =
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\p{White_Space}\\p{L}\\p{N}]+|\\p{White_Space}+(?!\\P{White_Space})|\\p{White_Space}+";

function isolate(regex: string): PreTokenizer {
  const split = { type: "Split", pattern: { Regex: regex }, behavior: "Isolated", invert: false };
  return split;
}

/** Code point index of the first lone surrogate, or null. */
function loneSurrogate(text: string): number | null {
  if (!/\p{Surrogate}/u.test(text)) return null;
  let index = 0;
  for (const character of text) {
    const code = character.codePointAt(0) ?? 0;
    if (code >= 0xd800 && code <= 0xdfff) return index;
    index++;
  }
  return null;
}

/** The bytes of every id: added tokens are their own UTF-8 text, all others are spelt in the byte alphabet. */
function tokenTable(spec: TokenizerSpec): Uint8Array[] {
  const alphabet = byteAlphabet();
  const literal = new Set(spec.tokenizer.added_tokens.map((token) => token.content));
  const encoder = new TextEncoder();
  const vocab = Object.entries(spec.tokenizer.model.vocab);
  const table = new Array<Uint8Array>(vocab.length).fill(new Uint8Array());
  for (const [text, id] of vocab) {
    table[id] = (literal.has(text) ? null : spelt(text, alphabet)) ?? encoder.encode(text);
  }
  return table;
}

/** null for padding entries that hold other characters: they stand for themselves. */
function spelt(text: string, alphabet: ReadonlyMap<string, number>): Uint8Array | null {
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) {
    const byte = alphabet.get(text.charAt(at));
    if (byte === undefined) return null;
    bytes[at] = byte;
  }
  return bytes;
}

/** The printable character of byte-level vocabularies -> the byte it stands for. */
function byteAlphabet(): Map<string, number> {
  const printable = (byte: number): boolean => (byte >= 0x21 && byte < 0x7f) || (byte >= 0xa1 && byte < 0x100 && byte !== 0xad);
  const alphabet = new Map<string, number>();
  let others = 256;
  for (let byte = 0; byte < 256; byte++) alphabet.set(String.fromCharCode(printable(byte) ? byte : others++), byte);
  return alphabet;
}
