import { count, duration, element } from "./dom.js";
import { Markdown } from "./markdown.js";

const ENDINGS = {
  length: "cut off at the longest answer allowed",
  tool_calls: "called tools",
  stopped: "stopped",
};

/** A message of the user: its text as it is, and its images. */
export function userMessage(text, images) {
  const pictures = images.map((image) => image.preview("sent-image"));
  return element(
    "article",
    { class: "message user", "aria-label": "You" },
    ...(pictures.length ? [element("div", { class: "images" }, ...pictures)] : []),
    element("div", { class: "text" }, text),
  );
}

/** Something that went wrong, in the words of the server; `retry` asks again. */
export function errorNote(text, retry) {
  return element(
    "div",
    { class: "note error", role: "alert" },
    element("span", {}, text),
    element("button", { type: "button", class: "quiet", onclick: retry }, "Try again"),
  );
}

/** An answer while it comes, and after: thinking folded, text, tool calls, and a line of numbers. */
export class AnswerView {
  #began = performance.now();
  #firstAt = null;
  #thinking = null; // {details, summary, text, began, seconds}; seconds is null until it ends
  #markdown = null;
  #calls = [];
  #timer;
  #dots; // until the first token

  constructor() {
    const dots = [element("i"), element("i"), element("i")];
    this.#dots = element("div", { class: "waiting", "aria-label": "Waiting for the first token" }, ...dots);
    const attributes = { class: "message assistant", "aria-label": "Assistant", "aria-busy": "true" };
    this.element = element("article", attributes, this.#dots);
    this.#timer = setInterval(() => this.#tick(), 100);
  }

  /** Shows what a delta adds. */
  add(delta) {
    if (delta.reasoning_content || delta.content || delta.tool_calls) {
      this.#firstAt ??= performance.now();
    }
    if (delta.reasoning_content) {
      this.#addThinking(delta.reasoning_content);
    }
    if (delta.content) {
      this.#addText(delta.content);
    }
    for (const piece of delta.tool_calls ?? []) {
      this.#addCall(piece);
    }
  }

  #append(child) {
    this.#dots.remove();
    this.element.append(child);
    return child;
  }

  #addThinking(text) {
    if (!this.#thinking) {
      const summary = element("summary", {}, "Thinking");
      const body = element("div", { class: "thinking-text" }, "");
      const details = this.#append(element("details", { class: "thinking running" }, summary, body));
      this.#thinking = { details, summary, text: body.firstChild, began: performance.now(), seconds: null };
    }
    this.#thinking.text.appendData(text);
  }

  #endThinking() {
    if (this.#thinking && this.#thinking.seconds === null) {
      this.#thinking.seconds = (performance.now() - this.#thinking.began) / 1000;
      this.#thinking.details.classList.remove("running");
      this.#nameThinking();
    }
  }

  #nameThinking(numTokens) {
    const tokens = numTokens ? ` · ${count(numTokens, "token")}` : "";
    this.#thinking.summary.textContent = `Thought for ${duration(this.#thinking.seconds)}${tokens}`;
  }

  #tick() {
    if (this.#thinking && this.#thinking.seconds === null) {
      const seconds = (performance.now() - this.#thinking.began) / 1000;
      this.#thinking.summary.textContent = `Thinking · ${duration(seconds)}`;
    }
  }

  #addText(text) {
    this.#endThinking();
    this.#markdown ??= new Markdown(this.#append(element("div", { class: "text" })));
    this.#markdown.append(text);
  }

  #addCall(piece) {
    this.#endThinking();
    const call = (this.#calls[piece.index] ??= this.#openCall());
    call.name.append(piece.function?.name ?? "");
    call.arguments.append(piece.function?.arguments ?? "");
  }

  #openCall() {
    const name = element("code", { class: "call-name" });
    const code = element("code");
    const head = element("div", { class: "call-head" }, element("span", { class: "call-label" }, "Tool call"), name);
    const pre = element("pre", { class: "call-arguments", tabindex: 0, "aria-label": "Arguments" }, code);
    const section = this.#append(element("section", { class: "call", "aria-label": "Tool call" }, head, pre));
    return { name, arguments: code, section };
  }

  /** Ends the answer, and shows why and how fast it ended. */
  end(answer, reason) {
    clearInterval(this.#timer);
    this.#endThinking();
    this.#dots.remove();
    this.element.setAttribute("aria-busy", "false");
    const { usage } = answer;
    const facts = this.#times(usage?.completion_tokens);
    if (usage) {
      const numReasoning = usage.completion_tokens_details?.reasoning_tokens;
      if (this.#thinking) {
        this.#nameThinking(numReasoning);
      }
      const cached = usage.prompt_tokens_details?.cached_tokens;
      const known = cached ? `, ${cached.toLocaleString("en")} cached` : "";
      facts.push(`prompt ${count(usage.prompt_tokens, "token")}${known}`);
    }
    if (ENDINGS[reason]) {
      facts.push(ENDINGS[reason]);
    }
    this.element.append(element("footer", { class: "facts" }, facts.join(" · ")));
  }

  /** How many tokens, how long until the first one, how fast after it. */
  #times(numTokens) {
    const now = performance.now();
    const facts = [duration((now - this.#began) / 1000)];
    if (this.#firstAt !== null) {
      facts.push(`first after ${duration((this.#firstAt - this.#began) / 1000)}`);
    }
    if (!numTokens) {
      return facts;
    }
    if (numTokens > 1 && this.#firstAt !== null && now > this.#firstAt) {
      facts.push(`${((numTokens - 1) / ((now - this.#firstAt) / 1000)).toFixed(1)} tokens/s`);
    }
    return [count(numTokens, "token"), ...facts];
  }

  /** Says something about the answer that is not the model's. */
  note(text) {
    this.element.append(element("div", { class: "note", role: "status" }, text));
  }

  /** Asks for the results of the calls; `send` is called with their texts once. */
  askForResults(calls, send) {
    const fields = calls.map((call, i) => {
      const label = `Result of ${call.function.name}`;
      const field = element("textarea", { rows: 2, "aria-label": label, placeholder: `${label}, as text` });
      this.#calls[i].section.append(field);
      return field;
    });
    const button = element("button", { type: "submit" }, fields.length > 1 ? "Send the results" : "Send the result");
    const submit = (event) => {
      event.preventDefault();
      form.remove();
      const results = fields.map((field) => field.value);
      fields.forEach((field, i) => field.replaceWith(resultView(results[i])));
      send(results);
    };
    const form = this.element.insertBefore(
      element("form", { class: "results", onsubmit: submit }, button),
      this.element.querySelector("footer"),
    );
    fields[0].focus();
  }
}

function resultView(text) {
  const head = element("div", { class: "call-head" }, element("span", { class: "call-label" }, "Result"));
  return element("div", { class: "call-result" }, head, element("pre", { tabindex: 0, "aria-label": "Result" }, text));
}
