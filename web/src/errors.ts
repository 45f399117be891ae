// Typed errors of the page's API, and how they cross between workers.

/** What an error is on a message channel. `fields` holds what its class adds (see `InferletError`). */
export interface ErrorData {
  readonly name: string;
  readonly message: string;
  readonly fields?: InferletErrorFields;
}

export interface InferletErrorFields {
  /** The author's exception, or what the host did: Cancelled, CpuBudgetExceeded, BudgetExceeded, Deadlock, GuestFault, … */
  readonly type: string;
  readonly file?: string | null;
  readonly line?: number | null;
  readonly traceback?: string;
}

/** Anything that Pie reports. `name` is the class's own name. */
export class PieError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }

  toData(): ErrorData {
    return { name: this.name, message: this.message };
  }
}

/** Why a fetch gave no answer at all. */
export const UNREACHABLE = "the server cannot be reached";
/** Why a script did not come: a browser does not tell which of the two. */
export const UNREACHED = `${UNREACHABLE}, or does not have the file`;

/** An argument is not what it may be: the message names it, shows it, and says what it must be. */
export class UsageError extends PieError {}
/** The model could not be brought up. */
export class LoadError extends PieError {}
/** A file could not be fetched. */
export class NetworkError extends LoadError {}
/** A file is not the one that its manifest names. */
export class IntegrityError extends LoadError {}
/** The browser refused to store, or has no room. */
export class StorageError extends LoadError {}
/** The device that was asked for is not there, or was lost during the load. */
export class DeviceUnavailable extends LoadError {}
/** The device is gone, and every run with it: load again. */
export class DeviceLost extends PieError {}
/** A kernel computes something else than it should on this device. */
export class SelfTestFailed extends LoadError {}
/** Ended by the caller's signal, whose reason is the `cause`, or by `dispose`. */
export class Cancelled extends PieError {}

/** An inferlet ended without a result. */
export class InferletError extends PieError {
  readonly type: string;
  readonly file: string | null;
  readonly line: number | null;
  readonly traceback: string;

  constructor(message: string, fields: InferletErrorFields) {
    super(message);
    this.type = fields.type;
    this.file = fields.file ?? null;
    this.line = fields.line ?? null;
    this.traceback = fields.traceback ?? "";
  }

  override toData(): ErrorData {
    const { type, file, line, traceback } = this;
    return { name: this.name, message: this.message, fields: { type, file, line, traceback } };
  }
}

const CLASSES: Readonly<Record<string, new (message: string, options?: ErrorOptions) => PieError>> = {
  PieError,
  UsageError,
  LoadError,
  NetworkError,
  IntegrityError,
  StorageError,
  DeviceUnavailable,
  DeviceLost,
  SelfTestFailed,
  Cancelled,
};

/** The error that `data` was made of. An unknown name becomes a PieError that keeps it in its message. */
export function errorFrom(data: ErrorData): PieError {
  if (data.name === "InferletError") return new InferletError(data.message, data.fields ?? { type: "Error" });
  const known = CLASSES[data.name];
  return known ? new known(data.message) : new PieError(`${data.name}: ${data.message}`);
}

/** Any thrown value as data; an AbortError counts as Cancelled, what is no PieError becomes `fallback`. */
export function errorData(error: unknown, fallback = "PieError"): ErrorData {
  if (error instanceof PieError) return error.toData();
  if (error instanceof Error) {
    const name = error.name === "AbortError" ? "Cancelled" : fallback;
    return { name, message: name === "Cancelled" ? error.message : `${error.name}: ${error.message}` };
  }
  return { name: fallback, message: String(error) };
}
