// The checkpoint's tokenizer from the engine's TokenizerSpec: byte-level BPE with the same ids and texts as the server's.

import { BytePairs, type PairTables, pairTables } from "./bpe.js";
import { characters } from "./ops.js";
import { TokenizerError } from "./text_errors.js";

export const MAX_CHARS = 1_000_000; // characters of one encode call

/** As pie_core.text.tokenizer.TokenizerSpec. */
export interface TokenizerSpec {
  readonly tokenizer: TokenizerJson;
  readonly specials: Readonly<Record<string, number>>;
  readonly eos: readonly number[];
  readonly bos: number | null;
  readonly add_bos: boolean;
}

/** The parts of a Hugging Face tokenizer.json that the engine writes. */
interface TokenizerJson {
  readonly added_tokens: readonly { readonly id: number; readonly content: string; readonly special: boolean }[];
  readonly pre_tokenizer: PreTokenizer;
  readonly model: {
    readonly type: string;
    readonly vocab: Readonly<Record<string, number>>;
    readonly merges: readonly (readonly [string, string])[];
  };
}

interface PreTokenizer {
  readonly type: string;
  readonly pretokenizers?: readonly PreTokenizer[];
  readonly individual_digits?: boolean;
  readonly use_regex?: boolean;
}

// GPT-2's pattern. The reference means Unicode's White_Space by \s, JavaScript something else.
const BYTE_LEVEL =
  /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** A tokenizer as plain arrays, which cost a new worker nothing: made once from the spec, handed to the others. */
export interface TokenizerTables {
  readonly pairs: PairTables;
  /** Each splits the pieces of the one before. */
  readonly splits: readonly RegExp[];
  /** Added tokens that are no special ones are found in plain text; templates look special ones up in the spec's `specials`. */
  readonly added: ReadonlyMap<string, number>;
  readonly addedPattern: RegExp | null;
  /** The bytes of all tokens, one after the other, and where each begins. */
  readonly bytes: Uint8Array;
  readonly offsets: Uint32Array;
}

/** Throws TokenizerError for a kind that this file does not know. */
export function tokenizerTables({ tokenizer }: TokenizerSpec): TokenizerTables {
  const { model, added_tokens: tokens } = tokenizer;
  if (model.type !== "BPE") throw new TokenizerError(`tokenizer kind '${model.type}' is not supported in the page; known: 'BPE'`);
  const vocab = new Map(Object.entries(model.vocab));
  const alphabet = byteAlphabet();
  const added = new Map(tokens.filter((token) => !token.special).map(({ content, id }) => [content, id]));
  const [bytes, offsets] = tokenTable(vocab, alphabet, new Set(tokens.map((token) => token.content)));
  return {
    pairs: pairTables(byteIds(vocab, alphabet), mergesOf(vocab, model.merges)),
    splits: splitsOf(tokenizer.pre_tokenizer),
    added,
    addedPattern: alternatives([...added.keys()]),
    bytes,
    offsets,
  };
}

export class TokenizerOf {
  readonly #tables: TokenizerTables;
  readonly #pairs: BytePairs;

  constructor(tables: TokenizerTables) {
    this.#tables = tables;
    this.#pairs = new BytePairs(tables.pairs);
  }

  get vocabSize(): number {
    return this.#tables.offsets.length - 1;
  }

  /** Ids of plain text: nothing is added, special tokens in it stay text. Throws TokenizerError over MAX_CHARS and for lone surrogates. */
  encode(text: string): number[] {
    if (text.length > MAX_CHARS) {
      const count = characters(text);
      if (count > MAX_CHARS) throw new TokenizerError(`text of ${count} characters is too long to encode; at most ${MAX_CHARS} are allowed`);
    }
    const lone = loneSurrogate(text);
    if (lone !== null) throw new TokenizerError(`character ${lone} of the text is a lone surrogate, which is no Unicode text`);
    const ids: number[] = [];
    const { added, addedPattern } = this.#tables;
    for (const piece of addedPattern === null ? [text] : text.split(addedPattern)) {
      const id = added.get(piece);
      if (id !== undefined) ids.push(id);
      else if (piece !== "") this.#encodePlain(piece, 0, ids);
    }
    return ids;
  }

