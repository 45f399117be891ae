// The checkpoint's own chat template: messages in, prompt text out. Bounded in time, text and structure, whoever wrote it.

import { Environment, Interpreter, parse, tokenize } from "@huggingface/jinja";
import { checkMessages } from "./chat_messages.js";
import { FILTERS, METHODS } from "./jinja_functions.js";
import { MAX_NODES, MAX_TEXT, RenderBudget } from "./jinja_guard.js";
import { equal, floatValue, isList, isText, listOf, type Node, printed, toValue, type Value } from "./jinja_values.js";
import { MessageError, TemplateError, TemplateRefused } from "./text_errors.js";

export const MAX_SOURCE = 65_536; // characters of a template
export const TIME_LIMIT = 2; // seconds of one render; wall time, so more than the server's 0.5 of CPU time

type Program = ReturnType<typeof parse>;

/** A parsed chat template. `tokens` are the strings that it may name, such as {"bos_token": "<s>"}. Throws TemplateError. */
export class ChatTemplate {
  readonly source: string;
  readonly takesTools: boolean;
  readonly #tokens: Readonly<Record<string, string>>;
  readonly #program: Program;
  readonly #seconds: number;

  constructor(source: string, tokens: Readonly<Record<string, string>> = {}, seconds = TIME_LIMIT) {
    if (source.length > MAX_SOURCE) {
      throw new TemplateError(`the chat template has ${source.length} characters; at most ${MAX_SOURCE} are allowed`);
    }
    this.source = source;
    this.#tokens = tokens;
    this.#seconds = seconds;
    try {
      // The tag marks what a model wrote, for training; here its body passes through.
      const plain = source.replace(/\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}/g, "{%$1 set generation_mark = 0 $2%}");
      this.#program = parse(tokenize(plain, { lstrip_blocks: true, trim_blocks: true }));
    } catch (error) {
      throw new TemplateError(`the chat template is not valid: ${messageOf(error)}`);
    }
    this.takesTools = namesIn(this.#program).has("tools");
  }

  /** The prompt text, with the opening of the assistant's turn when `cue`. Throws MessageError, TemplateRefused or TemplateError. */
  render(messages: unknown, tools: readonly unknown[] | null = null, cue = true): string {
    const checked = checkMessages(messages);
    if (tools !== null && tools.length > 0 && !this.takesTools) {
      throw new TemplateError("this model's chat template has no place for tools; send the request without them");
    }
    const variables = {
      ...this.#tokens,
      messages: checked,
      tools: tools !== null && tools.length > 0 ? tools : null,
      documents: null,
      add_generation_prompt: cue,
    };
    try {
      return renderBounded(this.#program, variables, new RenderBudget(this.#seconds));
    } catch (error) {
      if (error instanceof TemplateError || error instanceof MessageError) throw error;
      // The template is the model's code: whatever it throws is its failure, not ours.
      throw new TemplateError(`the chat template failed on these messages: ${messageOf(error)}`);
    }
  }
}

function renderBounded(program: Program, variables: Readonly<Record<string, unknown>>, budget: RenderBudget): string {
  const env = new Environment();
  const globals = { false: false, true: true, none: null, False: false, True: true, None: null };
  for (const [name, value] of Object.entries({ ...globals, ...functions(budget), ...variables })) env.set(name, value);
  const text = printed(new Bounded(env, budget).run(program));
  if (text.length > MAX_TEXT) throw new TemplateError(`the chat template writes more than ${MAX_TEXT} characters`);
  return text;
}

function functions(budget: RenderBudget): Record<string, unknown> {
  return {
    range: (start: number, stop?: number, step = 1) => {
      const [from, to] = stop === undefined ? [0, start] : [start, stop];
      const count = Math.max(0, Math.ceil((to - from) / step));
      if (!(count <= MAX_NODES / 2)) throw new TemplateError(`the chat template makes a range of ${count} values; ${MAX_NODES / 2} are allowed`);
      return Array.from({ length: count }, (_, index) => from + index * step);
    },
    raise_exception: (message: unknown) => {
      throw new TemplateRefused(`the chat template refused the messages: ${String(message).slice(0, 2000)}`);
    },
    strftime_now: (pattern: string) => {
      if (pattern.length > 200 || /\d{3}/.test(pattern)) {
        throw new TemplateError(`the chat template asks for a time format of ${pattern.length} characters or a wide field`);
      }
      budget.tick();
      return timeText(pattern);
    },
  };
}

/** The methods of the interpreter that are overridden below; the library marks some of them private. The version is pinned. */
interface Internals {
  run(program: Program): Value;
  evaluate(node: Node, env: Environment): Value;
  evaluateBlock(nodes: readonly Node[], env: Environment): Value;
  evaluateMemberExpression(node: Node, env: Environment): Value;
  evaluateBinaryExpression(node: Node, env: Environment): Value;
  evaluateArguments(args: readonly Node[], env: Environment): [Value[], Map<string, Value>];
  applyFilter(operand: Value, filter: Node, env: Environment): Value;
}
const Base = Interpreter as unknown as new (env: Environment) => Internals;

/** Nodes that make values; others only pass them on. */
const MAKERS = new Set(["ArrayLiteral", "TupleLiteral", "ObjectLiteral", "CallExpression", "FilterExpression", "BinaryExpression", "SliceExpression"]);
const OWN_OPERATORS = new Set(["==", "!=", "~", "*"]);
const SILENT = new Set(["Set", "Macro", "Comment"]);

class Bounded extends Base {
  readonly #budget: RenderBudget;

