/** An answer of the model, put together from the deltas of a stream. */
export class Answer {
  constructor() {
    this.reasoning = "";
    this.content = null;
    this.calls = [];
    this.finishReason = null;
    this.usage = null;
  }

  /** Takes a chunk; returns its delta, {} where it has none. */
  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices ?? [];
    if (!choice) {
      return {};
    }
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const delta = choice.delta ?? {};
    this.reasoning += delta.reasoning_content ?? "";
    if (delta.content != null) {
      this.content = (this.content ?? "") + delta.content;
    }
    for (const piece of delta.tool_calls ?? []) {
      this.#addCall(piece);
    }
    return delta;
  }

  #addCall(piece) {
    const call = (this.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id = piece.id ?? call.id;
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }

  get isEmpty() {
    return !this.reasoning && !this.content && this.calls.length === 0;
  }

  /**
   * The message for the history, whole: the model was trained to see its earlier thinking. A call that an answer broke
   * off in is no call; `lostCall` says so.
   */
  message() {
    const calls = this.calls.filter((call) => this.finishReason === "tool_calls" || isJson(call.function.arguments));
    return {
      message: {
        role: "assistant",
        ...(this.reasoning && { reasoning_content: this.reasoning }),
        content: calls.length > 0 ? this.content || null : this.content,
        ...(calls.length > 0 && { tool_calls: calls }),
      },
      lostCall: calls.length < this.calls.length,
    };
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
