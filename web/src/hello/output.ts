// The output of a run on the page: the last part of it, written once a frame, with a note of what is not shown.

export const KEPT = 200_000; // UTF-16 units

/** What a program says, in a `<pre>`; `note` stands above it. */
export class Output {
  readonly #box: HTMLElement;
  readonly #note: HTMLElement;
  #unwritten = "";
  #shown = 0; // units in the box
  #dropped = 0; // characters
  #inLine = false; // the last character is no newline

  constructor(box: HTMLElement, note: HTMLElement) {
    this.#box = box;
    this.#note = note;
  }

  clear(): void {
    this.#box.replaceChildren();
    this.#unwritten = "";
    this.#shown = this.#dropped = 0;
    this.#inLine = false;
    this.#tellDropped();
  }

  /** Goes on where the text before ended. */
  write(text: string): void {
    if (text === "") return;
    if (this.#unwritten === "") requestAnimationFrame(() => this.flush());
    this.#inLine = !text.endsWith("\n");
    this.#unwritten += text;
    if (this.#unwritten.length <= 2 * KEPT) return; // seldom: each cut is a copy
    const cut = cutAt(this.#unwritten, this.#unwritten.length - KEPT);
    this.#dropped += codePoints(this.#unwritten.slice(0, cut));
    this.#unwritten = this.#unwritten.slice(cut);
  }

  /** A line of its own. */
  line(text: string): void {
    this.write(`${this.#inLine ? "\n" : ""}${text}\n`);
  }

  flush(): void {
    const text = this.#unwritten;
    this.#unwritten = "";
    if (text === "") return;
    const box = this.#box;
    const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
    box.append(text);
    this.#shown += text.length;
    this.#shorten();
    this.#tellDropped();
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  /** Take the oldest text away until what is left may stay. */
  #shorten(): void {
    while (this.#shown > KEPT) {
      const first = this.#box.firstChild as Text;
      const cut = cutAt(first.data, Math.min(this.#shown - KEPT, first.length));
      this.#dropped += codePoints(first.data.slice(0, cut));
      this.#shown -= cut;
      if (cut === first.length) first.remove();
      else first.deleteData(0, cut);
    }
  }

  #tellDropped(): void {
    this.#note.hidden = this.#dropped === 0;
    this.#note.textContent = this.#dropped === 0 ? "" : droppedText(this.#dropped);
  }
}

export function droppedText(count: number): string {
  return count === 1 ? "… the first character is not shown" : `… the first ${count.toLocaleString("en")} characters are not shown`;
}

/** Where to cut at least `units` off the front without cutting a character in two. */
export function cutAt(text: string, units: number): number {
  if (units <= 0) return 0;
  return isLow(text, units) && isHigh(text, units - 1) ? units + 1 : units;
}

/** Characters as people and Python count them. */
export function codePoints(text: string): number {
  let count = text.length;
  for (let at = 1; at < text.length; at++) if (isLow(text, at) && isHigh(text, at - 1)) count--;
  return count;
}

function isLow(text: string, at: number): boolean {
  return (text.charCodeAt(at) & 0xfc00) === 0xdc00;
}

function isHigh(text: string, at: number): boolean {
  return (text.charCodeAt(at) & 0xfc00) === 0xd800;
}
