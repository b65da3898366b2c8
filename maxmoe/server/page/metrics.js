const INTERVAL_MS = 2000;
const PREFIX = "maxmoe:";

/** The values of a text for Prometheus by name, those of all labels together. */
export function readMetrics(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const [, name, value] = /^([\w:]+)(?:\{.*\})? (\S+)/.exec(line) ?? [];
    if (name?.startsWith(PREFIX)) {
      const key = name.slice(PREFIX.length);
      values.set(key, (values.get(key) ?? 0) + Number(value));
    }
  }
  return values;
}

/** What the strip shows: {running, waiting, speed, cache, hits}, as text; `before` is an earlier reading. */
export function summary(now, before, seconds) {
  const value = (name) => now.get(name) ?? 0;
  const since = (name) => value(name) - (before?.get(name) ?? 0);
  const share = (part) => `${Math.round(100 * part)} %`;
  const queries = value("prefix_cache_queries_total");
  // Tokens of ended requests come all at once; this one counts each token as it comes.
  const speed = before ? since("inter_token_latency_seconds_count") / seconds : 0;
  return {
    running: String(value("num_requests_running")),
    waiting: String(value("num_requests_waiting")),
    speed: speed < 10 ? speed.toFixed(1) : Math.round(speed).toLocaleString("en"),
    cache: share(value("kv_cache_usage_perc")),
    hits: queries ? share(value("prefix_cache_hits_total") / queries) : "–",
  };
}

/**
 * Keeps a strip of numbers up to date while the page is seen.
 *
 * @param {HTMLElement} strip Holds one element with data-metric for each number; hidden while there are none.
 * @param {() => Promise<string>} read Gives the text for Prometheus.
 */
export function keepUpToDate(strip, read) {
  let before = null;
  let readAt = 0;

  async function update() {
    if (!document.hidden) {
      try {
        const now = readMetrics(await read());
        const time = performance.now();
        show(summary(now, before, (time - readAt) / 1000));
        before = now;
        readAt = time;
        strip.hidden = false;
      } catch {
        strip.hidden = true; // not allowed to read, or the server is gone: the chat itself says which
        before = null;
      }
    }
    setTimeout(update, INTERVAL_MS);
  }

  function show(numbers) {
    for (const place of strip.querySelectorAll("[data-metric]")) {
      place.textContent = numbers[place.dataset.metric];
    }
  }

  update();
}