  constructor(env: Environment, budget: RenderBudget) {
    super(env);
    this.#budget = budget;
  }

  override evaluate(node: Node, env: Environment): Value {
    this.#budget.tick();
    const value = super.evaluate(node, env);
    if (value === undefined) return toValue(undefined); // first and last of an empty list
    if (node !== undefined && MAKERS.has(node.type)) this.#budget.grown(value);
    return value.type === "TupleValue" ? listOf(value.value as Value[]) : value; // the library unpacks lists only
  }

  /** As the library's, with values printed as Python prints them. */
  override evaluateBlock(nodes: readonly Node[], env: Environment): Value {
    let text = "";
    for (const node of nodes) {
      const value = this.evaluate(node, env);
      if (node === undefined || SILENT.has(node.type)) continue;
      if (!isText(value)) this.#budget.measure(value);
      const part = printed(value);
      this.#budget.charge(part.length);
      text += part;
      if (text.length > MAX_TEXT) throw new TemplateError(`the chat template writes more than ${MAX_TEXT} characters`);
    }
    return toValue(text);
  }

  override evaluateBinaryExpression(node: Node, env: Environment): Value {
    const { operator, left, right } = node as unknown as { operator: { value: string }; left: Node; right: Node };
    if (!OWN_OPERATORS.has(operator.value)) return super.evaluateBinaryExpression(node, env);
    const [a, b] = [this.evaluate(left, env), this.evaluate(right, env)];
    switch (operator.value) {
      case "==":
      case "!=":
        this.#budget.measure(a);
        this.#budget.measure(b);
        return toValue(equal(a, b) === (operator.value === "=="));
      case "~":
        this.#budget.charge(this.#budget.measure(a) + this.#budget.measure(b));
        return toValue(printed(a) + printed(b));
      default: {
        const product = this.#repeated(a, b) ?? this.#repeated(b, a);
        if (product !== null) return product;
        if (typeof a.value !== "number" || typeof b.value !== "number") throw new Error(`it multiplies ${a.type} by ${b.type}`);
        return a.type === "FloatValue" || b.type === "FloatValue" ? floatValue(a.value * b.value) : toValue(a.value * b.value);
      }
    }
  }

