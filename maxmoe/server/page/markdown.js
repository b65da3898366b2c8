import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^(#{1,6}) +(.*)$/;
const INLINE = /(`+)([^`]+)\1|\*\*([^*]+)\*\*/g;

/**
 * Shows text as it comes: code blocks, inline code, bold words and headings; all else as it is. A line is looked at
 * again until it is complete, and never after, so that a long answer costs no more per token than a short one.
 */
export class Markdown {
  #container;
  #line = "";
  #shown; // the element of the current line
  #fence = null; // what ends the code block; null outside of one
  #code; // the code block

  constructor(container) {
    this.#container = container;
    this.#begin();
  }

  append(text) {
    const [first, ...more] = text.split("\n");
    this.#line += first;
    for (const next of more) {
      this.#end();
      this.#line = next;
    }
    this.#show();
  }

  #begin() {
    this.#shown = element(this.#fence ? "span" : "div", { class: this.#fence ? false : "line" });
    (this.#fence ? this.#code : this.#container).append(this.#shown);
  }

  #show() {
    if (this.#fence) {
      this.#shown.textContent = this.#line;
      return;
    }
    const [, marks, title] = HEADING.exec(this.#line) ?? [];
    this.#shown.className = marks ? `line heading h${marks.length}` : "line";
    this.#shown.replaceChildren(...inline(title ?? this.#line));
  }

  #end() {
    const [, mark, language] = FENCE.exec(this.#line) ?? [];
    if (this.#fence) {
      if (mark?.startsWith(this.#fence) && !language) {
        this.#shown.remove();
        this.#fence = null;
      } else {
        this.#shown.textContent = `${this.#line}\n`;
      }
    } else if (mark) {
      this.#shown.remove();
      this.#fence = mark;
      this.#openCode(language.trim());
    } else {
      this.#show();
    }
    this.#begin();
  }

  #openCode(language) {
    const code = element("code");
    const copy = element("button", { type: "button", class: "quiet", "aria-label": "Copy this code" }, "Copy");
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    // Without https there is no clipboard.
    const bar = element("div", { class: "code-bar" }, language || "code", ...(navigator.clipboard ? [copy] : []));
    this.#code = code;
    this.#container.append(element("div", { class: "code" }, bar, element("pre", { tabindex: 0 }, code)));
  }
}

function* inline(text) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, bold] = match;
    yield text.slice(from, match.index);
    yield code === undefined ? element("strong", {}, bold) : element("code", { class: "inline" }, code);
    from = match.index + whole.length;
  }
  yield text.slice(from);
}