  /** Apply the splits from `depth` on, each within the pieces of the one before. */
  #encodePlain(text: string, depth: number, ids: number[]): void {
    const split = this.#tables.splits[depth];
    if (split === undefined) {
      this.#pairs.encode(text, ids);
      return;
    }
    let end = 0;
    for (const { 0: found, index } of text.matchAll(split)) {
      if (index > end) this.#encodePlain(text.slice(end, index), depth + 1, ids);
      this.#encodePlain(found, depth + 1, ids);
      end = index + found.length;
    }
    if (end < text.length) this.#encodePlain(text.slice(end), depth + 1, ids);
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
    const { bytes, offsets } = this.#tables;
    const end = offsets[id + 1];
    if (id < 0 || end === undefined) {
      throw new TokenizerError(`token id ${id} is outside the vocabulary; ids are 0 to ${this.vocabSize - 1}`);
    }
    return bytes.subarray(offsets[id], end);
  }
}

/** The regular expressions whose matches are pieces of their own, in order. */
function splitsOf(part: PreTokenizer): RegExp[] {
  if (part.type === "Sequence") return (part.pretokenizers ?? []).flatMap(splitsOf);
  if (part.type === "Digits") return [part.individual_digits ? /\p{N}/gu : /\p{N}+/gu];
  if (part.type === "ByteLevel") return part.use_regex === false ? [] : [BYTE_LEVEL];
  throw new TokenizerError(`pre-tokenizer '${part.type}' is not supported in the page; known: ByteLevel, Digits, Sequence`);
}

function byteIds(vocab: ReadonlyMap<string, number>, alphabet: ReadonlyMap<string, number>): Int32Array {
  const ids = new Int32Array(256).fill(-1);
  for (const [character, byte] of alphabet) ids[byte] = vocab.get(character) ?? -1;
  return ids;
}

function mergesOf(vocab: ReadonlyMap<string, number>, merges: readonly (readonly [string, string])[]): [number, number, number][] {
  return merges.map(([left, right]) => {
    const ids = [left, right, left + right].map((text) => vocab.get(text));
    if (ids.includes(undefined)) throw new TokenizerError(`the merge of '${left}' and '${right}' is not of the vocabulary`);
    return ids as [number, number, number];
  });
}

/** Matches any of `texts`, the longest at a place; as a group, so that `split` keeps them. null for none. */
export function alternatives(texts: readonly string[]): RegExp | null {
  if (texts.length === 0) return null;
  const sources = [...texts].sort((a, b) => b.length - a.length).map((text) => text.replace(/[\^$.*+?()[\]{}|/\\]/g, "\\$&"));
  return new RegExp(`(${sources.join("|")})`, "gu");
}

/** Code point index of the first lone surrogate, or null. */
function loneSurrogate(text: string): number | null {
  const at = text.search(/\p{Surrogate}/u);
  return at < 0 ? null : characters(text.slice(0, at));
}

/** The bytes of all ids, and where each begins. Added tokens are their own UTF-8 text, all others are spelt in the byte alphabet. */
function tokenTable(
  vocab: ReadonlyMap<string, number>,
  alphabet: ReadonlyMap<string, number>,
  literal: ReadonlySet<string>,
): [Uint8Array, Uint32Array] {
  const texts = new Array<string>(vocab.size).fill("");
  for (const [text, id] of vocab) texts[id] = text;
  const encoder = new TextEncoder();
  const offsets = new Uint32Array(vocab.size + 1);
  let bytes = new Uint8Array(1 << 20);
  let size = 0;
  texts.forEach((text, id) => {
    const spelling = literal.has(text) ? null : spelt(text, alphabet);
    const own = spelling ?? encoder.encode(text); // padding entries that hold other characters stand for themselves
    if (size + own.length > bytes.length) {
      const larger = new Uint8Array(2 * (size + own.length));
      larger.set(bytes);
      bytes = larger;
    }
    bytes.set(own, size);
    size += own.length;
    offsets[id + 1] = size;
  });
  return [bytes.slice(0, size), offsets];
}

function spelt(text: string, alphabet: ReadonlyMap<string, number>): number[] | null {
  const bytes: number[] = [];
  for (const character of text) {
    const byte = alphabet.get(character);
    if (byte === undefined) return null;
    bytes.push(byte);
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