  /** null for what is no text or list times a whole number. */
  #repeated(sequence: Value, count: Value): Value | null {
    if (count.type !== "IntegerValue" || !(isText(sequence) || isList(sequence))) return null;
    const times = Math.max(0, count.value as number);
    const { length } = sequence.value;
    if (length * times > (isText(sequence) ? MAX_TEXT : MAX_NODES)) {
      throw new TemplateError(`the chat template repeats ${length} items ${times} times, which is over the limit`);
    }
    if (isText(sequence)) return toValue(sequence.value.repeat(times));
    return listOf(Array.from({ length: times }, () => sequence.value).flat());
  }

  /** Methods of strings that the library lacks, or that could grow without bound in it. */
  override evaluateMemberExpression(node: Node, env: Environment): Value {
    const { computed, property, object } = node as unknown as { computed: boolean; property: { type: string; value: unknown }; object: Node };
    const name = !computed || property.type === "StringLiteral" ? String(property.value) : null;
    const method = name === null || !Object.hasOwn(METHODS, name) ? undefined : METHODS[name];
    if (method === undefined) return super.evaluateMemberExpression(node, env);
    const owner = this.evaluate(object, env);
    if (!isText(owner)) return super.evaluateMemberExpression(node, env);
    return functionValue((args) => toValue(method(owner.value, args, this.#budget)));
  }

  override applyFilter(operand: Value, filter: Node, env: Environment): Value {
    const call = filter as unknown as { type: string; value?: unknown; callee?: { value: unknown }; args?: readonly Node[] };
    const name = String(call.type === "CallExpression" ? call.callee?.value : call.value);
    const own = Object.hasOwn(FILTERS, name) ? FILTERS[name] : undefined;
    if (own === undefined) return super.applyFilter(operand, filter, env);
    const [args, named] = call.type === "CallExpression" ? this.evaluateArguments(call.args ?? [], env) : [[], new Map<string, Value>()];
    return own(operand, args, named, this.#budget) ?? super.applyFilter(operand, filter, env);
  }
}

/** A function of values; the interpreter's own wrapper would unpack them. */
function functionValue(body: (args: Value[]) => Value): Value {
  const made = toValue(() => null) as { value: unknown } & Value;
  made.value = body;
  return made;
}

/** The identifiers of a syntax tree. */
function namesIn(tree: unknown): Set<string> {
  const names = new Set<string>();
  const stack: unknown[] = [tree];
  while (stack.length > 0) {
    const node = stack.pop();
    if (node instanceof Map) stack.push(...node.keys(), ...node.values());
    else if (typeof node === "object" && node !== null) {
      if ((node as { type?: unknown }).type === "Identifier") names.add(String((node as { value?: unknown }).value));
      stack.push(...(Object.values(node) as unknown[]));
    }
  }
  return names;
}

function messageOf(error: unknown): string {
  if (error instanceof RangeError) return "it is nested too deeply or makes something too large";
  return (error instanceof Error ? error.message : String(error)).slice(0, 500);
}

function timeText(pattern: string): string {
  const now = new Date();
  const pad = (n: number, width = 2): string => String(n).padStart(width, "0");
  const name = (options: Intl.DateTimeFormatOptions): string => new Intl.DateTimeFormat("en-US", options).format(now);
  const fields: Readonly<Record<string, () => string>> = {
    Y: () => pad(now.getFullYear(), 4),
    y: () => pad(now.getFullYear() % 100),
    m: () => pad(now.getMonth() + 1),
    d: () => pad(now.getDate()),
    H: () => pad(now.getHours()),
    I: () => pad(now.getHours() % 12 || 12),
    M: () => pad(now.getMinutes()),
    S: () => pad(now.getSeconds()),
    p: () => (now.getHours() < 12 ? "AM" : "PM"),
    b: () => name({ month: "short" }),
    B: () => name({ month: "long" }),
    a: () => name({ weekday: "short" }),
    A: () => name({ weekday: "long" }),
    "%": () => "%",
  };
  return pattern.replace(/%(.)/g, (whole, letter: string) => fields[letter]?.() ?? whole);
}
