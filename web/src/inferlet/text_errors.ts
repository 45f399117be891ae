// Errors of texts, messages and templates; `name` is the type that the guest raises, the message is one sentence.

export class TextError extends Error {
  constructor(message: string) {
    super(message);
    this.name = new.target.name;
  }
}

/** A text or an id is outside what the checkpoint's tokenizer takes. */
export class TokenizerError extends TextError {
  override readonly name = "TokenizerError";
}

/** A chat message is malformed; the message names its index and field. */
export class MessageError extends TextError {
  override readonly name = "MessageError";
}

/** A chat template is invalid, over a limit, or failed on these messages. */
export class TemplateError extends TextError {
  override readonly name: string = "TemplateError";
}

/** The template itself rejected the messages, by its `raise_exception`. */
export class TemplateRefused extends TemplateError {
  override readonly name = "TemplateRefused";
}
