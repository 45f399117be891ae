// Incremental SHA-256 (FIPS 180-4): WebCrypto has no streaming digest, and a model should not be held in memory to be checked.

// prettier-ignore
const K = new Int32Array([
  0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
  0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
  0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
  0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
]);
const BLOCK = 64;

export class Sha256 {
  // prettier-ignore
  readonly #state = new Int32Array([0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19]);
  readonly #rest = new Uint8Array(BLOCK);
  #held = 0; // bytes in #rest
  #length = 0;

  update(bytes: Uint8Array): this {
    this.#length += bytes.length;
    let at = 0;
    if (this.#held > 0) {
      at = Math.min(BLOCK - this.#held, bytes.length);
      this.#rest.set(bytes.subarray(0, at), this.#held);
      this.#held += at;
      if (this.#held < BLOCK) return this;
      compress(this.#state, this.#rest, 0, BLOCK);
      this.#held = 0;
    }
    const whole = at + Math.floor((bytes.length - at) / BLOCK) * BLOCK;
    compress(this.#state, bytes, at, whole);
    this.#rest.set(bytes.subarray(whole));
    this.#held = bytes.length - whole;
    return this;
  }

  /** The digest as lower-case hex. Ends the object: `update` must not follow. */
  hex(): string {
    const padded = new Uint8Array(this.#held < BLOCK - 8 ? BLOCK : 2 * BLOCK);
    padded.set(this.#rest.subarray(0, this.#held));
    padded[this.#held] = 0x80;
    new DataView(padded.buffer).setBigUint64(padded.length - 8, BigInt(this.#length) * 8n);
    compress(this.#state, padded, 0, padded.length);
    return Array.from(this.#state, (word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
  }
}

const W = new Int32Array(64); // the message schedule of the block at work; nothing in it outlives a call

const sum0 = (a: number): number => ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
const sum1 = (e: number): number => ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
const mix0 = (x: number): number => ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
const mix1 = (y: number): number => ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);

/**
 * Fold the blocks of `bytes` from `start` to `end` into `state`. Eight rounds a turn: the eight variables change roles instead of values, which
 * is a third faster. All reads are inside their arrays; the `!` only tell the compiler so.
 */
function compress(state: Int32Array, bytes: Uint8Array, start: number, end: number): void {
  let s0 = state[0]!, s1 = state[1]!, s2 = state[2]!, s3 = state[3]!, s4 = state[4]!, s5 = state[5]!, s6 = state[6]!, s7 = state[7]!;
  for (let at = start; at < end; at += BLOCK) {
    for (let i = 0, j = at; i < 16; i++, j += 4) {
      W[i] = (bytes[j]! << 24) | (bytes[j + 1]! << 16) | (bytes[j + 2]! << 8) | bytes[j + 3]!;
    }
    for (let i = 16; i < 64; i++) W[i] = (W[i - 16]! + mix0(W[i - 15]!) + W[i - 7]! + mix1(W[i - 2]!)) | 0;
    let a = s0, b = s1, c = s2, d = s3, e = s4, f = s5, g = s6, h = s7;
    // prettier-ignore
    for (let i = 0; i < 64; i += 8) {
      h = (h + sum1(e) + (g ^ (e & (f ^ g))) + K[i]! + W[i]!) | 0; d = (d + h) | 0; h = (h + sum0(a) + ((a & b) | (c & (a | b)))) | 0;
      g = (g + sum1(d) + (f ^ (d & (e ^ f))) + K[i + 1]! + W[i + 1]!) | 0; c = (c + g) | 0; g = (g + sum0(h) + ((h & a) | (b & (h | a)))) | 0;
      f = (f + sum1(c) + (e ^ (c & (d ^ e))) + K[i + 2]! + W[i + 2]!) | 0; b = (b + f) | 0; f = (f + sum0(g) + ((g & h) | (a & (g | h)))) | 0;
      e = (e + sum1(b) + (d ^ (b & (c ^ d))) + K[i + 3]! + W[i + 3]!) | 0; a = (a + e) | 0; e = (e + sum0(f) + ((f & g) | (h & (f | g)))) | 0;
      d = (d + sum1(a) + (c ^ (a & (b ^ c))) + K[i + 4]! + W[i + 4]!) | 0; h = (h + d) | 0; d = (d + sum0(e) + ((e & f) | (g & (e | f)))) | 0;
      c = (c + sum1(h) + (b ^ (h & (a ^ b))) + K[i + 5]! + W[i + 5]!) | 0; g = (g + c) | 0; c = (c + sum0(d) + ((d & e) | (f & (d | e)))) | 0;
      b = (b + sum1(g) + (a ^ (g & (h ^ a))) + K[i + 6]! + W[i + 6]!) | 0; f = (f + b) | 0; b = (b + sum0(c) + ((c & d) | (e & (c | d)))) | 0;
      a = (a + sum1(f) + (h ^ (f & (g ^ h))) + K[i + 7]! + W[i + 7]!) | 0; e = (e + a) | 0; a = (a + sum0(b) + ((b & c) | (d & (b | c)))) | 0;
    }
    s0 = (s0 + a) | 0; s1 = (s1 + b) | 0; s2 = (s2 + c) | 0; s3 = (s3 + d) | 0;
    s4 = (s4 + e) | 0; s5 = (s5 + f) | 0; s6 = (s6 + g) | 0; s7 = (s7 + h) | 0;
  }
  state[0] = s0; state[1] = s1; state[2] = s2; state[3] = s3; state[4] = s4; state[5] = s5; state[6] = s6; state[7] = s7;
}
