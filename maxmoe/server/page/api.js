import { events } from "./sse.js";

const KEY = "maxmoe.api_key";

/** The API key lives as long as the tab: sessionStorage, and nowhere else. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server said went wrong, in its own words. */
export class ServerError extends Error {
  constructor(text, status) {
    super(text);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) {
    headers.Authorization = `Bearer ${apiKey.get()}`;
  }
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ServerError("The server cannot be reached. Is it still running?", 0);
  }
  if (!response.ok) {
    throw new ServerError(errorText(await response.text(), response), response.status);
  }
  return response;
}

function errorText(body, response) {
  try {
    const { error } = JSON.parse(body);
    return error.message ?? String(error);
  } catch {
    return body || `${response.status} ${response.statusText}`;
  }
}

/** The models that the server has: [{id, capabilities, ...}]. */
export async function models() {
  return (await (await request("v1/models")).json()).data;
}

/** What Prometheus reads. */
export async function metricsText() {
  return (await request("metrics", { cache: "no-store" })).text();
}

/** The chunks of an answer, as they come; throws ServerError also for what goes wrong midway. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ServerError(chunk.error.message ?? String(chunk.error), response.status);
    }
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.", response.status);
}
