import { Answer } from "./answer.js";
import { apiKey, metricsText, models, streamChat } from "./api.js";
import { element } from "./dom.js";
import { Image } from "./images.js";
import { AnswerView, errorNote, userMessage } from "./message_view.js";
import { keepUpToDate } from "./metrics.js";

const byId = (id) => document.getElementById(id);
const log = byId("log");
const prompt = byId("prompt");
const welcome = byId("welcome");

const state = {
  messages: [], // what is sent, whole: answers with their thinking, tool calls and results
  images: [], // of the message being written
  models: [],
  stop: null, // ends the answer that is coming; null while none is
  waitsForResults: false,
};

// --- the server

async function loadModels() {
  const select = byId("model");
  const chosen = select.value;
  try {
    state.models = await models();
    select.replaceChildren(...state.models.map(({ id }) => element("option", { value: id }, id)));
    if (state.models.some(({ id }) => id === chosen)) {
      select.value = chosen;
    }
    byId("notice").textContent = "";
  } catch (error) {
    byId("notice").textContent = error.message;
    byId("settings").open ||= error.status === 401;
  }
  showCapabilities();
}

function showCapabilities() {
  const model = state.models.find(({ id }) => id === byId("model").value);
  byId("attach").hidden = !model?.capabilities?.vision;
}

function request() {
  const system = byId("system").value;
  const body = {
    model: byId("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...state.messages],
    reasoning_effort: document.querySelector('input[name="effort"]:checked').value,
  };
  const tools = readTools();
  return tools.length ? { ...body, tools } : body;
}

/** The declared tools; throws what is wrong with them. */
function readTools() {
  const text = byId("tools").value.trim();
  const tools = text ? JSON.parse(text) : [];
  if (!Array.isArray(tools)) {
    throw new SyntaxError("a list is expected, [ ... ]");
  }
  return tools;
}

function checkTools() {
  let problem = "";
  try {
    readTools();
  } catch (error) {
    problem = `The tools are not JSON: ${error.message}`;
  }
  byId("tools-problem").textContent = problem;
  byId("tools").setAttribute("aria-invalid", String(problem !== ""));
  return problem === "";
}

// --- the conversation

async function send() {
  const text = prompt.value;
  if (state.stop || state.waitsForResults || (!text.trim() && state.images.length === 0)) {
    return;
  }
  if (!checkTools()) {
    byId("settings").open = true;
    byId("tools").focus();
    return;
  }
  const { images } = state;
  const content = images.length ? [...images.map((image) => image.part()), { type: "text", text }] : text;
  state.messages.push({ role: "user", content });
  show(userMessage(text, images));
  prompt.value = "";
  setImages([]);
  fitPrompt();
  await answer();
}

async function answer() {
  const controller = new AbortController();
  const taken = new Answer();
  const view = new AnswerView();
  const { messages } = state; // a new chat has others
  setStop(() => controller.abort());
  log.querySelector(".error")?.remove();
  show(view.element);
  let failure = null;
  try {
    if (state.models.length === 0) {
      await loadModels(); // the server was not there, or asked for a key
    }
    for await (const chunk of streamChat(request(), controller.signal)) {
      view.add(taken.add(chunk));
      follow();
    }
  } catch (error) {
    failure = error;
  }
  const isStopped = controller.signal.aborted;
  view.end(taken, isStopped ? "stopped" : taken.finishReason);
  if (messages !== state.messages) {
    return;
  }
  setStop(null);
  keep(taken, view);
  if (failure && !isStopped) {
    showFailure(failure, taken, view);
  }
  follow();
  if (!state.waitsForResults) {
    prompt.focus();
  }
}

/** Puts an answer into the history, and asks for the results of its calls. */
function keep(taken, view) {
  if (taken.isEmpty && !taken.finishReason) {
    return; // nothing came
  }
  const { message, lostCall } = taken.message();
  if (taken.finishReason && !taken.content && taken.calls.length === 0) {
    view.note("The model ended without an answer.");
  }
  if (lostCall) {
    view.note("The call that the answer broke off in is not kept in the conversation.");
  }
  state.messages.push(message);
  if (message.tool_calls) {
    state.waitsForResults = true;
    showHint();
    view.askForResults(message.tool_calls, (results) => {
      state.waitsForResults = false;
      showHint();
      message.tool_calls.forEach(({ id }, i) => {
        state.messages.push({ role: "tool", tool_call_id: id, content: results[i] });
      });
      answer();
    });
  }
}

function showFailure(failure, taken, view) {
  if (taken.isEmpty) {
    view.element.remove();
  }
  const askAnew = () => {
    if (!taken.isEmpty) {
      state.messages.pop(); // what came of the answer
      state.waitsForResults = false;
      view.element.remove();
    }
    answer();
  };
  show(errorNote(failure.message, askAnew));
  if (failure.status === 401) {
    byId("settings").open = true;
    byId("api-key").focus();
  }
}

function startAnew() {
  state.stop?.();
  state.messages = [];
  state.waitsForResults = false;
  log.replaceChildren();
  welcome.hidden = false;
  setStop(null);
  setImages([]);
  prompt.value = "";
  fitPrompt();
  prompt.focus();
}

// --- what is seen

function show(part) {
  welcome.hidden = true;
  log.append(part);
  part.scrollIntoView({ block: "end" });
}

/** Keeps the newest text in sight, unless the reader has scrolled away from it. */
function follow() {
  const page = document.scrollingElement;
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 160) {
    page.scrollTop = page.scrollHeight;
  }
}

function setStop(stop) {
  state.stop = stop;
  byId("stop").hidden = !stop;
  byId("send").hidden = Boolean(stop);
  showHint();
}

function showHint() {
  let hint = state.stop ? "Esc stops" : "Enter sends, Shift+Enter makes a new line";
  if (state.waitsForResults) {
    hint = "The model waits for the results of its calls, above.";
  }
  byId("hint").textContent = hint;
  byId("send").disabled = state.waitsForResults;
}

function setImages(images) {
  state.images = images;
  byId("images").replaceChildren(
    ...images.map((image) => {
      const remove = () => setImages(state.images.filter((other) => other !== image));
      const label = `Remove ${image.name}`;
      const button = element("button", { type: "button", class: "quiet", "aria-label": label, onclick: remove }, "×");
      return element("div", { class: "image" }, image.preview("thumbnail"), button);
    }),
  );
}

async function addImages(files) {
  try {
    setImages([...state.images, ...(await Promise.all([...files].map(Image.read)))]);
  } catch (error) {
    byId("notice").textContent = error.message;
  }
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

// --- what the user does

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length > 0 && !byId("attach").hidden) {
    event.preventDefault();
    addImages(event.clipboardData.files);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    state.stop?.();
  }
});
byId("stop").addEventListener("click", () => state.stop?.());
byId("new-chat").addEventListener("click", startAnew);
byId("model").addEventListener("change", showCapabilities);
byId("tools").addEventListener("change", checkTools);
byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", async (event) => {
  await addImages(event.target.files);
  event.target.value = "";
});
byId("api-key").value = apiKey.get();
byId("api-key").addEventListener("change", (event) => {
  apiKey.set(event.target.value.trim());
  loadModels();
});

showHint();
loadModels();
keepUpToDate(byId("metrics"), metricsText);
