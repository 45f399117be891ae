// An op that is refused: the guest gets it as {"error": {"type", "message", …}} and raises it at the author's line.

export class Refusal extends Error {
  readonly kind: string;
  readonly fields: Readonly<Record<string, number | string>>;

  constructor(kind: string, message: string, fields: Readonly<Record<string, number | string>> = {}) {
    super(message);
    this.name = "Refusal";
    this.kind = kind;
    this.fields = fields;
  }

  /** The answer of `host.call`. */
  json(): string {
    return JSON.stringify({ error: { ...this.fields, type: this.kind, message: this.message } });
  }
}

/** A budget is used up. */
export function over(what: string, used: number, cap: number, fix: string): Refusal {
  return new Refusal("BudgetExceeded", `${what}: ${used} in use, the cap is ${cap}; ${fix}`, { used, cap });
}
