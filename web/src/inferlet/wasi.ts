// The part of WASI that an inferlet gets in the page: clocks, random bytes, an empty environment and no files. Everything else throws.

const MAX_RANDOM = 65_536; // bytes of one request

/** The guest asked for something that no inferlet gets. Ends the instance. */
export class WasiDenied extends Error {
  constructor(call: string) {
    super(`the inferlet made a system call that it may not make: ${call}`);
    this.name = "WasiDenied";
  }
}

type Functions = Readonly<Record<string, (...args: never[]) => unknown>>;
type Interface = Record<string, unknown>;

function randomBytes(count: bigint): Uint8Array {
  if (count > MAX_RANDOM) throw new WasiDenied(`${count} random bytes at once; at most ${MAX_RANDOM} are given`);
  return crypto.getRandomValues(new Uint8Array(Number(count)));
}

const ALLOWED: Readonly<Record<string, Functions>> = {
  "wasi:clocks/monotonic-clock": {
    now: () => BigInt(Math.round(performance.now() * 1e6)),
    resolution: () => 100_000n,
  },
  "wasi:clocks/wall-clock": {
    now: () => {
      const ms = Date.now();
      return { seconds: BigInt(Math.floor(ms / 1000)), nanoseconds: (ms % 1000) * 1_000_000 };
    },
    resolution: () => ({ seconds: 0n, nanoseconds: 1_000_000 }),
  },
  "wasi:random/random": {
    getRandomBytes: randomBytes,
    getRandomU64: () => crypto.getRandomValues(new BigUint64Array(1))[0],
  },
  "wasi:random/insecure-seed": {
    insecureSeed: () => Array.from(crypto.getRandomValues(new BigUint64Array(2))),
  },
  "wasi:filesystem/preopens": { getDirectories: () => [] },
  "wasi:cli/environment": { getEnvironment: () => [], getArguments: () => [], initialCwd: () => undefined },
};

const kebab = (name: string): string => name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);

/** What is not allowed: functions throw when called, resource classes when constructed. */
function denied(name: string, member: string): unknown {
  const refuse = (): never => {
    throw new WasiDenied(`${name}#${kebab(member).replace(/^-/, "")}`);
  };
  if (!/^[A-Z]/.test(member)) return refuse;
  return class {
    constructor() {
      refuse();
    }
  };
}

function interfaceOf(name: string): Interface {
  const allowed = ALLOWED[name] ?? {};
  const made: Interface = {};
  return new Proxy(made, {
    get: (_, member) => {
      if (typeof member === "symbol") return undefined;
      return (made[member] ??= Object.hasOwn(allowed, member) ? allowed[member] : denied(name, member));
    },
    has: () => true,
  });
}

/** The imports of a component: `host` by name, and any WASI interface that it asks for. */
export function importsOf(host: Readonly<Record<string, Interface>>): Record<string, Interface> {
  const made: Record<string, Interface> = { ...host };
  return new Proxy(made, {
    get: (_, name) => (typeof name === "symbol" ? undefined : (made[name] ??= interfaceOf(name))),
    has: () => true,
  });
}
