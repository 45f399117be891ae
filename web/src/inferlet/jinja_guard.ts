// What one render of a chat template may still use: time, characters and values. Templates come with model files and may be hostile.

import { TemplateError } from "./text_errors.js";
import { isList, isMap, isText, type Value } from "./jinja_values.js";

export const MAX_TEXT = 4_000_000; // characters of one string
export const MAX_WORK = 64_000_000; // characters of all strings made by one render
export const MAX_NODES = 200_000; // values in one list or object, nested ones counted as often as they occur
export const MAX_FIELD = 1_000; // width of an indent

export class RenderBudget {
  readonly #seconds: number;
  readonly #deadline: number;
  #work = MAX_WORK;
  #ticks = 0;

  constructor(seconds: number) {
    this.#seconds = seconds;
    this.#deadline = performance.now() + seconds * 1000;
  }

  /** Called at every node; the clock is read now and then. */
  tick(): void {
    if (++this.#ticks % 64 === 0 && performance.now() > this.#deadline) {
      throw new TemplateError(`the chat template ran longer than ${this.#seconds} s and was stopped`);
    }
  }

  /** Account for a string of `size` characters that is made now. */
  charge(size: number): void {
    this.#work -= size;
    if (size > MAX_TEXT || this.#work < 0) {
      throw new TemplateError(
        `the chat template makes a string of ${size} characters; ${MAX_TEXT} are allowed, ${MAX_WORK} for all strings together`,
      );
    }
  }

  /** Check a value that was just made. */
  grown(value: Value): void {
    if (isText(value)) this.charge(value.value.length);
    else if (isList(value) || isMap(value)) this.measure(value);
    else if (value.type === "IntegerValue" && !Number.isSafeInteger(value.value)) {
      throw new TemplateError("the chat template computes a number of more than 53 bits");
    }
  }

  /** The characters in a value, about. Throws over MAX_NODES values or MAX_WORK characters. */
  measure(value: Value): number {
    let [nodes, size] = [0, 0];
    const stack: Value[] = [value];
    for (let item = stack.pop(); item !== undefined; item = stack.pop()) {
      this.tick();
      if (isText(item)) size += item.value.length + 2;
      else if (isList(item)) {
        nodes += item.value.length;
        if (nodes <= MAX_NODES) for (const inner of item.value) stack.push(inner);
      } else if (isMap(item)) {
        nodes += 2 * item.value.size;
        for (const [key, inner] of item.value) {
          size += key.length + 4;
          stack.push(inner);
        }
      } else size += 24;
      if (nodes > MAX_NODES) throw new TemplateError(`the chat template makes a list or object of more than ${MAX_NODES} values`);
      if (size > MAX_WORK) throw new TemplateError(`the chat template makes a value of more than ${MAX_WORK} characters`);
    }
    return size;
  }
}
